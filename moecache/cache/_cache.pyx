"""ExpertCache: which expert is in which slot, and which slots may be used or refilled."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

import threading

import numpy as np

from moecache.policies._echo cimport Echo
from moecache.policies._echo_cache cimport EchoCache
from moecache.policies._ids cimport as_ids, as_sequences, id_at, int32_data, sort_by_uses
from moecache.policies._policy cimport MAX_KEYS, PINNED, Policy, hold, unhold
from moecache.policies._python_policy cimport PythonPolicy
from moecache.cache._profiler cimport AccessProfiler, count_miss

from moecache.errors import CapacityError, ConfigError
from moecache.policies.making import make_policies, policy_name

cnp.import_array()

cdef enum:
    CLAIMED = -0x7FFFFFFF  # no expert, nor one's complement


@cython.final
cdef class ExpertCache:
    """Map (layer, expert) to slots, and decide which expert is evicted.

    The cache moves no bytes. A caller *acquires* the experts of a step: resident
    experts are leased where they are, and slots are claimed for the others. The
    caller fills a claimed slot and then *publishes* it, or *abandons* it if that
    failed, exactly once. Every slot that `acquire` returned is *released* exactly
    once, whatever became of it. A slot that is leased or being filled is never
    given to another expert.

    Calls are atomic and never block. Ids are int32 or int64 arrays of any shape.

    Parameters
    ----------
    num_layers, num_experts : int
        Shape of the model, each at least 1.
    capacity : int
        Number of slots, at least 1.
    policy : str, class, function or object, default "echo"
        Which expert is evicted. "echo": the one least likely to be used when its
        layer comes round again; "haz2": the same from each expert's own history
        alone, at half the cost; or a policy from the literature: "lfru", "lfu",
        "lru", "slru" (a quarter on probation), "slru-lfu" (evicts the least accessed
        there), and those for replays: "arc", "fifo", "least-stale", "lecar", "lrfu",
        "s3-fifo", "sieve", "w-tinylfu". docs/policies.md compares them.
        A class or function is called as ``policy(capacity, num_keys=...)``, once for all
        layers or once for each; an object is for scope "global". docs/policies.md says which
        methods one written in Python has. Its error ends the next `acquire`, as a
        ConfigError, and every one after it.
    scope : {"global", "layer"}, default "global"
        Whether layers compete for slots, or each has its share (the remainder
        goes to the first layers).
    profiler : AccessProfiler, optional
        Counts hits and misses; a new one if not given.

    Attributes
    ----------
    route_log : RouteLog or None
        The log in which `acquire` notes the ids of every step. None at first: nothing is noted.
    evicts : bool
        Whether slots may be taken from resident experts; True at first. While it is False only free
        slots are claimed, and experts keep their slots.
    num_changes : int
        How often `slot_table` changed.
    num_withheld : int
        Slots that are out of use, see `withhold`.

    Raises
    ------
    ConfigError
        If a name is unknown, a number is below 1, with scope "layer" there are
        fewer slots than layers, or a policy of the caller's does not fit or holds keys.
    """

    def __cinit__(
        self,
        int num_layers,
        int num_experts,
        Py_ssize_t capacity,
        *,
        policy="echo",
        str scope="global",
        AccessProfiler profiler=None,
    ):
        cdef int slot
        if num_layers < 1 or num_experts < 1 or capacity < 1:
            raise ConfigError(
                "num_layers, num_experts and capacity must be at least 1, "
                f"got {num_layers}, {num_experts} and {capacity}"
            )
        if num_layers * <int64_t>num_experts > MAX_KEYS:
            raise ConfigError(
                f"{num_layers} layers of {num_experts} experts are more than {MAX_KEYS}"
            )
        if profiler is None:
            profiler = AccessProfiler(num_layers, num_experts)
        if profiler.num_layers != num_layers or profiler.num_experts != num_experts:
            raise ConfigError(
                f"the profiler is for {profiler.num_layers} x {profiler.num_experts} experts, "
                f"the cache for {num_layers} x {num_experts}"
            )
        # More slots than experts could never be used.
        capacity = min(<int64_t>capacity, num_layers * <int64_t>num_experts)
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.capacity = <int>capacity
        self.policy = policy_name(policy)
        self.scope = scope
        self.is_global = scope == "global"
        self.evicts = True
        self.profiler = profiler
        self.generation = profiler.generation
        self.num_words = (num_experts + 63) // 64

        self.partitions = make_policies(
            policy, scope, num_layers, num_experts, self.capacity, profiler.counts
        )
        self.take_policies()
        self.table_owner = np.full((num_layers, num_experts), -1, np.int32)
        self.table_view = _read_only(self.table_owner)
        self.table = <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>self.table_owner)
        self.mask_owner = np.zeros((num_layers, self.num_words), np.uint64)
        self.mask_view = _read_only(self.mask_owner)
        self.mask = <uint64_t*>cnp.PyArray_DATA(<cnp.ndarray>self.mask_owner)
        self.abandoned = <int*>calloc(len(self.partitions), sizeof(int))
        self.slots = <Slot*>calloc(capacity, sizeof(Slot))
        self.free_slots = <int*>calloc(capacity, sizeof(int))
        self.in_flight = <int32_t*>calloc(num_layers * num_experts, sizeof(int32_t))
        self.seen = <uint64_t*>calloc(num_experts, sizeof(uint64_t))
        self.uses = <int*>calloc(num_experts, sizeof(int))
        self.last_row = <Py_ssize_t*>calloc(num_experts, sizeof(Py_ssize_t))
        self.first = <int*>calloc(num_experts, sizeof(int))
        self.missing = <int*>calloc(num_experts, sizeof(int))
        self.order = <uint64_t*>calloc(num_experts, sizeof(uint64_t))
        if (
            self.abandoned == NULL or self.slots == NULL
            or self.free_slots == NULL or self.in_flight == NULL or self.seen == NULL
            or self.uses == NULL or self.first == NULL or self.missing == NULL
            or self.order == NULL or self.last_row == NULL
        ):
            raise MemoryError(f"no memory for the tables of {capacity} slots")
        memset(self.in_flight, 0xFF, num_layers * num_experts * sizeof(int32_t))
        for slot in range(self.capacity - 1, -1, -1):
            self.free_slot(slot)

    def __dealloc__(self):
        free(self.abandoned)
        free(self.slots)
        free(self.free_slots)
        free(self.in_flight)
        free(self.seen)
        free(self.uses)
        free(self.last_row)
        free(self.first)
        free(self.missing)
        free(self.order)

    def acquire(
        self,
        Py_ssize_t layer,
        ids,
        cnp.ndarray slots_out not None,
        cnp.ndarray misses_out not None,
        *,
        Py_ssize_t share=-1,
        bint ignore_out_of_range=False,
        sequences=None,
    ) -> int:
        """Lease the resident experts of a step, and claim slots for the others.

        Duplicates are one access and one lease. An expert that another caller
        is already filling is leased too ("joined"): it counts as a miss, but
        must not be filled again.

        Parameters
        ----------
        layer : int
        ids : ndarray of int32 or int64, shape [..., top_k]
            The router's choice. A policy that looks at tokens takes a row as one.
        slots_out : ndarray of int32, C-contiguous, ids.size elements
            Receives the slot of each id; -1 where there is none. The three arrays
            must not share memory.
        misses_out : ndarray of int32, C-contiguous, at least min(ids.size, num_experts)
            Receives, for each distinct expert that is not resident, the flat index
            of its first occurrence in `ids`: first the experts whose slots the
            caller must fill; then, as ~index, the joined ones; then those that
            `share` left without a slot (slots_out -1).
        share : int, default -1
            Claim slots only until this many of the step's experts have one (resident
            experts count), for the experts that the most rows ask for, and no more
            than are available. -1: claim all or raise.
        ignore_out_of_range : bool, default False
            Drop ids outside [0, num_experts) rather than raise.
        sequences : array of int, shape [rows], optional
            Which sequence each row is of: a number that it keeps as long as it goes on, from
            0 to 2**31 - 1, at most 64 different ones. By default all rows are consecutive
            tokens of one. If they are of several, ECHO decides itself which experts a
            `share` claims slots for: those worth more than what would leave.

        Returns
        -------
        int
            Entries written to `misses_out`; 0 if every expert is resident.

        Raises
        ------
        ValueError
            If an id is out of range, or an output array or `sequences` does not fit.
        TypeError
            If ids or sequences are not integers.
        CapacityError
            If all are to be claimed and too few slots are free or can be evicted.
        ConfigError
            If a policy written in Python raised an error, in this call's place or before.
            After any error nothing has changed.
        """
        cdef cnp.ndarray array = as_ids(ids)
        cdef bint wide = cnp.PyArray_ITEMSIZE(array) == 8
        cdef const void* data = cnp.PyArray_DATA(array)
        cdef Py_ssize_t n = cnp.PyArray_SIZE(array)
        cdef int dimensions = cnp.PyArray_NDIM(array)
        cdef Py_ssize_t top_k = cnp.PyArray_DIM(array, dimensions - 1) if dimensions else 1
        cdef Py_ssize_t rows = 1 if n == top_k else n // max(1, top_k)
        cdef int num_missing, admitted = 0
        cdef cnp.ndarray names_owner = None
        cdef const int32_t* names = NULL
        cdef const int* worths
        cdef Policy part
        cdef int32_t* out = int32_data(slots_out, n, "slots_out", True)
        cdef int32_t* misses = int32_data(
            misses_out, min(n, self.num_experts), "misses_out", True
        )
        self.checked(layer, 0)
        part = self.part(<int>layer)
        if sequences is not None and n:
            names_owner = as_sequences(sequences, rows)
            names = <const int32_t*>cnp.PyArray_DATA(names_owner)
        with cython.critical_section(self):
            if self.scripted:
                self.enter()
            try:
                if self.scripted:
                    self.heed_script()
                num_missing = self.count_missing(
                    <int>layer, data, wide, n, top_k, ignore_out_of_range
                )
                if num_missing:
                    admitted = self.plan_claims(<int>layer, data, wide, n, num_missing, share)
                # A step without a valid id is no step: a replay tells the policy nothing either.
                if num_missing or self.any_valid(data, wide, n):
                    part.begin_step(<int>layer, data, wide, rows, top_k, names)
                if self.route_log is not None:
                    self.route_log.append(
                        <int>layer, data, wide, rows, top_k, self.is_bulk(<int>layer, rows, share),
                        names,
                    )
                # The hits first: they must be leased before a victim is chosen.
                self.lease_hits(<int>layer, data, wide, n, out)
                if num_missing:
                    worths = NULL
                    if self.is_bulk(<int>layer, rows, share):
                        worths = part.worths(<int>layer)
                    self.lease_misses(
                        <int>layer, data, wide, n, num_missing, admitted, worths, out, misses
                    )
            finally:
                if self.scripted:
                    self.leave()
        return num_missing

    def release(self, cnp.ndarray slots not None) -> None:
        """End one lease on each distinct slot; entries of -1 are skipped.

        Parameters
        ----------
        slots : ndarray of int32, any shape, C-contiguous
            The slots that `acquire` wrote.

        Raises
        ------
        ValueError
            If a slot is out of range or not leased. Nothing is changed then.
        """
        cdef Py_ssize_t i, n = cnp.PyArray_SIZE(slots)
        cdef const int32_t* data = int32_data(slots, n, "slots", False)
        with cython.critical_section(self):
            if self.scripted:
                self.enter()
            try:
                for i in range(n):
                    if data[i] < -1 or data[i] >= self.capacity:
                        raise ValueError(f"slot {data[i]} is not in [0, {self.capacity})")
                    if data[i] >= 0 and self.slots[data[i]].leases == 0:
                        raise ValueError(f"slot {data[i]} is not leased; was it released twice?")
                self.end_leases(data, n)
            finally:
                if self.scripted:
                    self.leave()

    def claim(
        self, Py_ssize_t layer, Py_ssize_t expert, *, bint evict=True, bint foreseen=True,
        bint likely=False
    ) -> int:
        """Claim a slot for an expert that no step has asked for yet.

        Takes a free slot, or that of an expert that the policy values less, or see `likely`.
        The slot is not leased; the caller publishes or abandons it.

        Parameters
        ----------
        layer, expert : int
        evict : bool, default True
            If false, take only a free slot.
        foreseen : bool, default True
            Count what becomes of the expert: `num_foreseen_hits`,
            `num_foreseen_late`, `num_foreseen_unused`.
        likely : bool, default False
            Evict the expert that the policy names even if the policy values that one more:
            a step will ask for this one, more likely than not, and would evict it as well.
            Not an expert of the same layer, which the same step may want.

        Returns
        -------
        int
            The slot, or -1 if the expert is resident or in flight, or no slot may
            be taken for it.
        """
        cdef Policy part
        cdef int partition, victim, local, slot
        cdef Py_ssize_t key
        self.checked(layer, expert)
        with cython.critical_section(self):
            if self.scripted:
                self.enter()
            try:
                key = layer * self.num_experts + expert
                if self.table[key] >= 0 or self.in_flight[key] >= 0:
                    return -1
                self.heed_reset()
                part = self.part(<int>layer)
                partition = 0 if self.is_global else <int>layer
                local = self.local_key(<int>key)
                if self.room_left(part, partition) == 0:
                    if not (evict and self.evicts):
                        return -1
                    part.expect(local)
                    victim = part.victim()
                    if self.scripted and (<PythonPolicy>part).error is not None:
                        return -1
                    if victim < 0:
                        return -1
                    # Where each layer has a policy, its keys are the layer's own experts.
                    likely = likely and self.is_global and victim // self.num_experts != layer
                    if not (likely or part.prefers(local, victim)):
                        return -1
                slot = self.take_slot(part, partition, <int>layer, <int>expert, False)
                self.slots[slot].foreseen = foreseen
                return slot
            finally:
                if self.scripted:
                    self.leave()

    def publish(self, Py_ssize_t slot) -> None:
        """Declare a claimed slot filled: its expert is resident from now on."""
        cdef Slot* filled
        cdef int layer, expert
        with cython.critical_section(self):
            if self.scripted:
                self.enter()
            try:
                filled = self.claimed(slot, "published")
                layer = filled.key // self.num_experts
                expert = filled.key % self.num_experts
                filled.state = RESIDENT
                self.in_flight[filled.key] = -1
                self.table[filled.key] = <int32_t>slot
                self.mask[layer * self.num_words + expert // 64] |= <uint64_t>1 << (expert % 64)
                self.resident_count += 1
                self.num_changes += 1
                if filled.leases == 0:
                    unhold(<Policy>self.partitions[filled.partition], self.local_key(filled.key))
            finally:
                if self.scripted:
                    self.leave()

    def abandon(self, Py_ssize_t slot) -> None:
        """Give a claimed slot back unfilled; leases on it are still to be released."""
        cdef Slot* failed
        with cython.critical_section(self):
            if self.scripted:
                self.enter()
            try:
                failed = self.claimed(slot, "abandoned")
                (<Policy>self.partitions[failed.partition]).remove(self.local_key(failed.key))
                self.in_flight[failed.key] = -1
                failed.key = -1
                if failed.leases:
                    failed.state = ABANDONED
                    self.abandoned[failed.partition] += 1
                else:
                    self.free_slot(<int>slot)
            finally:
                if self.scripted:
                    self.leave()

    def withhold(self, Py_ssize_t num) -> list[int]:
        """Take slots out of use until `restore`, the last ones first; their experts are evicted.

        Slots that are leased, being filled or pinned stay in use, and one always does.

        Parameters
        ----------
        num : int

        Returns
        -------
        list of int
            The slots that were taken, at most `num`.

        Raises
        ------
        ConfigError
            If each layer has slots of its own.
        """
        cdef int slot
        cdef Policy part
        cdef list taken = []
        if not self.is_global:
            raise ConfigError('slots can be withheld with scope "global" alone')
        with cython.critical_section(self):
            if self.scripted:
                self.enter()
            try:
                self.heed_reset()
                part = self.part(0)
                for slot in range(self.capacity - 1, -1, -1):
                    if len(taken) >= num or self.num_withheld + 1 >= self.capacity:
                        break
                    if self.withhold_slot(part, slot):
                        taken.append(slot)
            finally:
                if self.scripted:
                    self.leave()
        return taken

    def restore(self, slots) -> None:
        """Take slots that `withhold` returned into use again.

        Raises
        ------
        ValueError
            If one is not withheld, or is given twice. Nothing is changed then.
        """
        cdef list given = [int(slot) for slot in slots]
        with cython.critical_section(self):
            for slot in given:
                if not 0 <= slot < self.capacity or self.slots[<int>slot].state != WITHHELD:
                    raise ValueError(f"slot {slot} is not withheld")
            if len(set(given)) != len(given):
                raise ValueError(f"slots {given} have one twice")
            for slot in given:
                self.abandoned[0] -= 1
                self.num_withheld -= 1
                self.free_slot(<int>slot)

    def count_hits(self, Py_ssize_t first, ids, *, sequences=None) -> None:
        """Count steps that found their experts in their slots, and tell the policy of them.

        For a host that learns what was chosen only afterwards: does what `acquire` and `release`
        do for such a step, in the order of the layers. Ids that are out of range or not resident
        are no accesses.

        Parameters
        ----------
        first : int
            Layer of the first step.
        ids : ndarray of int32 or int64, shape [num_steps, rows, top_k]
            The router's choice, for layer after layer.
        sequences : array of int, shape [rows], optional
            See `acquire`.

        Raises
        ------
        ValueError
            If there are no such layers, or `ids` or `sequences` has another shape.
        TypeError
            If ids or sequences are not integers.
        """
        cdef cnp.ndarray array = as_ids(ids)
        cdef bint wide = cnp.PyArray_ITEMSIZE(array) == 8
        cdef const char* data = <const char*>cnp.PyArray_DATA(array)
        cdef cnp.ndarray names_owner = None
        cdef const int32_t* names = NULL
        cdef Py_ssize_t rows, top_k, n, step, num_steps
        cdef int layer
        cdef Policy part
        if cnp.PyArray_NDIM(array) != 3:
            raise ValueError(
                f"ids have {cnp.PyArray_NDIM(array)} axes; give [num_steps, rows, top_k]"
            )
        num_steps = cnp.PyArray_DIM(array, 0)
        rows, top_k = cnp.PyArray_DIM(array, 1), cnp.PyArray_DIM(array, 2)
        n = rows * top_k
        if n == 0 or num_steps == 0:
            return
        self.checked(first, 0)
        self.checked(first + num_steps - 1, 0)
        if sequences is not None:
            names_owner = as_sequences(sequences, rows)
            names = <const int32_t*>cnp.PyArray_DATA(names_owner)
        with cython.critical_section(self):
            if self.scripted:
                self.enter()
            try:
                if self.scripted:
                    self.heed_script()
                for step in range(num_steps):
                    layer = <int>(first + step)
                    part = self.part(layer)
                    if self.any_valid(data, wide, n):
                        part.begin_step(layer, data, wide, rows, top_k, names)
                    if self.route_log is not None:
                        self.route_log.append(layer, data, wide, rows, top_k, rows > 1, names)
                    self.use_hits(layer, data, wide, n, False)
                    data += n * (8 if wide else 4)
            finally:
                if self.scripted:
                    self.leave()

    @property
    def slot_table(self) -> np.ndarray:
        """Slot of each expert, int32 [num_layers, num_experts]: a live, read-only view.

        -1 where the expert is not resident.
        """
        return self.table_view

    def resident_mask(self, Py_ssize_t layer) -> np.ndarray:
        """Return the layer's resident experts as bits: a live, read-only view.

        Expert e is bit e % 64 of word e // 64, uint64 [(num_experts + 63) // 64].
        """
        self.checked(layer, 0)
        return self.mask_view[layer]

    def all_resident(self, Py_ssize_t layer, ids) -> bool:
        """Return whether every id's expert is resident; nothing is leased or counted."""
        cdef cnp.ndarray array = as_ids(ids)
        cdef Py_ssize_t i
        cdef int64_t expert
        cdef bint wide = cnp.PyArray_ITEMSIZE(array) == 8
        cdef const void* data = cnp.PyArray_DATA(array)
        cdef bint resident = True
        self.checked(layer, 0)
        for i in range(cnp.PyArray_SIZE(array)):
            expert = id_at(data, wide, i)
            if expert < 0 or expert >= self.num_experts:
                raise ValueError(f"expert {expert} is not in [0, {self.num_experts})")
            resident = resident and self.table[layer * self.num_experts + expert] >= 0
        return resident

    def fair_share(self, Py_ssize_t layer) -> int:
        """Return how many slots a layer would have if all had the same, at least 1.

        This is the `share` for a step of many tokens, which must not evict what
        other layers and later tokens need.
        """
        self.checked(layer, 0)
        return self.share_of(<int>layer)

    def pin(self, Py_ssize_t layer, Py_ssize_t expert) -> bool:
        """Keep a resident expert until it is unpinned.

        Returns False if it is not resident or the policy has no room for the pin.
        """
        self.checked(layer, expert)
        with cython.critical_section(self):
            if self.scripted:
                self.enter()
            try:
                if self.table[layer * self.num_experts + expert] < 0:
                    return False
                return self.part(<int>layer).pin_key(
                    self.local_key(<int>(layer * self.num_experts + expert))
                )
            finally:
                if self.scripted:
                    self.leave()

    def unpin(self, Py_ssize_t layer, Py_ssize_t expert) -> None:
        """Let an expert be evicted again; do nothing if it is not pinned."""
        self.checked(layer, expert)
        with cython.critical_section(self):
            if self.scripted:
                self.enter()
            try:
                self.part(<int>layer).unpin_key(
                    self.local_key(<int>(layer * self.num_experts + expert))
                )
            finally:
                if self.scripted:
                    self.leave()

    def is_pinned(self, Py_ssize_t layer, Py_ssize_t expert) -> bool:
        """Return whether an expert is pinned."""
        self.checked(layer, expert)
        return self.part(<int>layer).is_pinned(
            self.local_key(<int>(layer * self.num_experts + expert))
        )

    def expert_states(self) -> np.ndarray:
        """Return what becomes of each expert at this moment, for those who watch.

        Returns
        -------
        ndarray of uint8, shape [num_layers, num_experts]
            A new array; sums of 1 (resident), 2 (being read), 4 (leased) and 8 (pinned).
        """
        cdef int slot, key
        cdef Policy part
        cdef cnp.ndarray states = np.zeros((self.num_layers, self.num_experts), np.uint8)
        cdef uint8_t* data = <uint8_t*>cnp.PyArray_DATA(states)
        with cython.critical_section(self):
            if self.scripted:
                self.enter()
            try:
                for slot in range(self.capacity):
                    key = self.slots[slot].key
                    if key < 0:
                        continue
                    data[key] = 1 if self.slots[slot].state == RESIDENT else 2
                    if self.slots[slot].leases:
                        data[key] |= 4
                    part = self.part(key // self.num_experts)
                    if part.nodes[self.local_key(key)].blocked & PINNED:
                        data[key] |= 8
            finally:
                if self.scripted:
                    self.leave()
        return states

    def begin_sequence(self) -> None:
        """Tell the policy that the next tokens do not continue the last ones.

        Policies that look only at recency and counts take no notice.
        """
        with cython.critical_section(self):
            if self.scripted:
                self.enter()
            try:
                if self.route_log is not None:
                    self.route_log.mark_sequence()
                for part in self.partitions:
                    (<Policy>part).begin_sequence()
            finally:
                if self.scripted:
                    self.leave()

    @property
    def echo(self) -> Echo | None:
        """The learner of the policies "echo" and "haz2"; None with any other."""
        part = self.partitions[0]
        return (<EchoCache>part).echo if isinstance(part, EchoCache) else None

    @property
    def num_pinned(self) -> int:
        """Number of experts that are pinned."""
        return sum([(<Policy>part).pin_count for part in self.partitions])

    @property
    def num_resident(self) -> int:
        """Number of resident experts; never above `capacity`."""
        return self.resident_count

    @property
    def num_free(self) -> int:
        """Number of slots that hold nothing."""
        return self.num_free_slots

    def free_slots_now(self) -> list[int]:
        """Return the slots that hold nothing and are in use, for those who watch."""
        with cython.critical_section(self):
            return [self.free_slots[i] for i in range(self.num_free_slots)]

    def check(self) -> None:
        """Audit every invariant; for tests.

        Raises
        ------
        AssertionError
            If the tables contradict each other.
        """
        cdef int slot, layer, expert, key, resident = 0, empty = 0, withheld = 0
        cdef Policy part
        with cython.critical_section(self):
            if self.scripted:
                self.enter()
            try:
                for slot in range(self.capacity):
                    key = self.slots[slot].key
                    state = self.slots[slot].state
                    if state == FREE or state == ABANDONED or state == WITHHELD:
                        empty += state == FREE
                        withheld += state == WITHHELD
                        _require(key == -1, f"slot {slot} holds nothing but has key {key}")
                        _require(
                            (state != ABANDONED) == (self.slots[slot].leases == 0),
                            f"empty slot {slot} has {self.slots[slot].leases} leases",
                        )
                        continue
                    part = self.part(key // self.num_experts)
                    _require(
                        part.nodes[self.local_key(key)].segment != 0,
                        f"slot {slot} has key {key}, which the policy does not know",
                    )
                    held = state == FILLING or self.slots[slot].leases > 0
                    _require(
                        (part.nodes[self.local_key(key)].blocked & 1 != 0) == held,
                        f"key {key} in slot {slot} is held: {held}, the policy disagrees",
                    )
                    owner = self.table if state == RESIDENT else self.in_flight
                    _require(owner[key] == slot, f"slot {slot} has key {key} in slot {owner[key]}")
                _require(
                    empty == self.num_free_slots,
                    f"{empty} free slots, counted {self.num_free_slots}",
                )
                _require(
                    withheld == self.num_withheld,
                    f"{withheld} slots withheld, counted {self.num_withheld}",
                )
                for layer in range(self.num_layers):
                    for expert in range(self.num_experts):
                        key = layer * self.num_experts + expert
                        resident += self.table[key] >= 0
                        bit = self.mask[layer * self.num_words + expert // 64] >> (expert % 64) & 1
                        _require(
                            bit == (self.table[key] >= 0),
                            f"mask and table differ for expert {expert} of layer {layer}",
                        )
                        _require(
                            self.table[key] < 0 or self.in_flight[key] < 0,
                            f"expert {expert} of layer {layer} is resident and in flight",
                        )
                _require(
                    resident == self.resident_count,
                    f"{resident} resident, counted {self.resident_count}",
                )
                for index, part in enumerate(self.partitions):
                    problem = part.audit()
                    _require(problem is None, f"partition {index}: {problem}")
            finally:
                if self.scripted:
                    self.leave()

    cdef int share_of(self, int layer) noexcept:
        if self.is_global:
            return max(1, (self.capacity - self.num_withheld) // self.num_layers)
        return self.part(layer).capacity

    cdef Policy part(self, int layer):
        return <Policy>self.partitions[0 if self.is_global else layer]

    cdef int local_key(self, int key) noexcept nogil:
        # With one policy per layer, a key is the expert's number in its layer.
        return key if self.is_global else key % self.num_experts

    cdef void heed_reset(self) noexcept:
        # Policies that keep keys in the order of their counts read them again.
        if self.profiler.generation != self.generation:
            self.generation = self.profiler.generation
            for part in self.partitions:
                (<Policy>part).recount()

    cdef int room_left(self, Policy part, int partition) noexcept nogil:
        return part.capacity - part.size - self.abandoned[partition]

    cdef int take_slot(
        self, Policy part, int partition, int layer, int expert, bint accessed
    ) noexcept nogil:
        cdef int slot, key = layer * self.num_experts + expert
        if self.room_left(part, partition) == 0:
            part.expect(self.local_key(key))
            self.evict(part, part.victim(), partition)
        self.num_free_slots -= 1
        slot = self.free_slots[self.num_free_slots]
        self.slots[slot].key = key
        self.slots[slot].partition = partition
        self.slots[slot].state = FILLING
        self.slots[slot].foreseen = False
        self.in_flight[key] = slot
        part.insert(self.local_key(key), accessed)
        hold(part, self.local_key(key))
        return slot

    cdef void evict(self, Policy part, int victim, int partition) noexcept nogil:
        cdef int key = victim if self.is_global else partition * self.num_experts + victim
        cdef int layer = key // self.num_experts
        cdef int expert = key % self.num_experts
        cdef int slot = self.table[key]
        part.remove(victim)
        self.num_foreseen_unused += self.slots[slot].foreseen
        self.table[key] = -1
        self.mask[layer * self.num_words + expert // 64] &= ~(<uint64_t>1 << (expert % 64))
        self.resident_count -= 1
        self.num_evictions += 1
        self.num_changes += 1
        self.free_slot(slot)

    cdef bint withhold_slot(self, Policy part, int slot) noexcept nogil:
        cdef int i, at = self.num_free_slots
        cdef Slot* one = &self.slots[slot]
        if one.state == RESIDENT:
            # Held while it is leased, or pinned.
            if part.nodes[one.key].blocked:
                return False
            self.evict(part, one.key, 0)
            at = self.num_free_slots - 1
        elif one.state == FREE:
            at = 0
            while self.free_slots[at] != slot:
                at += 1
        else:
            return False
        self.num_free_slots -= 1
        for i in range(at, self.num_free_slots):
            self.free_slots[i] = self.free_slots[i + 1]
        one.state = WITHHELD
        # It takes the room of an expert, as an abandoned one does.
        self.abandoned[0] += 1
        self.num_withheld += 1
        return True

    cdef void free_slot(self, int slot) noexcept nogil:
        self.slots[slot].key = -1
        self.slots[slot].state = FREE
        self.free_slots[self.num_free_slots] = slot
        self.num_free_slots += 1

    cdef int count_missing(
        self, int layer, const void* ids, bint wide, Py_ssize_t n, Py_ssize_t top_k, bint drop
    ) except -1:
        # Changes nothing but scratch, so that a bad id leaves the cache as it was.
        cdef Py_ssize_t i, row
        cdef int64_t expert
        cdef int count = 0
        cdef const int32_t* table = self.table + layer * self.num_experts
        self.call += 1
        for i in range(n):
            expert = id_at(ids, wide, i)
            if expert < 0 or expert >= self.num_experts:
                if drop:
                    continue
                raise ValueError(f"expert {expert} is not in [0, {self.num_experts})")
            if table[expert] >= 0:
                continue
            if self.seen[expert] != self.call:
                self.seen[expert] = self.call
                self.first[expert] = <int>i
                self.uses[expert] = 0
                self.last_row[expert] = -1
                self.missing[count] = <int>expert
                count += 1
            # Once per row, as a trace has it: a row with an expert twice is still one token.
            row = i // top_k
            if self.last_row[expert] != row:
                self.last_row[expert] = row
                self.uses[expert] += 1
        return count

    cdef bint is_bulk(self, int layer, Py_ssize_t rows, Py_ssize_t share) noexcept:
        # With a slot for every expert the fair share is no limit, but the step is the same.
        cdef Py_ssize_t limit = self.num_experts - 1
        if rows > 1:
            limit = max(limit, self.share_of(layer))
        return 0 <= share <= limit

    cdef bint any_valid(self, const void* ids, bint wide, Py_ssize_t n) noexcept:
        cdef Py_ssize_t i
        for i in range(n):
            if 0 <= id_at(ids, wide, i) < self.num_experts:
                return True
        return False

    cdef int plan_claims(
        self, int layer, const void* ids, bint wide, Py_ssize_t n, int num_missing,
        Py_ssize_t share,
    ) except -1:
        # Returns how many slots to claim. Changes nothing but scratch.
        cdef Policy part = self.part(layer)
        cdef int32_t* table = self.table + layer * self.num_experts
        cdef int local_base = layer * self.num_experts if self.is_global else 0
        cdef int i, slot, slots, wanted = 0, hits = 0, evictable_hits = 0, room, limit
        cdef int64_t expert
        cdef Py_ssize_t position
        for i in range(num_missing):
            wanted += self.in_flight[layer * self.num_experts + self.missing[i]] < 0
        # Hits of this step will be leased: their slots cannot be evicted.
        for position in range(n):
            expert = id_at(ids, wide, position)
            if expert < 0 or expert >= self.num_experts or table[expert] < 0:
                continue
            slot = table[expert]
            if self.slots[slot].seen != self.call:
                self.slots[slot].seen = self.call
                hits += 1
                evictable_hits += part.nodes[local_base + expert].blocked == 0
        room = self.room_left(part, 0 if self.is_global else layer)
        if self.evicts:
            room += part.num_evictable - evictable_hits
        if share >= 0:
            # Joined experts have a slot too.
            limit = <int>max(0, share - hits - (num_missing - wanted))
            return min(wanted, min(limit, room))
        if wanted > room:
            slots = part.capacity - self.num_withheld
            raise CapacityError(
                f"layer {layer} asks for {wanted} experts that are not resident, but of "
                f"{slots} slots only {room} are free or can be evicted "
                f"({part.pin_count} pinned, {slots - room - part.pin_count} in use); "
                "raise the memory, ask for fewer at once, or go through waves"
            )
        return wanted

    cdef void lease_hits(
        self, int layer, const void* ids, bint wide, Py_ssize_t n, int32_t* out,
    ) noexcept:
        cdef int32_t* table = self.table + layer * self.num_experts
        cdef Py_ssize_t i
        cdef int64_t expert
        for i in range(n):
            expert = id_at(ids, wide, i)
            out[i] = table[expert] if 0 <= expert < self.num_experts else -1
        self.use_hits(layer, ids, wide, n, True)

    cdef bint lease_resident(
        self, int layer, const int32_t* ids, Py_ssize_t rows, Py_ssize_t top_k,
        const int32_t* names, int32_t* out
    ) except -1:
        """Do what `acquire` does for a few tokens if all experts are resident; else nothing.

        The tokens are of sequences with these names, or of the only one if there are none.
        For compiled code that has the layer's number checked and calls `end_leases` afterwards.
        Policies written in Python are asked by `acquire` alone.
        """
        cdef Py_ssize_t n = rows * top_k
        with cython.critical_section(self):
            if self.scripted or self.count_missing(layer, ids, False, n, top_k, False):
                return False
            self.part(layer).begin_step(layer, ids, False, rows, top_k, names)
            if self.route_log is not None:
                self.route_log.append(
                    layer, ids, False, rows, top_k,
                    rows > 1 and self.is_bulk(layer, rows, self.share_of(layer)), names
                )
            self.lease_hits(layer, ids, False, n, out)
            return True

    cdef void end_leases(self, const int32_t* slots, Py_ssize_t n) noexcept:
        cdef Slot* slot
        cdef Py_ssize_t i
        # Looked up once: a list item per slot costs as much as the rest.
        cdef Policy part = self.part(0)
        self.call += 1
        for i in range(n):
            if slots[i] < 0:
                continue
            slot = &self.slots[slots[i]]
            if slot.seen == self.call:
                continue
            slot.seen = self.call
            slot.leases -= 1
            if slot.leases == 0:
                if slot.state == RESIDENT:
                    if not self.is_global:
                        part = <Policy>self.partitions[slot.partition]
                    unhold(part, self.local_key(slot.key))
                elif slot.state == ABANDONED:
                    self.abandoned[slot.partition] -= 1
                    self.free_slot(slots[i])

    cdef void use_hits(
        self, int layer, const void* ids, bint wide, Py_ssize_t n, bint leased,
    ) noexcept:
        cdef Policy part = self.part(layer)
        cdef int base = layer * self.num_experts
        cdef int local_base = base if self.is_global else 0
        cdef int32_t* table = self.table + base
        cdef uint64_t* totals = self.profiler.totals + base
        cdef uint64_t hits = 0
        cdef Slot* slot
        cdef Py_ssize_t i
        cdef int64_t expert
        self.call += 1
        for i in range(n):
            expert = id_at(ids, wide, i)
            if expert < 0 or expert >= self.num_experts or table[expert] < 0:
                continue
            slot = &self.slots[table[expert]]
            if slot.seen == self.call:
                continue
            slot.seen = self.call
            # Counted first: the policy may read the count.
            totals[expert] += 1
            hits += 1
            part.access(local_base + <int>expert)
            if slot.foreseen:
                slot.foreseen = False
                self.num_foreseen_hits += 1
            if leased:
                slot.leases += 1
                if slot.leases == 1:
                    hold(part, local_base + <int>expert)
        self.profiler.layer_hits[layer] += hits
        self.profiler.hit_count += hits

    cdef void lease_misses(
        self, int layer, const void* ids, bint wide, Py_ssize_t n, int num_missing,
        int admitted, const int* worths, int32_t* out, int32_t* misses,
    ) noexcept:
        cdef Policy part = self.part(layer)
        cdef int partition = 0 if self.is_global else layer
        cdef int base = layer * self.num_experts
        cdef int i, expert, slot, num_claimed = 0, written
        cdef int64_t wide_expert
        cdef Py_ssize_t position
        self.heed_reset()
        if worths == NULL:
            sort_by_uses(self.missing, self.uses, self.order, num_missing)
        else:
            sort_by_uses(self.missing, worths, self.order, num_missing)
            # Free slots are shared fairly; after that it counts what an expert is worth.
            if self.room_left(part, partition) == 0:
                admitted = num_missing
        for i in range(num_missing):
            expert = self.missing[i]
            slot = self.in_flight[base + expert]
            if slot >= 0:
                count_miss(self.profiler, layer, base + expert)
                part.access(self.local_key(base + expert))
                if self.slots[slot].foreseen:
                    self.slots[slot].foreseen = False
                    self.num_foreseen_late += 1
                self.slots[slot].leases += 1
                self.missing[i] = ~expert
        for i in range(num_missing):
            expert = self.missing[i]
            if expert < 0:
                continue
            # Counted first: the policy reads the count when the key enters.
            count_miss(self.profiler, layer, base + expert)
            if num_claimed < admitted and worths != NULL:
                # What comes later is worth less.
                if not self.is_worth_it(part, partition, base + expert):
                    admitted = num_claimed
            if num_claimed < admitted:
                slot = self.take_slot(part, partition, layer, expert, True)
                self.slots[slot].leases = 1
                misses[num_claimed] = self.first[expert]
                num_claimed += 1
                self.missing[i] = CLAIMED
        written = num_claimed
        for i in range(num_missing):
            if CLAIMED < self.missing[i] < 0:
                misses[written] = ~self.first[~self.missing[i]]
                written += 1
        for i in range(num_missing):
            if self.missing[i] >= 0:
                misses[written] = self.first[self.missing[i]]
                written += 1
        for position in range(n):
            wide_expert = id_at(ids, wide, position)
            if out[position] < 0 and 0 <= wide_expert < self.num_experts:
                out[position] = self.in_flight[base + wide_expert]

    cdef bint is_worth_it(self, Policy part, int partition, int key) noexcept nogil:
        # Whether a key is worth more than what would leave for it.
        cdef int victim
        if self.room_left(part, partition):
            return True
        if not self.evicts:
            return False
        part.expect(self.local_key(key))
        victim = part.victim()
        return victim >= 0 and part.prefers(self.local_key(key), victim)

    cdef int checked(self, Py_ssize_t layer, Py_ssize_t expert) except -1:
        if layer < 0 or layer >= self.num_layers:
            raise ValueError(f"layer {layer} is not in [0, {self.num_layers})")
        if expert < 0 or expert >= self.num_experts:
            raise ValueError(f"expert {expert} is not in [0, {self.num_experts})")
        return 0

    cdef Slot* claimed(self, Py_ssize_t slot, str verb) except NULL:
        if slot < 0 or slot >= self.capacity:
            raise ValueError(f"slot {slot} is not in [0, {self.capacity})")
        if self.slots[slot].state != FILLING:
            raise ValueError(
                f"slot {slot} cannot be {verb}: it is not claimed; was that done twice?"
            )
        return &self.slots[slot]

    cdef int take_policies(self) except -1:
        # The tables begin empty, so a policy must.
        for part in self.partitions:
            if (<Policy>part).is_taken or (<Policy>part).size:
                raise ConfigError(
                    f"this {type(part).__name__} has keys, or is in another cache; give a new one, "
                    "or a class or function that makes it"
                )
        for part in self.partitions:
            (<Policy>part).is_taken = True
        self.scripted = isinstance(self.partitions[0], PythonPolicy)
        self.turn = threading.Lock() if self.scripted else None
        return 0

    cdef int enter(self) except -1:
        # A policy in Python may let another thread run, which would find half a change.
        if self.thread == threading.get_ident():
            raise RuntimeError(f"{self.policy} may not call the cache that asks it")
        self.turn.acquire()
        self.thread = threading.get_ident()
        return 0

    cdef void leave(self) noexcept:
        self.thread = 0
        self.turn.release()

    cdef int heed_script(self) except -1:
        for part in self.partitions:
            error = (<PythonPolicy>part).error
            if error is None:
                continue
            if not isinstance(error, Exception):
                raise error
            raise ConfigError(
                f"policy {self.policy} raised {type(error).__name__}: {error}"
            ) from error
        return 0


cdef object _read_only(array):
    view = array.view()
    view.flags.writeable = False
    return view


def _require(condition, message):
    if not condition:
        raise AssertionError(message)
