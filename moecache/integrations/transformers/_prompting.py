"""Prompts that a forward is asked for: in parts by a program, or in pages by the modules."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from moecache.decoding.recipe import Layer
from moecache.integrations.transformers._asked import Asked
from moecache.integrations.transformers._empty_cache import Kept, fill_in, reserve
from moecache.integrations.transformers.prompts import (
    cuts,
    has_pages,
    is_paged,
    read_prompt,
    span_pages,
)


def part_stops(asked: Asked, most: int) -> tuple[list[int], int]:
    """Return where parts of a prompt end, and how many rows the largest has without padding.

    Parameters
    ----------
    asked : Asked
    most : int
        Rows of a part; a part has a position at least.
    """
    each = asked.ids.shape[1]
    begun = asked.begins[:, None] <= np.arange(asked.length, asked.length + each)
    stops, rows, largest = [], 0, 0
    for place, num in enumerate(begun.sum(0).tolist()):
        if rows and rows + num > most:
            stops.append(place)
            rows = 0
        rows += num
        largest = max(largest, rows)
    return [*stops, each], largest


def in_parts(
    asked: Asked,
    stops: Sequence[int],
    layers: Sequence[Layer],
    dtype: torch.dtype,
    compute: Callable[[Asked], np.ndarray | None],
) -> np.ndarray | None:
    """Return the logits of a prompt that goes through a program's layers in parts.

    The cache is as it was if a part fails, or if the program takes none.

    Parameters
    ----------
    asked : Asked
    stops : sequence of int
        Where parts end.
    layers : sequence of Layer
        The program's.
    dtype : dtype
        Of keys and values of a cache that is empty.
    compute : callable (Asked)
        Puts a part into the cache, and returns its logits; `None` if the program does not take it.

    Returns
    -------
    ndarray of float32, shape [batch, num_logits, vocabulary], or None
    """
    batch, each = asked.ids.shape
    kept = Kept(asked.cache)
    found: np.ndarray | None = None
    try:
        if not asked.length and not fill_in(asked.cache, layers, batch, dtype):
            return None
        reserve(asked.cache, each)
        places = asked.positions.reshape(batch, each)
        for start, stop in pairwise((0, *stops)):
            first = max(start, each - asked.num_logits)
            logits = compute(
                replace(
                    asked,
                    ids=asked.ids[:, start:stop],
                    length=asked.length + start,
                    positions=places[:, start:stop].flatten(),
                    # Asked for once at least, as that ends a call.
                    num_logits=max(1, stop - first),
                )
            )
            if logits is None:
                kept.restore()
                return None
            if first >= stop:
                continue
            if stop - first == asked.num_logits:
                return logits
            if found is None:
                # All of them once: of a long prompt they take gigabytes.
                found = np.empty((batch, asked.num_logits, logits.shape[2]), np.float32)
            at = first - (each - asked.num_logits)
            found[:, at : at + stop - first] = logits
    except BaseException:
        kept.restore()
        raise
    return found


def read_in_pages(model: Any, asked: Asked) -> MoeCausalLMOutputWithPast | None:
    """Return the result of a prompt that is cut into pages; `None` if it is no such prompt.

    Parameters
    ----------
    model : PreTrainedModel
    asked : Asked
    """
    if not has_pages(model) or not is_paged(asked.cache):
        return None
    length, (batch, each) = asked.length, asked.ids.shape
    if (
        batch > 1
        or len(cuts(length, length + each)) < 2
        or asked.begins.any()
        or (asked.positions != np.arange(length, length + each)).any()
    ):
        return None
    logits = read_prompt(
        model.forward,
        asked.ids,
        asked.cache,
        num_logits=asked.num_logits,
        num_pages=functools.partial(span_pages, model),
    )
    return MoeCausalLMOutputWithPast(logits=logits, past_key_values=asked.cache)
