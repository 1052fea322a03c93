"""LookAhead: the next layer's own router, applied by a program, says what it will use."""

from collections.abc import Callable

import numpy as np

from moecache.prefetch.predict import Prediction, Predictor

# Applies a layer's router; returns up to n experts, the likeliest first, or `None`.
Foresee = Callable[[int, int], np.ndarray | None]


class LookAhead:
    """Predicts by what a program's `foresee` says while a layer's experts are looked up.

    Parameters
    ----------
    fallback : Predictor, optional
        For the first layer, which has none before it.
    """

    # As transformers' `RouterLookAhead`.
    is_likely = True

    def __init__(self, fallback: Predictor | None) -> None:
        self._fallback = fallback
        self._foresee: tuple[int, Foresee] | None = None

    def follow(self, layer: int, foresee: Foresee) -> None:
        """Take what applies routers to what a layer's router got."""
        self._foresee = layer, foresee

    def observe(self, layer: int, ids: np.ndarray) -> None:
        """Let the fallback learn what a step used."""
        if self._fallback is not None:
            self._fallback.observe(layer, ids)

    def predict(self, layer: int, n: int) -> Prediction:
        """Return what the layer's router makes of the input of the layer before."""
        known, self._foresee = self._foresee, None
        found = None if known is None or known[0] != layer - 1 else known[1](layer, n)
        if found is not None:
            return found, None
        if self._fallback is None:
            return np.empty(0, np.int32), None
        return self._fallback.predict(layer, n)

    def begin_sequence(self) -> None:
        """Tell the fallback."""
        if self._fallback is not None:
            self._fallback.begin_sequence()
