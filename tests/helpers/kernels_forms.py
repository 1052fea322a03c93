"""Compute forms by their definition, in NumPy: what `kernels.tile` should write."""

import ml_dtypes
import numpy as np

from moecache.formats import Format, GroupedFormat, ScaledFormat, find_format
from moecache.formats.scaled import unpack

_SCALES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}
_SCALES |= dict.fromkeys(("e4m3*", "e4m3/"), ml_dtypes.float8_e4m3fn)


def grouped_parts(name: str, rows: int, columns: int, seed: int) -> dict[str, np.ndarray]:
    """Return any codes, any zero points, and scales of either sign."""
    known, rng = find_format(name), np.random.default_rng(seed)
    raw = rng.integers(0, 256, known.nbytes(rows, columns)).astype(np.uint8)
    parts = known.split(raw, rows, columns)
    scales = parts["scales"]
    scales[...] = (rng.standard_normal(scales.shape) / 8).astype(scales.dtype)
    return parts


def form_of(raw: np.ndarray, known: Format, rows: int, columns: int) -> np.ndarray:
    """Return the compute form of a matrix that has the bytes `raw`."""
    form = known.form
    assert form is not None
    height, width = -(-rows // 16) * 16, -(-columns // 32) * 32
    group = form.group or max(width, 1)
    codes = np.full((height, width), 8 if form.codes == "i4" else 0, np.uint8)
    scales = np.zeros((height, form.num_groups(columns)), _SCALES[form.scale])
    parts = known.split(raw, rows, columns)
    codes[:rows, :columns] = _codes(parts, known, columns)
    found = _scales(parts, known, rows)
    scales[:rows, : found.shape[1]] = found
    zeros = np.zeros_like(scales)
    if isinstance(known, GroupedFormat):
        stored = integers_of(parts["zeros"].T, known, across=True).astype(np.int64)
        zeros[:rows] = (8 if known.bits < 8 else 128) - stored - (known.method == "gptq")
    pieces = []
    for row in range(0, height, 16):
        if "global_scale" in parts:
            pieces.append(parts["global_scale"].tobytes() + bytes(60))
        for column in range(0, width, 32):
            pieces += [
                scales[row : row + 16, at // group].tobytes()
                for at in (column, column + 16)
                if at % group == 0
            ]
            if form.has_zeros and column % group == 0:
                pieces.append(zeros[row : row + 16, column // group].tobytes())
            block = codes[row : row + 16, column : column + 32]
            four_bits = form.codes in ("i4", "e2m1")
            pieces.append(_nibbles(block) if four_bits else _bytes(block))
    return np.frombuffer(b"".join(pieces), np.uint8)


def integers_of(words: np.ndarray, known: GroupedFormat, *, across: bool) -> np.ndarray:
    """Return the integers in words [rows, ...], or [.., columns] that have several rows each."""
    bits, each = known.bits, 32 // known.bits
    order = (0, 4, 1, 5, 2, 6, 3, 7) if known.method == "awq" else range(each)
    shifts = np.array([bits * place for place in order], np.uint32)
    several = words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    if across:
        several = several.transpose(0, 2, 1)
        return several.reshape(len(words) * each, words.shape[1]).astype(np.uint8)
    return several.reshape(len(words), words.shape[1] * each).astype(np.uint8)


def _bytes(block: np.ndarray) -> bytes:
    """Of each 4 columns and 4 rows, put pairs of columns side by side."""
    # Group of rows, row; chunk of 4 columns, pair, column.
    split = block.reshape(4, 4, 8, 2, 2)
    return split.transpose(2, 0, 3, 1, 4).tobytes()


def _nibbles(block: np.ndarray) -> bytes:
    """Of each 8 columns, put the even ones first; a row has them in 4 bytes."""
    words = np.zeros((4, 16), np.uint32)
    for column in range(32):
        bit = 4 * (column % 8 // 2 + column % 2 * 4)
        words[column // 8] |= block[:, column].astype(np.uint32) << np.uint32(bit)
    return words.tobytes()


def _codes(parts: dict[str, np.ndarray], known: Format, columns: int) -> np.ndarray:
    if "blocks" in parts:
        stored = parts["blocks"][..., 2:]
        if stored.shape[2] == 16:
            stored = np.concatenate([stored & 15, stored >> 4], -1)
        return stored.reshape(len(stored), columns)
    stored = parts["codes"]
    if isinstance(known, GroupedFormat):
        codes = integers_of(stored.T, known, across=known.method == "awq")
        return codes ^ np.uint8(128) if known.bits == 8 else codes
    assert isinstance(known, ScaledFormat)
    if known.element == "e4m3":
        return stored.view(np.uint8)
    if known.element == "e2m1":
        return np.stack([stored & 15, stored >> 4], -1).reshape(len(stored), columns)
    offset = (8 if known.bits <= 4 else 0) - (1 << (known.bits - 1))
    return (unpack(stored, known.bits, columns).astype(np.int16) + offset).astype(np.uint8)


def _scales(parts: dict[str, np.ndarray], known: Format, rows: int) -> np.ndarray:
    """Return each row's scales."""
    if "blocks" in parts:
        return parts["blocks"][..., :2].copy().view(np.float16)[..., 0]
    if isinstance(known, GroupedFormat):
        return parts["scales"].T
    assert isinstance(known, ScaledFormat)
    scales = parts["scales"]
    if known.scale == "e4m3":
        return scales
    if known.scale == "e8m0":
        scales = known.scales(parts).astype(ml_dtypes.bfloat16)
    return scales.repeat(known.block[0] or max(rows, 1), 0)[:rows]
