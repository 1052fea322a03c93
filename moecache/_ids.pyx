"""Expert ids as C arrays: NumPy arrays of int32 or int64, without a copy where possible."""

cimport numpy as cnp
from libc.stdint cimport int32_t

import numpy as np

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
