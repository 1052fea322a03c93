"""What kernels compute, in float64 and one expert at a time, and how far they may be from it."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np

from moecache import kernels
from moecache.errors import ConfigError
from moecache.formats import find_format, quantize
from moecache.kernels import _processor
from moecache.kernels._matrix import Matrix
from moecache.layout import Role
from tests.helpers.nightly import some

# The levels to be tested: without bfloat16's products, AVX-512 computes floats as AVX2's code does;
# AMX computes all but many inputs and FP8 as AVX-512 does, which is the best of other machines.
LEVELS = some(
    kernels.levels(),
    lambda level: level not in ("avx512vnni", "avx512") or level == kernels.levels()[-1],
)
BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
DTYPES = (F32, BF16)
BLOCKED = ("q8_0", "q4_0")
# Each kind of codes, of scales and of groups, in pairs rather than all together.
SCALED = (
    "mxfp4",
    "fp8[128x128,f32]",
    "fp8[1x*,bf16]",
    "fp8[3x32,e8m0]",
    "fp8[2x16,f16]",
    "int4[1x32,bf16]",
    "int4[1x16,f32]",
    "int4[1x96,f16]",
    "int8[1x64,bf16]",
    "int8[*x*,f32]",
    "nvfp4",
    "nvfp4[modelopt]",
)
NAMES = ("f32", "f16", "bf16", *BLOCKED, *SCALED)
# Half a unit of the last place, relative: of float32, and of bfloat16.
U32, U16 = 2.0**-24, 2.0**-8

ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


@contextmanager
def computing(level: str | None = None, threads: int | None = None) -> Iterator[None]:
    """Have the kernels compute otherwise for a while; threads share whatever there is."""
    before = kernels.level(), kernels.num_threads()
    shared = _processor.share_from(0, 0)
    try:
        if level is not None:
            kernels.use_level(level)
        if threads is not None:
            kernels.use_threads(threads)
        yield
    finally:
        _processor.share_from(*shared)
        kernels.use_level(before[0])
        kernels.use_threads(before[1])


def fitting(name: str, columns: int) -> int:
    """Return the most columns, up to `columns`, of which a format stores a matrix."""
    known = find_format(name)
    while True:
        try:
            known.parts(max(1, known.block[0]), columns)
        except ConfigError:
            columns -= 1
        else:
            return columns


def draw_matrix(name: str, rows: int, columns: int, seed: int) -> tuple[Any, np.ndarray]:
    """Return a random matrix as the kernels read it, and its values in float64."""
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    parts = quantize(values, name)
    exact = find_format(name).dequantize(parts).astype(np.float64)
    return kernels.matrix_of(parts, name), exact


def draw_inputs(num: int, columns: int, dtype: np.dtype, seed: int) -> np.ndarray:
    """Return random inputs."""
    return np.random.default_rng(seed).standard_normal((num, columns)).astype(dtype)


def has_integers(name: str) -> bool:
    """Return whether weights of a format are multiplied as integers, by inputs of 15 bits."""
    known = find_format(name)
    forms = [one.form for one in getattr(known, "formats", (known,))]
    return any(form is not None and form.codes != "e4m3" for form in forms)


def product_error(inputs: np.ndarray, exact: np.ndarray, name: str = "") -> np.ndarray:
    """Return by how much a product in float32 may be wrong, whatever the order of its sum.

    `columns` products and sums are each rounded, those of blocks times their scale once more
    (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), and so is a value. Of
    integers inputs are off by half a step, of which the largest in 32 columns has 16256.
    """
    wide, sizes = np.abs(inputs.astype(np.float64)), np.abs(exact)
    error: np.ndarray = (exact.shape[1] + 5) * U32 * (wide @ sizes.T)
    if name and has_integers(name):
        rest, num = ((0, 0), (0, -exact.shape[1] % 32)), -(-exact.shape[1] // 32)
        blocks = np.pad(wide, rest).reshape(len(wide), num, 32).max(2, initial=0)
        error = error + blocks @ np.pad(sizes, rest).reshape(len(sizes), num, 32).sum(2).T / 32500
    return error


def rounding(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return by how much rounding to a dtype may change values."""
    bound: np.ndarray = np.abs(values) * (U16 if dtype == BF16 else U32)
    return bound


