"""Expert ids as C arrays: NumPy arrays of int32 or int64, without a copy where possible."""

cimport numpy as cnp
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport qsort

import numpy as np

from moecache.policies._policy cimport MAX_SEQUENCES

cnp.import_array()


cdef cnp.ndarray as_ids(ids):
    cdef cnp.ndarray array
    if cnp.PyArray_Check(ids):
        array = <cnp.ndarray>ids
        if (
            cnp.PyArray_ISCARRAY_RO(array)
            and array.descr.kind == 105  # ord("i")
            and (cnp.PyArray_ITEMSIZE(array) == 4 or cnp.PyArray_ITEMSIZE(array) == 8)
        ):
            return array
    converted = np.ascontiguousarray(ids)
    if converted.size == 0:
        converted = converted.astype(np.int64)
    if converted.dtype.kind not in "iu":
        raise TypeError(f"ids must be int32 or int64, got {converted.dtype}")
    if converted.dtype == np.uint64:
        # Out of range stays out of range: it must not wrap to an expert's id.
        converted = np.minimum(converted, np.uint64(2**63 - 1))
    return converted.astype(np.int64)


cdef cnp.ndarray as_sequences(sequences, Py_ssize_t rows):
    """Return a number for each row, int32, of at most 64 sequences."""
    cdef cnp.ndarray array
    cdef const int32_t* data
    cdef int32_t low = 0
    cdef Py_ssize_t row
    if cnp.PyArray_Check(sequences):
        array = <cnp.ndarray>sequences
        if (
            cnp.PyArray_TYPE(array) == cnp.NPY_INT32 and cnp.PyArray_ISCARRAY_RO(array)
            and cnp.PyArray_NDIM(array) == 1 and cnp.PyArray_SIZE(array) == rows
            and rows <= MAX_SEQUENCES
        ):
            data = <const int32_t*>cnp.PyArray_DATA(array)
            for row in range(rows):
                low = min(low, data[row])
            if low == 0:
                return array
    numbers = np.asarray(sequences)
    if numbers.dtype.kind not in "iu" and numbers.size:
        raise TypeError(f"sequences must be integers, got {numbers.dtype}")
    if numbers.shape != (rows,):
        raise ValueError(
            f"sequences must have a number for each of {rows} rows, got {list(numbers.shape)}"
        )
    if rows and (numbers.min() < 0 or numbers.max() > 0x7FFFFFFF):
        wrong = numbers.min() if numbers.min() < 0 else numbers.max()
        raise ValueError(f"sequence {wrong} is not in [0, {0x7FFFFFFF}]")
    if rows > MAX_SEQUENCES and len(set(numbers.tolist())) > MAX_SEQUENCES:
        raise ValueError(
            f"a step has rows of {len(set(numbers.tolist()))} sequences, but {MAX_SEQUENCES} at "
            "most are told apart; split the step, or leave out sequences"
        )
    return np.ascontiguousarray(numbers, np.int32)


cdef int32_t* int32_data(
    cnp.ndarray array, Py_ssize_t size, str name, bint written
) except? NULL:
    if (
        cnp.PyArray_TYPE(array) != cnp.NPY_INT32
        or not cnp.PyArray_ISCARRAY_RO(array)
        or (written and not cnp.PyArray_ISWRITEABLE(array))
        or cnp.PyArray_SIZE(array) < size
    ):
        raise ValueError(
            f"{name} must be {'writable ' if written else ''}C-contiguous int32 of at least "
            f"{size} elements, got {array.size} of {array.dtype}"
        )
    return <int32_t*>cnp.PyArray_DATA(array)


cdef void sort_by_uses(int* experts, const int* uses, uint64_t* order, int n) noexcept nogil:
    # The most used first, ties in the order they came.
    cdef int i
    for i in range(n):
        order[i] = (<uint64_t>(0x7FFFFFFF - uses[experts[i]]) << 32) | <uint64_t>i
    qsort(order, n, sizeof(uint64_t), _compare)
    for i in range(n):
        order[i] = <uint64_t>experts[<uint32_t>order[i]]
    for i in range(n):
        experts[i] = <int>order[i]


cdef int _compare(const void* a, const void* b) noexcept nogil:
    cdef uint64_t x = (<const uint64_t*>a)[0]
    cdef uint64_t y = (<const uint64_t*>b)[0]
    return (x > y) - (x < y)
