from libc.stdint cimport int64_t

from moecache.loading._load cimport Load


cdef enum:
    NUM_CAUSES = 4


cdef class LoadCounts:
    cdef public object clock
    cdef int64_t _num_urgent, _urgent_since
    cdef int64_t[NUM_CAUSES] _bytes  # of each cause
    cdef public int64_t num_steps, num_resident_steps
    cdef readonly int64_t num_reads, num_failed_reads, num_urgent_reads, urgent_ns
    cdef readonly int64_t num_prefetches, num_failed_prefetches, num_cancelled_prefetches
    cdef readonly int64_t num_prefetches_in_flight, prefetch_bytes_in_flight

    cdef int begin_urgent(self) except -1
    cdef int end_urgent(self, bint read) except -1
    cdef void begin_prefetch(self, int64_t num_bytes) noexcept
    cdef void end_prefetch(self, Load load, int64_t num_bytes) noexcept
    cdef void done(self, Load load, int64_t num_bytes) noexcept
