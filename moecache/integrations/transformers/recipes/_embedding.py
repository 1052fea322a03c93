"""Rows of an embedding, written where a program reads hidden states."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from moecache.errors import ConfigError
from moecache.formats import StackedFormat, find_format
from moecache.integrations.transformers._native import _KIND, FORM, NativeEmbedding
from moecache.integrations.transformers.recipes._parts import Weights
from moecache.kernels import tiler
from moecache.kernels._kernels import Matrix, Tiler

# Writes the embeddings of tokens, [num_tokens, hidden_size], as float32.
Embed = Callable[[list[int], np.ndarray], None]


def embedding_of(module: nn.Module, weights: Weights) -> Embed:
    """Return what writes the hidden states that a module makes of tokens, to the same bits.

    A table of numbers, or of rows in a format, is read without torch; any other module is called.

    Parameters
    ----------
    module : Module
        Called with ids; nobody follows it.
    weights : Weights
        Told what is read.
    """
    any_module: Any = module
    forward = type(module).forward
    if forward is nn.Embedding.forward and any_module.max_norm is None:
        weights.number(module, "max_norm")
        if any_module.weight.dtype in (torch.float32, torch.bfloat16):
            return _from_numbers(weights.values(module, "weight"))
    if forward is NativeEmbedding.forward:
        name, num, columns, dtype = weights.number(module, _KIND)
        known = find_format(name)
        if not isinstance(known, StackedFormat) and known.form is not None:
            raw = weights.tensor(module, FORM).numpy().reshape(num, -1)
            made = tiler(name, 1, columns)
            if isinstance(made, Tiler) and dtype in (torch.float32, torch.bfloat16):
                form = np.empty(known.form.nbytes(1, columns), np.uint8)
                try:
                    matrix = Matrix(form.ctypes.data, name, 1, columns, None, form)
                except ConfigError:  # no kernel of this level
                    return _from_module(module)
                return _from_rows(raw, made, form, matrix, is_rounded=dtype == torch.bfloat16)
    return _from_module(module)


def _from_numbers(table: np.ndarray) -> Embed:
    def embed(ids: list[int], out: np.ndarray) -> None:
        _check(ids, len(table))
        for row, token in zip(out, ids, strict=True):
            row[:] = table[token]

    return embed


def _from_rows(
    raw: np.ndarray, made: Tiler, form: np.ndarray, matrix: Matrix, *, is_rounded: bool
) -> Embed:
    """Return what brings a row into compute form, and expands it."""
    # The upper halves of float32.
    halves = np.empty(matrix.columns, np.uint16)
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


def _from_module(module: nn.Module) -> Embed:
    def embed(ids: list[int], out: np.ndarray) -> None:
        torch.from_numpy(out).copy_(module(torch.tensor(ids)))

    return embed


def _check(ids: list[int], num: int) -> None:
    for token in ids:
        if not 0 <= token < num:
            raise IndexError(f"token {token} is not one of {num}")
