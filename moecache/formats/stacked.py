"""Matrices that are stacked, each in a format of its own."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moecache.errors import ConfigError
from moecache.formats.base import FORMATS, PARSERS, Format, Parts

_BETWEEN = "+"


@dataclass(frozen=True)
class StackedFormat(Format):
    """Matrices of as many rows above each other, such as gate and up, in several formats.

    Parameters
    ----------
    formats : tuple of Format
        From the top on; each has one part.
    """

    formats: tuple[Format, ...]

    @property
    def has_form(self) -> bool:
        """Whether kernels compute with all, and some are not plain numbers."""
        kinds = [known.has_form for known in self.formats if not _is_plain(known)]
        return bool(kinds) and all(kinds)

    def form_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of all as the kernels want them, one behind the other."""
        if not self.has_form:
            return 0
        return sum(self.sizes(rows, columns, is_form=True))

    def sizes(self, rows: int, columns: int, *, is_form: bool = False) -> list[int]:
        """Return the bytes of each matrix, as in a file or as kernels want it."""
        shape = rows // len(self.formats), columns
        return [
            (known.form_bytes if is_form and not _is_plain(known) else known.nbytes)(*shape)
            for known in self.formats
        ]

    @property
    def has_more_to_check(self) -> bool:
        """Whether `check` of one looks at more than scales."""
        return any(known.has_more_to_check for known in self.formats)

    def parts(self, rows: int, columns: int) -> Parts:
        """Return the part of each matrix, by its number."""
        if rows % len(self.formats):
            raise ConfigError(f"{rows} rows are not {len(self.formats)} times as many: {self.name}")
        found = {}
        for number, known in enumerate(self.formats):
            (found[str(number)],) = known.parts(rows // len(self.formats), columns).values()
        return found

    def matrices(
        self, raw: np.ndarray, rows: int, columns: int, *, is_form: bool = False
    ) -> Iterator[tuple[Format, np.ndarray, tuple[int, int]]]:
        """Return format, bytes and shape of each matrix, as in a file or as kernels want them."""
        shape, start = (rows // len(self.formats), columns), 0
        sizes = self.sizes(rows, columns, is_form=is_form)
        for known, size in zip(self.formats, sizes, strict=True):
            yield known, raw[start : start + size], shape
            start += size

    def dequantize(
        self, parts: Mapping[str, np.ndarray], dtype: npt.DTypeLike = np.float32
    ) -> np.ndarray:
        """Return the values of all, one matrix above the other."""
        return np.concatenate(
            [
                known.dequantize(_alone(known, part), dtype)
                for known, part in zip(self.formats, parts.values(), strict=True)
            ]
        )

    def quantize(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Return the parts that are nearest to some values."""
        if len(values) % len(self.formats):
            raise ConfigError(f"{len(values)} rows cannot be split for {self.name}")
        pieces = np.split(values, len(self.formats))
        return {
            str(number): next(iter(known.quantize(piece).values()))
            for number, (known, piece) in enumerate(zip(self.formats, pieces, strict=True))
        }

    def check(self, parts: Mapping[str, np.ndarray]) -> None:
        """Raise FormatError if scales of one are no numbers."""
        for known, part in zip(self.formats, parts.values(), strict=True):
            known.check(_alone(known, part))


def stacked_name(formats: Sequence[Format]) -> str:
    """Return the name of matrices above each other; "" if one has several parts.

    Examples
    --------
    >>> stacked_name([FORMATS["q4_0"], FORMATS["f16"]])
    'q4_0+f16'
    """
    is_plain = all(len(known.parts(0, 0)) == 1 for known in formats)
    return _BETWEEN.join(known.name for known in formats) if is_plain else ""


@functools.cache
def parse(name: str) -> StackedFormat | None:
    """Return the format that has such a name."""
    formats = tuple(FORMATS[one] for one in name.split(_BETWEEN) if one in FORMATS)
    if len(formats) < 2 or stacked_name(formats) != name:
        return None
    columns = max(known.block[1] for known in formats)  # powers of two
    return StackedFormat(name, (len(formats), columns), formats)


def _is_plain(known: Format) -> bool:
    """Return whether elements are numbers, which kernels take as they are."""
    return known.block == (1, 1)


def _alone(known: Format, part: np.ndarray) -> dict[str, np.ndarray]:
    return dict.fromkeys(known.parts(0, 0), part)


PARSERS.append(parse)
