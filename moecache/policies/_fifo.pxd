cimport cython
from libc.stdint cimport uint8_t

from moecache.policies._policy cimport Policy


@cython.final
cdef class FifoCache(Policy):
    pass


@cython.final
cdef class SieveCache(Policy):
    cdef uint8_t* visited
    cdef int hand          # where the next search begins; the sentinel: at the oldest key


@cython.final
cdef class S3FifoCache(Policy):
    cdef readonly int small
    cdef readonly int main
    cdef uint8_t* uses     # since the key entered its queue, at most 3
    cdef uint8_t* ghost    # whether a key that is not in the cache is remembered
    cdef int num_small
    cdef int num_ghosts
    cdef int expected      # the key that is to be inserted, or -1
    cdef int returning     # the ghost that the last victim was evicted for, or -1
    cdef int chosen        # the victim named last, while nothing has changed since

    cdef int search_small(self) noexcept nogil
    cdef int search_main(self) noexcept nogil
    cdef void remember(self, int key) noexcept nogil
    cdef void drop_ghost(self, int key) noexcept nogil
