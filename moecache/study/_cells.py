"""Rows of experts, collected cell by cell, into the dense array of a trace."""

from array import array

import numpy as np

from moecache.errors import FormatError
from moecache.units import format_bytes


class Cells:
    """The cells of a trace while a text file is read: 12 bytes per cell, 4 per id.

    A cell is a token's choices at one layer. Cells come in any order.

    Parameters
    ----------
    name : str
        The file, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows, self.layers, self.widths = array("i"), array("i"), array("i")
        self.ids = array("i")
        self.num_rows = 0

    def add(self, row: int, layer: int, ids: list[int]) -> None:
        """Add a cell; numbers are those that `whole_number` let pass."""
        self.rows.append(row)
        self.layers.append(layer)
        self.widths.append(len(ids))
        self.ids.extend(ids)
        self.num_rows = max(self.num_rows, row + 1)

    def dense(self, allowed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return experts, int32 [rows, layers, top_k], and the layers' numbers.

        Raises
        ------
        FormatError
            If a cell came twice, or the array would take more than `allowed` bytes.
        """
        rows, widths = np.asarray(self.rows), np.asarray(self.widths)
        layers, places = np.unique(np.asarray(self.layers), return_inverse=True)
        if len(rows) == 0:
            raise FormatError(f"{self.name}: has no routing in it")
        top_k = max(1, int(widths.max()))
        nbytes = 4 * self.num_rows * len(layers) * top_k
        # The cells themselves are padded to the widest on the way.
        if max(nbytes, 4 * len(rows) * top_k) > allowed:
            raise FormatError(
                f"{self.name}: {self.num_rows} tokens x {len(layers)} layers x top-{top_k} take "
                f"{format_bytes(nbytes)}, too much for a file of this size; is it damaged?"
            )
        cells = rows.astype(np.int64) * len(layers) + places
        if len(np.unique(cells)) < len(cells):
            order = np.argsort(cells, kind="stable")
            twice = order[1:][np.diff(cells[order]) == 0][0]
            raise FormatError(
                f"{self.name}: token {rows[twice]} has layer {layers[places[twice]]} twice"
            )
        padded = np.full((len(rows), top_k), -1, np.int32)
        padded[np.arange(top_k) < widths[:, None]] = np.asarray(self.ids)
        experts = np.full((self.num_rows, len(layers), top_k), -1, np.int32)
        experts.reshape(-1, top_k)[cells] = padded
        return experts, layers.astype(np.int32)


def whole_number(value: object, what: str, where: str, *, least: int = 0) -> int:
    """Return the value if it is an int of at least `least` that fits into 32 bits.

    Raises
    ------
    FormatError
        Naming `where` (file and line) and `what`.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise FormatError(f"{where}: {what} must be a whole number, got {_short(value)}")
    if not least <= value < 2**31:
        raise FormatError(f"{where}: {what} {_short(value)} is not in [{least}, 2147483647]")
    return value


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a number beyond 64 bits"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
