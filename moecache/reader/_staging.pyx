"""Staging: buffers that reads go into where their targets are not aligned as direct reads want."""

from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from moecache.reader._pieces cimport SINK, Piece, place

cdef extern from "_buffers.h" nogil:
    char *mc_map_buffers(size_t nbytes)
    void mc_unmap_buffers(char *buffers, size_t nbytes)


cdef int open_staging(Staging *staging, int num_buffers, size_t buffer_bytes) noexcept nogil:
    """Make buffers in place of those that were there; -1 if there is no memory, and they stay."""
    cdef size_t nbytes = num_buffers * buffer_bytes
    cdef int *unused = <int *>malloc(num_buffers * sizeof(int))
    cdef char *memory = mc_map_buffers(nbytes + SINK)
    cdef int i
    if unused == NULL or memory == NULL:
        free(unused)
        mc_unmap_buffers(memory, nbytes + SINK)
        return -1
    for i in range(num_buffers):
        unused[i] = num_buffers - 1 - i
    close_staging(staging)
    staging[0] = Staging(memory, nbytes, memory + nbytes, buffer_bytes, unused, num_buffers)
    return 0


cdef void close_staging(Staging *staging) noexcept nogil:
    """Give the memory back; a second call does nothing."""
    mc_unmap_buffers(staging.memory, staging.nbytes + SINK)
    free(staging.unused)
    staging.memory, staging.unused = NULL, NULL


cdef bint lend(Staging *staging, Piece *piece) noexcept nogil:
    """Give a piece the buffer that it needs, if any; return False if all are in use."""
    if piece.num_staged == 0 or piece.buffer >= 0:
        return True
    if staging.num_unused == 0:
        return False
    staging.num_unused -= 1
    piece.buffer = staging.unused[staging.num_unused]
    place(piece, _buffer(staging, piece))
    return True


cdef void give_back(Staging *staging, const Piece *piece) noexcept nogil:
    """Take back the buffer of a piece, if it has one."""
    if piece.buffer >= 0:
        staging.unused[staging.num_unused] = piece.buffer
        staging.num_unused += 1


cdef void copy_out(const Staging *staging, const Piece *piece) noexcept nogil:
    """Copy what a piece has in its buffer to where it is wanted."""
    cdef int i
    for i in range(piece.num_copies):
        memcpy(
            piece.copies[i].target, _buffer(staging, piece) + piece.copies[i].source,
            piece.copies[i].nbytes)


cdef char *_buffer(const Staging *staging, const Piece *piece) noexcept nogil:
    return staging.memory + <size_t>piece.buffer * staging.buffer_bytes
