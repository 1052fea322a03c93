cimport cython
from libc.stdint cimport int64_t, uint8_t

from moecache.policies._policy cimport Policy


@cython.final
cdef class WTinyLfuCache(Policy):
    cdef readonly int window
    cdef readonly int protected
    cdef int main             # probation and the protected segment together
    cdef uint8_t* counts
    cdef int64_t num_counted  # until the counts are halved
    cdef int64_t sample
    cdef int num_window
    cdef int num_protected
    cdef int candidate        # of the window, to move on in the chosen key's place, or -1
    cdef int chosen           # the victim named last, or -1
    cdef bint made_room       # whether a key left for the one that is inserted next

    cdef void count(self, int key) noexcept nogil
    cdef void move(self, int key, uint8_t segment) noexcept nogil
    cdef int list_of(self, uint8_t segment) noexcept nogil
