from libc.stdint cimport int64_t, uint8_t, uint64_t

from moecache.kernels._kernels cimport Tiling

cdef extern from "<sys/uio.h>" nogil:
    cdef struct iovec:
        void *iov_base
        size_t iov_len

cdef enum:
    # Room for the bytes between those that are wanted.
    SINK = 64 * 1024

cdef struct File:
    int cached  # a descriptor that reads through the page cache
    int direct  # one that reads around it, or -1
    size_t alignment  # of direct reads; 1 without

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
    # The next matrix to be filled by whoever comes, and how many are not done.
    int next_fill
    int64_t next_matrix
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
