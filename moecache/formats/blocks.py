"""ggml's formats of blocks of 32 columns: q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl and mxfp4_gguf.

A block is a scale d (float16), maybe a number m that is added, and 32 integers q: d * q + m. With 4
or 5 bits, the first 16 columns are in low nibbles, the others in high ones; fifth bits lie apart.
Sources: ggml's `block_q4_0` and the like, and its reference quantisers, whose bits these give.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moecache.errors import ConfigError, FormatError
from moecache.formats.base import FORMATS, Format, Parts, check_matrix
from moecache.formats.form import BLOCK_COLUMNS, Form
from moecache.formats.scaled import E2M1, POWERS, check_scales

# The values of iq4_nl's and iq4_xs' codes: ggml's `kvalues_iq4nl`.
IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)


@dataclass(frozen=True)
class BlockFormat(Format):
    """Blocks one after the other, rows one after the other.

    Parameters
    ----------
    block_bytes : int
        Bytes of a block.
    order : Form or None
        The compute form: the same blocks, 16 rows interleaved.
    numbers_at : tuple of int, default (0,)
        Offsets of the float16 numbers in a block.
    """

    block_bytes: int
    order: Form | None
    numbers_at: tuple[int, ...] = (0,)

    @property
    def form(self) -> Form | None:
        """The compute form."""
        return self.order

    def parts(self, rows: int, columns: int) -> Parts:
        """Return one array, "blocks" [rows, blocks of a row, bytes of a block]."""
        if columns % self.block[1]:
            raise ConfigError(
                f"{self.name} stores whole blocks of {self.block[1]} columns; {columns} are not"
            )
        shape = (rows, columns // self.block[1], self.block_bytes)
        return {"blocks": (np.dtype(np.uint8), shape)}

    def dequantize(
        self, parts: Mapping[str, np.ndarray], dtype: npt.DTypeLike = np.float32
    ) -> np.ndarray:
        """Return the values as ggml computes them in float32, rounded once more if asked."""
        blocks = parts["blocks"]
        shape = len(blocks), blocks.shape[1] * self.block[1]
        with np.errstate(over="ignore", invalid="ignore"):  # such as zero times infinity
            return self._values(blocks).reshape(shape).astype(dtype, copy=False)

    def check(self, parts: Mapping[str, np.ndarray]) -> None:
        """Raise FormatError if a scale, or what is added, is infinite or NaN.

        Float16 times the integers of a block is far below the largest float32.
        """
        for at in self.numbers_at:
            numbers = np.ascontiguousarray(parts["blocks"][..., at : at + 2])
            check_scales(numbers.view(np.float16), self.name)

    def quantize(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Refuse: only what llama.cpp makes in this format is read."""
        check_matrix(values)
        raise ConfigError(
            f"{self.name} is read, not made: llama.cpp's llama-quantize makes it; or choose "
            "another format, such as q4_0"
        )

    def _values(self, blocks: np.ndarray) -> np.ndarray:
        """Return float32 [rows, blocks, columns of a block]."""
        raise NotImplementedError


