"""Span: pages of a prompt that go through a model together, a layer of experts at a time.

Each page has a forward of its own, in a greenlet of its own: it stops where its experts are to be
computed, and lets the next page come as far. When all have come, the experts are computed for all
of them, so that each is read once for the span. Page after page passes a layer, hence each finds
the keys and values of those before it. A page's bits are those of its forward alone.
"""

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import greenlet
import numpy as np
import torch
from torch import nn


class Asked(NamedTuple):
    """The experts that a page waits for.

    Attributes
    ----------
    module : Module
    hidden : Tensor, shape [num_tokens, hidden_size]
    ids, weights : Tensor, shape [num_tokens, top_k]
    """

    module: nn.Module
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


# Computes the experts of several pages; returns an output for each.
Together = Callable[[Sequence[Asked]], Sequence[torch.Tensor]]


class _Page(greenlet.greenlet):
    """A page's forward, as far as it has come."""


def is_page() -> bool:
    """Return whether the caller computes a page of a span."""
    return isinstance(greenlet.getcurrent(), _Page)


def ask(asked: Asked) -> torch.Tensor:
    """Return the output of a page's experts, once all pages of the span have asked for theirs."""
    page: Any = greenlet.getcurrent()
    found: torch.Tensor = page.parent.switch(asked)
    return found


def run(
    forwards: Sequence[Callable[[], Any]],
    together: Together,
    on_layer: Callable[[], object] = lambda: None,
) -> list[Any]:
    """Run the forwards of pages side by side; return what each returns.

    Parameters
    ----------
    forwards : sequence of callable ()
        In the order of the pages.
    together : callable
        Computes what pages ask for by `ask`.
    on_layer : callable (), optional
        Called each time when it has.

    Raises
    ------
    Exception
        The first error of a forward, or of `together`; the other forwards are ended.
    """
    pages = [_Page(forward) for forward in forwards]
    for page in pages:
        # A greenlet has none of its own accord, and a context is entered by one at a time.
        page.gr_context = contextvars.copy_context()
    try:
        given: list[Any] = [()] * len(pages)
        results: list[Any] = [None] * len(pages)
        going = list(range(len(pages)))
        while going:
            asked = {}
            for number in going:
                result = pages[number].switch(*given[number])
                if pages[number].dead:
                    results[number] = result
                else:
                    asked[number] = result
            going = list(asked)
            for number, output in zip(going, _by_module(asked, together), strict=True):
                given[number] = (output,)
            if going:
                on_layer()
        return results
    finally:
        for page in pages:
            if page:
                page.throw()


def _by_module(asked: dict[int, Asked], together: Together) -> list[torch.Tensor]:
    """Return the outputs in the order of the pages: those of one module are computed together."""
    outputs: dict[int, torch.Tensor] = {}
    modules = dict.fromkeys(one.module for one in asked.values())
    for module in modules:
        numbers = [number for number, one in asked.items() if one.module is module]
        found = together([asked[number] for number in numbers])
        outputs.update(zip(numbers, found, strict=True))
    return [outputs[number] for number in asked]


def page_pairs(pairs: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the number of the page of each pair; `starts` has the first pair of each page."""
    return np.searchsorted(starts, pairs, side="right") - 1
