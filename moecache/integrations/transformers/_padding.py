"""Padding: the rows of a call that are not, where texts of a batch begin within the call."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from moecache.decoding._held import KeyValues, States
from moecache.integrations.transformers._cache_layers import (
    EMPTY,
    GrowingLayer,
    SlidingLayer,
    StatesLayer,
)


class Ragged:
    """The rows of a call for a batch that is padded on the left: those of texts alone.

    Parameters
    ----------
    begins : ndarray of int64, shape [batch]
        The first position of each text.
    length : int
        Positions that are in the cache.
    each : int
        Positions of the call.

    Attributes
    ----------
    begins
    texts : list of int
        Those that have rows in this call.
    lengths, counts : ndarray of int64, shape [num_texts]
        Positions before each text's first row, padding among them, and its rows.
    rows : ndarray of int64
        Numbers of all texts' rows, among [batch * each].
    """

    def __init__(self, begins: np.ndarray, length: int, each: int) -> None:
        self.begins, self._length, self._end = begins, length, length + each
        self.texts: list[int] = np.flatnonzero(begins < self._end).tolist()
        self.lengths = np.maximum(begins[self.texts], length)
        self.counts = self._end - self.lengths
        is_row = np.arange(length, self._end) >= begins[:, None]
        self.rows = np.flatnonzero(is_row)

    @classmethod
    def find(cls, begins: np.ndarray | None, length: int, each: int) -> Self | None:
        """Return the rows of a call, if a text begins among them; else `None`."""
        if begins is None or begins.max() <= length:
            return None
        return cls(begins, length, each)

    def names(self, of_texts: np.ndarray | None) -> np.ndarray | None:
        """Return each row's name, which is its text's."""
        return None if of_texts is None else np.repeat(of_texts[self.texts], self.counts)

    def pages(
        self, whole: Sequence[KeyValues | States | None]
    ) -> list[list[KeyValues | States | None]]:
        """Return each text's part of a batch's pages."""
        return [
            [None if page is None else page.of_sequence(text) for page in whole]
            for text in self.texts
        ]

    def clear(self, layers: Sequence[Any]) -> None:
        """Write what no row does, in layers with room for the call: zeros, and states as before."""
        for layer in layers:
            if isinstance(layer, EMPTY):
                continue
            if isinstance(layer, StatesLayer):
                self._keep_states(layer)
                continue
            for held, start in _tensors(layer, self._length):
                for text, begin in enumerate(self.begins.tolist()):
                    num = min(begin, self._end) - self._length
                    if num > 0:
                        held[text, :, start : start + num] = 0

    def _keep_states(self, layer: StatesLayer) -> None:
        """Have the states of texts that have yet to begin where the others' will be."""
        assert layer._spare is not None
        late = np.flatnonzero(self.begins >= self._end).tolist()
        for held, spare in zip(layer.held, layer._spare, strict=True):
            if held is not None and spare is not None:
                spare[late] = held[late]


def _tensors(layer: GrowingLayer | SlidingLayer, length: int) -> list[tuple[Any, int]]:
    """Return a layer's keys and values, and where those of a position lie."""
    if isinstance(layer, GrowingLayer):
        return [(layer._keys, length), (layer._values, length)]
    return [(part.held, part.start + part.num) for part in layer.parts]
