"""Prompts in pages of 256 positions: the same cut, and so the same bits, whatever is cached."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from moecache.decoding.prefixes import Page
from moecache.integrations.transformers import _spans
from moecache.integrations.transformers._cache_layers import GrowingLayer, SlidingLayer, adopt
from moecache.integrations.transformers._forward import SpanExperts
from moecache.sizing.host_memory import free_host_bytes
from moecache.slots import HostSlots

# Positions of Qwen3-Omni depend on what it was asked before; the other one sees what comes after.
_NOT_CAUSAL = ("qwen3_omni_moe_thinker", "openai_privacy_filter")
# Positions of a page. A prompt is cut where their multiples are.
PAGE_TOKENS = 256
# Pages that go through a layer together, at most: their experts are read once.
SPAN_PAGES = 8
# Memory of the rows of a span, one for each token and each of its experts, in float32: no more than
# this, and than a part of what is free. What is computed of them, and the pages' keys and values,
# take some three times as much.
_SPAN_BYTES = 256 * 2**20
_FREE_PART = 6
# Pages for which a plan leaves room. More read fewer bytes, which a prompt so long hides behind
# products.
_PLANNED_PAGES = 4
# So few tokens of a page behind others are decoded, where a program computes them.
FEW_TOKENS = 16
# A page is kept, and found, up to a multiple of these positions, where rows are apart.
PART_TOKENS = 16
_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer, GrowingLayer, SlidingLayer)


def new_cache(model: Any) -> DynamicCache:
    """Return an empty cache for a model, as `generate` makes one."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def has_pages(model: Any) -> bool:
    """Return whether a model's prompts are read in pages.

    Layers that keep a state of their own (linear attention, indexers) get a prompt as a whole, as
    transformers' modules take it; so do models whose positions are not those of tokens.
    """
    return model.config.model_type not in _NOT_CAUSAL and is_paged(new_cache(model))


def are_rows_apart(model: Any) -> bool:
    """Return whether the rows of a model's prompts have the same bits wherever these are cut."""
    decoder = getattr(getattr(model, "moecache", None), "decoder", None)
    return decoder is not None and bool(decoder.are_rows_apart())


def is_paged(cache: Any) -> bool:
    """Return whether all layers of a cache are those of plain attention."""
    return (
        isinstance(cache, Cache)
        and not isinstance(cache, PageCache)
        and not getattr(cache, "offloading", False)
        and all(type(layer) in _PLAIN for layer in cache.layers)
    )


def planned_bytes(model: Any, top_k: int) -> int:
    """Return the memory that a plan leaves for prompts, beside their keys and values."""
    return 2 * _PLANNED_PAGES * _page_bytes(model, top_k)


def _page_bytes(model: Any, top_k: int) -> int:
    """Return the bytes of the rows of a page's experts; 0 if the model does not say its width."""
    width: int = getattr(model.config.get_text_config(decoder=True), "hidden_size", 0)
    return PAGE_TOKENS * max(1, top_k) * width * 4


def free_bytes(model: Any) -> int:
    """Return the memory that is free beside a model's slots.

    Those that were never filled are taken, though the system does not know it yet.
    """
    runtime = model.moecache.runtime
    pool, cache = runtime.pool, runtime.cache
    if not isinstance(pool, HostSlots):
        return free_host_bytes()
    unfilled = pool.nbytes * max(0, cache.capacity - cache.num_resident) // pool.num_slots
    return max(0, free_host_bytes() - unfilled)


