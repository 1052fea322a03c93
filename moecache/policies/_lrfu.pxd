cimport cython
from libc.stdint cimport uint64_t

from moecache.policies._policy cimport Policy
from moecache._slru cimport CountHeap


@cython.final
cdef class LrfuCache(Policy):
    cdef readonly double half_life
    cdef double* values    # log2 of the decayed count, as of time 0; below 0: never used
    cdef CountHeap heap    # keys that can be victims, by value
    cdef int lowest_layer  # -1 before the first step
    cdef uint64_t now      # tokens, or accesses while there are no steps

    cdef void count(self, int key) noexcept nogil
    cdef uint64_t rank(self, int key) noexcept nogil
