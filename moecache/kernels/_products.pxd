"""Declarations of the headers beside this file."""

from libc.stdint cimport int64_t

from moecache.kernels._jobs cimport (
    mc_conversion,
    mc_expansion,
    mc_experts,
    mc_level,
    mc_product,
    mc_sum,
    mc_work,
)


cdef extern from "_products.h" nogil:
    enum:
        MC_MAX_LEVELS

    int mc_tiles_are_refused
    int64_t mc_shared_bytes
    int64_t mc_waking_bytes
    void mc_share_from(int64_t shared_bytes, int64_t waking_bytes)

    int mc_levels(const mc_level **levels)
    void mc_use_level(const mc_level *level)
    void mc_convert_all(mc_conversion *conversion, int num_threads)
    void mc_expand(mc_expansion *expansion, int num_threads)
    void mc_products(mc_product *product, int num_threads)
    void mc_compute_experts(mc_experts *experts, int num_threads)
    void mc_combine(mc_sum *sum, int num_threads)
    void mc_share(int num_threads, mc_work work, void *job, int64_t num_items, int64_t bytes)
    int64_t mc_now_ns()
    void mc_after_fork() noexcept
    int mc_is_late(int64_t waited_ns, int64_t own_ns, int64_t own_items)
