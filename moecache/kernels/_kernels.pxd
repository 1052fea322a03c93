"""What other compiled code asks of the kernels."""

cimport numpy as cnp
from libc.stdint cimport int64_t, uint8_t

from moecache.kernels._jobs cimport (
    mc_experts,
    mc_file,
    mc_level,
    mc_matrix,
    mc_product,
    mc_sum,
    mc_work,
)


cdef class Matrix:
    cdef mc_matrix matrix
    cdef readonly object owner


cdef class Experts:
    cdef mc_experts experts
    cdef readonly object owner
    cdef tuple ups
    cdef bint multiplies_alike  # whether gate and up multiply the same inputs
    cdef Matrix down


cdef struct Tiling:
    # How forms are made of matrices, and where the parts of a matrix begin in its bytes.
    mc_file file
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


cdef const mc_level *level_in_use() noexcept nogil
cdef void convert_rows(
    const float *rows, int64_t step, int64_t num, int wanted, const mc_matrix *matrix,
    uint8_t *out, int64_t out_bytes
) noexcept nogil
cdef void run_product(mc_product *product) noexcept nogil
cdef void run_experts(mc_experts *experts) noexcept nogil
cdef void run_sum(mc_sum *sum) noexcept nogil
cdef void run_items(mc_work work, void *job, int64_t num_items, int64_t num_bytes) noexcept nogil
cdef int64_t now_ns() noexcept nogil
cdef bint tile_matrices(
    const Tiling *tiling, const uint8_t *raw, uint8_t *form, int64_t num
) noexcept nogil
