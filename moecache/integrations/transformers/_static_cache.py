"""Caches of keys and values that stay where they are, as graphs need them."""

import copy
from typing import Any

import torch
from transformers import StaticCache
from transformers.cache_utils import StaticLayer
from transformers.masking_utils import create_masks_for_generate

from moecache.errors import ConfigError

# Layers of a cache that write a token to the same place when they are computed again.
_REPEATABLE = ("StaticLayer",)
# Of these a layer that keeps every token does the same, as the mask hides what is outside.
_WINDOWS = ("StaticSlidingWindowLayer",)


def token_cache(model: Any, max_cache_len: int) -> StaticCache:
    """Return an empty cache for a `TokenGraph`: each of its layers keeps every token.

    A `StaticCache` of transformers moves the keys of a sliding window along, and a token that is
    computed again would move them twice. Here windows are a matter of the mask alone. They take
    the memory of full attention.

    Parameters
    ----------
    model : PreTrainedModel
    max_cache_len : int
        Tokens that it holds.

    Raises
    ------
    ConfigError
        If the model keeps states, or chunks of attention.
    """
    config = model.config.get_text_config(decoder=True)
    reason = why_not_static(config)
    if reason:
        raise ConfigError(reason)
    cache = StaticCache(config=config, max_cache_len=max_cache_len)
    cache.layers = [StaticLayer(max_cache_len=max_cache_len) for _ in cache.layers]
    return cache


def why_not_static(config: Any) -> str:
    """Return why a model's keys and values have no cache for graphs; empty if they have."""
    kinds = getattr(config, "layer_types", None) or ()
    if "chunked_attention" in kinds or getattr(config, "attention_chunk_size", None):
        return "attention goes by chunks"
    try:
        found: Any = StaticCache(config=config, max_cache_len=1)
    except (KeyError, TypeError, ValueError) as error:
        return f"transformers has no static cache for it ({type(error).__name__}: {error})"
    others = {type(layer).__name__ for layer in found.layers} - {*_REPEATABLE, *_WINDOWS}
    return f"its cache has states: {', '.join(sorted(others))}" if others else ""


def parts_of(cache: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the numbers of tokens that a cache's layers have, and their keys and values.

    Raises
    ------
    ConfigError
        If the cache has layers of other kinds, or holds nothing.
    """
    layers = getattr(cache, "layers", ())
    kinds = sorted({type(layer).__name__ for layer in layers} - set(_REPEATABLE))
    if kinds or not layers or not all(layer.is_initialized for layer in layers):
        raise ConfigError(
            "a graph needs a StaticCache that holds a prompt, without sliding windows or states; "
            f"this {type(cache).__name__} has {', '.join(kinds) or 'nothing yet'}; token_cache "
            "makes one, also for models with sliding windows"
        )
    lengths: list[torch.Tensor] = []
    contents: list[torch.Tensor] = []
    for layer in layers:
        for name, value in vars(layer).items():
            if isinstance(value, torch.Tensor):
                (contents if name in ("keys", "values") else lengths).append(value)
    return lengths, contents


def masks_of(model: Any, cache: Any, token: torch.Tensor) -> dict[str, Any]:
    """Return the mask of a token as arguments of the model; none where it makes one itself.

    The mask that transformers makes for attention "eager" may have a number of the host in it
    (5.17 of transformers has), which no graph holds. This one has the same numbers.
    """
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != "eager":
        return {}
    shown = copy.copy(config)
    shown._attn_implementation = "sdpa"
    inputs = torch.empty((*token.shape, 0), dtype=model.dtype, device=token.device)
    masks = create_masks_for_generate(
        config=shown, inputs_embeds=inputs, attention_mask=None, past_key_values=cache
    )
    zero = torch.zeros((), dtype=model.dtype, device=token.device)
    least = torch.full((), torch.finfo(model.dtype).min, dtype=model.dtype, device=token.device)

    if isinstance(masks, dict):
        shaped: Any = {name: torch.where(mask, zero, least) for name, mask in masks.items()}
    else:
        shaped = torch.where(masks, zero, least)
    return {"attention_mask": shaped}
