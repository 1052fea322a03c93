"""Formats of codes in one array and their scales in another: FP8, MXFP4, integers by groups.

As safetensors checkpoints have them. A value is its code times its block's scale; sources: OCP's
8-bit floating point and microscaling (MX) specifications, and `compressed-tensors`.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moecache.errors import ConfigError, FormatError
from moecache.formats.base import FORMATS, PARSERS, Format, Parts, check_matrix
from moecache.formats.form import BLOCK_COLUMNS, Form

# Values of the 16 codes of OCP's FP4 (E2M1).
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# The values of the bytes of "e8m0".
POWERS = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))
# Largest code, and its exponent. Integers go down to -2^(bits - 1).
_LARGEST = {"e4m3": (448, 8), "e2m1": (6, 2)}
_NAME = re.compile(r"(fp8|int[2-8])\[([1-9]\d{0,8}|\*)x([1-9]\d{0,8}|\*),(f32|f16|bf16|e8m0)\]")


@dataclass(frozen=True)
class ScaledFormat(Format):
    """Codes row by row, and a scale for each block of rows and columns; the last ones are short.

    A size of 0 in `block` stands for all rows, or columns.

    Parameters
    ----------
    element : str
        "e4m3", a byte each; "e2m1", two in a byte, the lower one first; or "int4" (or another
        width), in words of 32 bits from the lowest on, across them where 32 is no multiple.
    scale : {"f32", "f16", "bf16", "e8m0"}
        "e8m0" is a byte b that means 2^(b - 127), and no number if it is 255.
    """

    element: str
    scale: str

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return {"e4m3": 8, "e2m1": 4}.get(self.element) or int(self.element[3:])

    @property
    def most(self) -> float:
        """See `Format.most`."""
        found = _LARGEST.get(self.element)
        return found[0] if found else 2 ** (self.bits - 1)

    @property
    def form(self) -> Form | None:
        """The compute form; None where blocks of columns are neither 16 nor a multiple of 32."""
        columns = self.block[1]
        if columns % BLOCK_COLUMNS and columns != BLOCK_COLUMNS // 2:
            return None
        codes = self.element
        if codes.startswith("int"):
            codes = "i4" if self.bits <= 4 else "i8"
        return Form(codes, "bf16" if self.scale == "e8m0" else self.scale, columns)

    def parts(self, rows: int, columns: int) -> Parts:
        """Return "codes" [rows, ...] and "scales" [blocks of rows, blocks of columns]."""
        if self.element == "e4m3":
            codes = dtype_named("e4m3"), (rows, columns)
        elif self.element == "e2m1":
            if columns % 2:
                raise ConfigError(f"{self.name} has two columns in a byte; {columns} are odd")
            codes = np.dtype(np.uint8), (rows, columns // 2)
        else:
            if columns * self.bits % 32:
                raise ConfigError(
                    f"{self.name} stores whole words of 32 bits; {columns} columns "
                    f"of {self.bits} bits are not"
                )
            codes = np.dtype(np.int32), (rows, columns * self.bits // 32)
        counts = tuple(
            -(-size // (step or size or 1))
            for size, step in zip((rows, columns), self.block, strict=True)
        )
        return {"codes": codes, "scales": (dtype_named(self.scale), counts)}

    def dequantize(
        self, parts: Mapping[str, np.ndarray], dtype: npt.DTypeLike = np.float32
    ) -> np.ndarray:
        """Return code times scale, a float32 product that is rounded once more if asked."""
        columns = self._columns(parts)
        codes = self.codes(parts["codes"], columns)
        scales = self._spread(self.scales(parts), codes.shape)
        with np.errstate(over="ignore", invalid="ignore"):  # such as zero times infinity
            return (codes * scales).astype(dtype, copy=False)

    def quantize(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Return codes and scales: each block's largest value becomes the largest code.

        Scales of "e8m0" are OCP's, 2^(floor(log2(largest)) - the largest code's exponent), so that
        what is larger than the largest code becomes it; those of integers are
        largest / (2^bits - 1) * 2, as `compressed-tensors` has them.
        """
        check_matrix(values)
        wide = values.astype(np.float32)
        if not np.isfinite(wide).all():
            raise ConfigError(f"{self.name} stores no infinity and no NaN; some values are")
        wanted = self.parts(*wide.shape)
        largest = np.abs(wide)
        for axis, (size, step) in enumerate(zip(wide.shape, self.block, strict=True)):
            starts = np.arange(0, size, step or max(size, 1))
            largest = np.maximum.reduceat(largest, starts, axis) if size else largest
        parts = self._scales_for(largest.reshape(wanted["scales"][1]))
        try:
            self.check(parts)
        except FormatError as error:
            raise ConfigError(f"{self.name}: the values are too large for such scales") from error
        scaled = wide / self._spread(self.scales(parts), wide.shape)
        return {"codes": self._stored(scaled).reshape(wanted["codes"][1]), **parts}

    def _scales_for(self, largest: np.ndarray) -> dict[str, np.ndarray]:
        """Return the parts that are not codes, for each block's largest value."""
        most, exponent = _LARGEST.get(self.element) or ((2**self.bits - 1) / 2, 0)
        # A block of zeros, and one whose scale would be zero, is zero times one.
        if self.scale == "e8m0":
            powers = np.frexp(largest)[1] - 1 - exponent + 127
            stored = np.clip(powers, 0, 254).astype(np.uint8)
            stored[largest == 0] = 127
            return {"scales": stored}
        with np.errstate(over="ignore"):
            stored = (largest / np.float32(most)).astype(dtype_named(self.scale))
        stored[stored == 0] = 1
        return {"scales": stored}

    def _stored(self, scaled: np.ndarray) -> np.ndarray:
        """Return the nearest codes to values that were divided by their scale, as stored."""
        import ml_dtypes

        if self.element == "e4m3":
            return np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        if self.element == "e2m1":
            codes = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
            return codes[:, ::2] | codes[:, 1::2] << 4
        half = 1 << (self.bits - 1)
        return pack(np.clip(np.rint(scaled), -half, half - 1).astype(np.int16) + half, self.bits)

    def _spread(self, scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return the scale of each element."""
        for axis, (size, step) in enumerate(zip(shape, self.block, strict=True)):
            scales = scales.repeat(step or max(size, 1), axis)
        return scales[: shape[0], : shape[1]]

    def check(self, parts: Mapping[str, np.ndarray]) -> None:
        """Raise FormatError if a scale is infinite, NaN, or makes the largest code infinite."""
        check_scales(parts["scales"], self.name, self.most)

    def scales(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the scales as float32 [blocks of rows, blocks of columns]."""
        scales = parts["scales"]
        if self.scale != "e8m0":
            return scales.astype(np.float32)
        return POWERS[scales.view(np.uint8)]

    def codes(self, stored: np.ndarray, columns: int) -> np.ndarray:
        """Return what codes mean, float32 [rows, columns]."""
        if self.element == "e4m3":
            return stored.astype(np.float32)
        if self.element == "e2m1":
            return E2M1[np.stack([stored & 15, stored >> 4], -1).reshape(len(stored), columns)]
        offset = 1 << (self.bits - 1)
        return unpack(stored, self.bits, columns).astype(np.float32) - np.float32(offset)

    def _columns(self, parts: Mapping[str, np.ndarray]) -> int:
        codes = parts["codes"]
        return codes.shape[1] * codes.itemsize * 8 // self.bits


def unpack(words: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """Return the integers in words of 32 bits, from the lowest bits on.

    Parameters
    ----------
    words : ndarray of int32 or uint32, shape [rows, ceil(columns * bits / 32)]

    Returns
    -------
    ndarray of uint8, shape [rows, columns]
    """
    flat = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), 4 * words.shape[1])
    if bits == 4:  # ten times as fast as bit by bit
        both = np.stack([flat & 15, flat >> 4], -1)
        return both.reshape(len(flat), 2 * flat.shape[1])[:, :columns]
    each = np.unpackbits(flat, axis=1, bitorder="little", count=columns * bits)
    return np.packbits(each.reshape(len(words), columns, bits), axis=2, bitorder="little").reshape(
        len(words), columns
    )


