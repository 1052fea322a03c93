"""Declarations of the header beside this file."""

from libc.stdint cimport int64_t, uint8_t

from moecache.kernels._jobs cimport mc_level


cdef extern from "_linear.h" nogil:
    cdef enum:
        MC_MOST_HEAD
        MC_MOST_KERNEL

    ctypedef struct mc_stretch:
        int64_t first
        int64_t num
        int64_t num_saved
        const uint8_t *seen
        uint8_t *next_seen
        uint8_t *saved_seen
        int64_t row_step
        int64_t channel_step
        int seen_type
        const float *states
        float *next_states
        float *saved_states

    ctypedef struct mc_linear:
        const mc_level *level
        int64_t num_keys
        int64_t num_heads
        int64_t width
        int64_t value_width
        int is_tiled
        int is_scan
        int by_channel
        float bound
        int64_t kernel
        int64_t channels
        const float *conv
        const float *conv_bias
        int has_activation
        int64_t queries_at
        int64_t keys_at
        int64_t values_at
        const float *rates
        const float *steps
        const float *skips
        const uint8_t *norm
        int norm_type
        float epsilon
        const mc_stretch *stretches
        float *mixed
        const float *decays
        const float *shares
        const float *gates
        int64_t mixed_step
        int64_t share_step
        int64_t gate_step
        float *out

    int64_t mc_convolve_items(const mc_linear *l)
    void mc_convolve_item(void *job, int64_t item)
    void mc_delta_item(void *job, int64_t item)
    void mc_scan_item(void *job, int64_t item)
    void mc_multiply_rows(
        const float *x, const float *gate, int64_t step, float *out, int64_t out_step,
        int64_t num, int64_t width
    )
