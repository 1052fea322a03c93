"""Bound: a recipe's layers as C has them, over the weights where they lie."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport calloc, free

from moecache.cache._cache cimport ExpertCache
from moecache.decoding._linear cimport MC_MOST_HEAD, MC_MOST_KERNEL
from moecache.decoding._steps cimport (
    MC_MOST_RANK, MC_PAIRED_HALVES, MC_PAIRED_NEIGHBOURS, MC_PAIRED_NEIGHBOURS_TO_HALVES,
    MC_SIGMOID, MC_SIGMOID_OF_CHOSEN, MC_SOFTMAX, MC_SOFTMAX_OF_CHOSEN, MC_SPARSEMIXER,
)
from moecache.kernels._jobs cimport MC_BF16, MC_F32
from moecache.kernels._experts cimport Experts
from moecache.kernels._matrix cimport Matrix

from moecache.decoding.recipe import (
    DeltaAttention,
    LatentAttention,
    LinearAttention,
    ShortConvolution,
    StateSpace,
)
from moecache.errors import ConfigError
from moecache.kernels._experts import ACTIVATIONS as _ACTIVATIONS
from moecache.kernels._inputs import INPUTS as _INPUTS
from moecache.kernels.matrices import type_of

cnp.import_array()

# Numbers of a latent, and of a head that has a state, at most; rows of a convolution.
MOST_RANK, MOST_HEAD, MOST_KERNEL = MC_MOST_RANK, MC_MOST_HEAD, MC_MOST_KERNEL
_SCORES = {
    "softmax": MC_SOFTMAX, "sigmoid": MC_SIGMOID, "softmax of the chosen": MC_SOFTMAX_OF_CHOSEN,
    "sparsemixer": MC_SPARSEMIXER, "sigmoid of the chosen": MC_SIGMOID_OF_CHOSEN,
}
_PAIRS = {
    "halves": MC_PAIRED_HALVES, "neighbours": MC_PAIRED_NEIGHBOURS,
    "neighbours to halves": MC_PAIRED_NEIGHBOURS_TO_HALVES,
}
_TYPES = {"f32": MC_F32, "bf16": MC_BF16}
_INFINITE = float("inf")


@cython.final
cdef class Bound:
    """The layers of a recipe, checked, with the addresses of their weights, which it keeps alive.

    Parameters
    ----------
    recipe : Recipe
    cache : ExpertCache

    Raises
    ------
    ConfigError
        If matrices do not fit together.
    MemoryError
    """

    def __cinit__(self, recipe, ExpertCache cache not None):
        cdef int64_t i
        self.cache, self.owners = cache, []
        self.num_layers, self.hidden_size = len(recipe.layers), recipe.hidden_size
        self.product_type = _INPUTS.index(recipe.product_type)
        self.embedding_scale, self.logits_scale = recipe.embedding_scale, recipe.logits_scale
        self.layers = <Layer *>calloc(max(1, self.num_layers), sizeof(Layer))
        if self.layers == NULL:
            raise MemoryError("no memory for layers")
        self.top_k = max([layer.router.top_k for layer in recipe.layers if layer.router] or [1])
        sizes = {
            layer.latents[0].matrix.rows if layer.latents else recipe.hidden_size
            for layer in recipe.layers if layer.router
        }
        if len(sizes) > 1:
            raise ConfigError(
                f"layers' experts have inputs of {sorted(sizes)} numbers; all must have one width"
            )
        if len({layer.latents is None for layer in recipe.layers if layer.router}) > 1:
            raise ConfigError("the experts of all layers are given latents, or those of none")
        self.expert_size = sizes.pop() if sizes else recipe.hidden_size
        for i in range(self.num_layers):
            self._bind(&self.layers[i], recipe.layers[i])
        self._bind_norm(&self.norm, recipe.norm, self.hidden_size)
        self._bind_linear(&self.head, recipe.head, self.hidden_size)

    def __dealloc__(self):
        free(self.layers)

    cdef int _bind_norm(self, Norm *norm, given, int64_t multiple_of) except -1:
        cdef cnp.ndarray weight
        if given is None:
            return 0
        weight = given.weight
        norm.weight, norm.width = <const uint8_t *>self._own(weight), weight.size
        norm.type, norm.epsilon = _TYPES[type_of(weight)], given.epsilon
        if norm.width == 0 or multiple_of % norm.width:
            raise ConfigError(f"a norm of {norm.width} numbers does not fit {multiple_of}")
        if given.bias is not None:
            if given.bias.size != norm.width or type_of(given.bias) != type_of(weight):
                raise ConfigError(f"a norm's bias is not one of {norm.width} {type_of(weight)}")
            norm.bias = <const uint8_t *>self._own(given.bias)
        return 0

    cdef void *_own(self, cnp.ndarray array) except NULL:
        if not cnp.PyArray_IS_C_CONTIGUOUS(array):
            raise ConfigError("weights of a program must be contiguous")
        self.owners.append(array)
        return cnp.PyArray_DATA(array)

    cdef int _bind_linear(self, Linear *linear, given, int64_t columns, int64_t rows=0) except -1:
        cdef Matrix matrix
        cdef cnp.ndarray bias
        if given is None:
            return 0
        matrix = given.matrix
        linear.matrix, linear.is_there = matrix.matrix, True
        if matrix.columns != columns or (rows and matrix.rows != rows):
            raise ConfigError(
                f"a matrix of {matrix.rows} x {matrix.columns} is not one of "
                f"{rows or 'some'} x {columns}"
            )
        self.owners.append(matrix)
        if given.bias is not None:
            bias = given.bias
            if bias.size != matrix.rows:
                raise ConfigError(f"a bias of {bias.size} numbers does not fit {matrix.rows} rows")
            linear.bias.data = <uint8_t *>self._own(bias)
            linear.bias.type = _INPUTS.index(type_of(bias))
        return 0

    cdef int _bind(self, Layer *layer, given) except -1:
        cdef int64_t hidden = self.hidden_size, width
        cdef Experts experts
        a, forward, router = given.attention, given.forward, given.router
        self._bind_norm(&layer.attention_norm, given.attention_norm, hidden)
        self._bind_norm(&layer.forward_norm, given.forward_norm, hidden)
        layer.residual, layer.factor = given.scale, given.factor
        self._bind_norm(&layer.attention_out, given.attention_out, hidden)
        self._bind_norm(&layer.forward_out, given.forward_out, hidden)
        self._bind_beside(layer, given)
        layer.has_attention = a is not None
        layer.has_forward = forward is not None or router is not None
        if given.attention_norm is not None and a is None:
            raise ConfigError("a norm before attention comes with attention")
        if isinstance(a, LatentAttention):
            self._bind_latents(layer, a)
        elif isinstance(a, LinearAttention):
            self._bind_linear_attention(layer, a)
        elif isinstance(a, DeltaAttention):
            self._bind_delta(layer, a)
        elif isinstance(a, StateSpace):
            self._bind_space(layer, a)
        elif isinstance(a, ShortConvolution):
            self._bind_short(layer, a)
        elif a is not None:
            self._bind_attention(layer, a)
        if given.forward_norm is not None and not layer.has_forward:
            raise ConfigError("a norm before a feed-forward comes with one")
        if forward is not None:
            width = forward.up.matrix.rows
            self._bind_linear(&layer.gate, forward.gate, hidden, width)
            self._bind_linear(&layer.up, forward.up, hidden)
            self._bind_linear(&layer.down, forward.down, width, hidden)
            self._bind_linear(&layer.weight, forward.weight, hidden, 1)
            layer.activation.kind = _ACTIVATIONS.index(forward.activation)
        layer.number = given.number
        layer.has_experts = router is not None
        if router is None:
            return 0
        self._bind_linear(&layer.router, router.linear, hidden)
        if given.latents is not None:
            self._bind_linear(&layer.latent_down, given.latents[0], hidden)
            self._bind_linear(&layer.latent_up, given.latents[1], self.expert_size, hidden)
            if router.scales_input or given.beside is not None:
                raise ConfigError("experts of latents have neither scaled inputs nor own norms")
        experts = given.experts
        self.owners.append(experts)
        layer.experts = experts.experts
        layer.choice.num_experts = router.linear.matrix.rows
        layer.choice.top_k = router.top_k
        layer.choice.num_groups = router.num_groups
        layer.choice.num_kept = router.num_kept_groups
        layer.choice.kind = _SCORES[router.scores]
        layer.choice.is_normalized = router.is_normalized
        layer.choice.num_best, layer.choice.jitter = router.num_best, router.jitter
        layer.choice.least, layer.choice.floor = router.least, router.floor
        layer.choice.scale, layer.choice.cap = router.scale, router.cap
        layer.scales_input = router.scales_input
        if (
            not 1 <= router.top_k <= layer.choice.num_experts
            or layer.choice.num_experts != self.cache.num_experts
            or not 0 <= layer.number < self.cache.num_layers
            or router.top_k != self.top_k
            or experts.experts.down.first.rows != self.expert_size
            or experts.experts.up[0].first.columns != self.expert_size
            or not 1 <= router.num_kept_groups <= router.num_groups <= 64
            or layer.choice.num_experts % router.num_groups
            or (router.num_kept_groups < router.num_groups
                and router.top_k * router.num_groups
                > router.num_kept_groups * layer.choice.num_experts)
            or not 1 <= router.num_best <= 2
            or (router.num_groups > 1
                and layer.choice.num_experts < router.num_best * router.num_groups)
            or (layer.choice.kind == MC_SPARSEMIXER and router.top_k > 2)
            or (layer.scales_input and router.top_k > 1)
        ):
            raise ConfigError(f"the router of layer {given.number} does not fit its experts")
        layer.choice.correction = self._floats(router.correction, layer.choice.num_experts)
        layer.choice.expert_scales = self._floats(
            router.expert_scales, layer.choice.num_experts
        )
        return 0

    cdef int _bind_beside(self, Layer *layer, given) except -1:
        cdef int64_t hidden = self.hidden_size
        beside = given.beside
        layer.is_beside = beside is not None
        if beside is None:
            if given.forward_out is not None and None not in (given.router, given.forward):
                raise ConfigError("experts' sum has a norm beside a feed-forward alone")
            return 0
        if given.forward is None or given.router is None or given.router.scales_input:
            raise ConfigError("a feed-forward and experts are beside one another, or neither is")
        self._bind_norm(&layer.router_norm, beside.router, hidden)
        self._bind_norm(&layer.experts_norm, beside.experts, hidden)
        self._bind_norm(&layer.beside_out, beside.forward_out, hidden)
        self._bind_norm(&layer.experts_out, beside.experts_out, hidden)
        return 0

    cdef const float *_floats(self, given, int64_t num) except? NULL:
        if given is None:
            return NULL
        if type_of(given) != "f32" or given.size != num:
            raise ConfigError(f"{given.size} {given.dtype} are not {num} float32")
        return <const float *>self._own(given)

    cdef int _bind_attention(self, Layer *layer, a) except -1:
        cdef int64_t hidden = self.hidden_size, queries = a.num_heads * a.width
        layer.num_heads, layer.num_kv_heads = a.num_heads, a.num_kv_heads
        layer.width, layer.value_width = a.width, a.value_width
        layer.held, layer.value_held = a.width, a.value_width
        self._bind_rotation(layer, a, a.width)
        layer.clip, layer.window, layer.value_scale = a.clip or 0.0, a.window or 0, a.value_scale
        layer.has_late_norms, layer.is_chunked = a.has_late_norms, a.is_chunked
        self._bind_temperature(layer, a.temperature)
        if layer.num_kv_heads < 1 or layer.num_heads % layer.num_kv_heads or layer.window < 0:
            raise ConfigError(f"{a.num_heads} heads do not share {a.num_kv_heads}")
        layer.is_gated = a.is_gated or a.gates is not None
        if a.is_gated and a.gates is not None:
            raise ConfigError("queries are followed by gates, and there is a matrix of gates")
        if layer.is_gated and layer.value_width != layer.width:
            raise ConfigError(f"gates of {a.width} numbers for values of {a.value_width}")
        self._bind_linear(&layer.query, a.query, hidden, queries * (1 + a.is_gated))
        if a.gate_function == "softplus" and a.gates is not None:
            has_one = a.gates.matrix.rows == layer.num_heads
            layer.numbers_per_gate = layer.width if has_one else 1
        elif a.gate_function == "softplus":
            raise ConfigError("gates that become softplus have a matrix of their own")
        elif a.gate_function != "sigmoid":
            raise ConfigError(f"gates become sigmoid or softplus, not {a.gate_function}")
        self._bind_linear(&layer.gates, a.gates, hidden, queries // max(1, layer.numbers_per_gate))
        self._bind_linear(&layer.key, a.key, hidden, layer.num_kv_heads * layer.width)
        self._bind_linear(&layer.value, a.value, hidden, layer.num_kv_heads * layer.value_width)
        self._bind_linear(&layer.out, a.out, layer.num_heads * layer.value_width, hidden)
        self._bind_norm(&layer.query_norm, a.query_norm, queries)
        self._bind_norm(&layer.key_norm, a.key_norm, layer.num_kv_heads * layer.width)
        self._bind_norm(&layer.value_norm, a.value_norm, layer.num_kv_heads * layer.value_width)
        if a.value is None and layer.value_width != layer.width:
            raise ConfigError(f"keys of {a.width} numbers are no values of {a.value_width}")
        layer.sinks = self._floats(a.sinks, layer.num_heads)
        return 0

    cdef int _bind_linear_attention(self, Layer *layer, a) except -1:
        cdef int64_t hidden = self.hidden_size, values
        layer.is_tiled = a.is_tiled
        self._bind_heads(layer, a)
        values = layer.num_heads * layer.value_width
        self._bind_linear(
            &layer.query, a.mixed, hidden, layer.channels + (values if a.gates is None else 0)
        )
        self._bind_linear(&layer.key, a.decays, hidden, layer.num_heads)
        self._bind_linear(
            &layer.value, a.shares, hidden, layer.num_heads * (1 + (a.decays is None))
        )
        self._bind_linear(&layer.gates, a.gates, hidden, values)
        self._bind_linear(&layer.out, a.out, values, hidden)
        layer.steps = self._floats(a.steps, layer.num_heads)
        return self._bind_head_norm(layer, a)

    cdef int _bind_delta(self, Layer *layer, a) except -1:
        cdef int64_t hidden = self.hidden_size, keys, values
        layer.by_channel, layer.bound = True, a.bound or 0.0
        if a.bound is not None and not -_INFINITE < layer.bound < 0:
            raise ConfigError(f"a bound of decays is {a.bound}, and not below 0 and finite")
        self._bind_heads(layer, a)
        keys, values = layer.num_heads * layer.width, layer.num_heads * layer.value_width
        self._bind_linear(&layer.query, a.query, hidden, keys)
        self._bind_linear(&layer.key, a.key, hidden, keys)
        self._bind_linear(&layer.value, a.value, hidden, values)
        self._bind_chain(&layer.decay_low, &layer.decay, a.decays, keys)
        self._bind_linear(&layer.share, a.shares, hidden, layer.num_heads)
        self._bind_chain(&layer.gate_low, &layer.gates, a.gates, values)
        self._bind_linear(&layer.out, a.out, values, hidden)
        layer.steps = self._floats(a.steps, keys)
        return self._bind_head_norm(layer, a)

    cdef int _bind_chain(
        self, Linear *low, Linear *linear, given, int64_t rows
    ) except -1:
        """Bind a product, or two, the second of what the first makes."""
        cdef int64_t columns = self.hidden_size
        if not 1 <= len(given) <= 2:
            raise ConfigError(f"{len(given)} products are neither one nor two")
        if len(given) == 2:
            self._bind_linear(low, given[0], columns)
            columns = low.matrix.rows
        return self._bind_linear(linear, given[len(given) - 1], columns, rows)

    cdef int _bind_head_norm(self, Layer *layer, a) except -1:
        self._bind_norm(&layer.query_norm, a.norm, layer.value_width)
        if layer.query_norm.width != layer.value_width or layer.query_norm.bias != NULL:
            raise ConfigError(f"a norm of {a.norm.weight.size} is none of {a.value_width}")
        return 0

    cdef int _bind_heads(self, Layer *layer, a) except -1:
        """Bind what heads with states have in common."""
        layer.num_keys, layer.num_heads = a.num_keys, a.num_heads
        layer.width, layer.value_width = a.width, a.value_width
        if (
            layer.num_keys < 1 or layer.num_heads < 1 or layer.num_heads % layer.num_keys
            or not 1 <= layer.width <= MC_MOST_HEAD
            or not 1 <= layer.value_width <= MC_MOST_HEAD
        ):
            raise ConfigError(
                f"{a.num_heads} heads of {a.value_width} do not share {a.num_keys} of {a.width}"
            )
        layer.rates = self._floats(a.rates, layer.num_heads)
        return self._bind_convolution(
            layer, a, 2 * layer.num_keys * layer.width + layer.num_heads * layer.value_width
        )

    cdef int _bind_convolution(self, Layer *layer, a, int64_t channels) except -1:
        if a.conv.ndim != 2 or not 1 <= a.conv.shape[0] <= MC_MOST_KERNEL:
            raise ConfigError(
                f"a convolution with weights {a.conv.shape}; a program's are over 1 to "
                f"{MC_MOST_KERNEL} rows"
            )
        layer.is_linear, layer.kernel, layer.channels = True, a.conv.shape[0], channels
        layer.conv = self._floats(a.conv, layer.kernel * channels)
        return 0

    cdef int _bind_space(self, Layer *layer, a) except -1:
        cdef int64_t hidden = self.hidden_size, values
        layer.is_scan, layer.num_norms = True, a.num_norms
        self._bind_heads(layer, a)
        values = layer.num_heads * layer.value_width
        self._bind_linear(
            &layer.query, a.mixed, hidden, values + layer.channels + layer.num_heads
        )
        self._bind_linear(&layer.out, a.out, values, hidden)
        self._bind_norm(&layer.query_norm, a.norm, values)
        if (
            layer.query_norm.width != values or layer.query_norm.bias != NULL
            or not 1 <= layer.num_norms <= values or values % layer.num_norms
        ):
            raise ConfigError(
                f"a norm of {a.norm.weight.size} is none of {values} in {a.num_norms} parts"
            )
        layer.query_norm.width = values // layer.num_norms
        layer.conv_bias = self._floats(a.conv_bias, layer.channels)
        layer.steps = self._floats(a.steps, layer.num_heads)
        layer.skips = self._floats(a.skips, layer.num_heads)
        return 0

    cdef int _bind_short(self, Layer *layer, a) except -1:
        cdef int64_t hidden = self.hidden_size
        # As one head without a state.
        layer.is_short, layer.num_heads, layer.value_width = True, 1, hidden
        self._bind_convolution(layer, a, hidden)
        self._bind_linear(&layer.query, a.mixed, hidden, 3 * hidden)
        self._bind_linear(&layer.out, a.out, hidden, hidden)
        layer.conv_bias = self._floats(a.conv_bias, hidden)
        return 0

    cdef int _bind_rotation(self, Layer *layer, a, int64_t most) except -1:
        layer.scale, layer.pairs = a.scale, _PAIRS[a.rotation.pairs]
        layer.rotary_width, layer.first_angle = a.rotation.width, a.rotation.first
        if layer.first_angle < 0:
            raise ConfigError(f"no angle is number {layer.first_angle}")
        if layer.rotary_width:
            self.num_angles = max(
                self.num_angles, layer.first_angle + layer.rotary_width // 2
            )
        if not 0 <= layer.rotary_width <= min(most, 512) or layer.rotary_width % 2:
            raise ConfigError(f"{layer.rotary_width} of {most} numbers cannot be turned")
        return 0

    cdef int _bind_temperature(self, Layer *layer, temperature) except -1:
        if temperature is None:
            return 0
        layer.floor, layer.temperature = temperature.floor, temperature.scale
        layer.counts_own = temperature.is_own
        if not layer.floor > 0:
            raise ConfigError(f"queries have no temperature of {temperature}")
        return 0

    cdef int _bind_latents(self, Layer *layer, a) except -1:
        cdef int64_t hidden = self.hidden_size, more = a.shared_width, rank = a.norm.weight.size
        cdef cnp.ndarray expand = a.expand
        layer.is_latent, layer.num_kv_heads, layer.num_heads = True, 1, a.num_heads
        layer.width, layer.value_width = a.width, a.value_width
        layer.held, layer.value_held = rank, more
        self._bind_rotation(layer, a, more)
        if a.num_heads < 1 or rank > MC_MOST_RANK or (
            (<object>expand).shape != (a.num_heads, a.width + a.value_width, rank)
        ):
            raise ConfigError(
                f"{(<object>expand).shape} does not expand latents of {rank}, at most "
                f"{MC_MOST_RANK}, to {a.num_heads} keys of {a.width} and values of {a.value_width}"
            )
        if a.low is not None:
            self._bind_linear(&layer.low, a.low, hidden)
            self._bind_norm(&layer.low_norm, a.low_norm, layer.low.matrix.rows)
        self._bind_linear(
            &layer.query, a.query, layer.low.matrix.rows if layer.low.is_there else hidden,
            a.num_heads * (a.width + more)
        )
        self._bind_linear(&layer.key, a.compressed, hidden, rank + more)
        self._bind_linear(&layer.gates, a.gates, hidden, a.num_heads)
        self._bind_linear(&layer.out, a.out, a.num_heads * a.value_width, hidden)
        self._bind_norm(&layer.key_norm, a.norm, rank)
        self._bind_temperature(layer, a.temperature)
        layer.expand = <const uint8_t *>self._own(expand)
        layer.expand_type = _TYPES[type_of(expand)]
        return 0
