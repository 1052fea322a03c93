cimport cython
from libc.stdint cimport uint64_t

from moecache.policies._policy cimport Node, Policy


cdef struct Bucket:
    # Keys of one count; buckets are a circular list in the order of their counts.
    uint64_t count
    int previous
    int next


cdef class LfuCache(Policy):
    cdef uint64_t* counts
    cdef int* bucket_of    # [num_keys] of keys that can be victims
    cdef Bucket* buckets   # [num_keys + 2]; 0 is the sentinel
    cdef int* free_buckets
    cdef int num_free_buckets

    cdef int find_bucket(self, int after, uint64_t count) noexcept nogil
    cdef void enter(self, int key, int after) noexcept nogil
    cdef void leave(self, int key) noexcept nogil
    cdef void drop_if_empty(self, int bucket) noexcept nogil
    cdef int bucket_list(self, int bucket) noexcept nogil


@cython.final
cdef class LfruCache(LfuCache):
    cdef Node* recency     # a second list of the same keys, the latest first

    cdef double age(self, int key) noexcept nogil
