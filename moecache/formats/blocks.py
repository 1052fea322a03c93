"""ggml's formats of blocks of 32 columns: q8_0, q4_0.

A block is a scale d (float16) and 32 integers q: d * q, or d * (q - 8). Source: ggml's
`block_q8_0` and `block_q4_0`, and its reference quantisers, whose bits these give.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moecache.errors import ConfigError
from moecache.formats.base import FORMATS, Format, Parts, check_matrix
from moecache.formats.form import BLOCK_COLUMNS, Form


@dataclass(frozen=True)
class BlockFormat(Format):
    """Blocks one after the other, rows one after the other.

    Parameters
    ----------
    block_bytes : int
        Bytes of a block: 2 of the scale, then the integers.
    """

    block_bytes: int

    @property
    def form(self) -> Form:
        """The compute form: the same blocks, 16 rows interleaved."""
        return Form("i8" if self.block_bytes == 34 else "i4", "f16", BLOCK_COLUMNS)

    def parts(self, rows: int, columns: int) -> Parts:
        """Return one array, "blocks" [rows, columns / 32, bytes of a block]."""
        if columns % BLOCK_COLUMNS:
            raise ConfigError(
                f"{self.name} stores whole blocks of {BLOCK_COLUMNS} columns; {columns} are not"
            )
        shape = (rows, columns // BLOCK_COLUMNS, self.block_bytes)
        return {"blocks": (np.dtype(np.uint8), shape)}

    def dequantize(
        self, parts: Mapping[str, np.ndarray], dtype: npt.DTypeLike = np.float32
    ) -> np.ndarray:
        """Return scale times integer, a float32 product that is rounded once more if asked."""
        blocks = parts["blocks"]
        scales = blocks[..., :2].copy().view(np.float16).astype(np.float32)
        integers = self._integers(blocks[..., 2:]).astype(np.float32)
        shape = len(blocks), blocks.shape[1] * BLOCK_COLUMNS
        with np.errstate(over="ignore", invalid="ignore"):  # such as zero times infinity
            return (scales * integers).reshape(shape).astype(dtype, copy=False)

    def quantize(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Return blocks, as ggml's reference quantiser makes them."""
        check_matrix(values)
        _, shape = self.parts(*values.shape)["blocks"]
        wide = values.astype(np.float32).reshape(*shape[:2], BLOCK_COLUMNS)
        if not np.isfinite(wide).all():
            raise ConfigError(f"{self.name} has no infinity and no NaN; some values are")
        scale = self._scale(wide)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            inverse = np.float32(1) / scale
            stored = scale.astype(np.float16)
        if not np.isfinite(stored).all():
            raise ConfigError(f"{self.name} has scales of float16: the values are too large")
        # Of zero, and of scales so small that float16 has none of them: all is zero.
        inverse[np.isinf(inverse)] = 0
        blocks = np.empty(shape, np.uint8)
        blocks[..., :2] = stored.view(np.uint8)
        blocks[..., 2:] = self._bytes(wide * inverse)
        return {"blocks": blocks}

    def _scale(self, wide: np.ndarray) -> np.ndarray:
        """Return each block's scale, float32 [..., 1]."""
        raise NotImplementedError

    def _bytes(self, scaled: np.ndarray) -> np.ndarray:
        """Return what is stored of values that were divided by their scale."""
        raise NotImplementedError

    def _integers(self, stored: np.ndarray) -> np.ndarray:
        """Return the integers of what is stored, int8 [..., 32]."""
        raise NotImplementedError


class _Q8(BlockFormat):
    def _scale(self, wide: np.ndarray) -> np.ndarray:
        return np.abs(wide).max(-1, keepdims=True) / np.float32(127)

    def _bytes(self, scaled: np.ndarray) -> np.ndarray:
        # Halves away from zero, as C's roundf; clipped where the scale's own rounding overflows.
        rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
        return np.clip(rounded, -128, 127).astype(np.int8).view(np.uint8)

    def _integers(self, stored: np.ndarray) -> np.ndarray:
        return stored.view(np.int8)


class _Q4(BlockFormat):
    def _scale(self, wide: np.ndarray) -> np.ndarray:
        # The largest value, with its sign, becomes -8.
        largest = np.abs(wide).argmax(-1, keepdims=True)
        return np.take_along_axis(wide, largest, -1) / np.float32(-8)

    def _bytes(self, scaled: np.ndarray) -> np.ndarray:
        quants = np.clip(np.trunc(scaled + np.float32(8.5)), 0, 15).astype(np.uint8)
        return quants[..., :16] | quants[..., 16:] << 4

    def _integers(self, stored: np.ndarray) -> np.ndarray:
        return np.concatenate([stored & 15, stored >> 4], -1).astype(np.int8) - np.int8(8)


Q8_0 = _Q8("q8_0", (1, BLOCK_COLUMNS), 34)
Q4_0 = _Q4("q4_0", (1, BLOCK_COLUMNS), 18)
FORMATS.update({known.name: known for known in (Q8_0, Q4_0)})
