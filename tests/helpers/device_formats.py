"""Quantised matrices of random bytes, and stores of experts that consist of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from moecache.formats import BlockFormat, find_format
from moecache.layout import ExpertLayout
from moecache.stores.memory import MemoryStore

# Formats that kernels read: all kinds of codes, scales and blocks.
FORMATS = (
    *("q8_0", "q4_0", "mxfp4_gguf", "q4_k", "q5_k", "q6_k", "mxfp4", "nvfp4", "nvfp4[modelopt]"),
    *("fp8[128x128,f32]", "fp8[16x32,bf16]", "fp8[1x32,e8m0]", "fp8[1x*,f16]", "fp8[*x*,f32]"),
    *("int4[1x32,bf16]", "int4[1x64,f16]", "int8[1x*,f32]"),
)


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


class RandomStore(MemoryStore):
    """Experts of random bytes in two formats, and what they mean.

    Parameters
    ----------
    gate_up, down : str
    size, width, num_layers, num_experts, top_k : int
    halves : int, default 1
        2: gate and up are a matrix each.
    bias : dtype, optional
        Of biases.
    """

    def __init__(
        self,
        gate_up: str,
        down: str,
        size: int,
        width: int,
        *,
        num_layers: int = 2,
        num_experts: int = 8,
        top_k: int = 2,
        halves: int = 1,
        bias: Any = None,
    ) -> None:
        rng = np.random.default_rng(0)
        self.values: dict[tuple[str, int, int], np.ndarray] = {}
        arrays: dict[str, Any] = {}
        shapes = {"gate_up": (gate_up, 2 * width, size), "down": (down, size, width)}
        for number, (role, (name, rows, columns)) in enumerate(shapes.items()):
            count = halves if role == "gate_up" else 1
            stack = []
            for layer in range(num_layers):
                for expert in range(num_experts):
                    seed = 1000 * number + 100 * layer + 10 * expert
                    pieces = [
                        random_parts(name, rows // count, columns, seed + k) for k in range(count)
                    ]
                    stack.append(np.concatenate([joined(piece) for piece in pieces]))
                    values = [find_format(name).dequantize(piece) for piece in pieces]
                    self.values[role, layer, expert] = np.concatenate(values)
            arrays[role] = np.stack(stack).reshape(num_layers, num_experts, -1)
            if bias is not None:
                shape = num_layers, num_experts, rows
                arrays[f"{role}_bias"] = rng.normal(size=shape).astype(bias)
        formats = {role: (name, (rows, columns)) for role, (name, rows, columns) in shapes.items()}
        super().__init__(arrays, top_k=top_k, formats=formats)
        layers = [
            [replace(role, matrices=halves if role.name == "gate_up" else 1) for role in roles]
            for roles in self._layout.layers
        ]
        self._layout = ExpertLayout(num_experts, top_k, layers)
        self.biases = {name: array for name, array in arrays.items() if name.endswith("_bias")}
