"""Reading a model's recipe from its modules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
from torch import nn

from moecache.decoding.embedding import Embed
from moecache.decoding.families import FAMILIES, Family
from moecache.decoding.recipe import (
    Attention,
    LatentAttention,
    Layer,
    Linear,
    LinearAttention,
    Recipe,
    Rotation,
    Router,
)
from moecache.integrations.transformers._places import STATIC_ROTARY
from moecache.integrations.transformers.recipes._embedding import embedding_of
from moecache.integrations.transformers.recipes._parts import (
    NoRecipeError,
    UnknownFamilyError,
    Weights,
)
from moecache.kernels import SlotKernel

__all__ = ["NoRecipeError", "Reading", "UnknownFamilyError", "read_recipe"]

_CHUNKED = "chunked_attention"
# Settings that say what positions a layer sees.
_SEEN = ("layer_types", "sliding_window", "attention_chunk_size")
# Of every layer.
_PARTS = ("input_layernorm", "post_attention_layernorm")
# Where layers have linear attention, and how its classes are called beside those of attention.
_LINEARS = sorted({family.linear for family in FAMILIES.values() if family.linear})
_LINEAR = ("Attention", "GatedDeltaNet")
_MODELS = ("ForCausalLM", "ForConditionalGeneration")


@dataclass(frozen=True)
class Reading:
    """A recipe, and what it was read from.

    Parameters
    ----------
    recipe : Recipe
    weights : Weights
    embed : callable
        Writes hidden states of tokens.
    rotary : Module
        Makes angles of positions.
    rotary_width : int
        Numbers of a head that these angles turn.
    """

    recipe: Recipe
    weights: Weights
    embed: Embed
    rotary: nn.Module
    rotary_width: int


def read_recipe(
    model: Any,
    kernels: Mapping[str, tuple[int, SlotKernel]],
    num_router_hooks: Mapping[str, int],
) -> Reading:
    """Return the recipe of a model whose experts are in slots.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model, or the text part of one that reads images.
    kernels : mapping of str to (int, SlotKernel)
        By path of the experts module: its layer in the runtime, and what computes it.
    num_router_hooks : mapping of str to int
        Hooks of our own, by path of the experts module, on the router beside it.

    Raises
    ------
    NoRecipeError
        If it has none, with the reason.
    """
    weights = Weights()
    inner: Any = getattr(model, "model", None)
    if not type(model).__name__.endswith(_MODELS) or inner is None:
        raise UnknownFamilyError(f"{type(model).__name__} has no recipe")
    if hasattr(inner, "language_model"):
        weights.uses(inner)
        inner = inner.language_model
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    missing = [part for part in parts if getattr(inner, part, None) is None]
    if missing or not hasattr(model, "lm_head"):
        raise UnknownFamilyError(f"{type(model).__name__} has no {', '.join(missing) or 'lm_head'}")
    # Its own hooks run, as they do around any forward.
    weights.holds(model)
    for module in (inner, inner.layers, inner.embed_tokens, inner.rotary_emb):
        weights.uses(module)
    frequencies = getattr(inner.rotary_emb, "inv_freq", None)
    if frequencies is None or len(inner.layers) != inner.config.num_hidden_layers:
        raise UnknownFamilyError(
            "its positions are no rotary ones, or not all of its layers are run"
        )
    if getattr(inner.rotary_emb, "rope_type", None) in STATIC_ROTARY:
        # Others change theirs as texts grow, and are asked for every token.
        weights.watched(inner.rotary_emb, "inv_freq")
        weights.number(inner.rotary_emb, "attention_scaling")
    found = {
        id(model.get_submodule(path)): (*kernel, num_router_hooks.get(path, 0))
        for path, kernel in kernels.items()
    }
    for layer in inner.layers:
        missing = [name for name in _PARTS if not hasattr(layer, name)]
        if missing:
            raise UnknownFamilyError(f"{type(layer).__name__} has no {', '.join(missing)}")
    families = [_family_of(layer, found) for layer in inner.layers]
    if not families or any(family != families[0] for family in families):
        raise UnknownFamilyError("its layers are not of one family")
    reader = _Reader(weights, families[0], 2 * frequencies.numel(), found)
    family, config = families[0], inner.config
    for name in _SEEN:
        if hasattr(config, name):
            weights.number(config, name)
    for index, layer in enumerate(inner.layers):
        if weights.number(_attending(layer), "layer_idx") != index:
            raise NoRecipeError("its layers stand in another order than in its cache")
    layers = tuple(reader.layer(index, layer) for index, layer in enumerate(inner.layers))
    recipe = Recipe(
        config.hidden_size,
        layers,
        weights.norm(inner.norm, adds_one=family.adds_one),
        weights.linear(model, "lm_head"),
        float(weights.number(inner, family.embedding)) if family.embedding else 1.0,
        float(weights.number(config, family.logits)) if family.logits else 1.0,
    )
    embed = embedding_of(inner.embed_tokens, weights)
    return Reading(recipe, weights, embed, inner.rotary_emb, reader.rotary_width)


def _attending(layer: Any) -> Any:
    """Return a layer's attention, of either kind.

    Raises
    ------
    UnknownFamilyError
        If it has none.
    """
    found = next((name for name in ("self_attn", *_LINEARS) if hasattr(layer, name)), None)
    if found is not None:
        return getattr(layer, found)
    raise UnknownFamilyError(f"{type(layer).__name__} has no self_attn")


def _family_of(layer: Any, kernels: Mapping[int, Any]) -> Family:
    attention = _attending(layer)
    place = type(attention).__module__.split(".")
    kind = type(attention).__name__
    for (name, attending, routing), family in FAMILIES.items():
        is_linear = family.linear is not None and kind == attending.replace(*_LINEAR)
        if place[:3] != ["transformers", "models", name] or not (is_linear or kind == attending):
            continue
        block = getattr(layer, family.block, None)
        has_experts = id(getattr(block, "experts", None)) in kernels
        if block is not None and (not has_experts or type(block).__name__ == routing):
            return family
    blocks = " and ".join(
        type(module).__name__
        for module in layer.children()
        if id(getattr(module, "experts", None)) in kernels
    )
    raise UnknownFamilyError(
        f"{kind} beside {blocks or 'no experts'} in {type(layer).__name__} has no recipe"
    )


class _Reader:
    """Reads layers of one family.

    Parameters
    ----------
    weights : Weights
    family : Family
    rotary_width : int
    kernels : mapping of int to (int, SlotKernel, int)
        By identity of the experts module: its layer in the runtime, its kernel, hooks of our own.
    """

    def __init__(
        self,
        weights: Weights,
        family: Family,
        rotary_width: int,
        kernels: Mapping[int, tuple[int, SlotKernel, int]],
    ) -> None:
        self._weights, self._family, self._kernels = weights, family, kernels
        self.rotary_width = rotary_width

    def layer(self, index: int, layer: Any) -> Layer:
        """Return the recipe of a decoder layer."""
        weights, family = self._weights, self._family
        attention, block = _attending(layer), getattr(layer, family.block)
        for module in (layer, attention):
            weights.uses(module)
        read: Callable[[int, Any], Attention | LatentAttention | LinearAttention]
        read = self._latents if family.is_latent else self._attention
        if family.linear is not None and hasattr(layer, family.linear):
            read = self._linear
        made = Layer(
            weights.norm(layer.input_layernorm, adds_one=family.adds_one),
            read(index, attention),
            weights.norm(layer.post_attention_layernorm, adds_one=family.adds_one),
            scale=float(weights.number(layer, family.residual)) if family.residual else 1.0,
        )
        kernel = self._kernels.get(id(getattr(block, "experts", None)))
        if kernel is None:
            return replace(made, forward=weights.feed_forward(block))
        number, computing, num_hooks = kernel
        weights.uses(block)
        weights.uses(block.experts)
        shared = None
        if family.shared is not None and getattr(block, family.shared) is not None:
            shared = weights.feed_forward(getattr(block, family.shared))
            if family.shared_weight is not None:
                shared = replace(shared, weight=weights.linear(block, family.shared_weight))
        return replace(
            made,
            forward=shared,
            router=self._router(block, num_hooks),
            experts=computing.experts,
            number=number,
        )

    def _attention(self, index: int, module: Any) -> Attention:
        weights, family, config = self._weights, self._family, module.config
        norms = [
            weights.norm(getattr(module, name), module.head_dim, adds_one=family.adds_one)
            if isinstance(getattr(module, name, None), nn.Module)
            else None
            for name in family.norms
        ]
        query, key, value = (weights.linear(module, f"{name}_proj") for name in "qkv")
        num_kv_heads, width = config.num_key_value_heads, module.head_dim
        return Attention(
            query,
            key,
            value,
            weights.linear(module, "o_proj"),
            num_heads=config.num_attention_heads,
            num_kv_heads=num_kv_heads,
            width=width,
            value_width=value.matrix.rows // num_kv_heads,
            scale=weights.number(module, "scaling"),
            rotation=Rotation(self._turned(module, index), family.pairs),
            query_norm=norms[0],
            key_norm=norms[1],
            has_late_norms=family.has_late_norms,
            clip=None if family.clip is None else weights.number(config, family.clip),
            sinks=None if family.sinks is None else weights.floats(module, family.sinks),
            window=_window(config, index),
            is_chunked=_kind(config, index) == _CHUNKED,
            temperature=self._temperature(module),
            is_gated=family.is_gated,
        )

    def _linear(self, _: int, module: Any) -> LinearAttention:
        weights = self._weights
        weights.uses(module.conv1d)
        if module.conv1d.bias is not None or module.activation != "silu":
            raise UnknownFamilyError("its convolution has a bias, or another activation")
        weights.watched(module.conv1d, "weight")
        conv = weights.floats(module.conv1d, "weight")[:, 0].T
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
            np.ascontiguousarray(conv),
            -module.A_log.detach().float().exp().numpy(),
            weights.floats(module, "dt_bias"),
            weights.norm(module.norm),
            weights.linear(module, "out_proj"),
            num_keys=module.num_k_heads,
            num_heads=module.num_v_heads,
            width=module.head_k_dim,
            value_width=module.head_v_dim,
        )

    def _temperature(self, module: Any) -> tuple[float, float] | None:
        """Return (floor, scale) of a layer without rotation, if its family has them."""
        is_set = hasattr(module, "attn_temperature_tuning")
        if not (is_set and self._weights.number(module, "attn_temperature_tuning")):
            return None
        if module.use_rope:
            return None
        floor, scale = (self._weights.number(module, f"{name}_scale") for name in ("floor", "attn"))
        return float(floor), float(scale)

    def _turned(self, module: Any, index: int) -> int:
        """Return how many numbers of a layer's heads are turned."""
        config = module.config
        if hasattr(module, "use_rope") and not self._weights.number(module, "use_rope"):
            return 0
        is_whole = self._family.turns_windows and _window(config, index) is None
        return 0 if is_whole and config.sliding_window is not None else self.rotary_width

    def _latents(self, index: int, module: Any) -> LatentAttention:
        weights, config = self._weights, module.config
        if _window(config, index) is not None:
            raise UnknownFamilyError("its latent attention has a window")
        has_low = module.q_lora_rank is not None
        weights.uses(module.kv_b_proj)
        if not weights.is_plain(module.kv_b_proj):
            raise NoRecipeError('its kv_b_proj stays quantized: trunk="bf16" has a recipe')
        expand = weights.values(module.kv_b_proj, "weight")
        heads, pairs = config.num_attention_heads, self._family.pairs
        if hasattr(config, "rope_interleave"):
            pairs = "neighbours to halves" if config.rope_interleave else "halves"
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
            rotation=Rotation(module.qk_rope_head_dim, pairs),
            low=weights.linear(module, "q_a_proj") if has_low else None,
            low_norm=weights.norm(module.q_a_layernorm) if has_low else None,
        )

    def _router(self, block: Any, num_hooks: int) -> Router:
        weights, family = self._weights, self._family
        module = getattr(block, family.router)
        weights.uses(module, num_hooks)
        has_sum, has_groups = family.is_normalized, family.has_groups
        if getattr(module, "topk_method", "") == "greedy":
            has_groups = False
        elif getattr(module, "topk_method", "group_limited_greedy") != "group_limited_greedy":
            raise UnknownFamilyError(f"its router chooses by {module.topk_method}")
        scale = "routed_scaling_factor" if family.has_groups else family.scale
        weight = getattr(module, family.router_weight)
        if isinstance(weight, nn.Module):
            linear = weights.linear(weight)
        else:
            linear = Linear(weights.matrix(module, "weight"), weights.bias(module))
        correction: np.ndarray | None = None
        if family.correction is not None:
            where, _, name = family.correction.rpartition(".")
            holder = attrgetter(where)(block) if where else block
            correction = weights.floats(holder, name).reshape(-1)

        def number(name: str) -> Any:
            return weights.number(module, name)

        return Router(
            linear,
            number("top_k"),
            family.scores,
            correction,
            number("num_group") if has_groups else 1,
            number("topk_group") if has_groups else 1,
            family.num_best,
            is_normalized=number(has_sum) if isinstance(has_sum, str) else has_sum,
            least=family.least,
            floor=0.0 if family.floor is None else number(family.floor),
            scale=1.0 if scale is None else number(scale),
            jitter=number("router_jitter_noise") if hasattr(module, "router_jitter_noise") else 0.0,
            scales_input=family.scales_input,
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
