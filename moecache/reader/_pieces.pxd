from libc.stdint cimport uint64_t

from moecache.reader._files cimport File, iovec
from moecache.reader._requests cimport Range

cdef enum:
    # Room for the bytes between those that are wanted.
    SINK = 64 * 1024

cdef struct Copy:
    char *target
    size_t source  # in the piece's staging buffer
    size_t nbytes

cdef struct Piece:
    # One read: whole blocks, of one range or of several.
    Piece *next
    int file
    int descriptor
    uint64_t offset
    size_t nbytes
    size_t num_wanted  # bytes up to the last one that a range wants
    size_t num_done
    size_t num_staged
    int buffer
    int attempts
    int num_io_errors
    int error
    bint is_tried  # read by a thread if the page cache has it, else by the kernel
    int num_parts, num_ranges, num_copies
    iovec *parts
    iovec *rest
    char *staged  # for each part, whether its base is an offset into the staging buffer
    Range *ranges
    Copy *copies

cdef int cut(
    const File *files, size_t piece_bytes, char *sink, Range *ranges, Py_ssize_t count,
    Piece **first) noexcept nogil
cdef void free_pieces(Piece **chain) noexcept nogil
cdef void place(Piece *piece, char *buffer) noexcept nogil
cdef int rest(Piece *piece, iovec **parts) noexcept nogil