def pack(integers: np.ndarray, bits: int) -> np.ndarray:
    """Return integers [rows, columns] in words of 32 bits; see `unpack`."""
    rows, columns = integers.shape
    if bits == 4:
        nibbles = integers.astype(np.uint8)
        return np.ascontiguousarray(nibbles[:, ::2] | nibbles[:, 1::2] << 4).view(np.int32)
    each = np.unpackbits(integers.astype(np.uint8)[..., None], axis=2, bitorder="little")
    flat = each[..., :bits].reshape(rows, columns * bits)
    words = rows, columns * bits // 32
    return np.packbits(flat, axis=1, bitorder="little").view(np.int32).reshape(words)


# Largest finite scales, as bits without the sign; a byte is 2^(b - 127), and has none.
_LARGEST_BITS = {
    "float32": 0x7F7FFFFF,
    "float16": 0x7BFF,
    "bfloat16": 0x7F7F,
    "float8_e4m3fn": 0x7E,
    "uint8": 0xFE,
}


@functools.cache
def largest_scale(dtype: str, most: float) -> int:
    """Return the largest scale that makes no code infinite in float32, as bits without the sign.

    Parameters
    ----------
    dtype : str
        The scale's; "uint8" for a byte b that means 2^(b - 127).
    most : float
        The size of the largest code.
    """
    low, high = 0, _LARGEST_BITS[dtype]
    # Numbers are in the order of their bits.
    while low < high:
        middle = (low + high + 1) // 2
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(_number(middle, dtype) * np.float32(most))
        low, high = (middle, high) if is_finite else (low, middle - 1)
    return low


