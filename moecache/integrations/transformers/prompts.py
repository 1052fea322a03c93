"""Prompts in pages of 256 positions: the same cut, and so the same bits, whatever is cached."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
)

from moecache.decoding.prefixes import PAGE_TOKENS, Page
from moecache.integrations.transformers import _spans
from moecache.integrations.transformers._cache_layers import KEYED, adopt
from moecache.integrations.transformers._forward import SpanExperts
from moecache.sizing.headroom import kv_bytes_per_token

# Positions of Qwen3-Omni depend on what it was asked before; the other one sees what comes after.
NOT_CAUSAL = ("qwen3_omni_moe_thinker", "openai_privacy_filter")
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
# Tokens of a prompt whose scores a plan leaves room for, where torch holds all of them.
_SCORED_TOKENS = 1024
# So few tokens of a page behind others are decoded, where a program computes them.
FEW_TOKENS = 16


def new_cache(model: Any) -> DynamicCache:
    """Return an empty cache for a model, as `generate` makes one."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def has_pages(model: Any) -> bool:
    """Return whether a model's prompts are read in pages.

    Layers that keep a state of their own (linear attention, indexers) get a prompt as a whole, as
    transformers' modules take it; so do models whose positions are not those of tokens.
    """
    return model.config.model_type not in NOT_CAUSAL and is_paged(new_cache(model))


def reads_prompts(model: Any) -> bool:
    """Return whether a program reads a model's prompts, so that its modules read none."""
    decoder = getattr(getattr(model, "moecache", None), "decoder", None)
    return decoder is not None and bool(decoder.reads_prompts())


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
        and all(type(layer) in KEYED for layer in cache.layers)
    )


def planned_bytes(model: Any, top_k: int, compute: str) -> int:
    """Return the memory that a plan leaves for prompts, beside their keys and values."""
    scores = _scores_bytes(model) if compute == "torch" else 0
    return 2 * _PLANNED_PAGES * _page_bytes(model, top_k) + scores


