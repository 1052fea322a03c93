"""BounceBuffers: memory that experts are read to before they are brought into their slots' form."""

from collections.abc import Mapping, Sequence

import numpy as np

from moecache.slots._held import Held, strides_of
from moecache.slots._memory import BLOCK_BYTES, aligned_rows

# Dtypes and tilers need addresses that are multiples of this.
_LEAST_ALIGNMENT = 16


class BounceBuffers:
    """Buffers for the roles that are converted, each lent to a slot until that is filled.

    Parameters
    ----------
    held : sequence of dict of role to Held
        Of each layer.
    variants : sequence of int
        Of each layer: layers alike have one number.
    number : int
        Buffers that are made at once.
    """

    def __init__(
        self, held: Sequence[Mapping[str, Held]], variants: Sequence[int], number: int
    ) -> None:
        self._held = held
        self._lent: dict[int, _Buffer] = {}
        self._unit = 1
        # Of each layer: its variant, and the remainders at which its roles begin.
        self._kinds: list[tuple[int, tuple[tuple[str, int], ...]]] = [(v, ()) for v in variants]
        self._free = self._made(number) if number else []

    def align_to_file(self, offsets: Sequence[Mapping[str, int]], unit: int) -> None:
        """Have buffers begin as parts of a file do; see `HostSlots.align_to_file`."""
        if unit > BLOCK_BYTES or self._lent:
            return
        self._unit = unit
        self._kinds = [
            (variant, tuple((name, at % unit) for name, at in places.items()))
            for (variant, _), places in zip(self._kinds, offsets, strict=True)
        ]
        for buffer in self._free:
            buffer.views.clear()

    def views(self, slot: int, layer: int) -> dict[str, np.ndarray]:
        """Return the arrays of a slot's buffer, as they are in the file, by role."""
        buffer = self._lent.get(slot)
        if buffer is None:
            try:
                buffer = self._free.pop()
            except IndexError:
                (buffer,) = self._made(1)
            self._lent[slot] = buffer
        kind = self._kinds[layer]
        known = buffer.views.get(kind)
        if known is None:
            places = dict(kind[1])
            known = buffer.views[kind] = {
                name: held.stored_view(self._begin(buffer.rows[name], places.get(name)))
                for name, held in self._held[layer].items()
                if held.is_converted
            }
        return known

    def give_back(self, slot: int) -> None:
        """Keep a slot's buffer, if it has one, for another."""
        buffer = self._lent.pop(slot, None)
        if buffer is not None:
            self._free.append(buffer)

    def close(self) -> None:
        """Drop all buffers."""
        self._free = []
        self._lent = {}

    def _begin(self, row: np.ndarray, place: int | None) -> np.ndarray:
        """Return the part of a row that begins at the remainder of a place in the file."""
        if place is None or place % _LEAST_ALIGNMENT:
            return row
        return row[(place - row.ctypes.data) % self._unit :]

    def _made(self, number: int) -> "list[_Buffer]":
        """Make buffers; together they lie in huge pages, which direct reads are faster into."""
        # A role may begin anywhere in the first block.
        strides = strides_of(self._held, stored=True)
        rows = {
            name: aligned_rows(number, stride + BLOCK_BYTES) for name, stride in strides.items()
        }
        return [_Buffer({name: row[i] for name, row in rows.items()}) for i in range(number)]


class _Buffer:
    """Memory that an expert is read to before it is converted, and views of it by kind of layer."""

    __slots__ = ("rows", "views")

    def __init__(self, rows: dict[str, np.ndarray]) -> None:
        self.rows = rows
        self.views: dict[object, dict[str, np.ndarray]] = {}
