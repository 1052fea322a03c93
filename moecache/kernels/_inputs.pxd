"""Rows that matrices multiply, and addresses of rows."""

from libc.stdint cimport int64_t, uint8_t

from moecache.kernels._jobs cimport mc_matrix


cdef class Inputs:
    cdef const uint8_t *first
    cdef Inputs more
    cdef uint8_t *scratch
    cdef int64_t row_bytes, num, columns
    # The type by which products are chosen, and the one that this product multiplies.
    cdef int product_type, wanted, codes
    cdef int fill(
        self, const uint8_t *inputs, int given, int product_type, int64_t num, int64_t row_bytes,
        const mc_matrix *matrix
    ) except -1


cdef class Rows:
    cdef const uint8_t **rows
    cdef uint8_t *scratch
