"""From ranges of files to reads: adjoining ranges are joined, long ones cut into pieces."""

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, qsort
from libc.string cimport memcpy

from moecache.reader._files cimport File, iovec
from moecache.reader._requests cimport Range

cdef enum:
    # Most bytes between two ranges that are read along, rather than made a second request.
    GAP = 8 * 1024
    # Shorter parts go through staging: each part of a read costs the kernel something.
    SMALLEST_STRAIGHT = 16 * 1024
    MAX_RANGES = 128


cdef int cut(
    const File *files, size_t piece_bytes, char *sink, Range *ranges, Py_ssize_t count,
    Piece **first
) noexcept nogil:
    """Make a chain of pieces of some ranges; -1 if there is no memory. Sorts the ranges."""
    cdef Piece **end = first
    cdef Piece *piece
    cdef Py_ssize_t i = 0, j, k
    cdef uint64_t stop, low, high, at, until
    cdef size_t unit, step, num_pieces
    qsort(ranges, count, sizeof(Range), _by_place)
    while i < count:
        stop = ranges[i].offset + ranges[i].nbytes
        j = i + 1
        while (
            j < count and j - i < MAX_RANGES and ranges[j].file == ranges[i].file
            and stop <= ranges[j].offset <= stop + GAP
        ):
            stop = ranges[j].offset + ranges[j].nbytes
            j += 1
        unit = files[ranges[i].file].alignment
        low = ranges[i].offset // unit * unit
        high = (stop + unit - 1) // unit * unit
        num_pieces = (high - low + piece_bytes - 1) // piece_bytes
        # Pieces of one size, rather than a small one at the end.
        step = ((high - low + num_pieces - 1) // num_pieces + unit - 1) // unit * unit
        at, k = low, i
        while at < high:
            until = min(at + step, high)
            while ranges[k].offset + ranges[k].nbytes <= at:
                k += 1
            if ranges[k].offset < until:
                piece = _piece(files, sink, ranges + k, j - k, at, until)
                if piece == NULL:
                    free_pieces(first)
                    return -1
                end[0] = piece
                end = &piece.next
            at = until
        i = j
    return 0


cdef Piece *_piece(
    const File *files, char *sink, Range *ranges, Py_ssize_t count, uint64_t low, uint64_t high
) noexcept nogil:
    cdef Py_ssize_t used = 0, i
    cdef size_t unit
    cdef uint64_t at, first, last, inner, outer
    cdef Piece *piece
    cdef char *block
    while used < count and ranges[used].offset < high:
        used += 1
    block = <char *>calloc(
        1, sizeof(Piece) + used * (sizeof(Range) + 2 * sizeof(Copy))
        + (2 * used + 2) * (2 * sizeof(iovec) + 1))
    if block == NULL:
        return NULL
    piece = <Piece *>block
    block += sizeof(Piece)
    piece.ranges = <Range *>block
    block += used * sizeof(Range)
    piece.copies = <Copy *>block
    block += 2 * used * sizeof(Copy)
    piece.parts = <iovec *>block
    block += (2 * used + 2) * sizeof(iovec)
    piece.rest = <iovec *>block
    piece.staged = block + (2 * used + 2) * sizeof(iovec)
    piece.file = ranges[0].file
    unit = files[piece.file].alignment
    piece.descriptor = (
        files[piece.file].direct if unit > 1 else files[piece.file].cached)
    piece.offset, piece.nbytes, piece.buffer = low, high - low, -1
    at = low
    for i in range(used):
        first = max(ranges[i].offset, low)
        last = min(ranges[i].offset + ranges[i].nbytes, high)
        piece.ranges[i] = Range(
            piece.file, first, last - first,
            ranges[i].target + (first - ranges[i].offset), ranges[i].load)
        ranges[i].load.num_missing += 1
        piece.num_wanted = last - low
        inner, outer = _straight(&piece.ranges[i], unit)
        if inner < outer:
            _add_part(piece, sink, at, inner, i, i + 1)
            piece.parts[piece.num_parts] = iovec(
                piece.ranges[i].target + (inner - first), outer - inner)
            piece.num_parts += 1
            at = outer
    piece.num_ranges = <int>used
    _add_part(piece, sink, at, high, used, used)
    _plan_copies(piece)
    return piece


cdef (uint64_t, uint64_t) _straight(Range *part, size_t unit) noexcept nogil:
    """The bytes of a range that can be read straight into its target."""
    cdef uint64_t stop = part.offset + part.nbytes, inner, outer
    if unit == 1:
        return part.offset, stop
    inner = (part.offset + unit - 1) // unit * unit
    outer = stop // unit * unit
    if outer < inner + SMALLEST_STRAIGHT:
        return 0, 0
    if (<uintptr_t>part.target + (inner - part.offset)) % unit:
        return 0, 0
    return inner, outer


cdef void _add_part(
    Piece *piece, char *sink, uint64_t first, uint64_t last, Py_ssize_t num_before,
    Py_ssize_t num_ranges
) noexcept nogil:
    """Add what no target takes directly: into the sink if no range wants it, else staging."""
    cdef Py_ssize_t i
    cdef bint wanted = False
    if first >= last:
        return
    for i in range(min(num_before + 1, num_ranges)):
        wanted = wanted or (
            piece.ranges[i].offset < last
            and piece.ranges[i].offset + piece.ranges[i].nbytes > first)
    if wanted or last - first > SINK:
        piece.parts[piece.num_parts] = iovec(<void *>piece.num_staged, last - first)
        piece.staged[piece.num_parts] = 1
        piece.num_staged += last - first
    else:
        piece.parts[piece.num_parts] = iovec(sink, last - first)
    piece.num_parts += 1


cdef void _plan_copies(Piece *piece) noexcept nogil:
    """Note which bytes of staging go where, part by part."""
    cdef int i, k
    cdef uint64_t at = piece.offset, stop, first, last
    for k in range(piece.num_parts):
        stop = at + piece.parts[k].iov_len
        if piece.staged[k]:
            for i in range(piece.num_ranges):
                first = max(piece.ranges[i].offset, at)
                last = min(piece.ranges[i].offset + piece.ranges[i].nbytes, stop)
                if first < last:
                    piece.copies[piece.num_copies] = Copy(
                        piece.ranges[i].target + (first - piece.ranges[i].offset),
                        <size_t>piece.parts[k].iov_base + (first - at), last - first)
                    piece.num_copies += 1
        at = stop


cdef void free_pieces(Piece **chain) noexcept nogil:
    cdef Piece *piece
    while chain[0] != NULL:
        piece = chain[0]
        chain[0] = piece.next
        free(piece)


cdef void place(Piece *piece, char *buffer) noexcept nogil:
    """Give a piece its staging buffer."""
    cdef int i
    for i in range(piece.num_parts):
        if piece.staged[i]:
            piece.parts[i].iov_base = buffer + <size_t>piece.parts[i].iov_base


cdef int rest(Piece *piece, iovec **parts) noexcept nogil:
    """Find what of a piece is still to be read; return the number of parts."""
    cdef size_t skip = piece.num_done
    cdef int i = 0
    if skip == 0:
        parts[0] = piece.parts
        return piece.num_parts
    while skip >= piece.parts[i].iov_len:
        skip -= piece.parts[i].iov_len
        i += 1
    memcpy(piece.rest, piece.parts + i, (piece.num_parts - i) * sizeof(iovec))
    piece.rest[0].iov_base = <char *>piece.rest[0].iov_base + skip
    piece.rest[0].iov_len -= skip
    parts[0] = piece.rest
    return piece.num_parts - i


cdef int _by_place(const void *one, const void *two) noexcept nogil:
    cdef const Range *left = <const Range *>one
    cdef const Range *right = <const Range *>two
    if left.file != right.file:
        return -1 if left.file < right.file else 1
    return -1 if left.offset < right.offset else left.offset > right.offset
