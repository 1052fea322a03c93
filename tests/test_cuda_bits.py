"""What a GPU computes is what the emulator computes of the same bytes, bit for bit.

All else that is shown by the emulator holds for a GPU by this. The activation is ReLU: an
exponential is the only thing that may be rounded otherwise. Tensor cores add up in an order of
their own; with inputs that are zero but for one column there is nothing to add.
"""

import contextlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moecache.cuda._kinds import kind_of
from moecache.cuda._launches import Launches, Step, Tiles, tiles_of
from moecache.cuda._scratch import Scratch
from moecache.runtime.steps import Wave
from moecache.slots import CudaSlots
from moecache.stores.memory import MemoryStore
from tests.helpers.cuda_emulator import COMPILER
from tests.helpers.cuda_layers import DTYPES
from tests.helpers.device_formats import FORMATS, RandomStore
from tests.helpers.fake_device import FakeDevice
from tests.helpers.nightly import some
from tests.test_cuda_experts import on
from tests.test_cuda_quantized import KINDS

TOKENS, TOP_K, EXPERTS = 4, 2, 4
# Formats of gate_up (or up) and down, hidden size, width, matrices of gate_up, biases.
CASES = {
    **KINDS,
    **{name: (name, name, 40, 24, 1, "") for name in DTYPES},
    **{f"{name} without a gate": (name, name, 40, 24, 0, "") for name in DTYPES},
    "Q4_K without a gate": ("q4_k", "q5_k", 256, 256, 0, ""),
    "MXFP4 without a gate": ("mxfp4", "q6_k", 64, 256, 0, "bfloat16"),
    "Q4_0 and Q5_K": ("q4_0", "q5_k", 64, 256, 1, ""),
    "MXFP4 of GGUF": ("mxfp4_gguf", "nvfp4", 64, 96, 2, ""),
    "NVFP4 of ModelOpt": ("nvfp4[modelopt]", "fp8[128x128,f32]", 64, 96, 1, ""),
    "fp8 and MXFP8": ("fp8[16x32,bf16]", "fp8[1x32,e8m0]", 64, 96, 1, ""),
    "fp8 by rows": ("fp8[1x*,f16]", "fp8[*x*,f32]", 64, 96, 1, "bfloat16"),
    "int4 and int8": ("int4[1x64,f16]", "int8[1x*,f32]", 64, 96, 1, ""),
}


def make_store(gate_up: str, down: str, size: int, width: int, halves: int, bias: str) -> Any:
    """Return experts of a layer; of plain ones, the first row is below the normal numbers."""
    if gate_up not in DTYPES:
        return RandomStore(
            gate_up,
            down,
            size,
            width,
            num_layers=1,
            num_experts=EXPERTS,
            top_k=TOP_K,
            halves=halves,
            bias=bias or None,
        )
    rng, dtype = np.random.default_rng(0), DTYPES[gate_up]
    wide, num_rows = ("gate_up", 2 * width) if halves else ("up", width)
    matrices = rng.normal(size=(1, EXPERTS, num_rows, size)) / 6
    matrices[:, :, 0] *= 2.0 ** (-14 if gate_up == "f16" else -126)
    downs = rng.normal(size=(1, EXPERTS, size, width)) / 6
    arrays = {wide: matrices.astype(dtype), "down": downs.astype(dtype)}
    return MemoryStore(arrays, top_k=TOP_K)


def one_hot(num_rows: int, num_columns: int, dtype: np.dtype) -> np.ndarray:
    """Return rows of zeros with a small number in a column each."""
    rows = np.zeros((num_rows, num_columns), np.float32)
    at = np.arange(num_rows)
    rows[at, at * 7 % num_columns] = np.array([1, -1.5, 0.75])[at % 3]
    return rows.astype(dtype)


