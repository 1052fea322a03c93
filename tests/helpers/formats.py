"""What the bytes of ggml's blocks mean and how they are made, one number at a time."""

import struct

import numpy as np

BLOCK_BYTES = {"q8_0": 34, "q4_0": 18}
# ggml's code books, which have no kernels; what llama.cpp alone makes.
CODE_BOOKS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
READ_ONLY = ("iq4_nl", "iq4_xs", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", *CODE_BOOKS)


def values_of(name: str, blocks: np.ndarray) -> np.ndarray:
    """Return the values of blocks [rows, blocks, bytes], float32 [rows, columns]."""
    rows = [[v for block in row for v in _block(name, bytes(block))] for row in blocks]
    return np.array(rows, np.float32).reshape(len(blocks), blocks.shape[1] * 32)


def blocks_of(name: str, values: np.ndarray) -> np.ndarray:
    """Return the blocks that ggml's reference quantiser makes of values [rows, columns]."""
    rows = [
        b"".join(_quantized(name, row[at : at + 32]) for at in range(0, len(row), 32))
        for row in values.astype(np.float32)
    ]
    shape = len(values), values.shape[1] // 32, BLOCK_BYTES[name]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(shape)


def random_blocks(name: str, rows: int, num_blocks: int, seed: int) -> np.ndarray:
    """Return blocks of any bytes but for scales that are infinite or no number."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, num_blocks, BLOCK_BYTES[name])).astype(np.uint8)
    # The highest bit of the exponent, clear: below 2.
    blocks[..., 1] &= 0xBF
    return blocks


def _block(name: str, block: bytes) -> list[float]:
    (scale,) = struct.unpack("<e", block[:2])
    if name == "q8_0":
        return [scale * q for q in struct.unpack("<32b", block[2:])]
    low = [byte & 15 for byte in block[2:]]
    high = [byte >> 4 for byte in block[2:]]
    return [scale * (q - 8) for q in low + high]


def _quantized(name: str, values: np.ndarray) -> bytes:
    """Every operation rounds to float32, as in C."""
    largest = np.float32(0)
    for value in values:
        if abs(value) > abs(largest):
            largest = value
    if name == "q8_0":
        scale = abs(largest) / np.float32(127)
        inverse = np.float32(1) / scale if scale else np.float32(0)
        integers = [_roundf(value * inverse) for value in values]
        return struct.pack("<e32b", scale, *integers)
    scale = largest / np.float32(-8)
    inverse = np.float32(1) / scale if scale else np.float32(0)
    nibbles = [min(15, int(value * inverse + np.float32(8.5))) for value in values]
    pairs = zip(nibbles[:16], nibbles[16:], strict=True)
    return struct.pack("<e16B", scale, *(low | high << 4 for low, high in pairs))


def _roundf(value: np.float32) -> int:
    """Round to the nearest integer, halves away from zero."""
    size = int(abs(float(value)) + 0.5)
    return size if value >= 0 else -size
