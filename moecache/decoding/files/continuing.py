"""Texts of a model of files: a prompt, from what is known on, then a token after another."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import moecache
from moecache.decoding.files.model import TextModel
from moecache.decoding.prefixes import ARITHMETIC, PrefixCache, describe_files
from moecache.decoding.sampler import Sampling
from moecache.decoding.text import continue_text, keep_pages
from moecache.errors import ConfigError
from moecache.kernels import level
from moecache.units import parse_bytes

__all__ = ["continue_text", "open_prefixes", "prompt_of", "sampling_of"]


def prompt_of(tokens: Sequence[int], num_tokens: int) -> np.ndarray:
    """Return a prompt as an array, int64 [1, tokens].

    Parameters
    ----------
    tokens : sequence of int
    num_tokens : int
        Tokens that the model knows.

    Raises
    ------
    ConfigError
        If there is no token, or one is of another model's.
    """
    if not tokens:
        raise ConfigError("the prompt is empty; the model needs at least one token to start from")
    if max(tokens) >= num_tokens:
        raise ConfigError(
            f"the prompt has token {max(tokens)}, but the model knows {num_tokens} tokens; "
            "its tokenizer is of another model"
        )
    return np.array([tokens], np.int64)


def sampling_of(model: TextModel, seed: int = 0, **given: Any) -> Sampling:
    """Return how tokens are drawn: what is given, else what the model's files say.

    Parameters
    ----------
    model : TextModel
    seed : int, default 0
    **given
        Fields of `Sampling`; `None` is the files': the likeliest token, if they say nothing. A
        temperature of 0 takes the likeliest token, whatever else is said.

    Raises
    ------
    ConfigError
        If a number is out of its range.
    """
    drawn = {**model.drawn, **{name: one for name, one in given.items() if one is not None}}
    return Sampling(seed=seed, **drawn)


def open_prefixes(
    model: TextModel,
    max_bytes: int | str,
    *,
    directory: str | os.PathLike[str] | None = None,
    max_disk_bytes: int | str = 0,
) -> PrefixCache:
    """Return a cache of texts' pages for a model.

    Parameters
    ----------
    model : TextModel
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
    facts = {
        "way": ["text", moecache.__version__, ARITHMETIC],
        "files": describe_files(model.runtime.store),
        # A checkpoint's settings are in a file of their own.
        "settings": repr(sorted(model.settings.items())),
        # What angles are computed by, and all else.
        "machine": [np.__version__, level()],
    }
    identity = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode()).digest()
    return keep_pages(
        model,
        identity,
        parse_bytes(max_bytes),
        directory=None if directory is None else Path(directory),
        max_disk_bytes=parse_bytes(max_disk_bytes),
    )
