"""PromptReader: a prompt put into a cache page by page, from the pages that are known on."""

import hashlib
import itertools
import json
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.cache_utils import DynamicCache

import moecache
from moecache.decoding.prefixes import (
    ARITHMETIC,
    PAGE_TOKENS,
    PART_TOKENS,
    Page,
    PrefixCache,
    describe_files,
    num_positions,
)
from moecache.decoding.program_model import ProgramModel
from moecache.decoding.text import keep_pages
from moecache.integrations.transformers._cache_layers import growth
from moecache.integrations.transformers._decoded import decoded_model
from moecache.integrations.transformers.prompts import (
    Span,
    are_rows_apart,
    bytes_per_token,
    has_pages,
    make_room,
    new_cache,
    page_begin,
    read_spans,
    reads_prompts,
    span_pages,
)
from moecache.kernels import level
from moecache.units import parse_bytes


class PromptReader:
    """Puts a prompt into a cache of its own, a few pages at a time.

    Parameters
    ----------
    model : PreTrainedModel
    tokens : sequence of int
    prefixes : PrefixCache, optional
        Where known pages are found, and new ones kept.

    Attributes
    ----------
    cache : DynamicCache
        The keys and values of the tokens that were read.
    num_cached : int
        Tokens whose pages were known when it began to be read.
    num_read : int
        Tokens that are in the cache.
    """

    def __init__(
        self, model: Any, tokens: Sequence[int], prefixes: PrefixCache | None = None
    ) -> None:
        self.cache = new_cache(model)
        self.num_cached = self.num_read = 0
        self._model = model
        self._tokens = list(tokens)
        offload = getattr(model, "moecache", None)
        self._num_layers = 1 if offload is None else len(offload.paths)
        self._paged = has_pages(model) and not reads_prompts(model)
        self._prefixes = prefixes if self._paged and prefixes and not prefixes.way else None
        self._has_begun = False
        # Tokens of the beginning that others have, too.
        self._shared: weakref.WeakKeyDictionary[PromptReader, int] = weakref.WeakKeyDictionary()

    @property
    def num_left(self) -> int:
        """Tokens that are still to be read."""
        return len(self._tokens) - self.num_read

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was read but what was known."""
        return self.num_read == self.num_cached

    def begin(self) -> None:
        """Find the pages that are known, unless this was done before."""
        if self._has_begun:
            return
        make_room(self._model, growth(0, len(self._tokens)))
        if self._prefixes is not None:
            pages = self._prefixes.find(self._tokens, in_parts=are_rows_apart(self._model))
            if pages:
                cache = new_cache(self._model)
                _restore(cache, pages)
                self.cache = cache
                self.num_cached = self.num_read = sum(map(num_positions, pages))
                # The forward that begins a sequence is not computed.
                if (offload := getattr(self._model, "moecache", None)) is not None:
                    offload.runtime.begin_sequence()
        self._has_begun = True

    def forget(self) -> None:
        """Give keys and values back; the prompt would have to be read anew."""
        self.cache, self._has_begun = new_cache(self._model), False
        self.num_cached = self.num_read = 0

    def will_find(self, other: "PromptReader") -> bool:
        """Return whether pages that another prompt still reads need not be read for this one."""
        if self._has_begun or not other._has_begun or self._prefixes is None:
            return False
        shared = self._shared.get(other)
        if shared is None:
            pairs = enumerate(zip(self._tokens, other._tokens, strict=False))
            shorter = min(len(self._tokens), len(other._tokens))
            shared = next((num for num, (mine, its) in pairs if mine != its), shorter)
            # No more than is kept.
            most = self._prefixes.max_bytes // max(1, bytes_per_token(self._model))
            self._shared[other] = shared = page_begin(min(shared, most))
        return other.num_read < shared

    def next_span(self, num_pages: int) -> Span | None:
        """Return the next pages, at most so many; `None` if the prompt is read as a whole."""
        self.begin()
        if not self._paged:
            return None
        ids, is_kept = self._ids(), self._prefixes is not None
        return Span(self._model, ids, self.cache, num_pages, is_kept=is_kept)

    def progress_of(self, span: Span) -> Callable[[], int]:
        """Return what says, called once a layer, how many tokens are read, in layers."""
        begun, passed = self.num_read, itertools.count(1)
        return lambda: begun + span.num_tokens * next(passed) // (self._num_layers + 1)

    def take(self, span: Span) -> torch.Tensor | None:
        """Take a span that was read; return the logits after the last token once it is."""
        self.num_read = span.end
        if span.kept and self._prefixes is not None:
            tokens, is_apart = self._tokens[: span.end], are_rows_apart(self._model)
            self._prefixes.keep(tokens, span.kept, in_parts=is_apart)
        return None if self.num_left else span.logits[-1][0, -1]

    def advance(
        self, num_pages: int, progress: Callable[[int], object] = lambda _: None
    ) -> torch.Tensor | None:
        """Read at most so many pages on; return the logits after the last token once it is read.

        Parameters
        ----------
        num_pages : int
        progress : callable (int), optional
            Called now and then with the tokens that are read, if layers are counted in tokens.

        Returns
        -------
        Tensor of shape [vocabulary], or None
        """
        # What is free is asked before each span: keys and values of the last one are there by now.
        span = self.next_span(min(num_pages, span_pages(self._model)))
        if span is None:
            out = self._model(
                input_ids=self._ids(),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
            self.num_read = len(self._tokens)
            logits: torch.Tensor = out.logits[0, -1]
            return logits
        tokens_read = self.progress_of(span)
        read_spans([span], lambda: progress(tokens_read()))
        progress(span.end)
        return self.take(span)

    def _ids(self) -> torch.Tensor:
        """Return the tokens that are still to be read, where the model takes them."""
        ids = torch.tensor([self._tokens[self.num_read :]], dtype=torch.int64)
        return ids if self._model.device.type == "meta" else ids.to(self._model.device)


def _restore(cache: DynamicCache, pages: Sequence[Page]) -> None:
    """Put pages into an empty cache."""
    for layer in range(len(pages[0])):
        keys, values = (
            _tensor(np.concatenate([page[layer][part] for page in pages], 2)) for part in (0, 1)
        )
        cache.update(keys, values, layer)


def _tensor(array: np.ndarray) -> torch.Tensor:
    found = torch.from_numpy(array)
    return found.view(torch.bfloat16) if found.dtype == torch.uint16 else found


def open_prefixes(
    model: Any,
    max_bytes: int | str,
    *,
    directory: str | os.PathLike[str] | None = None,
    max_disk_bytes: int | str = 0,
) -> PrefixCache | None:
    """Return a cache of prompts' pages for a model; `None` if its prompts are not read in pages.

    The pages of a model that is spread over ranks are not kept: each rank would have to find the
    same ones.

    Parameters
    ----------
    model : PreTrainedModel
        As `load` returns it.
    max_bytes : int or str
        Of memory.
    directory : str or Path, optional
        Where pages are written to as well.
    max_disk_bytes : int or str, default 0

    Raises
    ------
    ConfigError
        If a size is none.
    StoreError
        If the directory cannot be used.
    """
    max_bytes, max_disk_bytes = parse_bytes(max_bytes), parse_bytes(max_disk_bytes)
    directory = None if directory is None else Path(directory)
    if (decoded := decoded_model(model)) is not None:
        return keep_pages(
            decoded,
            _identity(model, ProgramModel.way),
            max_bytes,
            directory=directory,
            max_disk_bytes=max_disk_bytes,
        )
    ranks = getattr(model.moecache, "ranks", None)
    is_spread = ranks is not None and ranks.num_ranks > 1
    if is_spread or not has_pages(model) or reads_prompts(model):
        return None
    return PrefixCache(
        _identity(model),
        PAGE_TOKENS,
        max_bytes,
        part_tokens=PART_TOKENS,
        directory=directory,
        max_disk_bytes=max_disk_bytes,
    )


def _identity(model: Any, way: str = "") -> bytes:
    """Return all that a page's bits depend on beside its tokens."""
    config = model.config.to_dict()
    config.pop("_name_or_path", None)
    facts = {
        "config": config,
        # Layers whose weights stay quantized are of classes of their own.
        "classes": [type(module).__name__ for module in model.modules()],
        "dtype": str(model.dtype),
        "compute": model.moecache.compute,
        "files": describe_files(model.moecache.runtime.store),
        "versions": [moecache.__version__, transformers.__version__, torch.__version__],
        # torch's products depend on these, a program's angles on the first.
        "machine": [torch.backends.cpu.get_cpu_capability(), level()],
        "threads": None if way else torch.get_num_threads(),
        "attention": getattr(model.config, "_attn_implementation", None),
        "page": [way, PAGE_TOKENS, ARITHMETIC],
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode()).digest()
