"""ggml's formats of blocks of 256 columns: q2_k to q6_k, and iq4_xs.

A block has a scale d (float16), maybe another one for offsets, and for each 16 or 32 columns an
integer that multiplies it: (d * scale) * q - (dmin * min). All products are exact in float32, so
that a value is rounded once where there is an offset, and never where there is none. llama.cpp's
quantiser alone makes them. Source: ggml's `block_q4_K` and the like; `gguf.quants`, whose bits
these give.
"""

import numpy as np

from moecache.formats.base import FORMATS
from moecache.formats.blocks import IQ4, BlockFormat, nibbles, number
from moecache.formats.form import SUPER_COLUMNS, Form


class _SuperFormat(BlockFormat):
    def _values(self, blocks: np.ndarray) -> np.ndarray:
        scales, offsets, codes = self._read(blocks)
        shape = (*scales.shape, SUPER_COLUMNS // scales.shape[-1])
        values = (number(blocks, self.numbers_at[0]) * scales)[..., None] * codes.reshape(shape)
        if offsets is None:
            return values
        return values - (number(blocks, self.numbers_at[1]) * offsets)[..., None]

    def _read(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """Return integers of scales and of offsets [..., groups], and what codes mean."""
        raise NotImplementedError


class _Q2(_SuperFormat):
    def _read(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        scales = blocks[..., :16]
        return _wide(scales & 15), _wide(scales >> 4), _wide(_planes(blocks[..., 16:80], 2, 32))


class _Q3(_SuperFormat):
    def _read(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        low, high = nibbles(blocks[..., 96:104]), _planes(blocks[..., 104:108], 2, 4)
        third = _planes(blocks[..., :32], 1, 32)
        codes = _planes(blocks[..., 32:96], 2, 32) | third << 2
        return _wide(low | high << 4) - 32, None, _wide(codes) - 4


class _Q45(_SuperFormat):
    """Q4_K and q5_k; scales and offsets of 6 bits lie in 12 bytes."""

    def _read(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        one, two, both = (blocks[..., at : at + 4] for at in (4, 8, 12))
        scales = np.concatenate([one & 63, both & 15 | one >> 2 & 48], -1)
        offsets = np.concatenate([two & 63, both >> 4 | two >> 2 & 48], -1)
        codes = _planes(blocks[..., -128:], 4, 32)
        if self.name == "q5_k":
            codes = codes | _planes(blocks[..., 16:48], 1, 32) << 4
        return _wide(scales), _wide(offsets), _wide(codes)


class _Q6(_SuperFormat):
    def _read(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        codes = _planes(blocks[..., :128], 4, 64) | _planes(blocks[..., 128:192], 2, 32) << 4
        scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
        return _wide(scales), None, _wide(codes) - 32


class _Iq4Xs(_SuperFormat):
    def _read(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1)
        high = blocks[..., 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
        scales = low.reshape(*low.shape[:-2], 8) | high.reshape(*high.shape[:-2], 8) << 4
        return _wide(scales) - 32, None, IQ4[_planes(blocks[..., 8:], 4, 16)]


def _planes(stored: np.ndarray, bits: int, width: int) -> np.ndarray:
    """Return integers of some bits: the lowest ones of `width` bytes, then the next, and so on."""
    *shape, size = stored.shape
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    chunks = stored.reshape(*shape, size // width, 1, width) >> shifts & np.uint8((1 << bits) - 1)
    return chunks.reshape(*shape, size * 8 // bits)


def _wide(integers: np.ndarray) -> np.ndarray:
    return integers.astype(np.float32)


def _form(codes: str, group: int, *, has_offsets: bool = False) -> Form:
    return Form(codes, "f16*i8", group, has_offsets=has_offsets)


_BLOCK = (1, SUPER_COLUMNS)
FORMATS.update(
    {
        known.name: known
        for known in (
            _Q2("q2_k", _BLOCK, 84, _form("u4", 16, has_offsets=True), (80, 82)),
            _Q3("q3_k", _BLOCK, 110, _form("i4", 16), (108,)),
            _Q45("q4_k", _BLOCK, 144, _form("u4", 32, has_offsets=True), (0, 2)),
            _Q45("q5_k", _BLOCK, 176, _form("u5", 32, has_offsets=True), (0, 2)),
            _Q6("q6_k", _BLOCK, 210, _form("i6", 16), (208,)),
            _Iq4Xs("iq4_xs", _BLOCK, 136, _form("iq4", 32), (0,)),
        )
    }
)
