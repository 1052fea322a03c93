"""ggml's formats of code books, iq1_s to iq3_s: their values are the `gguf` package's.

A block has a scale d (float16), and for each 16 or 32 columns an odd integer that multiplies it.
A column's entry of the code book, with its sign and its delta, is one of at most 16 integers, in
eighths (iq1, iq2), quarters (iq3_xxs) or ones: the compute form has an index of these. Source:
`gguf.quants`.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moecache.errors import ConfigError
from moecache.formats.base import FORMATS
from moecache.formats.blocks import BlockFormat
from moecache.formats.form import SUPER_COLUMNS, Form
from moecache.formats.scaled import check_scales

# Per name: bytes of a block, codes of the form, columns that share an integer.
_KINDS = {
    "iq1_s": (50, "iq1", 32),
    "iq1_m": (56, "iq1", 16),
    "iq2_xxs": (66, "iq2", 32),
    "iq2_xs": (74, "iq2", 16),
    "iq2_s": (82, "iq2", 16),
    "iq3_xxs": (98, "iq3x", 32),
    "iq3_s": (110, "iq3", 32),
}
# What codes mean, and in which unit: as `MC_TABLES` and `MC_CODES` of the kernels have it.
TABLES = {
    "iq1": (0.125, (-9, -7, -1, 1, 7, 9)),
    "iq2": (0.125, (-43, -25, -8, 8, 25, 43)),
    "iq3": (1.0, tuple(range(-15, 16, 2))),
    "iq3x": (0.25, (-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62)),
}


@dataclass(frozen=True)
class CodeBook(BlockFormat):
    """Blocks of code books.

    Attributes
    ----------
    plain : BlockFormat
        The order of bytes by way of which the compute form is made: d, integers of 8 bits for each
        16 or 32 columns, then indices of 4 bits, of 32 columns the first 16 in low nibbles.
    """

    @property
    def plain(self) -> BlockFormat:
        """The format that `repack` makes blocks of."""
        assert self.order is not None
        num_scales = SUPER_COLUMNS // self.order.group
        name = f"super{self.order.group}"
        return BlockFormat(name, self.block, 2 + num_scales + SUPER_COLUMNS // 2, self.order, (0,))

    def repack(self, blocks: np.ndarray) -> np.ndarray:
        """Return blocks [rows, blocks, bytes] in the order of `plain`."""
        assert self.order is not None
        unit, table = TABLES[self.order.codes]
        scales = self._scales(blocks)
        ones = self._with_number(blocks, np.float16(1))
        values = self._values(ones).reshape(*scales.shape, self.order.group)
        integers = values / (scales[..., None] * np.float32(unit))
        codes = np.searchsorted(table, integers).astype(np.uint8)
        codes = codes.reshape(*blocks.shape[:2], SUPER_COLUMNS // 32, 2, 16)
        packed = (codes[..., 0, :] | codes[..., 1, :] << 4).reshape(*blocks.shape[:2], -1)
        return np.concatenate([self._number(blocks), scales, packed], -1)

    def _scales(self, blocks: np.ndarray) -> np.ndarray:
        """Return the integers that multiply d, uint8 [rows, blocks, groups]."""
        name, four = self.name, np.uint8(4)
        if name == "iq1_m":
            words = np.ascontiguousarray(blocks[..., 48:56]).view(np.uint16)
            stored = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).astype(np.uint8)
        elif name == "iq1_s":
            stored = (blocks[..., 35:50:2] >> four & np.uint8(7))[..., None]
        elif name in ("iq2_xxs", "iq3_xxs"):
            step, first = (8, 2 + 7) if name == "iq2_xxs" else (4, 2 + 64 + 3)
            stored = (blocks[..., first::step] >> four)[..., None]
        else:
            tail = blocks[..., {"iq2_xs": 66, "iq2_s": 74, "iq3_s": 106}[name] :]
            stored = np.stack([tail & np.uint8(15), tail >> four], -1)
        return (2 * stored + 1).reshape(*blocks.shape[:2], -1)

    def _number(self, blocks: np.ndarray) -> np.ndarray:
        """Return the bytes of d."""
        if self.name != "iq1_m":
            return blocks[..., :2]
        words = np.ascontiguousarray(blocks[..., 48:56]).view(np.uint16)
        parts = (words >> 12) << np.array([0, 4, 8, 12], np.uint16)
        found: np.ndarray = np.bitwise_or.reduce(parts, -1, keepdims=True).view(np.uint8)
        return found

    def check(self, parts: Mapping[str, np.ndarray]) -> None:
        """Raise FormatError if a scale is infinite or NaN."""
        numbers = np.ascontiguousarray(self._number(parts["blocks"]))
        check_scales(numbers.view(np.float16), self.name)

    def _with_number(self, blocks: np.ndarray, number: np.float16) -> np.ndarray:
        """Return blocks that have another d."""
        changed, bits = blocks.copy(), number.view(np.uint16)
        if self.name != "iq1_m":
            changed[..., :2] = np.array([bits]).view(np.uint8)
            return changed
        for i in range(4):
            nibble = np.uint8(int(bits) >> 4 * i & 15)
            changed[..., 49 + 2 * i] = changed[..., 49 + 2 * i] & 15 | nibble << 4
        return changed

    def _values(self, blocks: np.ndarray) -> np.ndarray:
        gguf = self._package()
        if not blocks.size:
            return np.zeros(blocks.shape[:2], np.float32)
        rows = np.ascontiguousarray(blocks).reshape(len(blocks), -1)
        return np.asarray(gguf.dequantize(rows, gguf.GGMLQuantizationType[self.name.upper()]))

    def _package(self) -> Any:
        try:
            return importlib.import_module("gguf")
        except ImportError as error:
            raise ConfigError(
                f"values of {self.name} need the gguf package; install it with: "
                "pip install 'moecache[gguf]'"
            ) from error


for _name, (_nbytes, _codes, _group) in _KINDS.items():
    # iq1_m has its scale in the highest bits of four numbers.
    _places = () if _name == "iq1_m" else (0,)
    _form = Form(_codes, "f16*i8", _group)
    FORMATS[_name] = CodeBook(_name, (1, SUPER_COLUMNS), _nbytes, _form, _places)
