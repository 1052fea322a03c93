cimport cython
from libc.stdint cimport uint64_t

from moecache.policies._policy cimport Node, Policy


cdef struct Entry:
    uint64_t count
    uint64_t stamp
    int key


@cython.final
cdef class CountHeap:
    # Indexed 4-ary min-heap of (count, stamp): the least accessed key, ties to the older.
    cdef Entry* entries
    cdef int* positions
    cdef int size
    cdef int num_keys

    cdef bint contains(self, int key) noexcept nogil
    cdef void push(self, int key, uint64_t count, uint64_t stamp) noexcept nogil
    cdef void remove(self, int key) noexcept nogil
    cdef void raise_to(self, int key, uint64_t count, uint64_t stamp) noexcept nogil
    cdef void clear(self) noexcept nogil
    cdef int first_unblocked(self, Node* nodes) noexcept nogil
    cdef void _place(self, int index, Entry entry) noexcept nogil
    cdef void _sift_up(self, int index, Entry entry) noexcept nogil
    cdef void _sift_down(self, int index, Entry entry) noexcept nogil


cdef class RankedPolicy(Policy):
    cdef CountHeap heap  # keys that can be victims

    cdef uint64_t rank(self, int key) noexcept nogil
    cdef void rise(self, int key) noexcept nogil
