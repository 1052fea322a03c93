"""Products of integers as they are defined: from a compute form, every step in float32."""

import ml_dtypes
import numpy as np

from moecache.formats import Form, find_format
from moecache.formats.blocks import IQ4
from moecache.formats.code_books import TABLES

# What is smaller has no scale that is a normal number.
LEAST = np.float32(2.0**-109)
MOST = 16256  # 127 * 128
# What is added to stored integers.
_BIASES = {"i4": 8, "i5": 16, "i6": 32}
_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12])  # FP4 counts in halves
_UNITS = {"e2m1": 0.5} | {codes: unit for codes, (unit, _) in TABLES.items()}
_DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f16*i8": np.int8}
_DTYPES |= dict.fromkeys(("e4m3*", "e4m3/"), ml_dtypes.float8_e4m3fn)


def rounded(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each block's scale, and its integers [blocks, 32]."""
    blocks = row.astype(np.float32).reshape(-1, 32)
    scales, integers = np.zeros(len(blocks), np.float32), np.zeros(blocks.shape, np.int64)
    for i, block in enumerate(blocks):
        largest = np.abs(block).max(initial=0)
        if not np.isfinite(block).all():
            scales[i] = np.nan
        elif largest >= LEAST:
            turns = np.float32(MOST) / largest
            # NumPy rounds halves to even.
            integers[i] = np.rint(block * turns)
            scales[i] = largest / np.float32(MOST)
    return scales, integers


def values(row: np.ndarray) -> np.ndarray:
    """Return what is multiplied instead of a row, float64."""
    scales, integers = rounded(row)
    found: np.ndarray = (scales.astype(np.float64)[:, None] * integers).reshape(-1)
    return found


class Decoded:
    """A matrix in its compute form, taken apart.

    Parameters
    ----------
    raw : ndarray of uint8
    name : str
    rows, columns : int
    """

    def __init__(self, raw: np.ndarray, name: str, rows: int, columns: int) -> None:
        known = find_format(name).form
        assert known is not None
        self.form: Form = known
        height, width = -(-rows // 16) * 16, -(-columns // 32) * 32
        self.rows, self.width = rows, width
        self.group = known.group or max(width, 32)
        self.is_super = known.scale == "f16*i8"
        num_groups, num_supers = known.num_groups(columns), -(-width // 256)
        self.integers = np.zeros((height, width), np.int64)
        self.scales = np.zeros((height, num_groups), _DTYPES[known.scale])
        self.terms = np.zeros_like(self.scales)
        self.numbers = np.zeros((2, height, num_supers), np.float16)
        self.factor = np.float32(1)
        rest = raw.reshape(-1).tobytes()

        def take(dtype: type, num: int) -> np.ndarray:
            nonlocal rest
            size = num * np.dtype(dtype).itemsize
            found, rest = np.frombuffer(rest[:size], dtype), rest[size:]
            return found

        has_terms = known.has_zeros or known.has_offsets
        for tile in range(0, height, 16):
            at = slice(tile, tile + 16)
            if known.scale in ("e4m3*", "e4m3/"):
                self.factor = take(np.float32, 16)[0]
            for column in range(0, width, 32):
                if self.is_super and column % 256 == 0:
                    for i in range(1 + known.has_offsets):
                        self.numbers[i, at, column // 256] = take(np.float16, 16)
                groups = [g // self.group for g in (column, column + 16) if g % self.group == 0]
                for several in (self.scales, self.terms)[: 1 + has_terms]:
                    for group in groups:
                        several[at, group] = take(_DTYPES[known.scale], 16)
                self.integers[at, column : column + 32] = _integers(take, known.codes)
        assert not rest

    def products(self, inputs: np.ndarray) -> np.ndarray:
        """Return the products with inputs [num, columns], float32 [num, rows]."""
        padded = np.zeros((len(inputs), self.width), np.float32)
        padded[:, : inputs.shape[1]] = inputs.astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            return np.array([self._product(row) for row in padded], np.float32).reshape(
                len(inputs), self.rows
            )

    def _product(self, row: np.ndarray) -> np.ndarray:
        xs, integers = rounded(row)
        unit = np.float32(_UNITS.get(self.form.codes, 1))
        total = np.zeros(len(self.integers), np.float32)
        scaled, terms = total.copy(), total.copy()
        each = 2 if self.group == 16 else 1
        for block, (x_scale, x) in enumerate(zip(xs * unit, integers, strict=True)):
            first = 32 * block
            weighted = np.zeros(len(total), np.int64)
            for part in np.split(np.arange(32), each):
                group = (first + part[0]) // self.group
                scale, term = self.scales[:, group], self.terms[:, group]
                exact = self.integers[:, first + part] @ x[part]
                if self.form.has_zeros:
                    exact = exact + term.astype(np.int64) * x[part].sum()
                assert np.abs(exact).max(initial=0) < 2**31
                if self.is_super:
                    weighted += exact * scale.astype(np.int64)
                else:
                    some = exact.astype(np.float32) * x_scale
                    total = total + some * scale.astype(np.float32)
                if self.form.has_offsets:
                    whole = np.float32(x[part].sum()) * x_scale
                    if self.is_super:
                        terms = terms + term.astype(np.float32) * whole
                    else:
                        total = total + term.astype(np.float32) * whole
            if self.is_super:
                assert np.abs(weighted).max(initial=0) < 2**31
                scaled = scaled + weighted.astype(np.float32) * x_scale
                if (first + 32) % 256 == 0 or first + 32 == self.width:
                    first_number, second = self.numbers[:, :, first // 256].astype(np.float32)
                    total = total + scaled * first_number
                    if self.form.has_offsets:
                        total = total + terms * second
                    scaled, terms = np.zeros_like(total), np.zeros_like(total)
        if self.form.scale == "e4m3*":
            total = total * self.factor
        if self.form.scale == "e4m3/":
            total = total / self.factor
        return total[: self.rows]


def plane_products(inputs: np.ndarray, raw: np.ndarray, name: str, rows: int) -> np.ndarray:
    """Return products with a matrix whose compute form is `raw`."""
    return Decoded(raw, name, rows, inputs.shape[1]).products(inputs)


def _integers(take: object, codes: str) -> np.ndarray:
    """Return the integers of 16 rows and 32 columns."""
    if codes == "i8":
        # Chunk of 4 columns; group of 4 rows, pair, row, column.
        split = take(np.int8, 512).reshape(8, 4, 2, 4, 2)  # type: ignore[operator]
        return split.transpose(1, 3, 0, 2, 4).reshape(16, 32).astype(np.int64)
    words = take(np.uint32, 64).reshape(4, 16)  # type: ignore[operator]
    bits = {"5": 1, "6": 2}.get(codes[1:], 0)
    above = take(np.uint32, 16 * bits).reshape(bits, 16) if bits else None  # type: ignore[operator]
    stored = np.zeros((16, 32), np.int64)
    for column in range(32):
        chunk, place = divmod(column, 8)
        bit = 4 * (place // 2 + place % 2 * 4)
        stored[:, column] = words[chunk] >> np.uint32(bit) & 15
        if above is not None:
            slot = (2 * chunk + place // 2 % 2) * bits
            at = slot % 8 + place // 4 * 8 + place % 2 * 16
            more = above[slot // 8] >> np.uint32(at) & ((1 << bits) - 1)
            stored[:, column] |= more.astype(np.int64) << 4
    if codes == "iq4":
        return np.asarray(IQ4, np.int64)[stored]
    if codes in TABLES:
        table = TABLES[codes][1]
        return np.array(table + (0,) * (16 - len(table)))[stored]
    if codes == "e2m1":
        return np.where(stored & 8, -_HALVES[stored & 7], _HALVES[stored & 7])
    return stored - _BIASES.get(codes, 0)
