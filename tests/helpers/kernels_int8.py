"""Products of activations of 8 bits as they are defined: plain loops, every step in float32."""

import struct

import numpy as np

# What is smaller has no scale that is a normal number.
_LEAST = np.float32(127) * np.finfo(np.float32).tiny


def rounded(row: np.ndarray) -> list[tuple[np.float32, list[int]]]:
    """Return each block of a row as a scale and integers."""
    blocks = []
    for block in row.astype(np.float32).reshape(-1, 32):
        largest = max(abs(value) for value in block)
        if not np.isfinite(block).all():
            blocks.append((np.float32(np.nan), [0] * 32))
        elif largest < _LEAST:
            blocks.append((np.float32(0), [0] * 32))
        else:
            turns = np.float32(127) / largest
            # Python rounds halves to even.
            integers = [round(float(value * turns)) for value in block]
            blocks.append((largest / np.float32(127), integers))
    return blocks


def values(row: np.ndarray) -> np.ndarray:
    """Return what is multiplied instead of a row, float64."""
    return np.array([float(scale) * q for scale, block in rounded(row) for q in block])


def int8_products(inputs: np.ndarray, blocks: np.ndarray, name: str) -> np.ndarray:
    """Return the products of blocks [rows, blocks, bytes] with inputs, float32 [num, rows]."""
    weights = [[_integers(name, bytes(block)) for block in row] for row in blocks]
    out = np.zeros((len(inputs), len(blocks)), np.float32)
    for i, given in enumerate(inputs):
        xs = rounded(given)
        for j, row in enumerate(weights):
            total = np.float32(0)
            for (scale, integers), (x_scale, x) in zip(row, xs, strict=True):
                exact = sum(w * q for w, q in zip(integers, x, strict=True))
                assert abs(exact) < 2**24
                with np.errstate(invalid="ignore", over="ignore"):
                    total = total + np.float32(exact) * scale * x_scale
            out[i, j] = total
    return out


def _integers(name: str, block: bytes) -> tuple[np.float32, list[int]]:
    (scale,) = struct.unpack("<e", block[:2])
    if name == "q8_0":
        return np.float32(scale), list(struct.unpack("<32b", block[2:]))
    low, high = [byte & 15 for byte in block[2:]], [byte >> 4 for byte in block[2:]]
    return np.float32(scale), [q - 8 for q in low + high]
