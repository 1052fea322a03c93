"""What other compiled code has computed: by the level in use, and as many threads as are set."""

from libc.stdint cimport int64_t, uint8_t

from moecache.kernels._jobs cimport (
    mc_conversion,
    mc_expansion,
    mc_experts,
    mc_level,
    mc_matrix,
    mc_product,
    mc_sum,
    mc_work,
)


cdef const mc_level *level_in_use() noexcept nogil
cdef void convert_rows(
    const float *rows, int64_t step, int64_t num, int wanted, const mc_matrix *matrix,
    uint8_t *out, int64_t out_bytes
) noexcept nogil
cdef void run_conversion(mc_conversion *conversion) noexcept nogil
cdef void run_expansion(mc_expansion *expansion) noexcept nogil
cdef void run_product(mc_product *product) noexcept nogil
cdef void run_experts(mc_experts *experts) noexcept nogil
cdef void run_sum(mc_sum *sum) noexcept nogil
cdef void run_items(mc_work work, void *job, int64_t num_items, int64_t num_bytes) noexcept nogil
cdef int64_t now_ns() noexcept nogil
