"""Rows of an embedding, written where a program reads hidden states."""

from typing import Any

import numpy as np
import torch
from torch import nn

from moecache.decoding.embedding import Embed, embed_numbers, embed_rows
from moecache.integrations.transformers._native import _KIND, FORM, NativeEmbedding
from moecache.integrations.transformers.recipes._parts import Weights


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
    return embed_numbers(weights.values(module, "weight"))


def _rows_of(module: Any, weights: Weights) -> Embed | None:
    """Return what reads rows in a format; `None` if it takes other code than a kernel's."""
    name, num, columns, dtype = module.__dict__[_KIND]
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    weights.number(module, _KIND)
    raw = weights.tensor(module, FORM).numpy().reshape(num, -1)
    return embed_rows(raw, name, columns, is_rounded=dtype == torch.bfloat16)


def _from_module(module: nn.Module) -> Embed:
    def embed(ids: list[int], out: np.ndarray) -> None:
        torch.from_numpy(out).copy_(module(torch.tensor(ids)))

    return embed