def _scores_bytes(model: Any) -> int:
    """Return what torch's attention takes for a prompt of `_SCORED_TOKENS`, if it is much.

    Where keys and values differ in width, as with latents, it holds four matrices of scores in
    float32, of all heads.
    """
    said = model.config.get_text_config(decoder=True).to_dict()
    key = sum(said.get(name) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    value = said.get("v_head_dim")
    if not value or value == (key or said.get("head_dim")):
        return 0
    return 4 * 4 * int(said["num_attention_heads"]) * _SCORED_TOKENS**2


def _page_bytes(model: Any, top_k: int) -> int:
    """Return the bytes of the rows of a page's experts; 0 if the model does not say its width."""
    width: int = getattr(model.config.get_text_config(decoder=True), "hidden_size", 0)
    return PAGE_TOKENS * max(1, top_k) * width * 4


def make_room(model: Any, num_tokens: int) -> None:
    """Have slots give back what keys and values of new tokens take, as far as it was borrowed."""
    offload = getattr(model, "moecache", None)
    if num_tokens and offload is not None:
        offload.runtime.borrowed.make_room(num_tokens * bytes_per_token(model))


def bytes_per_token(model: Any) -> int:
    """Return the bytes of a token's keys and values, each layer's attention being a full one.

    0 if the model does not say how wide they are.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    return kv_bytes_per_token({**model.config.get_text_config().to_dict(), "dtype": dtype})


def span_pages(model: Any) -> int:
    """Return how many pages of a model go through a layer together, for what their rows take.

    Memory that is free now counts; a page's bits depend on it as little as on what is cached.
    """
    offload = getattr(model, "moecache", None)
    page = 0 if offload is None else _page_bytes(model, offload.runtime.layout.top_k)
    if not page:
        return SPAN_PAGES
    free: int = model.moecache.runtime.borrowed.free_bytes()
    most = min(_SPAN_BYTES, free // _FREE_PART)
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
        span = Span(forward, ids[:, start - stop :], cache, num_pages(), num_logits=num_logits)
        read_spans([span])
        logits += span.logits
        start = span.end
    if len(logits) == 1:
        return logits[0]
    # A program's are float32, modules' have the model's dtype.
    are_alike = len({part.dtype for part in logits}) == 1
    return torch.cat(logits if are_alike else [part.float() for part in logits], 1)


class Span:
    """The next pages of a prompt, which go through a model together, and with those of others.

    Parameters
    ----------
    forward, ids, cache, num_logits
        As those of `read_prompt`.
    num_pages : int
        Pages to read, at most.
    is_kept : bool, default False
        Whether the pages are wanted.

    Attributes
    ----------
    end : int
        The positions that the cache has once the span is read.
    is_decoded : bool
        A few tokens of a page behind others go alone: they are decoded, whatever was cached.
    logits : list of Tensor
        Of each page those that are wanted, once it is read.
    kept : list of Page
        The pages, the last one as far as it goes.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        ids: torch.Tensor,
        cache: Any,
        num_pages: int,
        *,
        num_logits: int = 1,
        is_kept: bool = False,
    ) -> None:
        begin = int(cache.get_seq_length())
        stop = begin + ids.shape[1]
        pages = cuts(begin, stop)
        last = page_begin(pages[-1][0])
        has_few = pages[-1][1] - last <= FEW_TOKENS and last > 0
        self._pages = pages[: max(1, min(num_pages, len(pages) - has_few))]
        self.end = self._pages[-1][1]
        self.is_decoded = has_few and len(pages) == 1
        self.logits: list[torch.Tensor] = []
        self.kept: list[Page] = []
        self._forward, self._ids, self._cache = forward, ids, cache
        self._begin, self._is_kept = begin, is_kept
        self._first = stop - num_logits if num_logits else begin

    @property
    def num_tokens(self) -> int:
        """Tokens that are read."""
        return self.end - self._begin

    def read(self, on_layer: Callable[[], object]) -> None:
        """Read the pages with no others."""
        for layer in self._cache.layers:
            adopt(layer)
        if len(self._pages) == 1 and (self.is_decoded or not self._is_kept):
            self.take([self._page(*self._pages[0], self._cache)], [])
        else:
            _read_together([self], on_layer)

    def views(self) -> list["PageCache"]:
        """Return the cache as each page finds it."""
        for layer in self._cache.layers:
            adopt(layer)
        return [PageCache(self._cache, *page, is_kept=self._is_kept) for page in self._pages]

    def forward_of(self, view: "PageCache") -> Callable[[], torch.Tensor]:
        """Return what computes a page."""
        return functools.partial(self._page, *view.positions, view)

    def take(self, logits: Sequence[torch.Tensor], views: Sequence["PageCache"]) -> None:
        """Take what the pages' forwards have returned."""
        ends = [end for _, end in self._pages]
        self.logits = [found for found, end in zip(logits, ends, strict=True) if end > self._first]
        if self._is_kept:
            self.kept = [view.page() for view in views]

    def _page(self, begin: int, end: int, into: Any) -> torch.Tensor:
        logits: torch.Tensor = self._forward(
            input_ids=self._ids[:, begin - self._begin : end - self._begin],
            past_key_values=into,
            use_cache=True,
            # One at least: none would be all of them.
            logits_to_keep=end - max(begin, self._first) if end > self._first else 1,
        ).logits
        return logits


def read_spans(spans: Sequence[Span], on_layer: Callable[[], object] = lambda: None) -> None:
    """Put the pages of some prompts into their caches; an expert is read once for all of them.

    Parameters
    ----------
    spans : sequence of Span
        Of different caches; one that `is_decoded` goes alone. What a call that fails leaves in
        the caches is of no use.
    on_layer : callable (), optional
        Called when a layer of several pages is computed.
    """
    if len(spans) == 1:
        spans[0].read(on_layer)
    else:
        _read_together(spans, on_layer)


def _read_together(spans: Sequence[Span], on_layer: Callable[[], object]) -> None:
    views = [span.views() for span in spans]
    forwards = [
        span.forward_of(view) for span, some in zip(spans, views, strict=True) for view in some
    ]
    found = iter(_spans.run(forwards, SpanExperts(), on_layer))
    for span, some in zip(spans, views, strict=True):
        span.take(list(itertools.islice(found, len(some))), some)


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
