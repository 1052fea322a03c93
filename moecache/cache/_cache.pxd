cimport cython
from libc.stdint cimport int32_t

from moecache.cache._leases cimport Leases
from moecache.cache._profiler cimport AccessProfiler
from moecache.cache._route_log cimport RouteLog


@cython.final
cdef class ExpertCache:
    cdef readonly int num_layers
    cdef readonly int num_experts
    cdef readonly int capacity
    cdef readonly str scope
    cdef readonly AccessProfiler profiler
    cdef public RouteLog route_log  # notes every step, unless None
    cdef Leases leases
    cdef object table  # what callers see of the tables
    cdef object mask

    cdef bint lease_resident(
        self, int layer, const int32_t* ids, Py_ssize_t rows, Py_ssize_t top_k,
        const int32_t* names, int32_t* out
    ) except -1
    cdef void end_leases(self, const int32_t* slots, Py_ssize_t n) noexcept
    cdef bint is_resident_or_coming(self, int key) noexcept
    cdef int checked(self, Py_ssize_t layer, Py_ssize_t expert) except -1
    cdef int check_claimed(self, Py_ssize_t slot, str verb) except -1
