"""Quantised matrices of random bytes."""

from collections.abc import Mapping

import numpy as np

from moecache.formats import BlockFormat, find_format


def random_parts(name: str, rows: int, columns: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return a matrix in a format: any codes that are numbers, scales that suit the kernels.

    Values are about 1 / 16.
    """
    rng = np.random.default_rng(seed)
    known = find_format(name)
    parts = {}
    for part, (dtype, shape) in known.parts(rows, columns).items():
        size = int(np.prod(shape))
        if part in ("blocks", "codes"):
            array = rng.integers(0, 256, size * dtype.itemsize).astype(np.uint8)
            if dtype.name == "float8_e4m3fn":
                array[array & 0x7F == 0x7F] = 0x42
            parts[part] = array.view(dtype).reshape(shape)
        elif dtype == np.uint8:
            parts[part] = rng.integers(118, 122, shape).astype(np.uint8)
        else:
            scale = 2e-2 if "global_scale" not in known.parts(1, 32) else 1.0
            parts[part] = (scale * rng.normal(size=shape)).astype(dtype)
            parts[part][parts[part] == 0] = 1e-2
    if isinstance(known, BlockFormat):
        blocks = parts["blocks"]
        size = 1e-2 if known.block[1] == 32 else 1e-4
        for at in known.numbers_at:
            numbers = (size * rng.normal(size=blocks.shape[:2])).astype(np.float16)
            blocks[..., at : at + 2] = numbers[..., None].view(np.uint8)
        if not known.numbers_at:
            blocks[..., 0] = rng.integers(118, 122, blocks.shape[:2])
    return parts


def joined(parts: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the bytes of all parts, as a file and a slot have them."""
    return np.concatenate(
        [np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in parts.values()]
    )
