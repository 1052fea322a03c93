"""Compute forms by their definition, in NumPy: what `kernels.tile` should write."""

import ml_dtypes
import numpy as np

from moecache.formats import Format, ScaledFormat
from moecache.formats.scaled import unpack

_SCALES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}


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
    pieces = []
    for row in range(0, height, 16):
        for column in range(0, width, 32):
            pieces += [
                scales[row : row + 16, at // group].tobytes()
                for at in (column, column + 16)
                if at % group == 0
            ]
            block = codes[row : row + 16, column : column + 32]
            four_bits = form.codes in ("i4", "e2m1")
            pieces.append(_nibbles(block) if four_bits else _bytes(block))
    return np.frombuffer(b"".join(pieces), np.uint8)


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
    assert isinstance(known, ScaledFormat)
    stored = parts["codes"]
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
    assert isinstance(known, ScaledFormat)
    scales = parts["scales"]
    if known.scale == "e8m0":
        scales = known.scales(parts).astype(ml_dtypes.bfloat16)
    return scales.repeat(known.block[0] or max(rows, 1), 0)[:rows]
