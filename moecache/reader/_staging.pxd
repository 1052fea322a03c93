"""Declarations of what is beside this file."""

from moecache.reader._pieces cimport Piece

cdef struct Staging:
    # Buffers for what cannot be read straight into its target.
    char *memory
    size_t nbytes
    char *sink  # behind them, for the bytes between those that are wanted
    size_t buffer_bytes
    int *unused
    int num_unused

cdef int open_staging(Staging *staging, int num_buffers, size_t buffer_bytes) noexcept nogil
cdef void close_staging(Staging *staging) noexcept nogil
cdef bint lend(Staging *staging, Piece *piece) noexcept nogil
cdef void give_back(Staging *staging, const Piece *piece) noexcept nogil
cdef void copy_out(const Staging *staging, const Piece *piece) noexcept nogil
