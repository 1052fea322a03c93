"""ExpertCache: which expert is in which slot, and which slots may be used or refilled."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t

import numpy as np

from moecache.cache._leases cimport Leases, Step
from moecache.cache._partitions cimport (
    Partitions, enter, heed_script, leave, local_key, policy_of,
)
from moecache.cache._profiler cimport AccessProfiler
from moecache.cache._slots cimport FILLING, RESIDENT, WITHHELD, Slot
from moecache.policies._echo cimport Echo
from moecache.policies._echo_cache cimport EchoCache
from moecache.policies._ids cimport as_ids, as_sequences, id_at, int32_data
from moecache.policies._policy cimport MAX_KEYS, PINNED, Policy

from moecache.errors import ConfigError

cnp.import_array()


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
        self.scope = scope
        self.profiler = profiler
        partitions = Partitions(
            policy, scope, num_layers, num_experts, self.capacity, profiler.counts
        )
        self.leases = Leases(self.capacity, partitions, profiler)
        self.table = _read_only(self.leases.table)
        self.mask = _read_only(self.leases.mask)

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
        cdef int dimensions = cnp.PyArray_NDIM(array)
        cdef Py_ssize_t n = cnp.PyArray_SIZE(array)
        cdef Py_ssize_t top_k = cnp.PyArray_DIM(array, dimensions - 1) if dimensions else 1
        cdef Py_ssize_t rows = 1 if n == top_k else n // max(1, top_k)
        cdef cnp.ndarray names = None
        cdef Step step
        cdef int32_t* out = int32_data(slots_out, n, "slots_out", True)
        cdef int32_t* misses = int32_data(
            misses_out, min(n, self.num_experts), "misses_out", True
        )
        self.checked(layer, 0)
        if sequences is not None and n:
            names = as_sequences(sequences, rows)
        step = _step(<int>layer, array, rows, top_k, names)
        with cython.critical_section(self):
            enter(self.leases.partitions)
            try:
                heed_script(self.leases.partitions)
                return self.leases.acquire(
                    &step, share, ignore_out_of_range, self.route_log, out, misses
                )
            finally:
                leave(self.leases.partitions)

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
            enter(self.leases.partitions)
            try:
                for i in range(n):
                    if data[i] < -1 or data[i] >= self.capacity:
                        raise ValueError(f"slot {data[i]} is not in [0, {self.capacity})")
                    if data[i] >= 0 and self.leases.slots.each[data[i]].leases == 0:
                        raise ValueError(f"slot {data[i]} is not leased; was it released twice?")
                self.leases.release(data, n)
            finally:
                leave(self.leases.partitions)

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
        cdef int slot
        self.checked(layer, expert)
        with cython.critical_section(self):
            enter(self.leases.partitions)
            try:
                slot = self.leases.claim(<int>layer, <int>expert, evict, likely)
                if slot >= 0:
                    self.leases.slots.each[slot].foreseen = foreseen
                return slot
            finally:
                leave(self.leases.partitions)

    def publish(self, Py_ssize_t slot) -> None:
        """Declare a claimed slot filled: its expert is resident from now on."""
        with cython.critical_section(self):
            enter(self.leases.partitions)
            try:
                self.check_claimed(slot, "published")
                self.leases.publish(<int>slot)
            finally:
                leave(self.leases.partitions)

    def abandon(self, Py_ssize_t slot) -> None:
        """Give a claimed slot back unfilled; leases on it are still to be released."""
        with cython.critical_section(self):
            enter(self.leases.partitions)
            try:
                self.check_claimed(slot, "abandoned")
                self.leases.abandon(<int>slot)
            finally:
                leave(self.leases.partitions)

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
        cdef list taken = []
        if not self.leases.partitions.is_global:
            raise ConfigError('slots can be withheld with scope "global" alone')
        with cython.critical_section(self):
            enter(self.leases.partitions)
            try:
                self.leases.partitions.heed_reset(self.profiler.generation)
                for slot in range(self.capacity - 1, -1, -1):
                    if len(taken) >= num or self.leases.slots.num_withheld + 1 >= self.capacity:
                        break
                    if self.leases.withhold(slot):
                        taken.append(slot)
            finally:
                leave(self.leases.partitions)
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
                if (
                    not 0 <= slot < self.capacity
                    or self.leases.slots.each[<int>slot].state != WITHHELD
                ):
                    raise ValueError(f"slot {slot} is not withheld")
            if len(set(given)) != len(given):
                raise ValueError(f"slots {given} have one twice")
            for slot in given:
                self.leases.restore(<int>slot)

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
        cdef cnp.ndarray names = None
        cdef Py_ssize_t num_steps, rows, top_k
        cdef Step step
        if cnp.PyArray_NDIM(array) != 3:
            raise ValueError(
                f"ids have {cnp.PyArray_NDIM(array)} axes; give [num_steps, rows, top_k]"
            )
        num_steps = cnp.PyArray_DIM(array, 0)
        rows, top_k = cnp.PyArray_DIM(array, 1), cnp.PyArray_DIM(array, 2)
        if rows * top_k == 0 or num_steps == 0:
            return
        self.checked(first, 0)
        self.checked(first + num_steps - 1, 0)
        if sequences is not None:
            names = as_sequences(sequences, rows)
        step = _step(<int>first, array, rows, top_k, names)
        with cython.critical_section(self):
            enter(self.leases.partitions)
            try:
                heed_script(self.leases.partitions)
                while step.layer < first + num_steps:
                    self.leases.count_hits(&step, self.route_log)
                    step.layer += 1
                    step.ids = <const char*>step.ids + step.n * cnp.PyArray_ITEMSIZE(array)
            finally:
                leave(self.leases.partitions)

    @property
    def slot_table(self) -> np.ndarray:
        """Slot of each expert, int32 [num_layers, num_experts]: a live, read-only view.

        -1 where the expert is not resident.
        """
        return self.table

    def resident_mask(self, Py_ssize_t layer) -> np.ndarray:
        """Return the layer's resident experts as bits: a live, read-only view.

        Expert e is bit e % 64 of word e // 64, uint64 [(num_experts + 63) // 64].
        """
        self.checked(layer, 0)
        return self.mask[layer]

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
            resident = resident and self.leases.slots.table[layer * self.num_experts + expert] >= 0
        return resident

    def fair_share(self, Py_ssize_t layer) -> int:
        """Return how many slots a layer would have if all had the same, at least 1.

        This is the `share` for a step of many tokens, which must not evict what
        other layers and later tokens need.
        """
        self.checked(layer, 0)
        return self.leases.share_of(<int>layer)

    def pin(self, Py_ssize_t layer, Py_ssize_t expert) -> bool:
        """Keep a resident expert until it is unpinned.

        Returns False if it is not resident or the policy has no room for the pin.
        """
        cdef int key
        self.checked(layer, expert)
        key = <int>(layer * self.num_experts + expert)
        with cython.critical_section(self):
            enter(self.leases.partitions)
            try:
                if self.leases.slots.table[key] < 0:
                    return False
                return policy_of(self.leases.partitions, <int>layer).pin_key(
                    local_key(self.leases.partitions, key)
                )
            finally:
                leave(self.leases.partitions)

    def unpin(self, Py_ssize_t layer, Py_ssize_t expert) -> None:
        """Let an expert be evicted again; do nothing if it is not pinned."""
        cdef int key
        self.checked(layer, expert)
        key = <int>(layer * self.num_experts + expert)
        with cython.critical_section(self):
            enter(self.leases.partitions)
            try:
                policy_of(self.leases.partitions, <int>layer).unpin_key(
                    local_key(self.leases.partitions, key)
                )
            finally:
                leave(self.leases.partitions)

    def is_pinned(self, Py_ssize_t layer, Py_ssize_t expert) -> bool:
        """Return whether an expert is pinned."""
        self.checked(layer, expert)
        return policy_of(self.leases.partitions, <int>layer).is_pinned(
            local_key(self.leases.partitions, <int>(layer * self.num_experts + expert))
        )

    def expert_states(self) -> np.ndarray:
        """Return what becomes of each expert at this moment, for those who watch.

        Returns
        -------
        ndarray of uint8, shape [num_layers, num_experts]
            A new array; sums of 1 (resident), 2 (being read), 4 (leased) and 8 (pinned).
        """
        cdef int i
        cdef Slot* slot
        cdef Policy part
        cdef cnp.ndarray states = np.zeros((self.num_layers, self.num_experts), np.uint8)
        cdef uint8_t* data = <uint8_t*>cnp.PyArray_DATA(states)
        with cython.critical_section(self):
            enter(self.leases.partitions)
            try:
                for i in range(self.capacity):
                    slot = &self.leases.slots.each[i]
                    if slot.key < 0:
                        continue
                    data[slot.key] = 1 if slot.state == RESIDENT else 2
                    if slot.leases:
                        data[slot.key] |= 4
                    part = policy_of(self.leases.partitions, slot.key // self.num_experts)
                    if part.nodes[local_key(self.leases.partitions, slot.key)].blocked & PINNED:
                        data[slot.key] |= 8
            finally:
                leave(self.leases.partitions)
        return states

    def begin_sequence(self) -> None:
        """Tell the policy that the next tokens do not continue the last ones.

        Policies that look only at recency and counts take no notice.
        """
        with cython.critical_section(self):
            enter(self.leases.partitions)
            try:
                if self.route_log is not None:
                    self.route_log.mark_sequence()
                for part in self.leases.partitions.each:
                    (<Policy>part).begin_sequence()
            finally:
                leave(self.leases.partitions)

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return self.leases.partitions.name

    @property
    def evicts(self) -> bool:
        """Whether slots may be taken from resident experts; True at first.

        While it is False only free slots are claimed, and experts keep their slots.
        """
        return self.leases.evicts

    @evicts.setter
    def evicts(self, bint value):
        self.leases.evicts = value

    @property
    def echo(self) -> Echo | None:
        """The learner of the policies "echo" and "haz2"; None with any other."""
        part = self.leases.partitions.each[0]
        return (<EchoCache>part).echo if isinstance(part, EchoCache) else None

    @property
    def num_changes(self) -> int:
        """How often `slot_table` changed."""
        return self.leases.slots.num_changes

    @property
    def num_withheld(self) -> int:
        """Number of slots that are out of use, see `withhold`."""
        return self.leases.slots.num_withheld

    @property
    def num_evictions(self) -> int:
        """Number of experts that were evicted."""
        return self.leases.num_evictions

    @property
    def num_foreseen_hits(self) -> int:
        """Number of experts that were read ahead, and then used."""
        return self.leases.num_foreseen_hits

    @property
    def num_foreseen_late(self) -> int:
        """Number of experts that a step asked for while they were read ahead."""
        return self.leases.num_foreseen_late

    @property
    def num_foreseen_unused(self) -> int:
        """Number of experts that were read ahead, and evicted unused."""
        return self.leases.num_foreseen_unused

    @property
    def num_pinned(self) -> int:
        """Number of experts that are pinned."""
        return sum([(<Policy>part).pin_count for part in self.leases.partitions.each])

    @property
    def num_resident(self) -> int:
        """Number of resident experts; never above `capacity`."""
        return self.leases.slots.num_resident

    @property
    def num_free(self) -> int:
        """Number of slots that hold nothing."""
        return self.leases.slots.num_free

    def free_slots_now(self) -> list[int]:
        """Return the slots that hold nothing and are in use, for those who watch."""
        with cython.critical_section(self):
            return [self.leases.slots.free[i] for i in range(self.leases.slots.num_free)]

    def check(self) -> None:
        """Audit every invariant; for tests.

        Raises
        ------
        AssertionError
            If the tables contradict each other.
        """
        with cython.critical_section(self):
            enter(self.leases.partitions)
            try:
                self.leases.audit()
            finally:
                leave(self.leases.partitions)

    cdef bint lease_resident(
        self, int layer, const int32_t* ids, Py_ssize_t rows, Py_ssize_t top_k,
        const int32_t* names, int32_t* out
    ) except -1:
        """Do what `acquire` does for a few tokens if all experts are resident; else nothing.

        The tokens are of sequences with these names, or of the only one if there are none.
        For compiled code that has the layer's number checked and calls `end_leases` afterwards.
        Policies written in Python are asked by `acquire` alone.
        """
        cdef Step step = Step(layer, ids, False, rows, top_k, rows * top_k, names)
        with cython.critical_section(self):
            if self.leases.partitions.is_scripted:
                return False
            return self.leases.acquire_resident(&step, self.route_log, out)

    cdef void end_leases(self, const int32_t* slots, Py_ssize_t n) noexcept:
        """Do what `release` does, for slots that are known to be leased."""
        self.leases.release(slots, n)

    cdef bint is_resident_or_coming(self, int key) noexcept:
        """Whether an expert is in a slot, or a slot is being filled with it."""
        return self.leases.slots.table[key] >= 0 or self.leases.slots.in_flight[key] >= 0

    cdef int checked(self, Py_ssize_t layer, Py_ssize_t expert) except -1:
        if layer < 0 or layer >= self.num_layers:
            raise ValueError(f"layer {layer} is not in [0, {self.num_layers})")
        if expert < 0 or expert >= self.num_experts:
            raise ValueError(f"expert {expert} is not in [0, {self.num_experts})")
        return 0

    cdef int check_claimed(self, Py_ssize_t slot, str verb) except -1:
        if slot < 0 or slot >= self.capacity:
            raise ValueError(f"slot {slot} is not in [0, {self.capacity})")
        if self.leases.slots.each[slot].state != FILLING:
            raise ValueError(
                f"slot {slot} cannot be {verb}: it is not claimed; was that done twice?"
            )
        return 0


cdef Step _step(
    int layer, cnp.ndarray ids, Py_ssize_t rows, Py_ssize_t top_k, cnp.ndarray names
) noexcept:
    """Describe the first step of an array of ids."""
    cdef Step step = Step(
        layer, cnp.PyArray_DATA(ids), cnp.PyArray_ITEMSIZE(ids) == 8, rows, top_k, rows * top_k,
        NULL,
    )
    if names is not None:
        step.names = <const int32_t*>cnp.PyArray_DATA(names)
    return step


cdef object _read_only(array):
    view = array.view()
    view.flags.writeable = False
    return view
