"""What a caller asks for: checked, and followed until its last matrix is in compute form."""

cimport numpy as cnp
from libc.errno cimport EILSEQ
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc

from moecache.kernels._tiler cimport Tiler

cnp.import_array()

# Above the size of any file by more than a block.
cdef uint64_t MAX_OFFSET = <uint64_t>1 << 62


cdef Request *new_request(Py_ssize_t num_fills) except NULL:
    """Make a request with room for fills; `free` it."""
    cdef Request *load = <Request *>calloc(1, sizeof(Request) + num_fills * sizeof(Fill))
    if load == NULL:
        raise MemoryError("no memory for reads")
    load.fills = <Fill *>(load + 1)
    return load


cdef Py_ssize_t add_ranges(
    Range *ranges, Py_ssize_t used, Request *load, int num_files, runs, parts
) except -1:
    """Write the ranges of a request's runs behind those that are there; return how many are."""
    cdef cnp.ndarray array
    cdef uint64_t offset
    cdef Py_ssize_t start, stop
    cdef int file
    for number, where, spans in runs:
        file, offset = number, where
        if not 0 <= file < num_files:
            raise ValueError(f"file {file} is not in [0, {num_files})")
        for role, first, last in spans:
            start, stop = first, last
            array = parts.get(role)
            if array is None:
                raise ValueError(f"there is no array for role {role!r}")
            if array.dtype.hasobject:
                raise ValueError(
                    f"the array for role {role!r} holds references to objects ({array.dtype}), "
                    "which bytes of a file are not")
            if not (cnp.PyArray_IS_C_CONTIGUOUS(array) and cnp.PyArray_ISWRITEABLE(array)):
                raise ValueError(f"the array for role {role!r} must be contiguous and writable")
            if not 0 <= start <= stop <= cnp.PyArray_NBYTES(array):
                raise ValueError(
                    f"bytes {start} to {stop} of role {role!r} are not in its array of "
                    f"{cnp.PyArray_NBYTES(array)} bytes")
            if stop == start:
                continue
            if offset > MAX_OFFSET - (stop - start):
                raise ValueError(f"byte {offset} is in no file")
            ranges[used] = Range(
                file, offset, stop - start, <char *>cnp.PyArray_DATA(array) + start, load)
            used += 1
            offset += stop - start
    return used


cdef int add_fills(Request *load, parts, fills) except -1:
    """Note which matrices of a request are to be filled, as `Reader.submit` is told."""
    cdef Tiler tiler
    cdef int64_t begin, num
    cdef cnp.ndarray part, target
    for making, role, start, form in fills:
        tiler, begin, target, part = making, start, form, parts.get(role)
        if part is None:
            raise ValueError(f"there is no array for role {role!r}")
        num = tiler.check(part, begin, target)
        if num == 0:
            continue
        load.fills[load.num_fills] = Fill(
            &tiler.tiling, <const uint8_t *>cnp.PyArray_DATA(part) + begin,
            <uint8_t *>cnp.PyArray_DATA(target), num)
        load.num_fills += 1
        load.num_to_fill += num
    return 0


cdef void complete(Requests *requests, Request *load, bint is_closed) noexcept nogil:
    """Note that all of a request's bytes are there, or that some failed."""
    if is_closed and load.num_to_fill and load.error == 0:
        load.error = ECANCELED
    if load.error or load.num_to_fill == 0:
        _finish(requests, load)
    else:
        _put(&requests.unfilled, load)


cdef Fill take_matrix(Requests *requests) noexcept nogil:
    """Take the next matrix of the first request that is unfilled; there must be one."""
    cdef Request *load = requests.unfilled.first
    cdef Fill *fill = &load.fills[load.next_fill]
    cdef Fill one = Fill(fill.tiling, fill.raw, fill.form, 1)
    fill.raw += fill.tiling.raw_bytes
    fill.form += fill.tiling.form_bytes
    fill.num -= 1
    if fill.num == 0:
        load.next_fill += 1
        if load.next_fill == load.num_fills:
            _shift(&requests.unfilled)
    return one


cdef bint end_matrix(Requests *requests, Request *load, bint is_wrong) noexcept nogil:
    """Note that a matrix that was taken is in compute form; return whether that was the last."""
    load.is_wrong = load.is_wrong or is_wrong
    load.num_to_fill -= 1
    if load.num_to_fill:
        return False
    if load.is_wrong and load.error == 0:
        load.error = EILSEQ
    _finish(requests, load)
    return True


cdef void give_up(Requests *requests) noexcept nogil:
    """Fail what is unfilled; a request ends when the matrices that were taken of it have."""
    cdef Request *load = _shift(&requests.unfilled)
    cdef int i
    while load != NULL:
        for i in range(load.next_fill, load.num_fills):
            load.num_to_fill -= load.fills[i].num
        load.error = ECANCELED
        if load.num_to_fill == 0:
            _finish(requests, load)
        load = _shift(&requests.unfilled)


cdef Request *take_finished(Requests *requests) noexcept nogil:
    """Return a request that is done, which the caller frees, or NULL."""
    return _shift(&requests.finished)


cdef void _finish(Requests *requests, Request *load) noexcept nogil:
    requests.num_to_fill -= load.num_fills > 0
    _put(&requests.finished, load)


cdef void _put(Line *line, Request *load) noexcept nogil:
    load.next = NULL
    if line.first == NULL:
        line.first = load
    else:
        line.last.next = load
    line.last = load


cdef Request *_shift(Line *line) noexcept nogil:
    cdef Request *load = line.first
    if load != NULL:
        line.first = load.next
    return load
