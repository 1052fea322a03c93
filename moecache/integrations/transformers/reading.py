"""PromptReader: a prompt put into a cache page by page, from the pages that are known on."""

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.cache_utils import DynamicCache

import moecache
from moecache.decoding.prefixes import Page, PrefixCache, num_positions
from moecache.integrations.transformers.prompts import (
    PAGE_TOKENS,
    PART_TOKENS,
    are_rows_apart,
    has_pages,
    new_cache,
    read_pages,
    span_pages,
)
from moecache.kernels import level

# Of a file, with the first of its tensors.
_HEAD_BYTES = 2**20


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
        Tokens whose pages were known.
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
        self._paged = has_pages(model)
        self._prefixes = prefixes if self._paged else None
        if self._prefixes is not None:
            pages = self._prefixes.find(self._tokens, in_parts=are_rows_apart(model))
            if pages:
                _restore(self.cache, pages)
                self.num_cached = self.num_read = sum(map(num_positions, pages))
                # The forward that begins a sequence is not computed.
                if offload is not None:
                    offload.runtime.begin_sequence()

    @property
    def num_left(self) -> int:
        """Tokens that are still to be read."""
        return len(self._tokens) - self.num_read

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
        ids = torch.tensor([self._tokens[self.num_read :]], dtype=torch.int64)
        if self._model.device.type != "meta":
            ids = ids.to(self._model.device)
        if not self._paged:
            out = self._model(
                input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
            )
            self.num_read = len(self._tokens)
            logits: torch.Tensor = out.logits[0, -1]
            return logits
        kept: list[Page] | None = None if self._prefixes is None else []
        begun, layers = self.num_read, self._num_layers
        # What is free is asked before each span: keys and values of the last one are there by now.
        num_pages = min(num_pages, span_pages(self._model))
        wanted = num_pages * PAGE_TOKENS
        passed = itertools.count(1)

        def on_layer() -> None:
            progress(begun + min(wanted, self.num_left) * next(passed) // (layers + 1))

        stop, last = read_pages(
            self._model, ids, self.cache, num_pages, num_logits=1, kept=kept, on_layer=on_layer
        )
        self.num_read = stop
        progress(stop)
        if kept and self._prefixes is not None:
            self._prefixes.keep(self._tokens[:stop], kept, in_parts=are_rows_apart(self._model))
        return None if self.num_left else last[-1][0, -1]


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
    model: Any, max_bytes: int, *, directory: Path | None = None, max_disk_bytes: int = 0
) -> PrefixCache | None:
    """Return a cache of prompts' pages for a model; `None` if its prompts are not read in pages.

    The pages of a model that is spread over ranks are not kept: each rank would have to find the
    same ones.

    Parameters
    ----------
    model : PreTrainedModel
        As `load` returns it.
    max_bytes : int
        Of memory.
    directory : Path, optional
        Where pages are written to as well.
    max_disk_bytes : int, default 0

    Raises
    ------
    StoreError
        If the directory cannot be used.
    """
    ranks = getattr(model.moecache, "ranks", None)
    if not has_pages(model) or (ranks is not None and ranks.num_ranks > 1):
        return None
    return PrefixCache(
        _identity(model),
        PAGE_TOKENS,
        max_bytes,
        part_tokens=PART_TOKENS,
        directory=directory,
        max_disk_bytes=max_disk_bytes,
    )


def _identity(model: Any) -> bytes:
    """Return all that a page's bits depend on beside its tokens."""
    store = model.moecache.runtime.store
    files = []
    for file in getattr(store, "files", ()):
        # Times may be those of an archive, the same for two models of one shape.
        known = Path(file.path).stat()
        with open(file.path, "rb") as content:
            head = hashlib.blake2b(content.read(_HEAD_BYTES)).hexdigest()
        files.append([Path(file.path).name, known.st_size, known.st_mtime_ns, head])
    config = model.config.to_dict()
    config.pop("_name_or_path", None)
    facts = {
        "config": config,
        "class": type(model).__name__,
        "dtype": str(model.dtype),
        "compute": model.moecache.compute,
        "files": sorted(files),
        "versions": [moecache.__version__, transformers.__version__, torch.__version__],
        # torch's products depend on these.
        "machine": [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), level()],
        "attention": getattr(model.config, "_attn_implementation", None),
        "page": PAGE_TOKENS,
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode()).digest()
