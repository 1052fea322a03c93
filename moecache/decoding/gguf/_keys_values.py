"""Keys and values of one text, in memory that grows with it."""

import math
from collections.abc import Sequence

import numpy as np

from moecache.decoding._held import KeyValues, States
from moecache.decoding.prefixes import Page, num_positions

# Positions that memory grows by, at least.
_STEP = 256


class TextCache:
    """Keys and values of a text, in bfloat16.

    Parameters
    ----------
    num_layers, num_heads, width, value_width : int
        The last two are numbers of a key and of a value.
    name : int, optional
        Of the text, if there are others beside it.

    Attributes
    ----------
    length : int
        Positions that are there.
    """

    _kind, _dtype = "bf16", np.dtype(np.uint16)

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        width: int,
        value_width: int,
        name: int | None = None,
    ) -> None:
        self.length = 0
        self.name = name
        self._shape = num_layers, num_heads
        self._widths = width, value_width
        self._capacity = 0
        # Of all layers, [num_layers, num_heads, capacity, width].
        self._parts = self._allocated(0)
        self._pages: list[KeyValues | States] = []

    def pages(self, num_new: int) -> list[KeyValues | States]:
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
        num_layers, heads = self._shape
        num = num_positions(page)
        return len(page) == num_layers and all(
            part.dtype == self._dtype and part.shape == (1, heads, num, width)
            for layer in page
            for part, width in zip(layer, self._widths, strict=True)
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
            for layer, given in enumerate(page):
                for held, part in zip(self._parts, given, strict=True):
                    held[layer, :, begin:end] = part[0]
        self.length = end

    def page(self, begin: int, end: int) -> Page:
        """Return a copy of the positions from `begin` to `end`."""
        keys, values = (held[:, None, :, begin:end].copy() for held in self._parts)
        return tuple(zip(keys, values, strict=True))

    def growth_bytes(self, num_new: int) -> int:
        """Return the bytes that `pages` would allocate."""
        capacity = self._wanted(num_new)
        each = math.prod(self._shape) * sum(self._widths) * self._dtype.itemsize
        return each * capacity if capacity > self._capacity else 0

    def _wanted(self, num_new: int) -> int:
        wanted = self.length + num_new
        if wanted <= self._capacity:
            return self._capacity
        # Half as many again, so that a text of n tokens is copied log(n) times.
        most = max(wanted, self.length * 3 // 2)
        return -(-most // _STEP) * _STEP

    def _grow(self, capacity: int) -> None:
        grown = self._allocated(capacity)
        for held, to in zip(self._parts, grown, strict=True):
            to[:, :, : self.length] = held[:, :, : self.length]
        (_, heads), (width, value_width) = self._shape, self._widths
        shape = 1, heads, capacity, width
        self._pages = [
            KeyValues(keys.ctypes.data, values.ctypes.data, self._kind, shape, value_width, grown)
            for keys, values in zip(*grown, strict=True)
        ]
        self._parts, self._capacity = grown, capacity

    def _allocated(self, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """Return zeros for keys and values of all layers.

        One piece of memory, as mapping one waits for whoever touches another.
        """
        shapes = [(*self._shape, capacity, width) for width in self._widths]
        sizes = [math.prod(shape) for shape in shapes]
        both = np.zeros(sum(sizes), self._dtype)
        return both[: sizes[0]].reshape(shapes[0]), both[sizes[0] :].reshape(shapes[1])
