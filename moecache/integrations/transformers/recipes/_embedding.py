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

    A table of numbers, or of rows in a format, is read without torch; any other module is called,
    and so is one whose forward is another by then.

    Parameters
    ----------
    module : Module
        Called with ids; nobody follows it.
    weights : Weights
        Told what is read.
    """
    forward, call = type(module).forward, _from_module(module)
    if forward is nn.Embedding.forward:
        table = _table_of(module, weights)
    elif forward is NativeEmbedding.forward:
        table = _rows_of(module, weights)
    else:
        table = None
    if table is None:
        return call
    read = table

    def embed(ids: list[int], out: np.ndarray) -> None:
        (read if type(module).forward is forward else call)(ids, out)

    return embed


def _table_of(module: Any, weights: Weights) -> Embed | None:
    """Return what reads an embedding's numbers; `None` if they are no plain ones."""
    weight = module._parameters.get("weight")
    if (
        module.max_norm is not None
        or type(weight) not in (torch.Tensor, nn.Parameter)
        or weight.dtype not in (torch.float32, torch.bfloat16)
        or not weight.is_contiguous()
    ):
        return None
    weights.number(module, "max_norm")
    return _from_numbers(weights.values(module, "weight"))


def _rows_of(module: Any, weights: Weights) -> Embed | None:
    """Return what reads rows in a format; `None` if it takes other code than a kernel's."""
    name, num, columns, dtype = module.__dict__[_KIND]
    known = find_format(name)
    if isinstance(known, StackedFormat) or known.form is None:
        return None
    made = tiler(name, 1, columns)
    if not isinstance(made, Tiler) or dtype not in (torch.float32, torch.bfloat16):
        return None
    form = np.empty(known.form.nbytes(1, columns), np.uint8)
    try:
        matrix = Matrix(form.ctypes.data, name, 1, columns, None, form)
    except ConfigError:  # this level has no kernel for it
        return None
    weights.number(module, _KIND)
    raw = weights.tensor(module, FORM).numpy().reshape(num, -1)
    return _from_rows(raw, made, form, matrix, is_rounded=dtype == torch.bfloat16)


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
            raise IndexError(f"token {token} is not one of {num}: it is of another tokenizer")
