# Expert ids as C arrays. int32 and int64 are taken as they are.

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t

cdef cnp.ndarray as_ids(ids)
cdef cnp.ndarray as_sequences(sequences, Py_ssize_t rows)
cdef int32_t* int32_data(
    cnp.ndarray array, Py_ssize_t size, str name, bint written
) except? NULL
cdef void sort_by_uses(
    int* experts, const int* uses, uint64_t* order, int n
) noexcept nogil


cdef inline int64_t id_at(const void* ids, bint wide, Py_ssize_t i) noexcept nogil:
    return (<const int64_t*>ids)[i] if wide else (<const int32_t*>ids)[i]
