"""Rows of an embedding, written where a program reads hidden states."""

from collections.abc import Callable

import numpy as np

from moecache.errors import ConfigError
from moecache.formats import StackedFormat, find_format
from moecache.kernels import tiler
from moecache.kernels._matrix import Matrix
from moecache.kernels._tiler import Tiler

# Writes the embeddings of tokens, [num_tokens, hidden_size], as float32.
Embed = Callable[[list[int], np.ndarray], None]


def embed_numbers(table: np.ndarray) -> Embed:
    """Return what copies rows of a table of numbers.

    Parameters
    ----------
    table : ndarray of float32 or bfloat16, shape [vocabulary, hidden_size]
    """

    def embed(ids: list[int], out: np.ndarray) -> None:
        _check(ids, len(table))
        for row, token in zip(out, ids, strict=True):
            row[:] = table[token]

    return embed


def embed_rows(raw: np.ndarray, name: str, columns: int, *, is_rounded: bool) -> Embed | None:
    """Return what brings a row in a format into compute form, and expands it.

    Parameters
    ----------
    raw : ndarray of uint8, shape [vocabulary, row_bytes]
    name : str
        Of the format.
    columns : int
    is_rounded : bool
        Whether values are rounded to bfloat16.

    Returns
    -------
    callable or None
        `None` if the format takes other code than a kernel's.
    """
    known = find_format(name)
    if isinstance(known, StackedFormat) or known.form is None:
        return None
    made = tiler(name, 1, columns)
    if not isinstance(made, Tiler):
        return None
    form = np.empty(known.form.nbytes(1, columns), np.uint8)
    try:
        matrix = Matrix(form.ctypes.data, name, 1, columns, None, form)
    except ConfigError:  # this level has no kernel for it
        return None
    # The upper halves of float32.
    halves = np.empty(columns, np.uint16)
    halves_at = halves.ctypes.data

    def embed(ids: list[int], out: np.ndarray) -> None:
        _check(ids, len(raw))
        for row, token in zip(out, ids, strict=True):
            made.tile(raw[token], form)
            if is_rounded:
                matrix.expand(halves_at, "bf16", halves.nbytes)
                np.left_shift(halves, 16, out=row.view(np.uint32), dtype=np.uint32)
            else:
                matrix.expand(row.ctypes.data, "f32", row.nbytes)

    return embed


def _check(ids: list[int], num: int) -> None:
    for token in ids:
        if not 0 <= token < num:
            raise IndexError(f"token {token} is not one of {num}: it is of another tokenizer")
