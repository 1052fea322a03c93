"""Declarations of what is beside this file."""

cimport cython
from libc.stdint cimport int64_t

from moecache.loading._counts cimport LoadCounts
from moecache.loading._load cimport Load
from moecache.loading._step cimport Step


@cython.final
cdef class LoadTable:
    cdef public object pool, cache
    cdef readonly object engine, lock
    cdef readonly dict by_slot  # in the order in which they were claimed
    cdef readonly Py_ssize_t num_queued
    cdef readonly Py_ssize_t num_reading  # with buffers, and not ahead of a step
    cdef LoadCounts counts
    cdef object layout
    cdef object over  # steps that are over, to be given back
    cdef object staging
    cdef bint closed
    cdef int _process
    cdef bint _to_announce

    cdef bint is_inherited(self) noexcept
    cdef int check_process(self) except -1
    cdef int check_open(self) except -1
    cdef int catch_up(self) except -1

    cdef bint acquire(self, Step step) except -1
    cdef bint stage(self, Step step) except -1
    cdef bint can_stage(self, Py_ssize_t layer) except -1
    cdef Load read_ahead(self, Py_ssize_t layer, Py_ssize_t expert, cause, bint likely)
    cdef list take_back(self)
    cdef list next_batch(self, most)
    cdef bint end(self, Load load, error) except -1
    cdef int release(self, leased, staged) except -1
    cdef int drain(self) except -1

    cdef int _load_misses(self, Step step, list misses) except -1
    cdef int _undo(self, Step step, list misses) except -1
    cdef int _enqueue(self, Load load) except -1
    cdef int _hasten(self, Load load) except -1
    cdef bint _cancel_ahead(self, Py_ssize_t layer) except -1
    cdef int _leave(self, Load load, arrived) except -1
    cdef int _retire(self, Load load) except -1
    cdef int _free_staged(self, Py_ssize_t slot) except -1
    cdef int64_t _bytes_of(self, Load load) except -1
