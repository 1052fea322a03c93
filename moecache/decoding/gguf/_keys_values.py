"""Keys and values of one text, in memory that grows with it."""

from collections.abc import Sequence

import numpy as np

from moecache.decoding._program import KeyValues
from moecache.decoding.prefixes import Page, num_positions

# Positions that memory grows by, at least.
_STEP = 256


class TextCache:
    """Keys and values of a text, in bfloat16.

    Parameters
    ----------
    num_layers, num_heads, width : int
    name : int, optional
        Of the text, if there are others beside it.

    Attributes
    ----------
    length : int
        Positions that are there.
    """

    def __init__(
        self, num_layers: int, num_heads: int, width: int, name: int | None = None
    ) -> None:
        self.length = 0
        self.name = name
        # Keys and values of all layers: one piece of memory, as mapping one waits for whoever
        # touches another.
        self._all = np.zeros((num_layers, 2, num_heads, 0, width), np.uint16)
        self._pages: list[KeyValues] = []

    def pages(self, num_new: int) -> list[KeyValues]:
        """Return what a program writes to, with room for so many positions more.

        Raises
        ------
        MemoryError
            The cache is as it was.
        """
        capacity = self._capacity(num_new)
        if capacity > self._all.shape[3]:
            self._grow(capacity)
        return self._pages

    def fits(self, page: Page) -> bool:
        """Return whether a page is of such keys and values."""
        num_layers, _, heads, _, width = self._all.shape
        num = num_positions(page)
        return len(page) == num_layers and all(
            part.dtype == np.uint16 and part.shape == (1, heads, num, width)
            for layer in page
            for part in layer
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
            for layer, parts in enumerate(page):
                for place, part in enumerate(parts):
                    self._all[layer, place, :, begin:end] = part[0]
        self.length = end

    def page(self, begin: int, end: int) -> Page:
        """Return a copy of the positions from `begin` to `end`."""
        found = self._all[:, :, None, :, begin:end].copy()
        return tuple((keys, values) for keys, values in found)

    def growth_bytes(self, num_new: int) -> int:
        """Return the bytes that `pages` would allocate."""
        num_layers, _, heads, before, width = self._all.shape
        capacity = self._capacity(num_new)
        return 4 * num_layers * heads * capacity * width if capacity > before else 0

    def _capacity(self, num_new: int) -> int:
        wanted = self.length + num_new
        if wanted <= self._all.shape[3]:
            return int(self._all.shape[3])
        # Half as many again, so that a text of n tokens is copied log(n) times.
        most = max(wanted, self.length * 3 // 2)
        return -(-most // _STEP) * _STEP

    def _grow(self, capacity: int) -> None:
        num_layers, _, heads, _, width = self._all.shape
        grown = np.zeros((num_layers, 2, heads, capacity, width), np.uint16)
        grown[:, :, :, : self.length] = self._all[:, :, :, : self.length]
        shape = 1, heads, capacity, width
        self._pages = [
            KeyValues(keys.ctypes.data, values.ctypes.data, "bf16", shape, width, grown)
            for keys, values in grown
        ]
        self._all = grown
