"""Texts of a GGUF file's model: a prompt, from what is known on, then a token after another."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

import moecache
from moecache.decoding.gguf._keys_values import TextCache
from moecache.decoding.gguf.model import TextModel
from moecache.decoding.prefixes import PAGE_TOKENS, PART_TOKENS, PrefixCache, describe_files
from moecache.decoding.sampler import Mask, Sampler, next_token
from moecache.decoding.streams import TokenTimes
from moecache.kernels import level


def continue_text(
    model: TextModel,
    prompt: Sequence[int],
    sampler: Sampler,
    stream: TokenTimes,
    *,
    max_new_tokens: int,
    mask: Mask | None = None,
    prefixes: PrefixCache | None = None,
) -> None:
    """Generate tokens until the model ends its text, `max_new_tokens` are there, or no room is.

    Parameters
    ----------
    model : TextModel
    prompt : sequence of int
    sampler : Sampler
    stream : TokenTimes
        Gets the prompt, each token, and the end.
    max_new_tokens : int
    mask : Mask, optional
        Which tokens may come.
    prefixes : PrefixCache, optional
        Pages of earlier texts, as `open_prefixes` gives it. This one's are kept however it ends,
        those of its answer, too: a token's keys and values are the same, however it was read.

    Raises
    ------
    ConfigError
        If the prompt leaves no room for a token.
    Stopped
        If the stream wants no more.
    """
    tokens = list(prompt)
    num_left = min(max_new_tokens, model.check_room(len(tokens)))
    stream.put(np.array([tokens]))
    known = [] if prefixes is None else prefixes.find(tokens, in_parts=True)
    cache = model.new_cache(known, len(tokens))
    num_known = stream.cached_tokens = cache.length
    num_kept = num_known

    def keep() -> None:
        nonlocal num_kept
        if prefixes is not None:
            with suppress(MemoryError):  # a text is none the worse without
                _keep(prefixes, tokens, cache, num_kept)
            num_kept = cache.length

    try:
        logits = model.read(tokens[num_known:], cache, lambda num: stream.read(num_known + num))
        while True:
            token = next_token(sampler, logits, mask)
            tokens.append(token)
            num_left -= 1
            stream.put(np.array([[token]]))
            if len(tokens) == len(prompt) + 1:
                # By itself: a file is found by the tokens that it ends with.
                keep()
            if token in model.ends or num_left < 1:
                break
            logits = model.read([token], cache)
    finally:
        keep()
    stream.end()


def open_prefixes(
    model: TextModel, max_bytes: int, *, directory: Path | None = None, max_disk_bytes: int = 0
) -> PrefixCache:
    """Return a cache of texts' pages for a model.

    Parameters
    ----------
    model : TextModel
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
    facts = {
        "way": ["text", moecache.__version__],
        "files": describe_files(model.runtime.store),
        # What angles are computed by, and all else.
        "machine": [np.__version__, level()],
    }
    return PrefixCache(
        hashlib.blake2b(json.dumps(facts, sort_keys=True).encode()).digest(),
        PAGE_TOKENS,
        max_bytes,
        part_tokens=PART_TOKENS,
        directory=directory,
        max_disk_bytes=max_disk_bytes,
    )


def _keep(prefixes: PrefixCache, tokens: list[int], cache: TextCache, num_kept: int) -> None:
    """Keep the pages of a cache's tokens that were not kept as a whole, one after the other."""
    size, part, num = prefixes.page_tokens, prefixes.part_tokens, cache.length
    if num // part == num_kept // part:
        return
    for begin in range(num_kept // size * size, num, size):
        end = min(begin + size, num)
        # A copy at a time: all of a long text would take as much again.
        prefixes.keep(tokens[:end], [cache.page(begin, end)], in_parts=True)
