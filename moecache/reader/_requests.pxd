"""Declarations of what is beside this file."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from moecache.kernels._tiler cimport Tiling

cdef extern from "<errno.h>" nogil:
    int ECANCELED

cdef struct Fill:
    # Matrices that are brought into compute form once all bytes of their expert are there.
    const Tiling *tiling
    const uint8_t *raw
    uint8_t *form
    int64_t num

cdef struct Request:
    # An expert of a caller: done when all its ranges are, and its fills.
    Request *next
    int64_t token
    int64_t num_missing
    int num_fills
    Fill *fills
    # The first fill with matrices that nobody has taken, and how many matrices are not done.
    int next_fill
    int64_t num_to_fill
    bint is_wrong
    int error
    int file
    uint64_t offset

cdef struct Range:
    # Bytes of a file and where they are wanted.
    int file
    uint64_t offset
    size_t nbytes
    char *target
    Request *load

cdef struct Line:
    # First in, first out.
    Request *first
    Request *last  # if there is a first

cdef struct Requests:
    Line unfilled  # read, and to be brought into compute form
    Line finished
    int num_to_fill  # with fills that are not done

cdef Request *new_request(Py_ssize_t num_fills) except NULL
cdef Py_ssize_t add_ranges(
    Range *ranges, Py_ssize_t used, Request *load, int num_files, runs, parts) except -1
cdef int add_fills(Request *load, parts, fills) except -1

cdef void complete(Requests *requests, Request *load, bint is_closed) noexcept nogil
cdef Fill take_matrix(Requests *requests) noexcept nogil
cdef bint end_matrix(Requests *requests, Request *load, bint is_wrong) noexcept nogil
cdef void give_up(Requests *requests) noexcept nogil
cdef Request *take_finished(Requests *requests) noexcept nogil
