cimport cython
from libc.stdint cimport uint8_t

from moecache.policies._policy cimport Policy


@cython.final
cdef class ArcCache(Policy):
    cdef double target     # p: the keys that T1 is meant for
    cdef uint8_t* ghost    # B1 or B2, of keys that are not in the cache
    cdef int num_t1
    cdef int num_b1
    cdef int num_b2
    cdef int expected      # the key that is to be inserted, or -1
    cdef int returning     # the ghost that the last victim was evicted for, or -1
    cdef int chosen        # the victim named last, or -1

    cdef double target_for(self, int key) noexcept nogil
    cdef void meet_ghost(self, int key) noexcept nogil
    cdef void remember(self, int key, uint8_t list_number) noexcept nogil
    cdef void drop_ghost(self, int key) noexcept nogil
    cdef int list_of(self, uint8_t list_number) noexcept nogil
