"""Recipe: how a matrix of floating-point numbers becomes tiles of a format."""

from dataclasses import dataclass, replace

import numpy as np

from moecache.errors import ConfigError
from moecache.formats import TILE_ROWS, find_format
from moecache.kernels import has_form, tile
from moecache.layout import ExpertLayout, Role
from moecache.stores._index import TensorPart

_MATRICES = ("gate_up", "up", "down")


@dataclass(frozen=True)
class Recipe:
    """A matrix [rows, columns] of a dtype, to be quantized and tiled.

    Parameters
    ----------
    format : str
    dtype : numpy.dtype
        Of the checkpoint's numbers.
    rows, columns : int
    """

    format: str
    dtype: np.dtype
    rows: int
    columns: int

    @property
    def source_bytes(self) -> int:
        """Bytes of the checkpoint's matrix."""
        return self.rows * self.columns * self.dtype.itemsize

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the tiles: [tiles, blocks, bytes of a block of 16 rows]."""
        known = find_format(self.format)
        blocks = self.columns // known.block[1]
        nbytes = known.nbytes(*known.block) * TILE_ROWS
        return self.rows // TILE_ROWS, blocks, nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the tiles."""
        return find_format(self.format).nbytes(self.rows, self.columns)

    def make(self, raw: bytearray) -> np.ndarray:
        """Return the tiles, uint8 [nbytes].

        Raises
        ------
        ConfigError
            If the format cannot have the values.
        """
        values = np.frombuffer(raw, self.dtype).reshape(self.rows, self.columns)
        blocks = find_format(self.format).quantize(values)["blocks"]
        tiles = np.empty(self.nbytes, np.uint8)
        tile(blocks, self.format, self.rows, self.columns, tiles)
        return tiles


def recipe_for(part: TensorPart, role: Role, name: str) -> Recipe | None:
    """Return how a part of a role is quantized, or None if it stays as it is: a bias."""
    if role.name not in _MATRICES:
        return None
    rows, columns = part.shape
    return Recipe(name, role.dtype, rows, columns)


def quantized_layout(layout: ExpertLayout, name: str) -> ExpertLayout:
    """Return what the experts look like in a format.

    Raises
    ------
    ConfigError
        If they cannot be quantized: the message says which matrix cannot, and why.
    """
    if not has_form(name):
        raise ConfigError(f"format {name!r} cannot be packed; q8_0 and q4_0 can")
    layers = []
    for roles in layout.layers:
        known = {role.name: role for role in roles}
        for role in roles:
            if role.format:
                raise ConfigError(f"the experts are in {role.format} already; pack the original")
        wide = known.get("gate_up") or known.get("up")
        down = known.get("down")
        if wide is None or down is None or len(wide.shape) != 2 or len(down.shape) != 2:
            raise ConfigError(f"experts of {', '.join(known)} have no gate_up (or up) and down")
        width = wide.shape[0] // (2 if wide.name == "gate_up" else 1)
        if down.shape != (wide.shape[1], width):
            raise ConfigError(
                f"{wide.name} {list(wide.shape)} and down {list(down.shape)} are not "
                "[rows, columns] of one feed-forward; what is stored transposed cannot be packed "
                "in a format"
            )
        if width % TILE_ROWS or wide.shape[1] % TILE_ROWS:
            raise ConfigError(
                f"a width of {width} and a hidden size of {wide.shape[1]} are no multiples of "
                f"{TILE_ROWS}, which tiles have"
            )
        layers.append(tuple(_quantized(role, name) for role in roles))
    return replace(layout, layers=layers)


def _quantized(role: Role, name: str) -> Role:
    if role.name not in _MATRICES:
        return role
    if "float" not in role.dtype.name or role.dtype.itemsize < 2:
        raise ConfigError(f"{role.name} is {role.dtype}; float16, bfloat16 and wider are quantized")
    return Role(role.name, role.shape, format=name, is_tiled=True)
