"""Bounds of a trace: Belady's optimum, and LRU at every capacity in one pass."""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, qsort
from libc.string cimport memset

from moecache.policies._policy cimport MAX_KEYS

import numpy as np

cdef enum:
    MAX_LEVELS = 8
    SIGNALS_EVERY = 4096  # steps between two looks at Ctrl-C
    CHOOSING = 2


cdef extern from *:
    """
    static inline int moecache_highest_bit(unsigned long long word)
    {
        return 63 - __builtin_clzll(word);
    }
    """
    int moecache_highest_bit(uint64_t word) noexcept nogil


@cython.final
cdef class Accesses:
    """A trace as one sequence of accesses: per step and layer each distinct expert once.

    Parameters
    ----------
    experts : int32 [num_tokens, num_layers, top_k]
        -1 is no expert.
    steps : int64 [num_steps + 1]
        Step s is the rows from steps[s] to steps[s + 1].
    num_experts : int
    bulk : uint8 [num_steps], optional
        1 where a step admits no more than its layer's fair share, 2 where it admits what is
        used before what would leave. By default 1 for the steps of several rows.

    Raises
    ------
    ValueError
        If an id is out of range, a step ends before it begins, or `bulk` has another
        length.
    """

    cdef int num_layers
    cdef int num_experts
    cdef Py_ssize_t num_steps
    cdef Py_ssize_t size
    cdef int32_t* keys        # [size] layer * num_experts + expert
    cdef int32_t* uses        # [size] rows of the step that ask for it
    cdef Py_ssize_t* bounds   # [num_steps * num_layers + 1] of each visit
    cdef unsigned char* bulk  # [num_steps] 1: a step keeps to its layer's fair share; or CHOOSING

    def __cinit__(
        self, const int32_t[:, :, ::1] experts not None, const int64_t[::1] steps not None,
        int num_experts, const uint8_t[::1] bulk=None,
    ):
        cdef Py_ssize_t step, row, position, visit, n = 0
        cdef Py_ssize_t num_rows = experts.shape[0]
        cdef int layer, i, k = <int>experts.shape[2]
        cdef int32_t expert
        cdef int64_t* seen
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        if experts.shape[1] * <int64_t>num_experts > MAX_KEYS:
            raise ValueError(
                f"{experts.shape[1]} layers of {num_experts} experts are more than {MAX_KEYS}"
            )
        self.num_layers = <int>experts.shape[1]
        self.num_experts = num_experts
        self.num_steps = steps.shape[0] - 1
        if bulk is not None and bulk.shape[0] != self.num_steps:
            raise ValueError(f"{self.num_steps} steps, {bulk.shape[0]} of bulk")
        for step in range(self.num_steps):
            if not 0 <= steps[step] <= steps[step + 1] <= num_rows:
                raise ValueError(f"step {step} ends before it begins, or past the trace's end")
        self.keys = <int32_t*>malloc(max(1, num_rows * self.num_layers * k) * sizeof(int32_t))
        self.uses = <int32_t*>malloc(max(1, num_rows * self.num_layers * k) * sizeof(int32_t))
        self.bounds = <Py_ssize_t*>malloc(
            (self.num_steps * self.num_layers + 1) * sizeof(Py_ssize_t)
        )
        self.bulk = <unsigned char*>calloc(max(1, self.num_steps), 1)
        # The access of this visit that an expert has already, as its index.
        seen = <int64_t*>malloc(num_experts * sizeof(int64_t))
        if (
            self.keys == NULL or self.uses == NULL or self.bounds == NULL or self.bulk == NULL
            or seen == NULL
        ):
            free(seen)
            raise MemoryError(f"no memory for the accesses of {num_rows} tokens")
        memset(seen, 0xFF, num_experts * sizeof(int64_t))
        try:
            visit = 0
            self.bounds[0] = 0
            for step in range(self.num_steps):
                if bulk is None:
                    self.bulk[step] = steps[step + 1] - steps[step] > 1
                else:
                    self.bulk[step] = bulk[step]
                for layer in range(self.num_layers):
                    for row in range(steps[step], steps[step + 1]):
                        for i in range(k):
                            expert = experts[row, layer, i]
                            if expert == -1:
                                continue
                            if not 0 <= expert < num_experts:
                                raise ValueError(
                                    f"expert {expert} is not in [0, {num_experts}), nor -1"
                                )
                            position = seen[expert]
                            if position >= self.bounds[visit]:
                                self.uses[position] += 1
                                continue
                            seen[expert] = n
                            self.keys[n] = layer * num_experts + expert
                            self.uses[n] = 1
                            n += 1
                    visit += 1
                    self.bounds[visit] = n
            self.size = n
        finally:
            free(seen)

    def __dealloc__(self):
        free(self.keys)
        free(self.uses)
        free(self.bounds)
        free(self.bulk)

    def __len__(self) -> int:
        return self.size

    def belady(
        self, int capacity, str scope, int32_t[:, ::1] hits_out not None,
        int32_t[:, ::1] misses_out not None,
    ) -> None:
        """Evict the expert that is used again the latest (Belady, IBM Systems Journal 5(2), 1966).

        Every miss of a step is admitted, as by any policy; a bulk step admits its layer's
        fair share, the experts that are used again the soonest, or, where it chooses, those
        that are used before what would leave. A step's own experts are never victims.
        Blocks, without the GIL.

        Parameters
        ----------
        capacity : int
        scope : {"global", "layer"}
        hits_out, misses_out : int32 [num_steps, num_layers]

        Raises
        ------
        ValueError
            If an array does not fit, or the capacity cannot be split.
        """
        cdef int layer, share
        cdef Timeline timeline
        _check_shape(hits_out, self.num_steps, self.num_layers)
        _check_shape(misses_out, self.num_steps, self.num_layers)
        if capacity < (1 if scope == "global" else self.num_layers):
            raise ValueError(f"a capacity of {capacity} is too small for scope {scope!r}")
        timeline = Timeline(self)
        if scope == "global":
            with nogil:
                timeline.run(
                    self, 0, self.num_layers, capacity, max(1, capacity // self.num_layers),
                    hits_out, misses_out,
                )
            return
        for layer in range(self.num_layers):
            share = capacity // self.num_layers + (layer < capacity % self.num_layers)
            with nogil:
                timeline.run(self, layer, layer + 1, share, share, hits_out, misses_out)

    def stack_distances(self, str scope) -> np.ndarray:
        """Return how often LRU finds a key at which depth (Mattson et al., 1970).

        With C slots LRU hits what is found at a depth of up to C. All experts of a step are
        looked up first and then moved to the top in the order of their ids. (A replay
        moves hits before misses, which depends on the capacity: the two differ in the
        fourth digit.) Holds for capacities of at least a step's experts. O(n log n).

        Parameters
        ----------
        scope : {"global", "layer"}
            One stack, or one for each layer.

        Returns
        -------
        ndarray of int64, shape [num_stacks, keys of a stack + 1]
            Entry d - 1: accesses found at depth d; the last: first accesses.
        """
        cdef bint is_global = scope == "global"
        cdef int first, num_keys = self.num_experts * (self.num_layers if is_global else 1)
        cdef int64_t[:, ::1] counts
        cdef int64_t* last
        cdef int32_t* tree
        found = np.zeros((1 if is_global else self.num_layers, num_keys + 1), np.int64)
        counts = found
        if self.size > 2**31 - 2:
            raise ValueError(f"{self.size} accesses are more than 2**31 - 2")
        last = <int64_t*>malloc(self.num_layers * <size_t>self.num_experts * sizeof(int64_t))
        tree = <int32_t*>calloc(self.size + 1, sizeof(int32_t))
        if last == NULL or tree == NULL:
            free(last)
            free(tree)
            raise MemoryError(f"no memory for the stack distances of {self.size} accesses")
        memset(last, 0xFF, self.num_layers * <size_t>self.num_experts * sizeof(int64_t))
        try:
            with nogil:
                for first in range(1 if is_global else self.num_layers):
                    memset(tree, 0, (self.size + 1) * sizeof(int32_t))
                    _stack(
                        self, first, self.num_layers if is_global else first + 1, last, tree,
                        &counts[first, 0], num_keys,
                    )
        finally:
            free(last)
            free(tree)
        return found


cdef int _stack(
    Accesses trace, int first, int end, int64_t* last, int32_t* tree, int64_t* found,
    int num_keys,
) except -1 nogil:
    # A Fenwick tree over time: 1 where the latest access of a key is.
    cdef Py_ssize_t step, visit, a, live = 0
    cdef int layer
    cdef int64_t before
    for step in range(trace.num_steps):
        if step % SIGNALS_EVERY == SIGNALS_EVERY - 1:
            with gil:
                PyErr_CheckSignals()
        for layer in range(first, end):
            visit = step * trace.num_layers + layer
            for a in range(trace.bounds[visit], trace.bounds[visit + 1]):
                before = last[trace.keys[a]]
                if before < 0:
                    found[num_keys] += 1
                else:
                    found[live - _sum(tree, before)] += 1
            for a in range(trace.bounds[visit], trace.bounds[visit + 1]):
                before = last[trace.keys[a]]
                if before < 0:
                    live += 1
                else:
                    _add(tree, trace.size, before, -1)
                _add(tree, trace.size, a, 1)
                last[trace.keys[a]] = a
    return 0


cdef inline void _add(int32_t* tree, Py_ssize_t size, Py_ssize_t at, int32_t value) noexcept nogil:
    at += 1
    while at <= size:
        tree[at] += value
        at += at & -at


cdef inline Py_ssize_t _sum(const int32_t* tree, Py_ssize_t at) noexcept nogil:
    # The sum of the entries up to `at`.
    cdef Py_ssize_t total = 0
    at += 1
    while at > 0:
        total += tree[at]
        at -= at & -at
    return total


@cython.final
cdef class Timeline:
    """When every resident key is used next: a bit per moment, and bits over the words of bits.

    The moments are unique (a key that is never used again has one after the end), so the
    victim is the key of the highest bit.
    """

    cdef int64_t* next_use       # [accesses] the key's next access, or size + key
    cdef int64_t* due            # [num_keys] of a resident key; -1 of others
    cdef uint64_t* levels[MAX_LEVELS]
    cdef int num_levels
    cdef int64_t* admitted       # [2 * num_experts] for sorting what a step of many may admit

    def __cinit__(self, Accesses trace not None):
        cdef Py_ssize_t num_keys = <Py_ssize_t>trace.num_layers * trace.num_experts
        cdef Py_ssize_t a, words = trace.size + num_keys
        cdef int key
        self.next_use = <int64_t*>malloc(max(1, trace.size) * sizeof(int64_t))
        self.due = <int64_t*>malloc(max(1, num_keys) * sizeof(int64_t))
        self.admitted = <int64_t*>malloc(2 * trace.num_experts * sizeof(int64_t))
        failed = self.next_use == NULL or self.due == NULL or self.admitted == NULL
        while True:
            words = (words + 63) // 64
            self.levels[self.num_levels] = <uint64_t*>calloc(max(1, words), sizeof(uint64_t))
            failed = failed or self.levels[self.num_levels] == NULL
            self.num_levels += 1
            if words <= 1:
                break
        if failed:
            raise MemoryError(f"no memory for the next uses of {trace.size} accesses")
        # Backwards: `due` has what comes after the access at hand.
        for key in range(num_keys):
            self.due[key] = trace.size + key
        for a in range(trace.size - 1, -1, -1):
            self.next_use[a] = self.due[trace.keys[a]]
            self.due[trace.keys[a]] = a
        memset(self.due, 0xFF, num_keys * sizeof(int64_t))

    def __dealloc__(self):
        cdef int level
        free(self.next_use)
        free(self.due)
        free(self.admitted)
        for level in range(self.num_levels):
            free(self.levels[level])

    cdef void set(self, int64_t moment) noexcept nogil:
        cdef int level
        cdef uint64_t word
        for level in range(self.num_levels):
            word = self.levels[level][moment >> 6]
            self.levels[level][moment >> 6] = word | (<uint64_t>1 << (moment & 63))
            if word:
                return
            moment >>= 6

    cdef void clear(self, int64_t moment) noexcept nogil:
        cdef int level
        for level in range(self.num_levels):
            self.levels[level][moment >> 6] &= ~(<uint64_t>1 << (moment & 63))
            if self.levels[level][moment >> 6]:
                return
            moment >>= 6

    cdef int64_t latest(self) noexcept nogil:
        # There must be at least one.
        cdef int level
        cdef int64_t at = 0
        for level in range(self.num_levels - 1, -1, -1):
            at = 64 * at + moecache_highest_bit(self.levels[level][at])
        return at

    cdef int run(
        self, Accesses trace, int first, int end, int capacity, int share,
        int32_t[:, ::1] hits_out, int32_t[:, ::1] misses_out,
    ) except -1 nogil:
        cdef Py_ssize_t step, visit, a, begin, stop
        cdef int layer, hits, missing, allowed, size = 0
        cdef int64_t moment, limit
        cdef int32_t key
        for step in range(trace.num_steps):
            if step % SIGNALS_EVERY == SIGNALS_EVERY - 1:
                with gil:
                    PyErr_CheckSignals()
            for layer in range(first, end):
                visit = step * trace.num_layers + layer
                begin, stop = trace.bounds[visit], trace.bounds[visit + 1]
                hits = missing = 0
                # A step's own experts have no bit until it is over: they are not victims.
                for a in range(begin, stop):
                    if self.due[trace.keys[a]] >= 0:
                        self.clear(a)
                        hits += 1
                    else:
                        self.admitted[missing] = self.next_use[a]
                        missing += 1
                hits_out[step, layer] = hits
                misses_out[step, layer] = missing
                allowed = capacity - hits
                if trace.bulk[step] == 1:
                    allowed = min(allowed, share - hits)
                allowed = max(0, min(allowed, missing))
                limit = -1
                if trace.bulk[step] == CHOOSING:
                    limit = self.worth_it(missing, capacity - size)
                elif allowed == missing:
                    limit = trace.size + <int64_t>trace.num_layers * trace.num_experts
                elif allowed:
                    limit = _smallest(self.admitted, missing, allowed)
                for a in range(begin, stop):
                    key = trace.keys[a]
                    moment = self.next_use[a]
                    if self.due[key] < 0:
                        if moment > limit:
                            continue
                        if size == capacity:
                            self.drop_latest(trace)
                            size -= 1
                        size += 1
                    self.due[key] = moment
                for a in range(begin, stop):
                    if self.due[trace.keys[a]] >= 0:
                        self.set(self.due[trace.keys[a]])
        # Ready for another layer.
        while size:
            self.drop_latest(trace)
            size -= 1
        return 0

    cdef int64_t worth_it(self, int missing, int room) noexcept nogil:
        # The last moment of those missing for which there is room, or a key that is used later.
        # The keys that leave are put back: they go when the others come.
        cdef int64_t* left = self.admitted + missing
        cdef int64_t limit = -1
        cdef int i, num_left = 0
        qsort(self.admitted, missing, sizeof(int64_t), _compare)
        for i in range(missing):
            if i >= room:
                if self.levels[self.num_levels - 1][0] == 0:
                    break
                if self.latest() < self.admitted[i]:
                    break
                left[num_left] = self.latest()
                self.clear(left[num_left])
                num_left += 1
            limit = self.admitted[i]
        for i in range(num_left):
            self.set(left[i])
        return limit

    cdef void drop_latest(self, Accesses trace) noexcept nogil:
        cdef int64_t moment = self.latest()
        self.clear(moment)
        self.due[trace.keys[moment] if moment < trace.size else moment - trace.size] = -1


cdef int _compare(const void* a, const void* b) noexcept nogil:
    cdef int64_t x = (<const int64_t*>a)[0]
    cdef int64_t y = (<const int64_t*>b)[0]
    return (x > y) - (x < y)


cdef int64_t _smallest(int64_t* values, int n, int count) noexcept nogil:
    # The count-th smallest of distinct values; n is a layer's experts at most.
    cdef int i, j, least
    cdef int64_t value
    for i in range(count):
        least = i
        for j in range(i + 1, n):
            if values[j] < values[least]:
                least = j
        value = values[i]
        values[i] = values[least]
        values[least] = value
    return values[count - 1]


cdef void _check_shape(int32_t[:, ::1] out, Py_ssize_t num_steps, int num_layers) except *:
    if out.shape[0] != num_steps or out.shape[1] != num_layers:
        raise ValueError(
            f"the results must be [{num_steps}, {num_layers}], "
            f"got [{out.shape[0]}, {out.shape[1]}]"
        )
