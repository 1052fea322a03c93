"""Keys and values of one text, in memory that grows with it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from moecache.decoding._held import KeyValues, States
from moecache.decoding.prefixes import Page, num_positions

# Of arrays: NumPy has no bfloat16 of its own.
DTYPES: dict[str, np.dtype[Any]] = {"bf16": np.dtype(np.uint16), "f32": np.dtype(np.float32)}
# Positions that memory grows by, at least.
_STEP = 256


class TextCache:
    """Keys and values of a text.

    Parameters
    ----------
    held : sequence of (int, int, int)
        Of each layer: heads, and numbers of a key and of a value.
    kind : {"bf16", "f32"}
    name : int, optional
        Of the text, if there are others beside it.

    Attributes
    ----------
    length : int
        Positions that are there.
    sizes : tuple of (int, int, int)
        What was given as `held`.
    """

    def __init__(
        self,
        held: Sequence[tuple[int, int, int]],
        kind: str = "bf16",
        name: int | None = None,
    ) -> None:
        self.length = 0
        self.name = name
        self.sizes = tuple(held)
        self._kind, self._dtype = kind, DTYPES[kind]
        self._capacity = 0
        # Of each layer, [heads, capacity, width] each.
        self._parts = self._allocated(0)
        self._pages: list[KeyValues | States | None] = []

    def pages(self, num_new: int) -> list[KeyValues | States | None]:
        """Return what a program writes to, with room for so many positions more.

        Raises
        ------
        MemoryError
            The cache is as it was.
        """
        capacity = self._wanted(num_new)
        if capacity > self._capacity:
            self._grow(capacity)
        return self._pages

    def advance(self, num_new: int) -> None:
        """Note that a call has put so many tokens behind the others."""
        self.length += num_new

    def fits(self, page: Page) -> bool:
        """Return whether a page is of such keys and values."""
        num = num_positions(page)
        return len(page) == len(self.sizes) and all(
            part.dtype == self._dtype and part.shape == (1, heads, num, width)
            for layer, (heads, *widths) in zip(page, self.sizes, strict=True)
            for part, width in zip(layer, widths, strict=True)
        )

    def restore(self, pages: Sequence[Page]) -> None:
        """Put the positions of pages that `fits` behind those that are there.

        Raises
        ------
        MemoryError
            The cache is as it was.
        """
        self.pages(sum(map(num_positions, pages)))
        end = self.length
        for page in pages:
            begin, end = end, end + num_positions(page)
            for held, given in zip(self._parts, page, strict=True):
                for to, part in zip(held, given, strict=True):
                    to[:, begin:end] = part[0]
        self.length = end

    def page(self, begin: int, end: int) -> Page:
        """Return a copy of the positions from `begin` to `end`."""
        return tuple(
            (keys[None, :, begin:end].copy(), values[None, :, begin:end].copy())
            for keys, values in self._parts
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values."""
        numbers = sum(heads * (width + value_width) for heads, width, value_width in self.sizes)
        return self._dtype.itemsize * numbers

    def growth_bytes(self, num_new: int) -> int:
        """Return the bytes that `pages` would allocate."""
        capacity = self._wanted(num_new)
        return self.bytes_per_token * capacity if capacity > self._capacity else 0

    def _wanted(self, num_new: int) -> int:
        wanted = self.length + num_new
        if wanted <= self._capacity:
            return self._capacity
        # Half as many again, so that a text of n tokens is copied log(n) times.
        most = max(wanted, self.length * 3 // 2)
        return -(-most // _STEP) * _STEP

    def _grow(self, capacity: int) -> None:
        grown = self._allocated(capacity)
        for before, after in zip(self._parts, grown, strict=True):
            for held, to in zip(before, after, strict=True):
                to[:, : self.length] = held[:, : self.length]
        self._pages = [
            KeyValues(
                keys.ctypes.data,
                values.ctypes.data,
                self._kind,
                (1, *keys.shape),
                values.shape[2],
                grown,
            )
            for keys, values in grown
        ]
        self._parts, self._capacity = grown, capacity

    def _allocated(self, capacity: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return zeros for keys and values of all layers.

        One piece of memory, as mapping one waits for whoever touches another.
        """
        shapes = [(heads, capacity, width) for heads, *both in self.sizes for width in both]
        sizes = [math.prod(shape) for shape in shapes]
        parts = np.split(np.zeros(sum(sizes), self._dtype), np.cumsum(sizes)[:-1])
        shaped = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        return list(zip(shaped[::2], shaped[1::2], strict=True))
