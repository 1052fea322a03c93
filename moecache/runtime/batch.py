"""Batch: which sequence each row of a step is of, by its place."""

import numpy as np

from moecache.errors import ConfigError

MAX_SEQUENCES = 64
# Numbers of sequences that begin in batches: far from those that a host counts from 0.
_FIRST, _END = 1 << 30, 1 << 31


class Batch:
    """Sequences that began side by side and keep their places.

    Parameters
    ----------
    size : int, default 1
        One sequence needs no number, and more than 64 get none.
    first : int, optional
        Number of the first one.
    """

    def __init__(self, size: int = 1, first: int = _FIRST) -> None:
        self.size = size
        self._first = first
        told_apart = 1 < size <= MAX_SEQUENCES
        self._numbers = np.arange(first, first + size, dtype=np.int32) if told_apart else None

    def following(self, size: int) -> "Batch":
        """Return the next batch, whose sequences have numbers of their own.

        Raises
        ------
        ConfigError
            If `size` is below 1.
        """
        if size < 1:
            raise ConfigError(f"a batch has at least 1 sequence, got {size}")
        first = self._first + self.size
        return Batch(size, first if first + size < _END else _FIRST)

    def of(self, ids: np.ndarray) -> np.ndarray | None:
        """Return each row's sequence, or `None` where rows are no batch of that size."""
        if self._numbers is None or ids.ndim < 2:
            return None
        return self.names_of(ids.size // max(1, ids.shape[-1]))

    def names_of(self, num_rows: int) -> np.ndarray | None:
        """Return the sequence of each of so many rows, or `None` as `of` does."""
        each, rest = divmod(num_rows, self.size)
        if self._numbers is None or rest or not each:
            return None
        return self._numbers if each == 1 else self._numbers.repeat(each)
