"""LRFU: counts that decay with time."""

cimport cython
from libc.math cimport exp2, log2
from libc.stdint cimport int32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from moecache.policies._heap cimport RankedPolicy
from moecache.policies._policy cimport RESIDENT

from moecache.policies.registry import register


@cython.final
cdef class LrfuCache(RankedPolicy):
    """LRFU (Lee et al., IEEE Trans. Computers 50(12), 2001): evict the lowest decayed count.

    A use counts 1 and half as much after every `half_life` tokens: the paper's
    weighing function F(x) = (1/2)^(lambda x) with lambda = 1 / half_life, and
    time in tokens rather than references. An infinite half-life makes this
    LFU, a very short one LRU. Ties go to the least recently used.

    A token begins when the lowest layer seen so far is visited again; a step
    of many tokens counts as one token, and as one use of each of its experts.
    While the policy is told of no steps (`touch` and `admit` alone), every
    access is a token.

    Counts survive eviction, as the paper's do only if its history is kept;
    `clear` forgets them. A prefetch is not a use. Everything is O(log n):
    decay keeps the order of counts, so that a heap holds their logarithms as
    of time 0.

    Parameters
    ----------
    capacity : int
        Most keys in the cache, at least 1.
    num_keys : int
        Keys are in [0, num_keys).
    half_life : float, default 128
        Tokens after which a use counts half, above 0. The default is that of
        llama.cpp's expert cache; the paper's best lambdas depend on the trace.

    Raises
    ------
    ValueError
        If the capacity is smaller than 1 or the half-life not above 0.
    """

    cdef readonly double half_life
    cdef double* values    # log2 of the decayed count, as of time 0; below 0: never used
    cdef int lowest_layer  # -1 before the first step
    cdef uint64_t now      # tokens, or accesses while there are no steps

    def __cinit__(self, int capacity, *, int num_keys, double half_life=128.0):
        self.hold_at_most(capacity)
        if not half_life > 0:
            raise ValueError(f"half_life must be above 0 tokens, got {half_life}")
        self.half_life = half_life
        self.values = <double*>malloc(num_keys * sizeof(double))
        if self.values == NULL:
            raise MemoryError(f"no memory for the counts of {num_keys} keys")
        self.reset()

    def __dealloc__(self):
        free(self.values)

    cdef void begin_step(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k,
        const int32_t* sequences,
    ) noexcept nogil:
        if self.lowest_layer < 0 or layer <= self.lowest_layer:
            self.lowest_layer = layer
            self.now += 1

    cdef void access(self, int key) noexcept nogil:
        self.count(key)
        self.rise(key)

    cdef void insert(self, int key, bint accessed) noexcept nogil:
        if accessed:
            self.count(key)
        else:
            self.clock += 1
            self.nodes[key].stamp = self.clock
        self.nodes[key].segment = RESIDENT
        self.size += 1
        self.num_evictable += 1
        RankedPolicy.insert(self, key, accessed)

    cdef bint prefers(self, int candidate, int resident) noexcept nogil:
        return self.rank(candidate) > self.rank(resident)

    cdef void reset(self) noexcept nogil:
        cdef int key
        for key in range(self.num_keys):
            self.values[key] = -1.0
        RankedPolicy.reset(self)
        self.lowest_layer = -1
        self.now = 0

    cdef void count(self, int key) noexcept nogil:
        # log2(C 2^-(t-s)/h + 1) at time t, plus t/h to bring it to time 0.
        cdef double age
        self.clock += 1
        self.nodes[key].stamp = self.clock
        if self.lowest_layer < 0:
            self.now += 1
        age = <double>self.now / self.half_life
        if self.values[key] < 0:
            self.values[key] = age
        else:
            self.values[key] = age + log2(1.0 + exp2(self.values[key] - age))

    cdef uint64_t rank(self, int key) noexcept nogil:
        # Doubles from 0 on are in the order of their bits; keys never used come before them.
        cdef uint64_t bits
        if self.values[key] < 0:
            return 0
        memcpy(&bits, &self.values[key], sizeof(uint64_t))
        return bits + 1


register("lrfu", LrfuCache, for_replays=True)
