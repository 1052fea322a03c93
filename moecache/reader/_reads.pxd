"""Declarations of what is beside this file."""

from libc.stdint cimport int64_t

from moecache.reader._files cimport Files
from moecache.reader._locks cimport pthread_cond_t
from moecache.reader._pieces cimport Piece
from moecache.reader._queue cimport Pieces, Queue
from moecache.reader._requests cimport Request, Requests
from moecache.reader._ring cimport mc_ring
from moecache.reader._staging cimport Staging

cdef enum:
    MAX_DEPTH = 256

cdef struct Reads:
    Files files
    Staging staging
    mc_ring ring
    bint uses_ring
    int depth
    size_t piece_bytes
    Queue queue
    int in_flight  # begun, and not settled
    int in_kernel
    Pieces arrived  # read, and to be copied out of staging
    Requests requests
    pthread_cond_t ended  # a piece has ended, or something else that somebody may wait for
    bint is_closed
    int64_t busy_since
    int64_t busy_ns
    int64_t num_reads
    int64_t num_retries
    int64_t bytes_wanted
    int64_t bytes_read
    int64_t bytes_copied

cdef bint has_faults() noexcept
cdef void inject(int kind, int error, int64_t skip, int64_t times, int refuse_ring) noexcept
cdef int open_ring(Reads *reads) noexcept nogil
cdef void enqueue(
    Reads *reads, Request **loads, Py_ssize_t count, Piece *pieces, bint deferred) noexcept nogil
cdef void drop_deferred(Reads *reads, int64_t token) noexcept nogil
cdef void drop_all(Reads *reads) noexcept nogil
cdef Piece *next_piece(Reads *reads) noexcept nogil
cdef int64_t read_now(Piece *piece) noexcept nogil
cdef int64_t read_cached(Piece *piece) noexcept nogil
cdef void issue(Reads *reads) noexcept nogil
cdef bint reap(Reads *reads) noexcept nogil
cdef bint judge(Reads *reads, Piece *piece, int64_t result) noexcept nogil
cdef void settle(Reads *reads, Piece *piece) noexcept nogil
cdef void leave_to_kernel(Reads *reads, Piece *piece) noexcept nogil
