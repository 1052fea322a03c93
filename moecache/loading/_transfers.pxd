"""Declarations of what is beside this file."""

cimport cython

from moecache.loading._load cimport Load
from moecache.loading._table cimport LoadTable


@cython.final
cdef class Transfers:
    cdef LoadTable table
    cdef object engine, clock, store
    cdef object filled  # the pool, if the engine brings slots into compute form
    cdef object filler
    cdef object prefetch_done
    cdef set _logged

    cdef int issue(self) except -1
    cdef int submit(self, list batch, bint deferred) except -1
    cdef int look(self) except -1
    cdef int take_in(self) except -1
    cdef bint fill(self) except -1
    cdef Load wait(self, arrived)
    cdef int wait_for(self, list loads) except -1
    cdef int close(self, double timeout_s) except -1
    cdef int drop(self) except -1

    cdef bint _take_one(self) except -1
    cdef bint _is_done(self, Load load) except -1
    cdef int _bring_in(self, Load load, error) except -1
    cdef int _conclude(self, Load load, error) except -1
