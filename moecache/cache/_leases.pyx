"""Leases: who uses which slot; what steps and claims do to slots, policies and counts."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t

import numpy as np

from moecache.cache._misses cimport (
    are_resident, close_misses, find_misses, open_misses, sort_misses,
)
from moecache.cache._partitions cimport Partitions, local_key, partition_of, policy_of, room_left
from moecache.cache._profiler cimport AccessProfiler, count_miss
from moecache.cache._route_log cimport RouteLog
from moecache.cache._slots cimport (
    ABANDONED, FILLING, FREE, RESIDENT, Slot, Slots, audit_slots, begin_filling, close_slots,
    end_filling, fail_filling, free_slot, open_slots, restore_slot, vacate, withhold_slot,
)
from moecache.policies._ids cimport id_at
from moecache.policies._policy cimport HELD, Node, Policy, hold, unhold
from moecache.policies._python_policy cimport PythonPolicy

from moecache.errors import CapacityError

cnp.import_array()

cdef enum:
    CLAIMED = -0x7FFFFFFF  # no expert, nor one's complement


@cython.final
cdef class Leases:
    """The slots of a cache with the policies that decide about them.

    Callers hold the cache's lock, and have checked layers, experts and slots.
    """

    def __cinit__(self, int capacity, Partitions partitions, AccessProfiler profiler):
        cdef Slots* slots = &self.slots
        self.partitions, self.profiler, self.evicts = partitions, profiler, True
        partitions.generation = profiler.generation
        slots.num = capacity
        slots.num_layers, slots.num_experts = profiler.num_layers, profiler.num_experts
        slots.num_words = (slots.num_experts + 63) // 64
        self.table = np.full((slots.num_layers, slots.num_experts), -1, np.int32)
        self.mask = np.zeros((slots.num_layers, slots.num_words), np.uint64)
        slots.table = <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>self.table)
        slots.mask = <uint64_t*>cnp.PyArray_DATA(<cnp.ndarray>self.mask)
        if open_slots(slots) < 0 or open_misses(&self.misses, slots.num_experts) < 0:
            raise MemoryError(f"no memory for the tables of {capacity} slots")

    def __dealloc__(self):
        close_slots(&self.slots)
        close_misses(&self.misses)

    cdef int share_of(self, int layer) noexcept:
        """Return how many slots a layer would have if all had the same."""
        if self.partitions.is_global:
            return max(1, (self.slots.num - self.slots.num_withheld) // self.slots.num_layers)
        return policy_of(self.partitions, layer).capacity

    cdef int acquire(
        self, const Step* step, Py_ssize_t share, bint drop, RouteLog log, int32_t* out,
        int32_t* misses_out,
    ) except -1:
        """Do what `ExpertCache.acquire` says."""
        cdef Policy part = policy_of(self.partitions, step.layer)
        cdef int admitted = 0, num_missing = self.count_misses(step, drop)
        cdef bint bulk = (num_missing or log is not None) and self.is_bulk(step, share)
        if num_missing:
            admitted = self.plan_claims(step, share)
        # A step without a valid id is no step: a replay tells the policy nothing either.
        if num_missing or self.any_valid(step):
            part.begin_step(step.layer, step.ids, step.wide, step.rows, step.top_k, step.names)
        if log is not None:
            _note(log, step, bulk)
        # The hits first: they must be leased before a victim is chosen.
        self.use_hits(step, out)
        if num_missing:
            self.lease_misses(
                step, admitted, part.worths(step.layer) if bulk else NULL, out, misses_out
            )
        return num_missing

    cdef bint acquire_resident(self, const Step* step, RouteLog log, int32_t* out) except -1:
        """Do what `acquire` does if all experts are resident; else nothing, and return False."""
        if self.count_misses(step, False):
            return False
        policy_of(self.partitions, step.layer).begin_step(
            step.layer, step.ids, step.wide, step.rows, step.top_k, step.names
        )
        if log is not None:
            _note(log, step, step.rows > 1)
        self.use_hits(step, out)
        return True

    cdef void count_hits(self, const Step* step, RouteLog log) noexcept:
        """Do what `acquire` and `release` do for what is resident, and nothing for the rest."""
        if self.any_valid(step):
            policy_of(self.partitions, step.layer).begin_step(
                step.layer, step.ids, step.wide, step.rows, step.top_k, step.names
            )
        if log is not None:
            _note(log, step, step.rows > 1)
        self.use_hits(step, NULL)

    cdef void release(self, const int32_t* slots, Py_ssize_t n) noexcept:
        """End one lease on each distinct slot; entries of -1 are skipped."""
        cdef Slot* slot
        cdef Py_ssize_t i
        # Looked up once: a list item per slot costs as much as the rest.
        cdef Policy part = policy_of(self.partitions, 0)
        cdef bint is_global = self.partitions.is_global
        cdef Slot* each = self.slots.each
        cdef uint64_t call = self.slots.call + 1
        self.slots.call = call
        for i in range(n):
            if slots[i] < 0:
                continue
            slot = &each[slots[i]]
            if slot.seen == call:
                continue
            slot.seen = call
            slot.leases -= 1
            if slot.leases == 0:
                if slot.state == RESIDENT:
                    if is_global:
                        unhold(part, slot.key)
                        continue
                    part = <Policy>self.partitions.each[slot.partition]
                    unhold(part, local_key(self.partitions, slot.key))
                elif slot.state == ABANDONED:
                    self.partitions.num_lost[slot.partition] -= 1
                    free_slot(&self.slots, slots[i])

    cdef int claim(self, int layer, int expert, bint evict, bint likely):
        """Do what `ExpertCache.claim` says; the slot is not foreseen yet."""
        cdef int key = layer * self.slots.num_experts + expert
        cdef int partition = partition_of(self.partitions, layer)
        cdef int local = local_key(self.partitions, key)
        cdef int victim
        cdef Policy part = policy_of(self.partitions, layer)
        if self.slots.table[key] >= 0 or self.slots.in_flight[key] >= 0:
            return -1
        self.partitions.heed_reset(self.profiler.generation)
        if room_left(self.partitions, part, partition) == 0:
            if not (evict and self.evicts):
                return -1
            part.expect(local)
            victim = part.victim()
            if self.partitions.is_scripted and (<PythonPolicy>part).error is not None:
                return -1
            if victim < 0:
                return -1
            # Where each layer has a policy, its keys are the layer's own experts.
            likely = (
                likely and self.partitions.is_global and victim // self.slots.num_experts != layer
            )
            if not (likely or part.prefers(local, victim)):
                return -1
        return self.take_slot(part, partition, key, False)

    cdef void publish(self, int slot) noexcept:
        """Make the expert of a slot that is being filled resident."""
        cdef Slot* filled = &self.slots.each[slot]
        end_filling(&self.slots, slot)
        if filled.leases == 0:
            unhold(
                <Policy>self.partitions.each[filled.partition],
                local_key(self.partitions, filled.key),
            )

    cdef void abandon(self, int slot) noexcept:
        """Give a slot that is being filled back."""
        cdef Slot* failed = &self.slots.each[slot]
        (<Policy>self.partitions.each[failed.partition]).remove(
            local_key(self.partitions, failed.key)
        )
        if fail_filling(&self.slots, slot):
            self.partitions.num_lost[failed.partition] += 1

    cdef bint withhold(self, int slot) noexcept:
        """Take a slot out of use; return False if it is leased, being filled or pinned."""
        cdef Slot* one = &self.slots.each[slot]
        cdef Policy part = policy_of(self.partitions, 0)
        if one.state == RESIDENT:
            # Held while it is leased, or pinned.
            if part.nodes[one.key].blocked:
                return False
            self.evict(part, one.key, 0)
        elif one.state != FREE:
            return False
        withhold_slot(&self.slots, slot)
        # It takes the room of an expert, as an abandoned one does.
        self.partitions.num_lost[0] += 1
        return True

    cdef void restore(self, int slot) noexcept:
        """Take a slot that was withheld into use."""
        self.partitions.num_lost[0] -= 1
        restore_slot(&self.slots, slot)

    cdef int audit(self) except -1:
        """Raise AssertionError where slots and policies contradict each other."""
        cdef int slot, key
        cdef bint held
        cdef Node* node
        cdef Policy part
        audit_slots(&self.slots)
        for slot in range(self.slots.num):
            key = self.slots.each[slot].key
            if key < 0:
                continue
            held = self.slots.each[slot].state == FILLING or self.slots.each[slot].leases > 0
            part = policy_of(self.partitions, key // self.slots.num_experts)
            node = &part.nodes[local_key(self.partitions, key)]
            if node.segment == 0:
                raise AssertionError(f"slot {slot} has key {key}, which the policy does not know")
            if (node.blocked & HELD != 0) != held:
                raise AssertionError(
                    f"key {key} in slot {slot} is held: {held}, the policy disagrees"
                )
        for partition, policy in enumerate(self.partitions.each):
            problem = (<Policy>policy).audit()
            if problem is not None:
                raise AssertionError(f"partition {partition}: {problem}")
        return 0

    cdef int count_misses(self, const Step* step, bint drop) except -1:
        """Find the distinct experts that are not resident; return how many."""
        cdef const int32_t* table = self.slots.table + step.layer * self.slots.num_experts
        if are_resident(table, self.slots.num_experts, step.ids, step.wide, step.n):
            return 0
        return find_misses(
            &self.misses, table, step.ids, step.wide, step.n, step.top_k, drop
        )

    cdef bint is_bulk(self, const Step* step, Py_ssize_t share) noexcept:
        """Whether a step with a `share` keeps to its layer's fair one."""
        # With a slot for every expert the fair share is no limit, but the step is the same.
        cdef Py_ssize_t limit = self.slots.num_experts - 1
        if step.rows > 1:
            limit = max(limit, self.share_of(step.layer))
        return 0 <= share <= limit

    cdef bint any_valid(self, const Step* step) noexcept:
        cdef Py_ssize_t i
        for i in range(step.n):
            if 0 <= id_at(step.ids, step.wide, i) < self.slots.num_experts:
                return True
        return False

    cdef int plan_claims(self, const Step* step, Py_ssize_t share) except -1:
        """Return how many slots to claim for the misses. Changes nothing but scratch."""
        cdef Policy part = policy_of(self.partitions, step.layer)
        cdef int base = step.layer * self.slots.num_experts
        cdef int32_t* table = self.slots.table + base
        cdef int local_base = local_key(self.partitions, base)
        cdef int num_missing = self.misses.num
        cdef int i, slot, slots, wanted = 0, hits = 0, evictable_hits = 0, room, limit
        cdef int64_t expert
        cdef Py_ssize_t position
        for i in range(num_missing):
            wanted += self.slots.in_flight[base + self.misses.experts[i]] < 0
        # Hits of this step will be leased: their slots cannot be evicted.
        self.slots.call += 1
        for position in range(step.n):
            expert = id_at(step.ids, step.wide, position)
            if expert < 0 or expert >= self.slots.num_experts or table[expert] < 0:
                continue
            slot = table[expert]
            if self.slots.each[slot].seen != self.slots.call:
                self.slots.each[slot].seen = self.slots.call
                hits += 1
                evictable_hits += part.nodes[local_base + expert].blocked == 0
        room = room_left(self.partitions, part, partition_of(self.partitions, step.layer))
        if self.evicts:
            room += part.num_evictable - evictable_hits
        if share >= 0:
            # Joined experts have a slot too.
            limit = <int>max(0, share - hits - (num_missing - wanted))
            return min(wanted, min(limit, room))
        if wanted > room:
            slots = part.capacity - self.slots.num_withheld
            raise CapacityError(
                f"layer {step.layer} asks for {wanted} experts that are not resident, but of "
                f"{slots} slots only {room} are free or can be evicted "
                f"({part.pin_count} pinned, {slots - room - part.pin_count} in use); "
                "raise the memory, ask for fewer at once, or go through waves"
            )
        return wanted

    cdef void use_hits(self, const Step* step, int32_t* out) noexcept:
        """Count what is resident as used; with `out`, write the slots there, and lease them."""
        # Read once: the compiler cannot know that the loop writes to none of these fields.
        cdef const void* ids = step.ids
        cdef bint wide = step.wide
        cdef Policy part = policy_of(self.partitions, step.layer)
        cdef int num_experts = self.slots.num_experts
        cdef int base = step.layer * num_experts
        cdef int local_base = local_key(self.partitions, base)
        cdef const int32_t* table = self.slots.table + base
        cdef Slot* slots = self.slots.each
        cdef uint64_t* totals = self.profiler.totals + base
        cdef uint64_t hits = 0, call = self.slots.call + 1
        cdef Slot* slot
        cdef Py_ssize_t i, n = step.n
        cdef int64_t expert
        self.slots.call = call
        for i in range(n):
            expert = id_at(ids, wide, i)
            if expert < 0 or expert >= num_experts or table[expert] < 0:
                if out != NULL:
                    out[i] = -1
                continue
            if out != NULL:
                out[i] = table[expert]
            slot = &slots[table[expert]]
            if slot.seen == call:
                continue
            slot.seen = call
            # Counted first: the policy may read the count.
            totals[expert] += 1
            hits += 1
            part.access(local_base + <int>expert)
            if slot.foreseen:
                slot.foreseen = False
                self.num_foreseen_hits += 1
            if out != NULL:
                slot.leases += 1
                if slot.leases == 1:
                    hold(part, local_base + <int>expert)
        self.profiler.layer_hits[step.layer] += hits
        self.profiler.hit_count += hits

    cdef void lease_misses(
        self, const Step* step, int admitted, const int* worths, int32_t* out, int32_t* misses_out
    ) noexcept:
        """Join what is being filled, claim slots for the best of the rest, and write which."""
        cdef Policy part = policy_of(self.partitions, step.layer)
        cdef int partition = partition_of(self.partitions, step.layer)
        cdef int base = step.layer * self.slots.num_experts
        cdef int local_base = local_key(self.partitions, base)
        cdef int* missing = self.misses.experts
        cdef int num_missing = self.misses.num
        cdef int i, expert, slot, num_claimed = 0, written
        cdef int64_t wide_expert
        cdef Py_ssize_t position
        self.partitions.heed_reset(self.profiler.generation)
        sort_misses(&self.misses, worths)
        # Free slots are shared fairly; after that it counts what an expert is worth.
        if worths != NULL and room_left(self.partitions, part, partition) == 0:
            admitted = num_missing
        for i in range(num_missing):
            expert = missing[i]
            slot = self.slots.in_flight[base + expert]
            if slot >= 0:
                count_miss(self.profiler, step.layer, base + expert)
                part.access(local_base + expert)
                if self.slots.each[slot].foreseen:
                    self.slots.each[slot].foreseen = False
                    self.num_foreseen_late += 1
                self.slots.each[slot].leases += 1
                missing[i] = ~expert
        for i in range(num_missing):
            expert = missing[i]
            if expert < 0:
                continue
            # Counted first: the policy reads the count when the key enters.
            count_miss(self.profiler, step.layer, base + expert)
            if num_claimed < admitted and worths != NULL:
                # What comes later is worth less.
                if not self.is_worth_it(part, partition, base + expert):
                    admitted = num_claimed
            if num_claimed < admitted:
                slot = self.take_slot(part, partition, base + expert, True)
                self.slots.each[slot].leases = 1
                misses_out[num_claimed] = self.misses.first[expert]
                num_claimed += 1
                missing[i] = CLAIMED
        written = num_claimed
        for i in range(num_missing):
            if CLAIMED < missing[i] < 0:
                misses_out[written] = ~self.misses.first[~missing[i]]
                written += 1
        for i in range(num_missing):
            if missing[i] >= 0:
                misses_out[written] = self.misses.first[missing[i]]
                written += 1
        for position in range(step.n):
            wide_expert = id_at(step.ids, step.wide, position)
            if out[position] < 0 and 0 <= wide_expert < self.slots.num_experts:
                out[position] = self.slots.in_flight[base + wide_expert]

    cdef bint is_worth_it(self, Policy part, int partition, int key) noexcept nogil:
        """Whether a key is worth more than what would leave for it."""
        cdef int victim
        if room_left(self.partitions, part, partition):
            return True
        if not self.evicts:
            return False
        part.expect(local_key(self.partitions, key))
        victim = part.victim()
        return victim >= 0 and part.prefers(local_key(self.partitions, key), victim)

    cdef int take_slot(self, Policy part, int partition, int key, bint accessed) noexcept nogil:
        """Have a slot filled with an expert, without a lease; there is room, or a victim."""
        cdef int slot, local = local_key(self.partitions, key)
        if room_left(self.partitions, part, partition) == 0:
            part.expect(local)
            self.evict(part, part.victim(), partition)
        slot = begin_filling(&self.slots, key, partition)
        part.insert(local, accessed)
        hold(part, local)
        return slot

    cdef void evict(self, Policy part, int victim, int partition) noexcept nogil:
        cdef int key = victim
        cdef int slot
        if not self.partitions.is_global:
            key += partition * self.slots.num_experts
        slot = self.slots.table[key]
        part.remove(victim)
        self.num_foreseen_unused += self.slots.each[slot].foreseen
        self.num_evictions += 1
        vacate(&self.slots, slot)


cdef void _note(RouteLog log, const Step* step, bint bulk) noexcept:
    log.append(step.layer, step.ids, step.wide, step.rows, step.top_k, bulk, step.names)