class Run:
    """A layer's kernels on a device, launched one after the other.

    Parameters
    ----------
    device : Device
    store : MemoryStore
    pool : CudaSlots
        Its slots have the experts, the first in the last.
    scratch : Scratch
    activation : str, default "relu"
    """

    def __init__(
        self,
        device: Any,
        store: MemoryStore,
        pool: CudaSlots,
        scratch: Scratch,
        activation: str = "relu",
    ) -> None:
        self._device = device
        self._scratch = scratch
        self.kind = kind_of(store.layout, 0, None)
        self.launches = Launches(pool, activation, is_interleaved=False, alpha=0, limit=0)
        self._plan = self.launches.plan(self.kind)
        device.prepare([kernel for kernel, _, _ in self._plan.entries.values()])
        rng = np.random.default_rng(1)
        ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).astype(np.int32)
        self.table = np.arange(EXPERTS, dtype=np.int32)[::-1].copy()
        self.ids = ids
        self.hidden = rng.normal(size=(TOKENS, self.kind.size)).astype(self.kind.dtype)
        self.weights = rng.random((TOKENS, TOP_K)).astype(np.float32)
        # Of results: CuPy may not know bfloat16.
        self.dtype = np.dtype(np.uint16) if self.kind.dtype.kind == "V" else self.kind.dtype
        self._kept: list[Any] = []  # what kernels read

    def place(self, array: np.ndarray) -> Any:
        """Return where a copy of an array is."""
        self._kept += on(self._device, array)
        return self._device.locate(self._kept[-1])

    def step(self, hidden: np.ndarray, out: Any) -> Step:
        """Return a step of hidden states."""
        x, weights, place = self.place(hidden), self.place(self.weights), self._device.locate(out)
        return Step(0, x, weights, place, TOKENS, TOP_K, self._plan, self._scratch)

    def result(
        self, shape: tuple[int, ...], dtype: np.dtype, launch: Callable[[Any], object]
    ) -> tuple[Any, np.ndarray]:
        """Return an array that a launch fills, on the device and on the host."""
        made = self._device.empty(shape, dtype, self._device.current_stream())
        self._kept.append(made)
        launch(made)
        return self._device.locate(made).address, self._device.to_host(made)

    def streamed(self) -> dict[str, np.ndarray]:
        """Return what the kernels of few tokens give."""
        launches, float32 = self.launches, np.dtype(np.float32)
        num_pairs, size, width = TOKENS * TOP_K, self.kind.size, self.kind.width
        ids, table = self.place(self.ids), self.place(self.table).address
        lists = np.stack([self.table[self.ids].ravel(), np.arange(num_pairs, dtype=np.int32)])
        slots = self.place(lists).address
        pairs = slots + 4 * num_pairs
        shape = (TOKENS, size)
        found = {}
        _, found["decode"] = self.result(
            shape,
            self.dtype,
            lambda out: launches.decode(self.step(self.hidden, out), ids, table, EXPERTS),
        )
        unused = self._device.empty(shape, self.dtype, self._device.current_stream())
        step = self.step(self.hidden, unused)
        h, found["gate_up"] = self.result(
            (num_pairs, width),
            float32,
            lambda out: launches.gate_up(
                step, slots, pairs, num_pairs, self._device.locate(out).address
            ),
        )
        rows, found["down"] = self.result(
            (num_pairs, size),
            float32,
            lambda out: launches.down(
                step, slots, pairs, num_pairs, h, self._device.locate(out).address
            ),
        )
        _, found["combine_rows"] = self.result(
            shape,
            self.dtype,
            lambda out: launches.combine_rows(self.step(self.hidden, out), rows),
        )
        return found

    def multiplied(self, hidden: np.ndarray, h: np.ndarray | None) -> dict[str, np.ndarray]:
        """Return what the kernels of many tokens give; the second has an h of its own, if any."""
        launches, size, width = self.launches, self.kind.size, self.kind.width
        order = np.argsort(self.ids.ravel(), kind="stable")
        experts, counts = np.unique(self.ids, return_counts=True)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        wave = Wave(self.table[experts], order, offsets, TOP_K)
        lists = np.concatenate([tiles_of(wave).ravel(), order]).astype(np.int32)
        at = self.place(lists).address
        tiles = Tiles(at, len(tiles_of(wave)), at + tiles_of(wave).nbytes)
        unused = self._device.empty((TOKENS, size), self.dtype, self._device.current_stream())
        step = self.step(hidden, unused)
        found = {}
        own, found["multiply_gate_up"] = self.result(
            (len(order), width),
            self.dtype,
            lambda out: launches.multiply_gate_up(step, tiles, self._device.locate(out).address),
        )
        given = own if h is None else self.place(h).address
        rows, found["multiply_down"] = self.result(
            (len(order), size),
            self.dtype,
            lambda out: launches.multiply_down(
                step, tiles, given, self._device.locate(out).address
            ),
        )
        _, found["combine"] = self.result(
            (TOKENS, size),
            self.dtype,
            lambda out: launches.combine(self.step(hidden, out), rows, 0),
        )
        return found


def results(device: Any, case: tuple[Any, ...]) -> tuple[dict[str, Any], np.ndarray | None]:
    """Return what each kernel gives, and what tensor cores give of any hidden states."""
    return results_of(device, make_store(*case), "relu" if case[4] else "relu2")


def results_of(
    device: Any, store: MemoryStore, activation: str
) -> tuple[dict[str, Any], np.ndarray | None]:
    """Return the same of a store's experts."""
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(CudaSlots(store.layout, EXPERTS, 0, device))
        for expert in range(EXPERTS):
            pool.upload(EXPERTS - 1 - expert, 0, store.view(0, expert))
        pool.before_compute(np.arange(EXPERTS, dtype=np.int32))
        scratch = Scratch(device, device.current_stream())
        stack.callback(scratch.close)
        run = Run(device, store, pool, scratch, activation)
        found, kind = run.streamed(), run.kind
        if kind.dtype.itemsize != 2:
            return found, None
        hot = one_hot(TOKENS, kind.size, kind.dtype)
        found |= run.multiplied(hot, one_hot(TOKENS * TOP_K, kind.width, kind.dtype))
        dense = run.multiplied(run.hidden, None)["multiply_down"]
        return found, dense.view(kind.dtype).astype(np.float64)


@pytest.mark.parametrize("name", some(CASES, lambda name: name in {*KINDS, *DTYPES}))
def test_a_gpu_gives_the_emulators_bits(gpu: Any, name: str) -> None:
    """Of every format and every kernel, whatever the number of blocks."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} compiles the kernels for the CPU and is not here")
    emulated = FakeDevice()
    emulated.num_multiprocessors = 2
    wanted, wanted_dense = results(emulated, CASES[name])
    found, dense = results(gpu, CASES[name])
    assert found.keys() == wanted.keys()
    for kernel, array in wanted.items():
        assert np.array_equal(found[kernel].view(np.uint8), array.view(np.uint8)), kernel
        assert array.any(), kernel
    if wanted_dense is not None:
        # Roundings to the type, of which h has one.
        assert np.linalg.norm(dense - wanted_dense) < 1e-2 * np.linalg.norm(wanted_dense)


def test_every_format_is_in_a_case() -> None:
    """As gate and up, or as down."""
    assert {*FORMATS} <= {name for case in CASES.values() for name in case[:2]}
