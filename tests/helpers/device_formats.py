"""Stores of experts that consist of random bytes, in the formats that kernels read."""

from dataclasses import replace
from typing import Any

import numpy as np

from bench.random_parts import joined, random_parts
from moecache.formats import find_format
from moecache.layout import ExpertLayout
from moecache.stores.memory import MemoryStore

# Formats that kernels read: all kinds of codes, scales and blocks.
FORMATS = (
    *("q8_0", "q4_0", "mxfp4_gguf", "q4_k", "q5_k", "q6_k", "mxfp4", "nvfp4", "nvfp4[modelopt]"),
    *("fp8[128x128,f32]", "fp8[16x32,bf16]", "fp8[1x32,e8m0]", "fp8[1x*,f16]", "fp8[*x*,f32]"),
    *("int4[1x32,bf16]", "int4[1x64,f16]", "int8[1x*,f32]"),
)


class RandomStore(MemoryStore):
    """Experts of random bytes in two formats, and what they mean.

    Parameters
    ----------
    gate_up, down : str
    size, width, num_layers, num_experts, top_k : int
    halves : int, default 1
        2: gate and up are a matrix each; 0: there is no gate, and the first format is up's.
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
        wide, rows_of_wide = ("gate_up", 2 * width) if halves else ("up", width)
        shapes = {wide: (gate_up, rows_of_wide, size), "down": (down, size, width)}
        for number, (role, (name, rows, columns)) in enumerate(shapes.items()):
            count = halves if role == "gate_up" else 1  # matrices
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
