"""Reading a model's recipe from its modules."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from moecache.decoding.embedding import Embed
from moecache.decoding.families import FAMILIES, Family
from moecache.decoding.recipe import Beside, Layer, Linear, Norm, Recipe, Router
from moecache.integrations.transformers.recipes._attending import AttentionReader
from moecache.integrations.transformers.recipes._embedding import embedding_of
from moecache.integrations.transformers.recipes._parts import (
    NoRecipeError,
    UnknownFamilyError,
    Weights,
)
from moecache.integrations.transformers.recipes._rotary import Turns, turns_by_base, turns_of
from moecache.kernels import SlotKernel

__all__ = ["NoRecipeError", "Reading", "UnknownFamilyError", "read_recipe"]

# Settings that say what positions a layer sees, and how it turns.
_SEEN = ("layer_types", "sliding_window", "attention_chunk_size", "layer_rope_theta")
# What an inner model's embedding, last norm and angles are called.
_EMBEDDINGS = ("embed_tokens", "embeddings")
_NORMS, _ROTARY = ("norm", "norm_f", "embedding_norm"), ("rotary_emb", "pos_emb")
# Where layers have attention, or what is there instead, and how the latter's classes are called.
_ATTENDING = sorted(
    {name for row in FAMILIES.values() for name in (row.attention, row.linear) if name}
)
_STATEFUL = ("GatedDeltaNet", "DeltaAttention", "MambaLayer", "Mamba2Mixer", "ShortConv")
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
    rotary : Module, or callable as one
        Makes angles of positions.
    rotary_width : int
        Numbers of a head that these angles turn.
    """

    recipe: Recipe
    weights: Weights
    embed: Embed
    rotary: Callable[..., Any]
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
    embedding, norm, rotary = (_part(inner, names) for names in (_EMBEDDINGS, _NORMS, _ROTARY))
    parts = {"lm_head": getattr(model, "lm_head", None), "embed_tokens": embedding, "norm": norm}
    parts["layers"] = getattr(inner, "layers", None)
    missing = [name for name, part in parts.items() if part is None]
    if missing:
        raise UnknownFamilyError(f"{type(model).__name__} has no {', '.join(missing)}")
    # Its own hooks run, as they do around any forward.
    weights.holds(model)
    for module in (inner, inner.layers, embedding, rotary):
        if module is not None:
            weights.uses(module)
    if len(inner.layers) != inner.config.num_hidden_layers:
        raise UnknownFamilyError("not all of its layers are run")
    found = {
        id(model.get_submodule(path)): (*kernel, num_router_hooks.get(path, 0))
        for path, kernel in kernels.items()
    }
    families = [_family_of(layer, found) for layer in inner.layers]
    if not families or any(family != families[0] for family in families):
        raise UnknownFamilyError("its layers are not of one family")
    family, config = families[0], inner.config
    if family.bases is None:
        turns = turns_of(rotary, weights, may_be_still=family.linear is not None)
    else:
        weights.holds(inner.rotary_embs)
        turns = turns_by_base(inner.rotary_embs, weights)
    reader = _Reader(weights, family, turns, found)
    for name in _SEEN:
        if hasattr(config, name):
            weights.number(config, name)
    for index, layer in enumerate(inner.layers):
        attending = _attending(layer)
        place = attending if hasattr(attending, "layer_idx") else layer
        if weights.number(place, "layer_idx") != index:
            raise NoRecipeError("its layers stand in another order than in its cache")
    layers = tuple(reader.layer(index, layer) for index, layer in enumerate(inner.layers))
    recipe = Recipe(
        config.hidden_size,
        layers,
        weights.norm(norm, adds_one=family.adds_one),
        weights.linear(model, "lm_head"),
        _embedding_scale(inner, family, weights),
        float(weights.number(config, family.logits)) if family.logits else 1.0,
        weights.number(config, family.cap) if family.cap else None,
        # Its modules round all that this rounds.
        product_type="bf16" if model.dtype == torch.bfloat16 else "f32",
    )
    embed = embedding_of(embedding, weights)
    return Reading(recipe, weights, embed, turns.module, turns.width)


def _embedding_scale(inner: Any, family: Family, weights: Weights) -> float:
    if family.scales_by_root and weights.number(inner.config, family.scales_by_root):
        return float(inner.config.hidden_size**0.5)
    return float(weights.number(inner, family.embedding)) if family.embedding else 1.0


def _attending(layer: Any) -> Any:
    """Return a layer's attention, of either kind.

    Raises
    ------
    UnknownFamilyError
        If it has none.
    """
    found = _part(layer, _ATTENDING)
    if found is None:
        raise UnknownFamilyError(f"{type(layer).__name__} has no self_attn")
    return found


def _part(module: Any, names: Iterable[str]) -> Any:
    """Return the part that goes by one of some names, `None` if there is none."""
    return next((part for name in names if (part := getattr(module, name, None)) is not None), None)


def _block(layer: Any, family: Family) -> Any:
    """Return what has a layer's experts: a module of it, or itself."""
    return getattr(layer, family.block, None) if family.block else layer


