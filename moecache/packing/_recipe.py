"""Recipe: how the bytes of a packed tensor are made of some of the checkpoint's."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from moecache.formats import BF16, TILE_ROWS, find_format
from moecache.kernels import values_in
from moecache.kernels.forms import joined, tile
from moecache.layout import Role
from moecache.packing._report import Deviation

# File, offset and length of bytes of the checkpoint.
Place = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Recipe(ABC):
    """A tensor that is made of a matrix [rows, columns].

    Parameters
    ----------
    source : str
        The matrix' name in errors.
    places : tuple of (int, int, int)
        File, offset and length of each of its parts.
    format : str
        The quantized matrix's format.
    rows, columns : int
    """

    source: str
    places: tuple[Place, ...]
    format: str
    rows: int
    columns: int

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the tensor."""

    @abstractmethod
    def make(self, raw: np.ndarray) -> tuple[np.ndarray, Deviation | None]:
        """Return the tensor, uint8 [nbytes], and how far its values are from the original ones.

        Parameters
        ----------
        raw : ndarray of uint8
            The parts' bytes, one part after the other.

        Raises
        ------
        ConfigError, FormatError
            If the format cannot have the values, or the parts are damaged.
        """


@dataclass(frozen=True, slots=True)
class Quantize(Recipe):
    """Tiles of a format.

    Parameters
    ----------
    dtype : numpy.dtype
        Type of the checkpoint's numbers.
    matrices : int
        Matrices of as many rows, one above the other, that are quantized each for itself.
    is_transposed : bool, default False
        Whether the checkpoint has them as [columns, rows].
    """

    dtype: np.dtype
    matrices: int
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the tiles: [tiles, groups, bytes of a group of 16 rows]."""
        form = find_format(self.format).form
        assert form is not None
        groups, nbytes = form.num_groups(self.columns), form.tile_bytes(self.columns)
        if nbytes % groups:  # a factor of all scales begins each tile
            groups = 1
        return self.rows // TILE_ROWS, groups, nbytes // groups

    @property
    def nbytes(self) -> int:
        """Bytes of the tiles."""
        tiles, groups, nbytes = self.shape
        return tiles * groups * nbytes

    def make(self, raw: np.ndarray) -> tuple[np.ndarray, Deviation]:
        """Return the tiles; see `Recipe.make`."""
        known, tiles = find_format(self.format), np.empty(self.nbytes, np.uint8)
        rows, deviations = self.rows // self.matrices, []
        numbers, shape = raw.view(self.dtype), (self.rows, self.columns)
        ordered = numbers.reshape(shape[::-1]).T if self.is_transposed else numbers
        stacked = np.ascontiguousarray(ordered).reshape(self.matrices, rows, self.columns)
        for values, out in zip(stacked, tiles.reshape(self.matrices, -1), strict=True):
            parts = known.quantize(values)
            tile(joined(parts.values()), known.name, rows, self.columns, out)
            deviations.append(Deviation.between(known.dequantize(parts), values))
        return tiles, Deviation.of_all(deviations)


@dataclass(frozen=True, slots=True)
class Tile(Recipe):
    """The compute form, with the same values."""

    @property
    def shape(self) -> tuple[int]:
        """Shape of the form: its bytes."""
        return (self.nbytes,)

    @property
    def nbytes(self) -> int:
        """Bytes of the form."""
        form = find_format(self.format).form
        assert form is not None
        return form.nbytes(self.rows, self.columns)

    def make(self, raw: np.ndarray) -> tuple[np.ndarray, None]:
        """Return the form; see `Recipe.make`."""
        known, form = find_format(self.format), np.empty(self.nbytes, np.uint8)
        known.check(known.split(raw, self.rows, self.columns))
        tile(raw, self.format, self.rows, self.columns, form)
        return form, None


@dataclass(frozen=True, slots=True)
class Dequantize(Recipe):
    """The values of a matrix as bfloat16.

    Parameters
    ----------
    is_transposed : bool
        Whether the model has them as [columns, rows].
    """

    is_transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix in the model."""
        shape = self.rows, self.columns
        return shape[::-1] if self.is_transposed else shape

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return BF16.nbytes(self.rows, self.columns)

    def make(self, raw: np.ndarray) -> tuple[np.ndarray, None]:
        """Return the values; see `Recipe.make`."""
        known = find_format(self.format)
        known.check(known.split(raw, self.rows, self.columns))
        role = Role("", (self.rows, self.columns), format=self.format)
        values = values_in(raw, role, stored=True, dtype=BF16.dtype)
        ordered = np.ascontiguousarray(values.T if self.is_transposed else values)
        return ordered.reshape(-1).view(np.uint8), None
