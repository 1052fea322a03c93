"""Compute forms by their definition, in NumPy: what `kernels.tile` should write."""

import ml_dtypes
import numpy as np

from moecache.formats import BlockFormat, Format, GroupedFormat, ScaledFormat, find_format
from moecache.formats.blocks import IQ4
from moecache.formats.scaled import E2M1, unpack

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


def block_parts(name: str, rows: int, columns: int, seed: int) -> dict[str, np.ndarray]:
    """Return blocks of ggml with any codes, and numbers of either sign."""
    known, rng = find_format(name), np.random.default_rng(seed)
    assert isinstance(known, BlockFormat)
    raw = rng.integers(0, 256, known.nbytes(rows, columns)).astype(np.uint8)
    parts = known.split(raw, rows, columns)
    blocks = parts["blocks"]
    for at in known.numbers_at:
        numbers = (rng.standard_normal((*blocks.shape[:2], 1)) / 64).astype(np.float16)
        blocks[..., at : at + 2] = numbers.view(np.uint8)
    if name == "iq1_m":  # the number is in the highest bits of the last four
        blocks[..., 55] = blocks[..., 55] & 15 | 0x20
    elif not known.numbers_at:
        blocks[..., 0] = rng.integers(110, 130, blocks.shape[:2])
    return parts


def terms_of(parts: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Return the sizes of what is multiplied apart: of code times scale, and of the offset."""
    known, blocks = find_format(name), parts["blocks"]
    assert isinstance(known, BlockFormat)
    offsets = blocks.copy()
    for at in known.numbers_at[:1]:
        offsets[..., at : at + 2] = 0
    without = np.abs(known.dequantize({"blocks": offsets}).astype(np.float64))
    if len(known.numbers_at) < 2:
        return np.abs(known.dequantize(parts).astype(np.float64))
    codes = blocks.copy()
    codes[..., known.numbers_at[1] : known.numbers_at[1] + 2] = 0
    return without + np.abs(known.dequantize({"blocks": codes}).astype(np.float64))


def form_of_blocks(parts: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Return the compute form of ggml's blocks; rows beyond the matrix are of zero bytes."""
    known, blocks = find_format(name), parts["blocks"]
    form = known.form
    assert isinstance(known, BlockFormat)
    assert form is not None
    rows, width = len(blocks), blocks.shape[1] * known.block[1]
    blocks = np.concatenate([blocks, np.zeros((-rows % 16, *blocks.shape[1:]), np.uint8)])
    numbers = [
        np.ascontiguousarray(blocks[..., at : at + 2]).view(np.int16)[..., 0]
        for at in known.numbers_at
    ]
    offsets = None
    if known.block[1] == 256:
        scales, offsets, codes = known._read(blocks)  # type: ignore[attr-defined]
        if form.codes == "iq4":
            codes = np.searchsorted(IQ4, codes)
        codes = codes + {"i4": 8, "i6": 32}.get(form.codes, 0)
        scales = scales.astype(np.int8).reshape(len(blocks), width // form.group)
        if offsets is not None:
            offsets = offsets.astype(np.int8).reshape(scales.shape)
            numbers[1] = numbers[1] ^ np.int16(-(2**15))
    elif name == "mxfp4_gguf":
        codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], -1)
        codes[E2M1[codes] == 0] = 0
        powers = blocks[..., 0].astype(np.float64) - 127
        scales = np.where(powers == 128, np.nan, np.exp2(powers)).astype(ml_dtypes.bfloat16)
        scales[rows:] = 0
    else:
        codes = np.concatenate([blocks[..., -16:] & 15, blocks[..., -16:] >> 4], -1)
        if form.codes in ("i5", "u5"):
            fifth = np.unpackbits(blocks[..., -20:-16], axis=-1, bitorder="little")
            codes = codes | fifth << 4
        scales, offsets = numbers[0], numbers[1] if form.has_offsets else None
    codes = codes.astype(np.uint8).reshape(len(blocks), width)
    each, bits = max(1, 32 // form.group), {"5": 5, "6": 6}.get(form.codes[1:], 4)
    pieces = []
    for row, column in np.ndindex(len(blocks) // 16, codes.shape[1] // 32):
        tile, groups = slice(16 * row, 16 * row + 16), slice(column * each, (column + 1) * each)
        if known.block[1] == 256 and column % 8 == 0:
            pieces += [number[tile, column // 8].tobytes() for number in numbers]
        for array in (scales, offsets):
            pieces += (
                [] if array is None else [np.ascontiguousarray(array[tile, groups].T).tobytes()]
            )
        block = codes[tile, 32 * column : 32 * column + 32]
        pieces += [_nibbles(block & 15), _above(block >> 4, bits)]
    return np.frombuffer(b"".join(pieces), np.uint8)


def _above(block: np.ndarray, bits: int) -> bytes:
    """Return what is above the fourth bit: a word for each row, of 6 bits two."""
    words = np.zeros((2, 16), np.uint32)
    for column in range(32):
        chunk, place = divmod(column, 8)
        # Two nibbles' bits lie side by side in a byte, those of 8 columns after the others.
        slot = (2 * chunk + place // 2 % 2) * (bits - 4)
        bit = slot % 8 + place // 4 * 8 + place % 2 * 16
        words[slot // 8] |= block[:, column].astype(np.uint32) << np.uint32(bit)
    return words[: bits - 4].tobytes()


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
