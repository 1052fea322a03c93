"""A small layer of experts as the CUDA kernels see it, and what NumPy says it gives."""

import ctypes
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from moecache.cuda._sources import kernel_name
from moecache.cuda._structs import STRUCTS
from tests.helpers.cuda_emulator import EmulatedKernels, address_of

DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
# Relative error of the norm.
TOLERANCES = {"f32": 1e-5, "f16": 1e-2, "bf16": 1e-2}
BLOCK = 256
PAGE_BYTES = mmap.PAGESIZE

# Tokens, choices of each, experts, hidden size and width.
Sizes = tuple[int, int, int, int, int]
Place = Callable[[np.ndarray], np.ndarray]


def _erf(x: np.ndarray) -> np.ndarray:
    return np.array([math.erf(one) for one in x.ravel()]).reshape(x.shape)


# In the kernels' order.
ACTIVATIONS: list[Callable[[np.ndarray], np.ndarray]] = [
    lambda x: x * np.where(x >= 0, 1, np.exp(-np.abs(x))) / (1 + np.exp(-np.abs(x))),
    lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    lambda x: np.maximum(x, 0),
    lambda x: np.maximum(x, 0) ** 2,
]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the norm of the difference as a share of the expected norm."""
    wide = found.astype(np.float64)
    return float(np.linalg.norm(wide - expected) / np.linalg.norm(expected))


def argument(
    entry: str, arrays: Mapping[str, np.ndarray], numbers: Mapping[str, float]
) -> list[np.ndarray]:
    """Return what a kernel is given: its struct, whose other fields are zero."""
    given = np.zeros(1, STRUCTS[entry].dtype)
    for name, array in arrays.items():
        given[name] = address_of(array)
    for name, number in numbers.items():
        given[name] = number
    return [given]


def ends_at_guard(array: np.ndarray) -> np.ndarray:
    """Return a copy whose last byte lies right before a page where an access is an error."""
    return _guarded(array, at_end=True)


def starts_at_guard(array: np.ndarray) -> np.ndarray:
    """Return a copy whose first byte lies right behind a page where an access is an error."""
    return _guarded(array, at_end=False)


def _guarded(array: np.ndarray, *, at_end: bool) -> np.ndarray:
    num_pages = -(-array.nbytes // PAGE_BYTES)
    region = np.frombuffer(mmap.mmap(-1, (num_pages + 1) * PAGE_BYTES), np.uint8)
    guard = num_pages * PAGE_BYTES if at_end else 0
    first = num_pages * PAGE_BYTES - array.nbytes if at_end else PAGE_BYTES
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(region.ctypes.data + guard)
    assert libc.mprotect(address, ctypes.c_size_t(PAGE_BYTES), 0) == 0
    copy = region[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@dataclass
class Layer:
    """Tokens, where they are routed, and slots that hold the experts they chose.

    Parameters
    ----------
    suffix : str
        Of the kernels: "f32", "f16", "bf16".
    sizes : tuple of int
        Tokens, top_k, experts, hidden size, width.
    activation : int, default 0
    ids_dtype : dtype, default int32
    own_weights : bool, default False
        Routing weights of the experts' type, not float32.
    padding_bytes : int, default 0
        In front of, between and behind the matrices of a slot.
    place : callable, default numpy.array
        Copies each array to where the kernels get it.
    seed : int, default 0
    is_gated : bool, default True
        Else an expert is up and down.
    """

    suffix: str
    sizes: Sizes
    activation: int = 0
    ids_dtype: type[np.signedinteger] = np.int32
    own_weights: bool = False
    padding_bytes: int = 0
    place: Place = np.array
    seed: int = 0
    is_gated: bool = True
    slot_stride: int = field(init=False)
    x: np.ndarray = field(init=False)
    ids: np.ndarray = field(init=False)
    weights: np.ndarray = field(init=False)
    slot_table: np.ndarray = field(init=False)
    slots: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        """Draw all of it."""
        self.num_tokens, self.top_k, self.num_experts, self.hidden, self.width = self.sizes
        rng = np.random.default_rng(self.seed)
        dtype = DTYPES[self.suffix]
        shape = (self.num_tokens, self.top_k)
        down_bytes = self.width * self.hidden * dtype.itemsize
        self.slot_stride = self.down_offset + down_bytes + self.padding_bytes
        self.x = self.place(rng.standard_normal((self.num_tokens, self.hidden)).astype(dtype))
        chosen = [rng.permutation(self.num_experts)[: self.top_k] for _ in range(self.num_tokens)]
        self.ids = self.place(np.array(chosen, self.ids_dtype))
        weights = rng.random(shape).astype(dtype if self.own_weights else np.float32)
        self.weights = self.place(weights)
        used = np.unique(self.ids)
        table = np.full(self.num_experts, -1, np.int32)
        table[used] = rng.permutation(used.size)
        self.slot_table = self.place(table)
        gate_up = rng.standard_normal((used.size, self.gate_up_rows * self.hidden)) / 4
        down = rng.standard_normal((used.size, self.hidden * self.width)) / 4
        slots = np.zeros((used.size, self.slot_stride), np.uint8)
        for matrix, offset in ((gate_up, self.gate_up_offset), (down, self.down_offset)):
            stored = matrix.astype(dtype).view(np.uint8)
            slots[:, offset : offset + stored.shape[1]] = stored
        self.slots = self.place(slots)

    @property
    def gate_up_rows(self) -> int:
        """Rows of a slot's first matrix."""
        return self.width * (2 if self.is_gated else 1)

    @property
    def gate_up_offset(self) -> int:
        """Where a slot's first matrix begins."""
        return self.padding_bytes

    @property
    def down_offset(self) -> int:
        """Where a slot's second matrix begins."""
        size = self.gate_up_rows * self.hidden * DTYPES[self.suffix].itemsize
        return self.gate_up_offset + size + self.padding_bytes

    def expected(self) -> np.ndarray:
        """Return what float64 gives."""
        out = np.zeros((self.num_tokens, self.hidden))
        for token, choices in enumerate(self.ids):
            x = self.x[token].astype(np.float64)
            for weight, expert in zip(self.weights[token], choices, strict=True):
                slot = self.slots[self.slot_table[expert]]
                shape = (self.gate_up_rows, self.hidden)
                gate_up = self._matrix(slot, self.gate_up_offset, shape)
                down = self._matrix(slot, self.down_offset, (self.hidden, self.width))
                both = gate_up @ x
                h = ACTIVATIONS[self.activation](both[: self.width])
                if self.is_gated:
                    h *= both[self.width :]
                out[token] += float(weight) * (down @ h)
        return out

    def _matrix(self, slot: np.ndarray, offset: int, shape: tuple[int, int]) -> np.ndarray:
        """Return a matrix of a slot in float64."""
        dtype = DTYPES[self.suffix]
        stored = slot[offset : offset + math.prod(shape) * dtype.itemsize].copy()
        return stored.view(dtype).reshape(shape).astype(np.float64)

    def decode(
        self,
        module: EmulatedKernels,
        grid: int = 2,
        seed: int = 0,
        barrier: np.ndarray | None = None,
        gate: int = 0,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return what the single launch gives."""
        h = self.place(np.full((self.ids.size, self.width), np.nan, np.float32))
        out = self.place(np.zeros_like(self.x)) if out is None else out
        barrier = self.place(np.zeros(1, np.uint64)) if barrier is None else barrier
        arrays = {
            "x": self.x,
            "ids": self.ids,
            "slot_table": self.slot_table,
            "weights": self.weights,
            "first_slot": self.slots,
            "h": h,
            "out": out,
            "barrier": barrier,
        }
        numbers = {
            "step_gate": gate,
            "ids_kind": self.ids.itemsize == 8,
            "weights_kind": self.own_weights,
            "num_tokens": self.num_tokens,
            "top_k": self.top_k,
            "num_experts": self.num_experts,
            "num_slots": len(self.slots),
        }
        given = argument("decode", arrays, {**numbers, **self.of_gate, **self.of_down})
        module.launch(self.kernel("decode"), grid, BLOCK, given, cooperative=True, seed=seed)
        return out

    def kernel(self, entry: str) -> str:
        """Return the name of a kernel for these experts."""
        return kernel_name(entry, self.suffix, halves=int(self.is_gated))

    @property
    def of_gate(self) -> dict[str, int]:
        """What arguments have of gate and up."""
        return {
            "gate.slot_stride": self.slot_stride,
            "gate.offset": self.gate_up_offset,
            "gate.hidden": self.hidden,
            "gate.width": self.width,
            "gate.activation": self.activation,
        }

    @property
    def of_down(self) -> dict[str, int]:
        """What arguments have of down."""
        return {
            "down.slot_stride": self.slot_stride,
            "down.offset": self.down_offset,
            "down.hidden": self.hidden,
            "down.width": self.width,
        }

    def by_parts(
        self,
        module: EmulatedKernels,
        lists: Sequence[Sequence[int]],
        grid: int = 2,
        seed: int = 0,
    ) -> np.ndarray:
        """Return what gate_up and down of each list of pairs, and then combine_rows, give."""
        h = self.place(np.full((self.ids.size, self.width), np.nan, np.float32))
        rows = self.place(np.full((self.ids.size, self.hidden), np.nan, np.float32))
        out = self.place(np.zeros_like(self.x))
        for chosen in lists:
            pairs = self.place(np.array(chosen, np.int32))
            slots = self.place(self.slot_table[self.ids.ravel()[pairs]])
            arrays = {"pair_slots": slots, "pairs": pairs, "first_slot": self.slots, "h": h}
            first = argument(
                "gate_up",
                {**arrays, "x": self.x},
                {"num_pairs": pairs.size, "top_k": self.top_k, **self.of_gate},
            )
            second = argument(
                "down", {**arrays, "rows": rows}, {"num_pairs": pairs.size, **self.of_down}
            )
            module.launch(self.kernel("gate_up"), grid, BLOCK, first, seed=seed)
            module.launch(self.kernel("down"), grid, BLOCK, second, seed=seed)
        last = argument(
            "combine_rows",
            {"rows": rows, "weights": self.weights, "out": out},
            {
                "weights_kind": self.own_weights,
                "num_tokens": self.num_tokens,
                "top_k": self.top_k,
                "hidden": self.hidden,
            },
        )
        module.launch(self.kernel("combine_rows"), grid, BLOCK, last, seed=seed)
        return out
