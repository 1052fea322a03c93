"""Formats of integers with zero points, stored [in, out]: GPTQ and AWQ.

A value is (q - zero) * scale, each for a group of input columns. Sources: `QuantLinear` of AutoGPTQ
and GPTQModel, `WQLinear_GEMM` of AutoAWQ.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moecache.errors import ConfigError, FormatError
from moecache.formats.base import PARSERS, Format, Parts, check_matrix
from moecache.formats.form import BLOCK_COLUMNS, Form
from moecache.formats.scaled import check_scales, dtype_named, unpack

# Which of 8 outputs each nibble of a word of AWQ is, from the lowest on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_NAME = re.compile(
    r"(gptq|gptq_v2|awq)([248])\[([1-9]\d{0,8}|\*),(f16|bf16|f32)(?:,(g_idx|in order))?\]"
)


@dataclass(frozen=True)
class GroupedFormat(Format):
    """Integers, zero points and scales of groups of columns; words of 32 bits hold several.

    Parameters
    ----------
    method : {"gptq", "gptq_v2", "awq"}
        A word has consecutive columns of one row; or, "awq", 8 rows of one column. "gptq" stores
        zero points less 1.
    bits : int
    scale : {"f16", "bf16", "f32"}
    order : {"", "g_idx", "in order"}
        Whether a part "g_idx" says which group each column is of: as it likes ("act-order"), or
        that columns fill the groups in their order, as they do without it.
    """

    method: str
    bits: int
    scale: str
    order: str = ""

    @property
    def form(self) -> Form | None:
        """The compute form, with zero points; None if a group is no multiple of 32 columns."""
        columns = self.block[1]
        if self.order == "g_idx" or columns % BLOCK_COLUMNS:
            return None
        return Form("i8" if self.bits == 8 else "i4", self.scale, columns, has_zeros=True)

    @property
    def most(self) -> float:
        """The largest distance of a code from its zero point."""
        return int(self.zeros(np.array((1 << self.bits) - 1)))

    def parts(self, rows: int, columns: int) -> Parts:
        """Return "codes", "zeros", "scales" [groups, rows], and "g_idx" [columns] if any."""
        each = 32 // self.bits
        if rows % each or columns % each:
            raise ConfigError(
                f"{self.name} has {each} rows and {each} columns in a word; {rows} x {columns} "
                "are not whole words"
            )
        groups = -(-columns // (self.block[1] or columns or 1))
        words, is_awq = np.dtype(np.int32), self.method == "awq"
        parts = {
            "codes": (words, (columns, rows // each) if is_awq else (columns // each, rows)),
            "zeros": (words, (groups, rows // each)),
            "scales": (dtype_named(self.scale), (groups, rows)),
        }
        return parts | ({"g_idx": (words, (columns,))} if self.order else {})

    def dequantize(
        self, parts: Mapping[str, np.ndarray], dtype: npt.DTypeLike = np.float32
    ) -> np.ndarray:
        """Return (q - zero) * scale, a float32 product that is rounded once more if asked.

        Raises
        ------
        FormatError
            If "g_idx" names a group that is not there.
        """
        scales = parts["scales"].astype(np.float32)
        codes = self._codes(parts["codes"])
        group = self.groups(parts, len(codes))
        zeros = self.zeros(self._across(parts["zeros"]).astype(np.int16))
        integers = (codes.astype(np.int16) - zeros[group]).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # such as zero times infinity
            return np.ascontiguousarray((integers * scales[group]).T).astype(dtype, copy=False)

    @property
    def has_more_to_check(self) -> bool:
        """Whether there is an order of columns."""
        return bool(self.order)

    def check(self, parts: Mapping[str, np.ndarray]) -> None:
        """Raise FormatError if a scale is no number or too large, or a group is not there."""
        check_scales(parts["scales"], self.name, self.most)
        columns = len(parts["codes"]) * (1 if self.method == "awq" else 32 // self.bits)
        group = self.groups(parts, columns)
        if self.order == "in order" and not np.array_equal(parts["g_idx"], group):
            raise FormatError(
                f"{self.name}: g_idx has columns in another order than that of their groups, but "
                "desc_act in config.json is not true"
            )

    def zeros(self, stored: np.ndarray) -> np.ndarray:
        """Return zero points, as integers of what is stored of them."""
        return stored + (self.method == "gptq")

    def groups(self, parts: Mapping[str, np.ndarray], columns: int) -> np.ndarray:
        """Return the group of each column."""
        if self.order != "g_idx":
            return np.arange(columns) // (self.block[1] or columns or 1)
        group, num = parts["g_idx"], len(parts["scales"])
        if group.size and not 0 <= group.min() <= group.max() < num:
            raise FormatError(
                f"{self.name}: g_idx goes from {group.min()} to {group.max()}, there are {num} "
                "groups"
            )
        return group

    def quantize(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Refuse: only what is published in this format is read."""
        check_matrix(values)
        raise ConfigError(f"{self.name} is read, not made; choose another format")

    def _codes(self, words: np.ndarray) -> np.ndarray:
        """Return the integers [columns, rows]."""
        if self.method == "awq":
            return self._across(words)
        integers = unpack(np.ascontiguousarray(words.T), self.bits, len(words) * 32 // self.bits)
        return np.ascontiguousarray(integers.T)

    def _across(self, words: np.ndarray) -> np.ndarray:
        """Return the integers of words that have several rows."""
        integers = unpack(words, self.bits, words.shape[1] * 32 // self.bits)
        if self.method != "awq":
            return integers
        ordered = np.empty_like(integers).reshape(*words.shape, len(_AWQ_ORDER))
        ordered[..., _AWQ_ORDER] = integers.reshape(ordered.shape)
        return ordered.reshape(integers.shape)


@functools.cache
def parse(name: str) -> GroupedFormat | None:
    """Return a format by a name such as "awq4[128,f16]" or "gptq4[*,f16,g_idx]"."""
    match = _NAME.fullmatch(name)
    if match is None or (match[1] == "awq" and match[2] != "4"):
        return None
    group = 0 if match[3] == "*" else int(match[3])
    return GroupedFormat(name, (1, group), match[1], int(match[2]), match[4], match[5] or "")


def grouped_name(method: str, bits: int, group: int, scale: str, order: str = "") -> str:
    """Return the name of a format; see `parse`."""
    return f"{method}{bits}[{group or '*'},{scale}{f',{order}' if order else ''}]"


PARSERS.append(parse)