class _Made(BlockFormat):
    """Blocks that are made of values, too."""

    def quantize(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Return blocks, as ggml's reference quantiser makes them."""
        check_matrix(values)
        _, shape = self.parts(*values.shape)["blocks"]
        wide = values.astype(np.float32).reshape(*shape[:2], self.block[1])
        if not np.isfinite(wide).all():
            raise ConfigError(f"{self.name} has no infinity and no NaN; some values are")
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            parts = {"blocks": self._blocks(wide).reshape(shape)}
        try:
            self.check(parts)
        except FormatError as error:
            kind = "float16" if self.numbers_at else "8 bits"
            raise ConfigError(
                f"{self.name} has scales of {kind}: the values are too large"
            ) from error
        return parts

    def _blocks(self, wide: np.ndarray) -> np.ndarray:
        """Return the blocks of finite float32 [rows, blocks, columns of a block]."""
        raise NotImplementedError


class _Q8(_Made):
    def _values(self, blocks: np.ndarray) -> np.ndarray:
        return number(blocks, 0) * blocks[..., 2:].view(np.int8).astype(np.float32)

    def _blocks(self, wide: np.ndarray) -> np.ndarray:
        scale = np.abs(wide).max(-1, keepdims=True, initial=0) / np.float32(127)
        scaled = wide * _inverse(scale)
        # Halves away from zero, as C's roundf; clipped where the scale's own rounding overflows.
        rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
        return _joined(scale, np.clip(rounded, -128, 127).astype(np.int8).view(np.uint8))


class _Small(_Made):
    """Integers of 4 or 5 bits."""

    @property
    def _bits(self) -> int:
        return 5 if self.name.startswith("q5") else 4

    def _integers(self, blocks: np.ndarray) -> np.ndarray:
        low = nibbles(blocks[..., -16:])
        if self._bits == 4:
            return low
        return low | np.unpackbits(blocks[..., -20:-16], axis=-1, bitorder="little") << 4

    def _stored(self, scaled: np.ndarray) -> list[np.ndarray]:
        """Return what is stored of integers that were not cut off yet."""
        integers = np.clip(np.trunc(scaled), 0, 2**self._bits - 1).astype(np.uint8)
        low = integers & 15
        fifth = np.packbits(integers >> 4, axis=-1, bitorder="little")
        return [fifth] * (self._bits == 5) + [low[..., :16] | low[..., 16:] << 4]


class _Signed(_Small):
    """d * (q - half)."""

    @property
    def _half(self) -> int:
        return 1 << (self._bits - 1)

    def _values(self, blocks: np.ndarray) -> np.ndarray:
        integers = self._integers(blocks).astype(np.int8) - np.int8(self._half)
        return number(blocks, 0) * integers.astype(np.float32)

    def _blocks(self, wide: np.ndarray) -> np.ndarray:
        # The largest value, with its sign, becomes -half.
        largest = (
            np.abs(wide).argmax(-1)[..., None] if wide.size else np.zeros((*wide.shape[:2], 1), int)
        )
        scale = np.take_along_axis(wide, largest, -1) / np.float32(-self._half)
        return _joined(scale, *self._stored(wide * _inverse(scale) + np.float32(self._half + 0.5)))


class _Affine(_Small):
    """d * q + m."""

    def _values(self, blocks: np.ndarray) -> np.ndarray:
        return number(blocks, 0) * self._integers(blocks).astype(np.float32) + number(blocks, 2)

    def _blocks(self, wide: np.ndarray) -> np.ndarray:
        least = wide.min(-1, keepdims=True, initial=np.inf)
        most = wide.max(-1, keepdims=True, initial=-np.inf)
        scale = (most - least) / np.float32(2**self._bits - 1)
        stored = self._stored((wide - least) * _inverse(scale) + np.float32(0.5))
        return _joined(scale, least.astype(np.float16).view(np.uint8), *stored)


class _Iq4(BlockFormat):
    def _values(self, blocks: np.ndarray) -> np.ndarray:
        return number(blocks, 0) * IQ4[nibbles(blocks[..., 2:])]


class _Mxfp4(_Made):
    """FP4 times 2^(byte - 127), as "mxfp4", but ordered by halves and without a zero below zero."""

    def _values(self, blocks: np.ndarray) -> np.ndarray:
        # As ggml's integers, twice FP4 and with one zero, times half of the power: so 255 is one.
        halves = np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 128)
        return halves * (2 * E2M1 + np.float32(0))[nibbles(blocks[..., 1:])]

    @property
    def most(self) -> float:
        """See `Format.most`."""
        return float(E2M1.max())

    def check(self, parts: Mapping[str, np.ndarray]) -> None:
        """Raise FormatError if a scale makes the largest code infinite: from 253 on."""
        check_scales(parts["blocks"][..., 0], self.name, self.most)

    def _blocks(self, wide: np.ndarray) -> np.ndarray:
        largest = np.abs(wide).max(-1, keepdims=True, initial=0)
        powers = np.where(largest > 0, np.floor(np.log2(largest)) + np.float32(125), 0)
        powers = np.clip(powers, 0, 254).astype(np.uint8)
        errors = np.abs(POWERS[powers][..., None] * E2M1 - wide[..., None])
        codes = errors.argmin(-1).astype(np.uint8)
        return np.concatenate([powers, codes[..., :16] | codes[..., 16:] << 4], -1)


def number(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return the float16 that each block has at a byte, as float32 [..., 1]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16).astype(np.float32)


def nibbles(stored: np.ndarray) -> np.ndarray:
    """Return low nibbles, then high ones, along the last axis."""
    return np.concatenate([stored & 15, stored >> 4], -1)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """Return 1 / scale; zero of zero, and of scales so small that float16 has none of them."""
    inverse = np.float32(1) / scale
    inverse[np.isinf(inverse)] = 0
    return inverse


def _joined(scale: np.ndarray, *stored: np.ndarray) -> np.ndarray:
    return np.concatenate([scale.astype(np.float16).view(np.uint8), *stored], -1)


_BLOCK = (1, BLOCK_COLUMNS)
Q8_0 = _Q8("q8_0", _BLOCK, 34, Form("i8", "f16", BLOCK_COLUMNS))
Q4_0 = _Signed("q4_0", _BLOCK, 18, Form("i4", "f16", BLOCK_COLUMNS))
FORMATS.update(
    {
        known.name: known
        for known in (
            Q8_0,
            Q4_0,
            _Affine("q4_1", _BLOCK, 20, Form("u4", "f16", BLOCK_COLUMNS, has_offsets=True), (0, 2)),
            _Signed("q5_0", _BLOCK, 22, Form("i5", "f16", BLOCK_COLUMNS)),
            _Affine("q5_1", _BLOCK, 24, Form("u5", "f16", BLOCK_COLUMNS, has_offsets=True), (0, 2)),
            _Iq4("iq4_nl", _BLOCK, 18, Form("iq4", "f16", BLOCK_COLUMNS)),
            _Mxfp4("mxfp4_gguf", _BLOCK, 17, Form("e2m1", "bf16", BLOCK_COLUMNS), ()),
        )
    }
)
