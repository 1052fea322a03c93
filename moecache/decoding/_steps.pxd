"""Declarations of the header beside this file."""

from libc.stdint cimport int32_t, int64_t, uint8_t

from moecache.kernels._jobs cimport mc_attention, mc_level


cdef extern from "_steps.h" nogil:
    enum:
        MC_SOFTMAX
        MC_SIGMOID
        MC_SOFTMAX_OF_CHOSEN
        MC_SPARSEMIXER
        MC_SIGMOID_OF_CHOSEN

    enum:
        MC_PAIRED_HALVES
        MC_PAIRED_NEIGHBOURS
        MC_PAIRED_NEIGHBOURS_TO_HALVES

    cdef enum:
        MC_MOST_RANK
        MC_MOST_TILE

    ctypedef struct mc_held:
        uint8_t *keys
        uint8_t *values
        int64_t key_head
        int64_t value_head
        int64_t position
        int64_t begin
        int64_t dropped

    ctypedef struct mc_heads:
        const mc_level *level
        mc_attention first
        int64_t num_heads
        int64_t num_kv_heads
        int64_t parts
        int64_t window
        int64_t num_rows
        int64_t tile
        const mc_held *held
        float *queries
        const float *sinks
        float *scores
        int64_t most
        float *out
        const uint8_t *expand
        int expand_type
        int64_t content
        int64_t out_width
        const float *given

    ctypedef struct mc_router:
        int64_t num_experts
        int64_t top_k
        int64_t num_groups
        int64_t num_kept
        int64_t num_best
        int kind
        int is_normalized
        float least
        float floor
        float scale
        float jitter
        float cap
        const float *expert_scales
        const float *correction

    void mc_norm(
        const float *x, const uint8_t *weight, int type, int64_t num, float eps, float *out
    )
    void mc_layer_norm(
        const float *x, const uint8_t *weight, const uint8_t *bias, int type, int64_t num,
        float eps, float *out
    )
    void mc_turn(float *head, const float *cos, const float *sin, int64_t width, int pairs)
    void mc_store(const float *given, int64_t num, int type, uint8_t *to)
    void mc_add(float *to, const float *given, int64_t num, float scale)
    void mc_scale(float *values, int64_t num, float factor)
    void mc_clip(float *values, int64_t num, float bound)
    void mc_scale_parts(float *x, const float *gates, int64_t num, int64_t each)
    void mc_attend_item(void *job, int64_t item)
    void mc_latent_item(void *job, int64_t item)
    void mc_top(const float *scores, int64_t num_scores, int64_t num, int32_t *out)
    void mc_softmax(float *values, int64_t num)
    void mc_route(
        const mc_router *r, float *logits, float *scratch, int32_t *ids, float *weights
    )
