"""Reading a model's recipe from its modules."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from moecache.decoding.recipe import Attention, Layer, Linear, Recipe, Router
from moecache.integrations.transformers.recipes._families import FAMILIES, Family
from moecache.integrations.transformers.recipes._parts import NoRecipeError, Weights
from moecache.kernels import SlotKernel

__all__ = ["NoRecipeError", "Reading", "read_recipe"]


@dataclass(frozen=True)
class Reading:
    """A recipe, and what it was read from.

    Parameters
    ----------
    recipe : Recipe
    weights : Weights
    embedding, rotary : Module
        What makes hidden states of tokens, and angles of positions.
    """

    recipe: Recipe
    weights: Weights
    embedding: nn.Module
    rotary: nn.Module


def read_recipe(
    model: Any,
    kernels: Mapping[str, tuple[int, SlotKernel]],
    num_router_hooks: Mapping[str, int],
) -> Reading:
    """Return the recipe of a model whose experts are in slots.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
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
    if type(model).__name__.removesuffix("ForCausalLM") == type(model).__name__ or inner is None:
        raise NoRecipeError(f"{type(model).__name__} has no recipe")
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    missing = [part for part in parts if not hasattr(inner, part)]
    if missing or not hasattr(model, "lm_head"):
        raise NoRecipeError(f"{type(model).__name__} has no {', '.join(missing) or 'lm_head'}")
    for module in (inner, inner.layers, inner.embed_tokens, inner.rotary_emb):
        weights.uses(module)
    layers = []
    for index, layer in enumerate(inner.layers):
        kinds = getattr(model.config, "layer_types", None)
        has_window = getattr(model.config, "sliding_window", None) if kinds is None else False
        if has_window or (kinds is not None and kinds[index] != "full_attention"):
            raise NoRecipeError("its attention does not see all positions")
        path = f"model.layers.{index}.mlp.experts"
        layers.append(_layer(weights, layer, kernels.get(path), num_router_hooks.get(path, 0)))
    if len(layers) != model.config.num_hidden_layers:
        raise NoRecipeError("not all of its layers are run")
    recipe = Recipe(
        model.config.hidden_size,
        tuple(layers),
        weights.norm(inner.norm),
        weights.linear(model, "lm_head"),
    )
    return Reading(recipe, weights, inner.embed_tokens, inner.rotary_emb)


def _layer(
    weights: Weights, layer: Any, kernel: tuple[int, SlotKernel] | None, num_hooks: int
) -> Layer:
    attention, block = layer.self_attn, layer.mlp
    for module in (layer, attention):
        weights.uses(module)
    family = _family_of(attention, block, has_experts=kernel is not None)
    common = (
        weights.norm(layer.input_layernorm),
        _attention(weights, attention, family),
        weights.norm(layer.post_attention_layernorm),
    )
    if kernel is None:
        return Layer(*common, weights.feed_forward(block))
    number, computing = kernel
    weights.uses(block)
    weights.uses(block.experts)
    shared = None
    if family.shared is not None:
        shared = weights.feed_forward(getattr(block, family.shared))
    if shared is not None and family.shared_weight is not None:
        weight = weights.linear(block, family.shared_weight)
        shared = type(shared)(shared.gate, shared.up, shared.down, shared.activation, weight)
    router = _router(weights, block.gate, family, num_hooks)
    return Layer(*common, shared, router, computing.experts, number)


def _family_of(attention: Any, block: Any, *, has_experts: bool) -> Family:
    place = type(attention).__module__.split(".")
    kind = type(attention).__name__
    for (name, attending, routing), family in FAMILIES.items():
        if place[:3] != ["transformers", "models", name] or kind != attending:
            continue
        if not has_experts or type(block).__name__ == routing:
            return family
    raise NoRecipeError(f"{kind} with {type(block).__name__} has no recipe")


def _attention(weights: Weights, module: Any, family: Family) -> Attention:
    config = module.config
    norms = [
        weights.norm(getattr(module, name))
        if isinstance(getattr(module, name, None), nn.Module)
        else None
        for name in ("q_norm", "k_norm")
    ]
    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    width = module.head_dim
    value = weights.linear(module, "v_proj")
    num_kv_heads = config.num_key_value_heads
    return Attention(
        weights.linear(module, "q_proj"),
        weights.linear(module, "k_proj"),
        value,
        weights.linear(module, "o_proj"),
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        width=width,
        value_width=value.matrix.rows // num_kv_heads,
        scale=module.scaling,
        rotary_width=int(width * partial),
        query_norm=norms[0],
        key_norm=norms[1],
        clip=None if family.clip is None else getattr(config, family.clip),
    )


def _router(weights: Weights, module: Any, family: Family, num_hooks: int) -> Router:
    weights.uses(module, num_hooks)
    has_sum = family.is_normalized
    correction: np.ndarray | None = None
    if family.has_groups:
        correction = np.asarray(weights.values(module, "e_score_correction_bias"), np.float32)
    return Router(
        Linear(weights.matrix(module, "weight")),
        module.top_k,
        family.scores,
        correction,
        module.num_group if family.has_groups else 1,
        module.topk_group if family.has_groups else 1,
        is_normalized=getattr(module, has_sum) if isinstance(has_sum, str) else has_sum,
        least=family.least,
        scale=module.routed_scaling_factor if family.has_groups else 1.0,
    )