def span_pages(model: Any) -> int:
    """Return how many pages of a model go through a layer together, for what their rows take.

    Memory that is free now counts; a page's bits depend on it as little as on what is cached.
    """
    offload = getattr(model, "moecache", None)
    page = 0 if offload is None else _page_bytes(model, offload.runtime.layout.top_k)
    if not page:
        return SPAN_PAGES
    most = min(_SPAN_BYTES, free_bytes(model) // _FREE_PART)
    return max(1, min(SPAN_PAGES, most // page))


def cuts(start: int, stop: int) -> list[tuple[int, int]]:
    """Return where pages begin and end, from `start` to `stop`."""
    found = []
    while start < stop:
        end = min(stop, page_begin(start) + PAGE_TOKENS)
        found.append((start, end))
        start = end
    return found


def page_begin(position: int) -> int:
    """Return the first position of a position's page."""
    return position // PAGE_TOKENS * PAGE_TOKENS


def read_prompt(
    forward: Callable[..., Any],
    ids: torch.Tensor,
    cache: Any,
    *,
    num_logits: int = 1,
    num_pages: Callable[[], int] = lambda: SPAN_PAGES,
) -> torch.Tensor:
    """Put tokens into a cache behind those that it holds; return the logits of the last ones.

    Parameters
    ----------
    forward : callable
        A model's forward; takes input_ids, past_key_values, use_cache and logits_to_keep.
    ids : Tensor of int64, shape [1, num_tokens]
    cache : Cache
        One that `is_paged`. What a call that fails leaves in it is of no use.
    num_logits : int, default 1
        Tokens whose logits are wanted; 0: all of them.
    num_pages : callable ()
        Returns how many pages to read together, at most; asked before each span.

    Returns
    -------
    Tensor, shape [1, num_logits, vocabulary]
    """
    start = int(cache.get_seq_length())
    stop, logits = start + ids.shape[1], []
    while start < stop:
        now, found = read_pages(
            forward, ids[:, start - stop :], cache, num_pages(), num_logits=num_logits
        )
        logits += found
        start = now
    if len(logits) == 1:
        return logits[0]
    # A program's are float32, modules' have the model's dtype.
    return torch.cat([part.float() for part in logits], 1)


def read_pages(
    forward: Callable[..., Any],
    ids: torch.Tensor,
    cache: Any,
    num_pages: int,
    *,
    num_logits: int = 1,
    kept: list[Page] | None = None,
    on_layer: Callable[[], object] = lambda: None,
) -> tuple[int, list[torch.Tensor]]:
    """Put the first pages of tokens into a cache, together; see `read_prompt`.

    Parameters
    ----------
    forward, ids, cache, num_logits
        As those of `read_prompt`.
    num_pages : int
        Pages to read, at most; they go through the model together.
    kept : list of Page, optional
        Gets the pages that were read: the last one as far as it goes, unless it was decoded.
    on_layer : callable (), optional
        Called when a layer of several pages is computed.

    Returns
    -------
    (int, list of Tensor)
        The positions that are in the cache now, and of each page the logits that are wanted.
    """
    start = int(cache.get_seq_length())
    stop = start + ids.shape[1]
    pages = cuts(start, stop)
    # A few tokens of a page behind others go alone: they are decoded, whatever was cached.
    last = page_begin(pages[-1][0])
    few = pages[-1][1] - last <= FEW_TOKENS and last > 0
    span = pages[: max(1, min(num_pages, len(pages) - few))]
    first = stop - num_logits if num_logits else start

    def page(begin: int, end: int, into: Any) -> torch.Tensor:
        logits: torch.Tensor = forward(
            input_ids=ids[:, begin - start : end - start],
            past_key_values=into,
            use_cache=True,
            # One at least: none would be all of them.
            logits_to_keep=end - max(begin, first) if end > first else 1,
        ).logits
        return logits

    for layer in cache.layers:
        adopt(layer)
    if len(span) == 1 and (kept is None or len(pages) == few):
        read = [page(*span[0], cache)]
        views = []
    else:
        views = [PageCache(cache, *one, is_kept=kept is not None) for one in span]
        forwards = [functools.partial(page, *view.positions, view) for view in views]
        read = _spans.run(forwards, SpanExperts(), on_layer)
    if kept is not None:
        kept += [view.page() for view in views]
    end = span[-1][1]
    return end, [found for found, one in zip(read, span, strict=True) if one[1] > first]


class PageCache(Cache):
    """A cache as one page of a span finds it: up to the page's own tokens.

    Other pages may be layers ahead or behind.

    Parameters
    ----------
    cache : Cache
    begin, end : int
        The page's first position, and the one behind its last.
    is_kept : bool
        Whether `page` will be asked for.
    """

    def __init__(self, cache: Cache, begin: int, end: int, *, is_kept: bool) -> None:
        # Not Cache's own: layers are the other cache's.
        self._cache = cache
        self.positions = begin, end
        self._length = begin
        self._is_kept = is_kept
        self._updated: dict[int, tuple[torch.Tensor, torch.Tensor] | None] = {}

    def page(self) -> Page:
        """Return the page's keys and values, from its first position on, once they are there."""
        found = [pair for _, pair in sorted(self._updated.items()) if pair is not None]
        return tuple((_array(keys), _array(values)) for keys, values in found)

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """The layers of the cache."""
        found: list[Any] = self._cache.layers
        return found

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the page's keys and values to a layer."""
        found = self._cache.update(key_states, value_states, layer_idx, *args, **kwargs)
        adopt(self.layers[layer_idx])
        begin, end = self.positions
        kept = (key_states, value_states)
        if self._is_kept and begin > (first := page_begin(begin)):
            kept = (found[0][:, :, first:end].clone(), found[1][:, :, first:end].clone())
        self._updated[layer_idx] = kept if self._is_kept else None
        return found

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the positions up to the page, and its own once a layer has them."""
        return self.positions[layer_idx in self._updated]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return how many positions a layer's mask has, and the first of them."""
        layers = self.layers
        window = getattr(layers[layer_idx], "sliding_window", 0) if layer_idx < len(layers) else 0
        if not window or self._length < window:
            return self._length + query_length, 0
        return window - 1 + query_length, self._length - window + 1

    def __getattr__(self, name: str) -> Any:
        """Return what the cache has besides."""
        if name.startswith("__") or name == "_cache":
            raise AttributeError(name)
        return getattr(self._cache, name)


def _array(states: torch.Tensor) -> np.ndarray:
    states = states.detach().contiguous()
    if states.dtype == torch.bfloat16:
        states = states.view(torch.uint16)  # which NumPy knows
    array: np.ndarray = states.numpy()
    return array
