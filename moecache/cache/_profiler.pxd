cimport cython
from libc.stdint cimport uint64_t


cdef enum:
    # Stalls below 8 ns one by one, then 8 buckets to each doubling, up to 2**41 ns: 37 minutes.
    NUM_STALL_BUCKETS = 312


@cython.final
cdef class AccessProfiler:
    cdef readonly int num_layers
    cdef readonly int num_experts
    cdef uint64_t* totals        # [num_layers, num_experts] hits and misses
    cdef uint64_t* layer_hits    # [num_layers]
    cdef uint64_t* layer_misses  # [num_layers]
    cdef uint64_t hit_count
    cdef uint64_t miss_count
    cdef uint64_t stall_ns
    cdef uint64_t stall_count
    cdef uint64_t[NUM_STALL_BUCKETS] stall_buckets
    cdef uint64_t warm_hits
    cdef uint64_t warm_misses
    cdef uint64_t generation
    cdef object counts_owner
    cdef object counts_view
    cdef tuple pinned_pairs

    cdef int checked(self, Py_ssize_t layer, Py_ssize_t expert) except -1


cdef inline void count_miss(AccessProfiler profiler, int layer, int key) noexcept nogil:
    profiler.totals[key] += 1
    profiler.layer_misses[layer] += 1
    profiler.miss_count += 1