def _family_of(layer: Any, kernels: Mapping[int, Any]) -> Family:
    attention = _attending(layer)
    place = type(attention).__module__.split(".")
    kind = type(attention).__name__
    for (name, attending, routing), family in FAMILIES.items():
        kinds = {attending}
        if family.linear is not None:
            kinds |= {attending.replace("Attention", one) for one in _STATEFUL}
        if family.is_single:
            kinds |= {routing, attending.replace("Attention", "MLP")}
        if place[:3] != ["transformers", "models", name] or kind not in kinds:
            continue
        block = _block(layer, family)
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
    turns : Turns
    kernels : mapping of int to (int, SlotKernel, int)
        By identity of the experts module: its layer in the runtime, its kernel, hooks of our own.
    """

    def __init__(
        self,
        weights: Weights,
        family: Family,
        turns: Turns,
        kernels: Mapping[int, tuple[int, SlotKernel, int]],
    ) -> None:
        self._weights, self._family, self._kernels = weights, family, kernels
        self._attending = AttentionReader(weights, family, turns)

    def layer(self, index: int, layer: Any) -> Layer:
        """Return the recipe of a decoder layer."""
        weights, family = self._weights, self._family
        attention, block = _attending(layer), _block(layer, family)
        for module in (layer, attention):
            weights.uses(module)
        if family.is_beside:
            return self._beside(index, layer)
        if family.is_single:
            norm = weights.norm(layer.norm)
            if weights.number(layer, "block_type") not in ("moe", "mlp"):
                return Layer(norm, self._attending.read(index, layer), None)
            return self._with_forward(Layer(None, None, norm), layer, block)
        before, behind = self._norms(layer, family.layer_norms)
        scale = float(weights.number(layer, family.residual)) if family.residual else 1.0
        made = Layer(before, self._attending.read(index, layer), behind, scale=scale)
        made = self._with_forward(made, layer, block)
        attention_out, forward_out = self._norms(layer, family.part_norms)
        if family.block_norm is not None and made.router is not None:
            forward_out = weights.norm(getattr(block, family.block_norm))
        made = replace(made, attention_out=attention_out, forward_out=forward_out)
        if forward_out is None or made.router is None or made.forward is None:
            return made
        # Experts are given what the feed-forward beside them is, and their sum has the norm.
        return replace(made, beside=Beside(behind, behind))

    def _norms(self, layer: Any, names: tuple[str, str] | None) -> tuple[Norm | None, Norm | None]:
        """Return two norms of a layer by their attributes, if it has them."""
        if names is None:
            return None, None
        first, second = (
            self._weights.norm(getattr(layer, name), adds_one=self._family.adds_one)
            for name in names
        )
        return first, second

    def _with_forward(self, made: Layer, layer: Any, block: Any) -> Layer:
        """Return a layer with its experts, or the feed-forward that it has instead."""
        weights, family = self._weights, self._family
        kernel = self._kernels.get(id(getattr(block, "experts", None)))
        if kernel is None:
            return replace(made, forward=weights.feed_forward(block))
        number, computing, num_hooks = kernel
        weights.uses(block)
        weights.uses(block.experts)
        latents = None
        if not isinstance(getattr(block, "fc1_latent_proj", None), nn.Identity | None):
            names = ("fc1_latent_proj", "fc2_latent_proj")
            down, up = (weights.linear(block, name) for name in names)
            latents = down, up
        shared, holder = None, layer if family.is_shared_beside else block
        if family.shared is not None and getattr(holder, family.shared) is not None:
            shared = weights.feed_forward(getattr(holder, family.shared))
            if family.shared_weight is not None:
                shared = replace(shared, weight=weights.linear(block, family.shared_weight))
        return replace(
            made,
            forward=shared,
            router=self._router(block, num_hooks),
            experts=computing.experts,
            number=number,
            latents=latents,
        )

    def _beside(self, index: int, layer: Any) -> Layer:
        """Return a layer that has a feed-forward beside its experts, each with norms of its own."""
        weights = self._weights
        if getattr(layer, "hidden_size_per_layer_input", 0):
            raise UnknownFamilyError("its layers have inputs of their own")
        kernel = self._kernels.get(id(getattr(layer, "experts", None)))
        if kernel is None:
            raise UnknownFamilyError("not all of its layers have experts")
        number, computing, num_hooks = kernel
        weights.uses(layer.experts)
        router = layer.router
        weights.uses(router, num_hooks)
        weights.uses(router.norm)
        weights.watched(router, "scale")
        weights.watched(layer, "layer_scalar")
        scale = np.float32(weights.number(router, "scalar_root_size"))
        scaled = Norm(weights.floats(router, "scale") * scale, weights.number(router, "eps"))
        config = router.config
        return Layer(
            weights.norm(layer.input_layernorm),
            self._attending.read(index, layer),
            weights.norm(layer.pre_feedforward_layernorm),
            weights.feed_forward(layer.mlp),
            Router(
                weights.linear(router, "proj"),
                weights.number(config, "top_k_experts"),
                self._family.scores,
                is_normalized=True,
                expert_scales=weights.floats(router, "per_expert_scale"),
            ),
            computing.experts,
            number,
            attention_out=weights.norm(layer.post_attention_layernorm),
            forward_out=weights.norm(layer.post_feedforward_layernorm),
            beside=Beside(
                scaled,
                weights.norm(layer.pre_feedforward_layernorm_2),
                weights.norm(layer.post_feedforward_layernorm_1),
                weights.norm(layer.post_feedforward_layernorm_2),
            ),
            factor=float(weights.floats(layer, "layer_scalar")[0]),
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
        holder = module if scale is None or hasattr(module, scale) else block
        weight = getattr(module, family.router_weight)
        if isinstance(weight, nn.Module):
            linear = weights.linear(weight)
        else:
            linear = Linear(weights.matrix(module, "weight"), weights.bias(module))
        correction: np.ndarray | None = None
        if family.correction is not None:
            where, _, name = family.correction.rpartition(".")
            place = attrgetter(where)(block) if where else block
            if getattr(place, name, None) is not None:
                correction = weights.floats(place, name).reshape(-1)

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
            scale=1.0 if scale is None else weights.number(holder, scale),
            jitter=number("router_jitter_noise") if hasattr(module, "router_jitter_noise") else 0.0,
            scales_input=family.scales_input,
            cap=0.0 if family.router_cap is None else max(0.0, number(family.router_cap)),
        )