def check_scales(scales: np.ndarray, name: str, most: float = 1) -> None:
    """Raise FormatError if a scale is infinite, NaN, or infinite times the largest code.

    Comparing bits costs as much as looking for infinities alone. Scales of float16 times the
    integers of any format are far below the largest float32.

    Parameters
    ----------
    scales : ndarray
    name : str
        The format.
    most : float, default 1
        The size of the largest code.
    """
    dtype, bits = scales.dtype.name, scales.view(f"u{scales.itemsize}")
    if dtype != "uint8":
        bits = bits & ((1 << 8 * scales.itemsize - 1) - 1)
    largest = largest_scale(dtype, most)
    wrong = bits[bits > largest]
    if not wrong.size:
        return
    none = int(np.count_nonzero(wrong > _LARGEST_BITS[dtype]))
    if none:
        raise FormatError(
            f"{none} of {scales.size} scales are infinite or NaN in {name}; the checkpoint "
            "is damaged: download it again"
        )
    raise FormatError(
        f"{wrong.size} of {scales.size} scales are too large in {name}: the largest code, "
        f"{most:g}, times {_number(int(wrong.max()), dtype):.4g} is infinite in float32, and "
        f"{_number(largest, dtype):.4g} is the largest scale; the checkpoint is damaged: "
        "download it again"
    )


def _number(bits: int, dtype: str) -> np.float32:
    """Return the scale that some bits mean."""
    if dtype == "uint8":
        return np.float32(POWERS[bits])
    known = {"bfloat16": "bf16", "float8_e4m3fn": "e4m3"}.get(dtype)
    stored = dtype_named(known) if known else np.dtype(dtype)
    return np.float32(np.array(bits, f"u{stored.itemsize}").view(stored))


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype of numbers of a name such as "bf16"; bytes for "e8m0"."""
    if name == "e8m0":
        return np.dtype(np.uint8)
    if name in ("f32", "f16"):
        return np.dtype(name.replace("f", "float"))
    import ml_dtypes  # here, as `import moecache` needs NumPy alone

    return np.dtype({"bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}[name])


@functools.cache
def parse(name: str) -> ScaledFormat | None:
    """Return a format by a name such as "fp8[128x128,f32]" or "int4[1x32,bf16]"."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    element, *sizes, scale = match.groups()
    rows, columns = (0 if size == "*" else int(size) for size in sizes)
    return ScaledFormat(name, (rows, columns), element.replace("fp8", "e4m3"), scale)


def scaled_name(element: str, block: tuple[int, int], scale: str) -> str:
    """Return the name of a format; see `parse`."""
    rows, columns = (str(size) if size else "*" for size in block)
    return f"{element}[{rows}x{columns},{scale}]"


@dataclass(frozen=True)
class GlobalFormat(ScaledFormat):
    """The same with scales of FP8, and a number for the whole matrix: NVFP4.

    Parameters
    ----------
    divides : bool
        Whether scales are divided by that number, as `compressed-tensors` has it; NVIDIA's
        ModelOpt multiplies by it.
    """

    divides: bool

    @property
    def form(self) -> Form:
        """The compute form; its scales are those of the file."""
        return Form(self.element, "e4m3/" if self.divides else "e4m3*", self.block[1])

    def parts(self, rows: int, columns: int) -> Parts:
        """Return "codes", "scales" and "global_scale" [1]."""
        return super().parts(rows, columns) | {"global_scale": (np.dtype(np.float32), (1,))}

    def check(self, parts: Mapping[str, np.ndarray]) -> None:
        """Raise FormatError if scales do, alone or with the whole matrix's; see `ScaledFormat`."""
        check_scales(parts["scales"], self.name)
        check_scales(parts["global_scale"], self.name)
        whole = f"{self.name} with the number of the whole matrix, {parts['global_scale'][0]:.4g}"
        check_scales(self.scales(parts), whole, self.most)

    def scales(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the scales as float32 [rows, blocks of columns], the whole matrix's included."""
        scales, whole = super().scales(parts), parts["global_scale"]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return scales / whole if self.divides else scales * whole

    def _scales_for(self, largest: np.ndarray) -> dict[str, np.ndarray]:
        """Return scales of which the largest is FP8's largest, and what makes it so."""
        most, most_scale = _LARGEST[self.element][0], _LARGEST["e4m3"][0]
        top = np.float32(largest.max(initial=0) or 1)
        whole = np.float32(most * most_scale) / top
        stored = np.minimum(largest * (whole / most), most_scale).astype(dtype_named("e4m3"))
        stored[stored == 0] = 1
        factor = whole if self.divides else 1 / whole
        return {"scales": stored, "global_scale": np.array([factor], np.float32)}


NVFP4 = GlobalFormat("nvfp4", (1, 16), "e2m1", "e4m3", divides=True)
NVFP4_MODELOPT = GlobalFormat("nvfp4[modelopt]", (1, 16), "e2m1", "e4m3", divides=False)
MXFP4 = ScaledFormat("mxfp4", (1, 32), "e2m1", "e8m0")
FORMATS.update({known.name: known for known in (MXFP4, NVFP4, NVFP4_MODELOPT)})
PARSERS.append(parse)
