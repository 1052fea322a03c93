"""Declarations of what is beside this file."""

cimport cython
from libc.stdint cimport int64_t

from moecache.reader._locks cimport pthread_cond_t, pthread_mutex_t
from moecache.reader._pieces cimport Piece
from moecache.reader._reads cimport Reads
from moecache.reader._requests cimport Range, Request


@cython.final
cdef class Crew:
    cdef Reads reads
    cdef int refusal  # of io_uring: an errno, or 0
    cdef int64_t epoch  # calls of `announce`
    cdef int num_fillers  # threads that serve, and fill
    cdef bint has_drained  # closed, and nothing is in flight
    cdef int _process
    cdef bint _is_initialised
    cdef pthread_mutex_t _mutex
    cdef pthread_cond_t _work  # for threads that serve
    cdef int _num_inside
    cdef bint _is_reaping  # a thread waits in the kernel, or is about to
    cdef bint _reaper_serves  # it waits for no request

    cdef bint is_inherited(self) noexcept
    cdef int num_in_flight(self) noexcept
    cdef int tune(self, int depth, size_t piece_bytes, size_t staging_bytes) except -1
    cdef Piece **add_pieces(
        self, Range *ranges, Py_ssize_t count, bint is_filled, Piece **end) except NULL

    cdef bint begin(
        self, Request **loads, Py_ssize_t count, Piece *pieces, bint deferred) noexcept nogil
    cdef void hasten(self, int64_t token) noexcept nogil
    cdef void cancel(self, int64_t token) noexcept nogil
    cdef bint wait(self, int64_t seen) noexcept nogil
    cdef bint is_done(self, bint *has_work) noexcept nogil
    cdef bint poll(self) noexcept nogil
    cdef Request *take(self) noexcept nogil
    cdef void announce(self) noexcept nogil
    cdef void serve(self, bint fills) noexcept nogil
    cdef void close(self, int64_t timeout_ns) noexcept nogil

    cdef bint _needs_help(self) noexcept nogil
    cdef bint _has_to_fill(self) noexcept nogil
    cdef bint _step(self, int64_t deadline, bint is_serving) noexcept nogil
    cdef bint _read(self, int64_t timeout) noexcept nogil
    cdef bint _reap_or_wait(self, int64_t timeout, bint is_serving) noexcept nogil
    cdef bint _take_in(self) noexcept nogil
    cdef void _hand_over(self) noexcept nogil
    cdef void _wake_caller(self) noexcept nogil
    cdef void _settle(self, Piece *piece) noexcept nogil
    cdef void _try(self) noexcept nogil
    cdef void _fill(self) noexcept nogil
