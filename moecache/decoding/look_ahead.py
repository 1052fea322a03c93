"""LookAhead: the next layer's own router, applied a layer early, says what it will use."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from moecache.decoding._program import Program
from moecache.prefetch.predict import Prediction, Predictor
from moecache.runtime.source import StepSource
from moecache.runtime.steps import Observe

# Applies a layer's router; returns up to n experts, the likeliest first, or `None`.
Foresee = Callable[[int, int], np.ndarray | None]


class LookAhead:
    """Predicts by applying the next layer's router to what this layer's router got.

    A hidden state changes little from layer to layer, so that the next router, applied one
    layer early, finds most of what it will choose.

    Parameters
    ----------
    fallback : Predictor, optional
        For the first layer, which has none before it, and where no router is known.
    """

    # It names .84 of the experts that a 17 GB model uses, and .63 of the tiny model's.
    is_likely = True

    def __init__(self, fallback: Predictor | None = None) -> None:
        self._fallback = fallback
        # Each thread has its own: two may be at different layers.
        self._seen = threading.local()

    def follow(self, layer: int, foresee: Foresee | None) -> None:
        """Take what applies routers to what a layer's router got; `None` is nothing."""
        self._seen.inputs = None if foresee is None else (layer, foresee)

    def observe(self, layer: int, ids: np.ndarray) -> None:
        """Let the fallback learn what a step used."""
        if self._fallback is not None:
            self._fallback.observe(layer, ids)

    def predict(self, layer: int, n: int) -> Prediction:
        """Return what the layer's router makes of the input of the layer before."""
        inputs = self._seen.__dict__.pop("inputs", None)
        if inputs is not None and inputs[0] == layer - 1:
            foreseen = inputs[1](layer, n)
            if foreseen is not None:
                return foreseen, None
        if self._fallback is None:
            return np.empty(0, np.int32), None
        return self._fallback.predict(layer, n)

    def begin_sequence(self) -> None:
        """Tell the fallback."""
        if self._fallback is not None:
            self._fallback.begin_sequence()


def observer(steps: StepSource, program: Program, look_ahead: LookAhead | None) -> Observe | None:
    """Return what is told of a program's resident steps, and lets the next layer be foreseen.

    `None` where nothing more can be read.
    """
    observe = steps.observer()
    if observe is None or look_ahead is None:
        return observe

    def tell(layer: int, ids: np.ndarray, sequences: Any) -> None:
        look_ahead.follow(layer, program.foresee)
        observe(layer, ids, sequences)

    return tell
