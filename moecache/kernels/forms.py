"""Compute forms: blocks in the order that vectors want, 16 rows interleaved; and back."""

from collections.abc import Callable

import numpy as np

from moecache.errors import ConfigError
from moecache.formats import TILE_ROWS, Format, find_format, tiled_rows
from moecache.kernels._kernels import to_form
from moecache.layout import Role

_SCALES = 2 * TILE_ROWS


def has_form(name: str) -> bool:
    """Return whether a format has a compute form, other than the order of the file."""
    return name in _INTEGERS


def tile(blocks: np.ndarray, name: str, rows: int, columns: int, out: np.ndarray) -> None:
    """Write the compute form of a matrix of blocks.

    Parameters
    ----------
    blocks : ndarray of uint8
        C-contiguous; the blocks of one row after the other, as in a file.
    name : {"q8_0", "q4_0"}
    rows, columns : int
    out : ndarray of uint8
        C-contiguous; the blocks of `tiled_rows(rows)` rows, those beyond `rows` of zeros.
    """
    known = _tiled_format(name, rows, columns)
    wanted = known.nbytes(rows, columns), known.nbytes(tiled_rows(rows), columns)
    if (blocks.nbytes, out.nbytes) != wanted:
        raise ValueError(
            f"a {rows} x {columns} matrix in {name} takes {wanted[0]} bytes, tiled {wanted[1]}; "
            f"got {blocks.nbytes} and {out.nbytes}"
        )
    if not (blocks.flags.c_contiguous and out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("blocks must be contiguous, and what they are tiled into writable, too")
    if blocks.size:
        row_bytes = known.nbytes(1, columns)
        to_form(blocks.ctypes.data, name, rows, columns, row_bytes, out.ctypes.data)


def untile(form: np.ndarray, name: str, rows: int, columns: int) -> dict[str, np.ndarray]:
    """Return the parts of a matrix that is in its compute form.

    Parameters
    ----------
    form : ndarray of uint8
        As `tile` writes it.
    name : {"q8_0", "q4_0"}
    rows, columns : int

    Returns
    -------
    dict of str to ndarray
        As `Format.parts` says; `dequantize` them for the values.
    """
    known = _tiled_format(name, rows, columns)
    dtype, (_, num_blocks, block_bytes) = known.parts(rows, columns)["blocks"]
    num_tiles = tiled_rows(rows) // TILE_ROWS
    tiles = form.reshape(num_tiles, num_blocks, TILE_ROWS * block_bytes)
    blocks = np.empty((tiled_rows(rows), num_blocks, block_bytes), dtype)
    by_tile = blocks.reshape(num_tiles, TILE_ROWS, num_blocks, block_bytes)
    scales = tiles[..., :_SCALES].reshape(*tiles.shape[:2], TILE_ROWS, 2)
    by_tile[..., :2] = scales.swapaxes(1, 2)
    by_tile[..., 2:] = _INTEGERS[name](tiles[..., _SCALES:]).swapaxes(1, 2)
    return {"blocks": blocks[:rows]}


def _tiled_format(name: str, rows: int, columns: int) -> Format:
    if not has_form(name):
        raise ConfigError(f"format {name!r} has no compute form; {', '.join(_INTEGERS)} have")
    if rows < 0 or columns < 0:
        raise ConfigError(f"a matrix cannot have {rows} x {columns} elements")
    return find_format(name)


def values_in(array: np.ndarray, role: Role, *, stored: bool = False) -> np.ndarray:
    """Return a role's array from a slot of the host; of a format, the values as float32.

    Parameters
    ----------
    array : ndarray
    role : Role
    stored : bool, default False
        The array is as in the file, not as in a slot.
    """
    if not role.format:
        return array
    if role.is_tiled or (has_form(role.format) and not stored):
        parts = untile(array, role.format, *role.shape)
    else:
        parts = find_format(role.format).split(array, *role.shape)
    return find_format(role.format).dequantize(parts)


def _bytes_of_q8_0(values: np.ndarray) -> np.ndarray:
    """Return [tiles, blocks, rows, 32]: of 4 rows, pairs of columns lie side by side."""
    # Chunk of 4 columns, group of 4 rows, pair of columns, row, column.
    split = values.reshape(*values.shape[:2], 8, 4, 2, 4, 2)
    return split.transpose(0, 1, 3, 5, 2, 4, 6).reshape(*values.shape[:2], TILE_ROWS, 32)


def _bytes_of_q4_0(values: np.ndarray) -> np.ndarray:
    """Return [tiles, blocks, rows, 16]: a row has 8 columns in 4 bytes, the even ones first."""
    split = values.reshape(*values.shape[:2], 4, TILE_ROWS, 4).swapaxes(2, 3)
    nibbles = np.stack([split & 15, split >> 4], -1)  # ..., chunk, byte, half
    # Bytes 0 and 1 have columns 0, 2, 4, 6 of the 8; bytes 2 and 3 have 1, 3, 5, 7.
    by_column = nibbles.reshape(*nibbles.shape[:4], 2, 4).swapaxes(4, 5)
    columns = by_column.reshape(*values.shape[:2], TILE_ROWS, 32)
    return columns[..., :16] | columns[..., 16:] << 4


_INTEGERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "q8_0": _bytes_of_q8_0,
    "q4_0": _bytes_of_q4_0,
}
