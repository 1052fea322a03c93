"""Declarations of what is beside this file."""

cimport cython
from libc.stdint cimport int32_t, uint64_t

from moecache.cache._misses cimport Misses
from moecache.cache._partitions cimport Partitions
from moecache.cache._profiler cimport AccessProfiler
from moecache.cache._route_log cimport RouteLog
from moecache.cache._slots cimport Slots
from moecache.policies._policy cimport Policy


cdef struct Step:
    int layer
    const void* ids         # [rows, top_k]
    bint wide               # int64 rather than int32
    Py_ssize_t rows
    Py_ssize_t top_k
    Py_ssize_t n            # number of ids
    const int32_t* names    # of each row's sequence, or NULL


@cython.final
cdef class Leases:
    cdef Slots slots
    cdef Misses misses
    cdef Partitions partitions
    cdef AccessProfiler profiler
    cdef bint evicts
    cdef uint64_t num_evictions
    cdef uint64_t num_foreseen_hits    # foreseen, and then used from its slot
    cdef uint64_t num_foreseen_late    # foreseen, and asked for while being filled
    cdef uint64_t num_foreseen_unused  # foreseen, and evicted unused
    cdef object table                  # arrays that own the tables of `slots`
    cdef object mask

    cdef int share_of(self, int layer) noexcept
    cdef int acquire(
        self, const Step* step, Py_ssize_t share, bint drop, RouteLog log, int32_t* out,
        int32_t* misses_out,
    ) except -1
    cdef bint acquire_resident(self, const Step* step, RouteLog log, int32_t* out) except -1
    cdef void count_hits(self, const Step* step, RouteLog log) noexcept
    cdef void release(self, const int32_t* slots, Py_ssize_t n) noexcept
    cdef int claim(self, int layer, int expert, bint evict, bint likely)
    cdef void publish(self, int slot) noexcept
    cdef void abandon(self, int slot) noexcept
    cdef bint withhold(self, int slot) noexcept
    cdef void restore(self, int slot) noexcept
    cdef int audit(self) except -1

    cdef int count_misses(self, const Step* step, bint drop) except -1
    cdef bint is_bulk(self, const Step* step, Py_ssize_t share) noexcept
    cdef bint any_valid(self, const Step* step) noexcept
    cdef int plan_claims(self, const Step* step, Py_ssize_t share) except -1
    cdef void use_hits(self, const Step* step, int32_t* out) noexcept
    cdef void lease_misses(
        self, const Step* step, int admitted, const int* worths, int32_t* out, int32_t* misses_out
    ) noexcept
    # Without the GIL Cython counts no references of what `self` has.
    cdef bint is_worth_it(self, Policy part, int partition, int key) noexcept nogil
    cdef int take_slot(self, Policy part, int partition, int key, bint accessed) noexcept nogil
    cdef void evict(self, Policy part, int victim, int partition) noexcept nogil
