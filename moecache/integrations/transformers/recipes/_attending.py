"""Reading the attention of a model's layers, of each kind."""

import math
from typing import Any

import numpy as np
from torch import nn

from moecache.decoding.families import Family
from moecache.decoding.recipe import (
    Attending,
    Attention,
    DeltaAttention,
    LatentAttention,
    Linear,
    LinearAttention,
    Norm,
    Rotation,
    ShortConvolution,
    StateSpace,
    Temperature,
)
from moecache.integrations.transformers.recipes._parts import (
    NoRecipeError,
    UnknownFamilyError,
    Weights,
)
from moecache.integrations.transformers.recipes._rotary import Turns

_CHUNKED = "chunked_attention"


class AttentionReader:
    """Reads the attention of layers of one family.

    Parameters
    ----------
    weights : Weights
    family : Family
    turns : Turns
    """

    def __init__(self, weights: Weights, family: Family, turns: Turns) -> None:
        self._weights, self._family, self._turns = weights, family, turns

    def read(self, index: int, layer: Any) -> Attending:
        """Return the recipe of a layer's attention, or of what it has instead."""
        family = self._family
        stateful = getattr(layer, family.linear, None) if family.linear else None
        kind = type(stateful).__name__
        if kind.endswith("GatedDeltaNet"):
            return self._linear(stateful)
        if kind.endswith("DeltaAttention"):
            return self._delta(stateful)
        if kind.endswith(("MambaLayer", "Mamba2Mixer")):
            return self._space(stateful)
        if kind.endswith("ShortConv"):
            return self._short(stateful)
        module = getattr(layer, family.attention)
        return self._latents(index, module) if family.is_latent else self._attention(index, module)

    def _attention(self, index: int, module: Any) -> Attention:
        weights, family, config = self._weights, self._family, module.config
        norms = [
            weights.norm(getattr(module, name), module.head_dim, adds_one=family.adds_one)
            if isinstance(getattr(module, name, None), nn.Module)
            else None
            for name in family.norms
        ]
        if getattr(module, "is_kv_shared_layer", False):
            raise UnknownFamilyError("layers share their keys")
        # Without a matrix values are the keys' own products.
        query, key = (weights.linear(module, name) for name in ("q_proj", "k_proj"))
        value = None if module.v_proj is None else weights.linear(module, "v_proj")
        width = module.head_dim
        num_kv_heads = key.matrix.rows // width
        turned, first = self._turned(module, index)
        sinks, scale = family.sinks, family.value_scale
        if sinks is not None and getattr(module, sinks) is None:
            sinks = weights.number(module, sinks)
        return Attention(
            query,
            key,
            value,
            weights.linear(module, family.out),
            # Layers may have other numbers of heads.
            num_heads=query.matrix.rows // width // (1 + family.is_gated),
            num_kv_heads=num_kv_heads,
            width=width,
            value_width=width if value is None else value.matrix.rows // num_kv_heads,
            scale=weights.number(module, "scaling"),
            rotation=Rotation(turned, family.pairs, first),
            query_norm=norms[0],
            key_norm=norms[1],
            value_norm=self._plain_norm(module.v_norm, width) if family.is_beside else None,
            has_late_norms=family.has_late_norms,
            clip=None if family.clip is None else weights.number(config, family.clip),
            sinks=None if sinks is None else weights.floats(module, sinks),
            window=_window(config, index),
            is_chunked=_kind(config, index) == _CHUNKED,
            temperature=self._temperature(module),
            is_gated=family.is_gated,
            gates=None if family.gates is None else weights.linear(module, family.gates),
            gate_function=family.gate_function,
            value_scale=1.0 if scale is None else float(weights.number(module, scale)),
        )

    def _linear(self, module: Any) -> LinearAttention:
        weights = self._weights
        conv, bias = self._convolution(module.conv1d)
        if bias is not None or module.activation != "silu":
            raise UnknownFamilyError("its convolution has a bias, or another activation")
        for name in ("A_log", "dt_bias"):
            weights.watched(module, name)
        is_grouped = hasattr(module, "in_proj_qkvz")
        names = ("in_proj_qkvz", "in_proj_ba") if is_grouped else ("in_proj_qkv", "in_proj_b")
        mixed, shares = (weights.linear(module, name) for name in names)
        gates, decays = (
            None if is_grouped else weights.linear(module, name)
            for name in ("in_proj_z", "in_proj_a")
        )
        return LinearAttention(
            mixed,
            gates,
            decays,
            shares,
            conv,
            -np.exp(weights.floats(module, "A_log")),
            weights.floats(module, "dt_bias"),
            weights.norm(module.norm),
            weights.linear(module, "out_proj"),
            num_keys=module.num_k_heads,
            num_heads=module.num_v_heads,
            width=module.head_k_dim,
            value_width=module.head_v_dim,
        )

    def _delta(self, module: Any) -> DeltaAttention:
        weights, forget = self._weights, module.forget_gate
        conv, bias = self._convolution(module.conv1d)
        if bias is not None or weights.number(module, "activation") != "silu":
            raise UnknownFamilyError("its convolution has a bias, or another activation")
        if weights.number(module.o_norm, "activation") != "sigmoid":
            raise UnknownFamilyError("its gates have another activation")
        weights.uses(forget)
        for name in ("A_log", "dt_bias"):
            weights.watched(forget, name)
        query, key, value, shares, out = (
            weights.linear(module, f"{name}_proj") for name in "qkvbo"
        )
        return DeltaAttention(
            query,
            key,
            value,
            self._chain(forget, "f"),
            shares,
            self._chain(module, "g"),
            conv,
            -np.exp(weights.floats(forget, "A_log").reshape(-1)),
            weights.floats(forget, "dt_bias"),
            weights.norm(module.o_norm),
            out,
            num_heads=module.num_heads,
            width=module.head_dim,
            value_width=module.head_dim,
            bound=self._bound(forget),
        )

    def _chain(self, module: Any, name: str) -> tuple[Linear, ...]:
        """Return a product, or two, the second of what the first makes."""
        names = (
            [f"{name}_proj"]
            if hasattr(module, f"{name}_proj")
            else [f"{name}_{part}_proj" for part in "ab"]
        )
        return tuple(self._weights.linear(module, name) for name in names)

    def _bound(self, forget: Any) -> float | None:
        """Return the least logarithm of a decay, if there is one."""
        if not (hasattr(forget, "safe_gate") and self._weights.number(forget, "safe_gate")):
            return None
        bound = float(np.float32(self._weights.number(forget, "lower_bound")))
        if not -math.inf < bound < 0:
            raise UnknownFamilyError(f"its decays have a bound of {bound}")
        return bound

    def _convolution(self, module: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """Return a convolution's weights, the oldest row's first, and its biases."""
        weights = self._weights
        weights.uses(module)
        weights.watched(module, "weight")
        conv = np.ascontiguousarray(weights.floats(module, "weight")[:, 0].T)
        bias = weights.bias(module)
        return conv, None if bias is None else weights.floats(module, "bias")

    def _space(self, module: Any) -> StateSpace:
        weights = self._weights
        conv, bias = self._convolution(module.conv1d)
        if module.activation not in ("silu", "swish"):
            raise UnknownFamilyError("its convolution has another activation")
        least, most = weights.number(module, "time_step_limit")
        # Nemotron's least step, in transformers' prompts alone, is no part of its tokens.
        usual = getattr(getattr(module, "config", None), "time_step_min", 0.0)
        if most != math.inf or least not in (0.0, usual):
            raise UnknownFamilyError(f"its steps in time are of {least} to {most}")
        weights.watched(module, "A_log")
        inner = module.intermediate_size
        return StateSpace(
            weights.linear(module, "in_proj"),
            conv,
            bias,
            -np.exp(weights.floats(module, "A_log")),
            weights.floats(module, "dt_bias"),
            weights.floats(module, "D"),
            weights.norm(module.norm),
            weights.linear(module, "out_proj"),
            num_keys=module.n_groups,
            num_heads=module.num_heads,
            width=module.ssm_state_size,
            value_width=module.head_dim,
            num_norms=inner // weights.number(module.norm, "group_size"),
        )

    def _short(self, module: Any) -> ShortConvolution:
        weights = self._weights
        conv, bias = self._convolution(module.conv)
        mixed, out = (weights.linear(module, name) for name in ("in_proj", "out_proj"))
        return ShortConvolution(mixed, conv, bias, out)

    def _temperature(self, module: Any) -> Temperature | None:
        """Return that of a layer without rotation, if its family has one."""
        is_set = hasattr(module, "attn_temperature_tuning")
        if not (is_set and self._weights.number(module, "attn_temperature_tuning")):
            return None
        if module.use_rope:
            return None
        floor, scale = (self._weights.number(module, f"{name}_scale") for name in ("floor", "attn"))
        return Temperature(float(floor), float(scale))

    def _own_temperature(self, module: Any) -> Temperature | None:
        """Return that of latent attention, which the rotation's parameters say."""
        if not self._family.is_scaled:
            return None
        said = module.config.rope_parameters
        beta = said.get("llama_4_scaling_beta")
        if beta is None:
            return None
        length = said["original_max_position_embeddings"]
        return Temperature(float(length), float(beta), is_own=True)

    def _plain_norm(self, module: Any, width: int) -> Norm:
        """Return a norm that has no weights."""
        self._weights.uses(module)
        return Norm(np.ones(width, np.float32), self._weights.number(module, "eps"))

    def _turned(self, module: Any, index: int) -> tuple[int, int]:
        """Return how many numbers of a layer's heads are turned, and by which angles."""
        config = module.config
        if hasattr(module, "use_rope") and not self._weights.number(module, "use_rope"):
            return 0, 0
        if self._family.bases is not None:
            base = getattr(config, self._family.bases)[index]
            return self._turns.of(str(float(base))) if base else (0, 0)
        is_whole = self._family.turns_windows and _window(config, index) is None
        if is_whole and config.sliding_window is not None:
            return 0, 0
        return self._turns.of(_kind(config, index))

    def _latents(self, index: int, module: Any) -> LatentAttention:
        weights, family, config = self._weights, self._family, module.config
        if _window(config, index) is not None:
            raise UnknownFamilyError("its latent attention has a window")
        has_low = getattr(module, "q_lora_rank", None) is not None
        weights.uses(module.kv_b_proj)
        if not weights.is_plain(module.kv_b_proj):
            raise NoRecipeError('its kv_b_proj stays quantized: trunk="bf16" has a recipe')
        expand = weights.values(module.kv_b_proj, "weight")
        heads, pairs = config.num_attention_heads, family.pairs
        is_still = self._turns.width == 0
        if family.may_turn_halves and not config.rope_interleave:
            pairs = "halves"
        return LatentAttention(
            weights.linear(module, "q_b_proj" if has_low else "q_proj"),
            weights.linear(module, "kv_a_proj_with_mqa"),
            weights.norm(module.kv_a_layernorm),
            expand.reshape(heads, -1, expand.shape[1]),
            weights.linear(module, "o_proj"),
            num_heads=heads,
            width=module.qk_nope_head_dim,
            value_width=module.v_head_dim,
            scale=weights.number(module, "scaling"),
            rotation=Rotation(0 if is_still else module.qk_rope_head_dim, pairs),
            still_width=module.qk_rope_head_dim if is_still else 0,
            gates=None if family.gates is None else weights.linear(module, family.gates),
            low=weights.linear(module, "q_a_proj") if has_low else None,
            low_norm=weights.norm(module.q_a_layernorm) if has_low else None,
            temperature=self._own_temperature(module),
        )


def _window(config: Any, index: int) -> int | None:
    """Return how many positions a layer's tokens see; `None` if it is all of them."""
    kind = _kind(config, index)
    window = getattr(config, "attention_chunk_size" if kind == _CHUNKED else "sliding_window", None)
    if kind in (None, "sliding_attention", _CHUNKED):
        if window is None and kind is None:
            return None
        if not isinstance(window, int) or window < 2:
            raise UnknownFamilyError(f"a layer has a window of {window}")
        return window
    if kind != "full_attention":
        raise UnknownFamilyError(f"a layer has {kind}")
    return None


def _kind(config: Any, index: int) -> str | None:
    kinds = getattr(config, "layer_types", None)
    return None if kinds is None else str(kinds[index])
