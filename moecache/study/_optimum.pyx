"""Belady's optimum: which misses nobody could avoid, with the future known."""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, qsort
from libc.string cimport memset

from moecache.study._accesses cimport SIGNALS_EVERY, Accesses

cdef enum:
    MAX_LEVELS = 8
    CHOOSING = 2


cdef extern from *:
    """
    static inline int moecache_highest_bit(unsigned long long word)
    {
        return 63 - __builtin_clzll(word);
    }
    """
    int moecache_highest_bit(uint64_t word) noexcept nogil


def belady(
    Accesses trace not None, int capacity, str scope, int32_t[:, ::1] hits_out not None,
    int32_t[:, ::1] misses_out not None,
) -> None:
    """Evict the expert that is used again the latest (Belady, IBM Systems Journal 5(2), 1966).

    Every miss of a step is admitted, as by any policy; a bulk step admits its layer's
    fair share, the experts that are used again the soonest, or, where it chooses, those
    that are used before what would leave. A step's own experts are never victims.
    Blocks, without the GIL.

    Parameters
    ----------
    trace : Accesses
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
    _check_shape(hits_out, trace.num_steps, trace.num_layers)
    _check_shape(misses_out, trace.num_steps, trace.num_layers)
    if capacity < (1 if scope == "global" else trace.num_layers):
        raise ValueError(f"a capacity of {capacity} is too small for scope {scope!r}")
    timeline = Timeline(trace)
    if scope == "global":
        with nogil:
            timeline.run(
                trace, 0, trace.num_layers, capacity, max(1, capacity // trace.num_layers),
                hits_out, misses_out,
            )
        return
    for layer in range(trace.num_layers):
        share = capacity // trace.num_layers + (layer < capacity % trace.num_layers)
        with nogil:
            timeline.run(trace, layer, layer + 1, share, share, hits_out, misses_out)


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
