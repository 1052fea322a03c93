"""Declarations of what is beside this file."""

cimport numpy as cnp
from libc.stdint cimport int64_t, uint8_t

from moecache.cache._cache cimport ExpertCache
from moecache.decoding._steps cimport mc_router
from moecache.kernels._jobs cimport mc_activation, mc_experts, mc_matrix, mc_rows


cdef struct Linear:
    mc_matrix matrix
    mc_rows bias
    bint is_there


cdef struct Norm:
    const uint8_t *weight
    const uint8_t *bias
    int type
    int64_t width
    float epsilon


cdef struct Layer:
    Norm attention_norm
    Norm forward_norm
    Norm query_norm
    Norm key_norm
    Norm value_norm
    # Of what is added to hidden states; of a feed-forward beside the experts, whose norm is
    # `forward_norm` then.
    Norm attention_out
    Norm forward_out
    bint is_beside
    Norm router_norm
    Norm experts_norm
    Norm beside_out
    Norm experts_out
    float factor
    Linear query
    Linear key
    Linear value
    Linear out
    int64_t num_heads
    int64_t width
    int64_t value_width
    int64_t rotary_width
    int64_t first_angle
    int64_t window
    int pairs
    float scale
    float clip
    bint has_late_norms
    bint is_chunked
    float floor
    float temperature
    bint counts_own
    const float *sinks
    # Heads of the cache, and numbers of what it holds of each.
    int64_t num_kv_heads
    int64_t held
    int64_t value_held
    # What multiplies what attention gives: a second part of each query, or of linear attention.
    bint is_gated
    Linear gates
    # Numbers that a gate multiplies by its softplus; 0: each has one, and its sigmoid.
    int64_t numbers_per_gate
    float value_scale
    # Of linear attention, whose query is of all that goes through the convolution, whose key and
    # value say how states decay and change, and whose query's norm is its result's.
    bint is_linear
    bint is_tiled
    # With a decay for each number of a key: products that are made one behind the other.
    bint by_channel
    float bound
    Linear decay_low
    Linear decay
    Linear share
    Linear gate_low
    int64_t num_keys
    int64_t kernel
    int64_t channels
    const float *conv
    const float *conv_bias
    const float *rates
    const float *steps
    # Of a state space, whose gates, shares and all that goes through the convolution are one
    # product; of a convolution alone.
    bint is_scan
    const float *skips
    int64_t num_norms
    bint is_short
    bint has_attention
    bint has_forward
    # Of latent attention.
    bint is_latent
    Linear low
    Norm low_norm
    const uint8_t *expand
    int expand_type
    float residual
    Linear gate
    Linear up
    Linear down
    Linear weight
    mc_activation activation
    Linear router
    mc_router choice
    bint scales_input
    mc_experts experts
    bint has_experts
    # What their input is made of, and their sum made into.
    Linear latent_down
    Linear latent_up
    int number


cdef class Bound:
    cdef Layer *layers
    cdef int64_t num_layers, hidden_size, top_k
    # Type of the inputs of weights that are no integers, where the processor has such products.
    cdef int product_type
    # Numbers of an expert's input.
    cdef int64_t expert_size
    # Angles of a position, of all layers.
    cdef int64_t num_angles
    cdef Norm norm
    cdef Linear head
    cdef float embedding_scale, logits_scale
    cdef ExpertCache cache
    cdef list owners

    cdef int _bind_norm(self, Norm *norm, given, int64_t multiple_of) except -1
    cdef void *_own(self, cnp.ndarray array) except NULL
    cdef int _bind_linear(
        self, Linear *linear, given, int64_t columns, int64_t rows=*
    ) except -1
    cdef int _bind(self, Layer *layer, given) except -1
    cdef int _bind_beside(self, Layer *layer, given) except -1
    cdef const float *_floats(self, given, int64_t num) except? NULL
    cdef int _bind_attention(self, Layer *layer, a) except -1
    cdef int _bind_linear_attention(self, Layer *layer, a) except -1
    cdef int _bind_delta(self, Layer *layer, a) except -1
    cdef int _bind_chain(
        self, Linear *low, Linear *linear, given, int64_t rows
    ) except -1
    cdef int _bind_head_norm(self, Layer *layer, a) except -1
    cdef int _bind_heads(self, Layer *layer, a) except -1
    cdef int _bind_convolution(self, Layer *layer, a, int64_t channels) except -1
    cdef int _bind_space(self, Layer *layer, a) except -1
    cdef int _bind_short(self, Layer *layer, a) except -1
    cdef int _bind_rotation(self, Layer *layer, a, int64_t most) except -1
    cdef int _bind_latents(self, Layer *layer, a) except -1
    cdef int _bind_temperature(self, Layer *layer, temperature) except -1
