"""Sequences: which request each row of a step is of, as numbers that policies take."""

import itertools

import numpy as np

from moecache.runtime.batch import MAX_SEQUENCES

# A number is from 0 to this, less one.
_END = 2**31


class Sequences:
    """Numbers of the requests that a step has rows of.

    A request keeps its number from step to step, and loses it by a step that has no row of it.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._counted = itertools.count()
        self._rows: np.ndarray | None = None

    def begin(self, requests: list[tuple[str, int]]) -> None:
        """Note a step's requests and how many rows each has, in the order of the rows."""
        known = self._numbers
        self._numbers = {
            name: known[name] if name in known else next(self._counted) % _END
            for name, _ in requests
        }
        self._rows = None
        if 1 < len(requests) <= MAX_SEQUENCES:
            numbers = np.array([self._numbers[name] for name, _ in requests], np.int32)
            self._rows = numbers.repeat([count for _, count in requests])

    def of(self, num_tokens: int) -> np.ndarray | None:
        """Return each row's number; `None` where rows are of one request, or of too many.

        Rows beyond the requests' are padding, which goes with the last request.
        """
        rows = self._rows
        if rows is None or len(rows) > num_tokens:
            return None
        return np.pad(rows, (0, num_tokens - len(rows)), mode="edge")
