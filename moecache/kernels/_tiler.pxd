"""Compute forms, as other compiled code has them made."""

cimport numpy as cnp
from libc.stdint cimport int64_t, uint8_t

from moecache.kernels._jobs cimport mc_file


cdef struct Tiling:
    # How forms are made of matrices, and where the parts of a matrix begin in its bytes.
    mc_file file
    int64_t number_bytes  # of a matrix of numbers that is stored transposed; else 0
    int64_t codes_at
    int64_t scales_at
    int64_t zeros_at
    int64_t factor_at
    int64_t raw_bytes
    int64_t form_bytes


cdef class Tiler:
    cdef Tiling tiling
    cdef bytes zero_points
    cdef int64_t check(self, cnp.ndarray raw, int64_t raw_at, cnp.ndarray out) except -1


cdef bint tile_matrices(
    const Tiling *tiling, const uint8_t *raw, uint8_t *form, int64_t num
) noexcept nogil