class Experts:
    """Random experts in slots, their kernel, and what it should compute.

    Parameters
    ----------
    dtype : numpy dtype
        Of the weights and biases.
    hidden_size, width, num_slots : int
    activation : str
    is_gated, is_interleaved : bool
    bias_dtype : numpy dtype, optional
        By default there are no biases.
    names : (str, str), optional
        Formats of gate and up, and of down, which are held in their compute forms.
    matrices : int, default 1
        2 if gate and up are stored as a matrix each.
    """

    def __init__(
        self,
        dtype: np.dtype,
        hidden_size: int,
        width: int,
        num_slots: int,
        *,
        activation: str = "silu",
        is_gated: bool = True,
        is_interleaved: bool = False,
        bias_dtype: np.dtype | None = None,
        limit: float = 7.0,
        names: tuple[str, str] | None = None,
        matrices: int = 1,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        wide = "gate_up" if is_gated else "up"
        rows = width * (2 if is_gated else 1)
        self.activation, self.limit = activation, limit
        self.is_gated, self.is_interleaved = is_gated, is_interleaved
        self.wide, self.width = wide, width
        shapes = {wide: (rows, hidden_size), "down": (hidden_size, width)}
        self.roles = {
            name: (rng.standard_normal((num_slots, *shape)) * shape[1] ** -0.5).astype(dtype)
            for name, shape in shapes.items()
        }
        if bias_dtype is not None:
            for name, (height, _) in shapes.items():
                bias = rng.standard_normal((num_slots, height)).astype(bias_dtype)
                self.roles[f"{name}_bias"] = bias
        self.names = names or ("", "")
        held, layer = dict(self.roles), []
        for name, form in zip((wide, "down"), names or (), strict=False):
            role = Role(name, shapes[name], format=form, matrices=matrices if name == wide else 1)
            held[name], self.roles[name] = in_forms(self.roles[name], role)
            layer.append(role)
        self.kernel = kernels.SlotKernel(
            lambda slot: {name: array[slot] for name, array in held.items()},
            num_slots,
            roles=layer,
            activation=activation,
            is_interleaved=is_interleaved,
            limit=limit,
        )

    def expected(self, slot: int, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return an expert's output for inputs in float64, and how far a kernel's may be."""
        x = inputs.astype(np.float64)
        roles = {name: array[slot].astype(np.float64) for name, array in self.roles.items()}
        both = x @ roles[self.wide].T + roles.get(f"{self.wide}_bias", 0.0)
        error = product_error(x, roles[self.wide], self.names[0]) + U32 * np.abs(both)
        if not self.is_gated:
            gates = np.arange(self.width)
        elif self.is_interleaved:
            gates = np.arange(self.width) * 2
        else:
            gates = np.arange(self.width)
        ups = gates + 1 if self.is_interleaved else gates + self.width
        gate, gate_error = both[:, gates], error[:, gates]
        up, up_error = np.ones_like(gate), np.zeros_like(gate)
        if self.is_gated:
            up, up_error = both[:, ups], error[:, ups]
        if self.activation in ("swiglu", "clamped_silu"):
            is_swiglu = self.activation == "swiglu"
            gate = np.minimum(gate, self.limit)
            up = np.clip(up, -self.limit, self.limit) + is_swiglu
            slope = 1.702 if is_swiglu else 1.0
            acted = gate * np.vectorize(_sigmoid, otypes=[float])(gate * slope)
        else:
            acted = np.vectorize(ACTIVATIONS[self.activation], otypes=[float])(gate)
        steepness = 2 * np.abs(gate) + 1 if self.activation == "relu2" else 1.2
        hidden = acted * up
        hidden_error = gate_error * steepness * np.abs(up) + np.abs(acted) * up_error
        # An activation is good to some units of the last place; a vector product of bfloat16 takes
        # what it is given rounded to that.
        down = roles["down"]
        hidden_error += 16 * U32 * (np.abs(hidden) + np.abs(gate * up))
        if inputs.dtype == BF16 and not (self.names[1] and has_integers(self.names[1])):
            hidden_error += U16 * np.abs(hidden)
        out = hidden @ down.T + roles.get("down_bias", 0.0)
        bound = hidden_error * 1.01 @ np.abs(down).T + product_error(
            np.abs(hidden) + hidden_error, down, self.names[1]
        )
        return out, bound + U32 * np.abs(out)


def in_forms(stack: np.ndarray, role: Role) -> tuple[np.ndarray, np.ndarray]:
    """Return a role's matrices in their compute forms, a row for each slot, and their values."""
    known, shape = find_format(role.format), role.matrix_shape
    forms = np.zeros((len(stack), role.form_bytes), np.uint8)
    values = np.zeros((len(stack) * role.matrices, *shape), np.float32)
    each = zip(stack.reshape(values.shape), forms.reshape(len(values), -1), values, strict=True)
    for given, form, exact in each:
        parts = known.quantize(given.astype(np.float32))
        raw = np.concatenate([part.reshape(-1).view(np.uint8) for part in parts.values()])
        kernels.tiler(role.format, *shape).tile(raw, form)
        exact[...] = known.dequantize(parts)
    return forms, values.reshape(stack.shape)


def wave_of(slots: np.ndarray, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return slots, offsets and pairs of a wave, as a runtime orders them.

    Parameters
    ----------
    slots : ndarray of int
        The slot of each pair.
    pairs : ndarray of int
    """
    order = np.argsort(slots, kind="stable")
    found, counts = np.unique(slots, return_counts=True)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return found.astype(np.int32), offsets, pairs[order].astype(np.int64)


def compute_pairs(
    kernel: kernels.SlotKernel,
    inputs: np.ndarray,
    rows: np.ndarray,
    *,
    slots: np.ndarray,
    pairs: np.ndarray | None = None,
    top_k: int = 1,
) -> None:
    """Compute rows as one wave.

    Parameters
    ----------
    kernel : SlotKernel
    inputs : ndarray, shape [num_tokens, hidden_size]
    rows : ndarray, shape [num_tokens * top_k, hidden_size]
        Those of `pairs` are written.
    slots : ndarray of int
        The slot of each pair.
    pairs : ndarray of int, optional
        By default all.
    top_k : int, default 1
    """
    if pairs is None:
        pairs = np.arange(slots.size)
    found, offsets, ordered = wave_of(slots, pairs)
    kernel.compute(inputs, found, offsets, ordered, top_k, rows)


def wide_products(inputs: np.ndarray, matrix: Matrix) -> np.ndarray:
    """Return products with sums as they are, in float32."""
    inputs, out = np.ascontiguousarray(inputs), np.empty((len(inputs), matrix.rows), F32)
    matrix.multiply(
        inputs=inputs.ctypes.data,
        input_type="bf16" if inputs.dtype == BF16 else "f32",
        num=len(inputs),
        input_row_bytes=inputs.strides[0],
        out=out.ctypes.data,
        out_type="f32",
        out_row_bytes=out.strides[0],
    )
    return out


def combined(rows: np.ndarray, weights: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return each token's weighted sum of rows, in float32 and in the order of the choices."""
    num_tokens, top_k = weights.shape
    out = np.zeros((num_tokens, rows.shape[1]), np.float32)
    for token in range(num_tokens):
        for j in range(top_k):
            term = rows[token * top_k + j] * np.float32(weights[token, j])
            out[token] = term if j == 0 else out[token] + term
    return out.astype(dtype)
