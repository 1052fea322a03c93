"""Format: the meaning of a weight matrix' bytes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moecache.errors import ConfigError
from moecache.formats.form import Form

Parts = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
# By name; each is put there by the file that has it.
FORMATS: dict[str, "Format"] = {}
# Each returns a format that has parameters in its name, or None.
PARSERS: list[Callable[[str], "Format | None"]] = []
# Names of formats that have parameters, for messages.
EXAMPLES = ("fp8[128x128,f32]", "int4[1x32,bf16]", "gptq4[128,f16]", "awq4[128,f16]")


@dataclass(frozen=True)
class Format(ABC):
    """How a weight matrix [rows, columns] is stored, and what its values are.

    Parameters
    ----------
    name : str
        Such as "bf16" or "q4_0"; that of ggml where it has the format.
    block : (int, int)
        Rows and columns that are stored together, and share a scale; 0 for all.
    """

    name: str
    block: tuple[int, int]

    @property
    def form(self) -> Form | None:
        """How the kernels want a matrix, if that is another order than the file's."""
        return None

    @property
    def has_form(self) -> bool:
        """Whether it has a compute form."""
        return self.form is not None

    def form_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix in its compute form; 0 if there is none."""
        return 0 if self.form is None else self.form.nbytes(rows, columns)

    @abstractmethod
    def parts(self, rows: int, columns: int) -> Parts:
        """Return dtype and shape of each array that a matrix consists of, by name.

        Raises
        ------
        ConfigError
            If no matrix of this shape can be stored.
        """

    @abstractmethod
    def dequantize(
        self, parts: Mapping[str, np.ndarray], dtype: npt.DTypeLike = np.float32
    ) -> np.ndarray:
        """Return the values, exact in float32 and then rounded once.

        Parameters
        ----------
        parts : mapping of str to ndarray
            As `parts` says.
        dtype : numpy dtype, default float32

        Returns
        -------
        ndarray, shape [rows, columns]
        """

    @abstractmethod
    def quantize(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Return the parts that are nearest to some values, as the format defines it.

        Parameters
        ----------
        values : ndarray of float, shape [rows, columns]

        Raises
        ------
        ConfigError
            If the shape cannot be stored, or a value is infinite or no number and the format
            has none.
        """

    @property
    def most(self) -> float:
        """The size of the code farthest from zero; 1 where no scale can be too large."""
        return 1

    @property
    def has_more_to_check(self) -> bool:
        """Whether `check` looks at more than scales."""
        return False

    def check(self, parts: Mapping[str, np.ndarray]) -> None:  # noqa: B027 - most bytes are values
        """Raise FormatError if these are no numbers: where scales are infinite or NaN.

        Or where the largest code times a scale is infinite in float32. Codes that are no numbers
        themselves, as FP8 has, are values.
        """

    def nbytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix."""
        parts = self.parts(rows, columns).values()
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in parts)

    def split(self, raw: np.ndarray, rows: int, columns: int) -> dict[str, np.ndarray]:
        """Return the parts of a matrix whose bytes follow each other, as views.

        Parameters
        ----------
        raw : ndarray of uint8, shape [nbytes(rows, columns)]
        """
        parts, start = {}, 0
        for name, (dtype, shape) in self.parts(rows, columns).items():
            stop = start + dtype.itemsize * math.prod(shape)
            parts[name] = raw[start:stop].view(dtype).reshape(shape)
            start = stop
        return parts

    @property
    def bits_per_weight(self) -> float:
        """Bits that a weight takes, scales included."""
        return self.nbytes(*self.block) * 8 / (self.block[0] * self.block[1])


def find_format(name: str) -> Format:
    """Return a format by its name.

    Raises
    ------
    ConfigError
        If there is none.
    """
    found = FORMATS.get(name) if isinstance(name, str) else None
    for parse in PARSERS if found is None and isinstance(name, str) else ():
        found = found or parse(name)
    if found is None:
        known = ", ".join((*FORMATS, *EXAMPLES))
        raise ConfigError(f"format {name!r} is not supported; supported are {known}")
    return found


def format_of(dtype: npt.DTypeLike) -> Format:
    """Return the format of a matrix whose elements are numbers of a dtype.

    Raises
    ------
    ConfigError
        If there is none.
    """
    wanted = np.dtype(dtype)
    for known in FORMATS.values():
        if known.block == (1, 1) and known.parts(1, 1)["values"][0] == wanted:
            return known
    raise ConfigError(f"no format has elements of {wanted}; supported are {', '.join(FORMATS)}")


def quantize(values: npt.ArrayLike, name: str) -> dict[str, np.ndarray]:
    """Return the parts of a matrix in a format; see `Format.quantize`."""
    return find_format(name).quantize(np.asarray(values))


def check_matrix(values: np.ndarray) -> None:
    """Raise ConfigError if this is not a matrix of floating-point numbers."""
    if values.ndim != 2 or "float" not in values.dtype.name:
        raise ConfigError(
            f"a matrix [rows, columns] of floating-point numbers is needed, got {values.dtype} "
            f"of shape {list(values.shape)}"
        )
