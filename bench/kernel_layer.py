"""One layer's experts in one format, in huge pages, and steps over them by several contestants."""

import mmap
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

from bench.ggml import GgmlLayer, NotRepackedError, has_format, parts_of
from moecache import kernels
from moecache.formats import find_format
from moecache.kernels._experts import Experts
from moecache.kernels._matrix import Matrix
from moecache.kernels._processor import read_all
from moecache.kernels.matrices import matrix_of

TOP_K = 8
_HUGE = 2 * 2**20

Work = Callable[[int], None]


class Layer:
    """Experts of one format in huge pages, and steps over them."""

    def __init__(self, name: str, hidden_size: int, width: int, num_experts: int) -> None:
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.name = name
        random_ = np.random.default_rng(0)
        shapes = {"up": (2 * width, hidden_size), "down": (hidden_size, width)}
        self.slabs: dict[str, np.ndarray] = {}
        self.matrices: dict[str, Any] = {}
        self.strides: dict[str, int] = {}
        self.parts: dict[str, np.ndarray] = {}
        self.raw = np.zeros(0, np.uint8)
        for role, (rows, columns) in shapes.items():
            # One expert's worth of sensible numbers, again and again.
            values = (random_.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
            parts = {part: np.ascontiguousarray(a) for part, a in parts_of(values, name).items()}
            self.parts[role] = next(iter(parts.values()))
            self.raw = np.concatenate([a.reshape(-1).view(np.uint8) for a in parts.values()])
            one = matrix_of(parts, name)
            flat = np.asarray(one.owner).reshape(-1).view(np.uint8)
            self.strides[role] = flat.size
            self.slabs[role] = slab = huge(num_experts * flat.size)
            slab.reshape(num_experts, flat.size)[:] = flat
            self.matrices[role] = Matrix(slab.ctypes.data, name, rows, columns, None, slab)
            del one
        self.width = width
        slab, half = self.slabs["up"], self.strides["up"] // 2
        places = (slab.ctypes.data + i * half for i in range(2))
        self.kernel = Experts(
            [Matrix(place, name, width, hidden_size, None, slab) for place in places],
            self.strides["up"],
            self.matrices["down"],
            self.strides["down"],
            width,
        )
        self.nbytes = TOP_K * sum(
            find_format(name).nbytes(rows, columns) for rows, columns in shapes.values()
        )

    def step(self, number: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return slots, offsets and pairs of a step; of one token's, others each time."""
        if num_tokens == 1:
            first = number * TOP_K % self.num_experts
            slots = np.arange(first, first + TOP_K, dtype=np.int32)
            return slots, np.arange(TOP_K + 1), np.arange(TOP_K)
        ids = np.arange(num_tokens * TOP_K) % self.num_experts
        pairs = np.argsort(ids, kind="stable")
        counts = np.bincount(ids, minlength=self.num_experts)
        slots = np.arange(self.num_experts, dtype=np.int32)
        return slots, np.concatenate([[0], np.cumsum(counts)]), pairs

    def kernel_works(self, hidden: np.ndarray) -> dict[str, Work]:
        """Return steps by the kernels, on each level but the plain one."""
        best, name = kernels.level(), f"ours {self.name}"
        shown = {level: f" {level}" for level in kernels.levels()[1:]} | {best: ""}
        return {f"{name}{title}": self.kernel_work(hidden, level) for level, title in shown.items()}

    def kernel_work(self, hidden: np.ndarray, level: str = "") -> Work:
        """Return a step by the kernels."""
        rows = np.empty((len(hidden) * TOP_K, self.hidden_size), np.float32)
        best = kernels.level()

        def work(number: int) -> None:
            kernels.use_level(level or best)
            slots, offsets, pairs = self.step(number, len(hidden))
            self.kernel.compute(
                slots,
                offsets,
                pairs,
                TOP_K,
                self.kernel.inputs(
                    hidden.ctypes.data, "bf16", len(hidden), input_row_bytes=hidden.strides[0]
                ),
                out=rows.ctypes.data,
                out_type="f32",
                out_row_bytes=rows.strides[0],
            )
            kernels.use_level(best)

        self.rows = rows
        return work

    def form_works(self) -> dict[str, tuple[int, Work]]:
        """Return what makes the form of the last matrix, "down", and what makes numbers of it."""
        if self.name == "bf16":
            return {}
        shape = self.matrices["down"].rows, self.matrices["down"].columns
        slab, stride = self.slabs["down"], self.strides["down"]
        out, form = np.empty(shape, ml_dtypes.bfloat16), np.empty(stride, np.uint8)

        def expand(number: int) -> None:
            first = number * TOP_K % self.num_experts
            kernels.expand(slab[first * stride :][:stride], self.name, *shape, out)

        def tile(_: int) -> None:
            kernels.tile(self.raw, self.name, *shape, form)

        return {
            f"expand {self.name}": (out.nbytes, expand),
            f"tile {self.name}": (self.raw.nbytes, tile),
        }

    def ggml_works(self, hidden: np.ndarray) -> dict[str, Work]:
        """Return steps of one token by ggml, as far as it is there, checked to do the same."""
        up, works = self.parts["up"], {}
        roles = {"gate": up[: self.width], "up": up[self.width :], "down": self.parts["down"]}
        self.kernel_work(hidden)(0)
        for repacked in (False, True) if has_format(self.name) else ():
            try:
                layer = GgmlLayer(
                    self.name,
                    roles,
                    hidden_size=self.hidden_size,
                    width=self.width,
                    num_experts=self.num_experts,
                    top_k=TOP_K,
                    threads=kernels.num_threads(),
                    repacked=repacked,
                )
            except NotRepackedError:
                continue
            layer.inputs[:] = hidden[0].astype(np.float32)

            def work(number: int, layer: GgmlLayer = layer) -> None:
                layer.experts[:] = np.arange(TOP_K) + number * TOP_K % self.num_experts
                layer.compute()

            work(0)
            assert np.abs(self.rows.reshape(-1) - layer.rows).max() < 0.05 * np.abs(self.rows).max()
            works[f"ggml {self.name}{' repacked' if repacked else ''}"] = work
        return works

    def torch_work(self, hidden: np.ndarray) -> Work:
        """Return the same step by torch, a product for each expert."""
        up, down = (self._tensor(role) for role in ("up", "down"))
        given = torch.from_numpy(hidden.view(np.uint16)).view(torch.bfloat16)

        @torch.inference_mode()
        def work(number: int) -> None:
            slots, offsets, pairs = self.step(number, len(hidden))
            self.torch_rows = torch.empty(len(pairs), self.hidden_size, dtype=torch.bfloat16)
            for expert, slot in enumerate(slots.tolist()):
                chosen = torch.from_numpy(pairs[offsets[expert] : offsets[expert + 1]])
                gate, high = (given[chosen // TOP_K] @ up[slot].t()).chunk(2, -1)
                self.torch_rows[chosen] = (torch.nn.functional.silu(gate) * high) @ down[slot].t()

        return work

    def read_work(self) -> Work:
        """Return the reading of what a step of one token reads."""

        def work(number: int) -> None:
            first = number * TOP_K % self.num_experts
            for role, slab in self.slabs.items():
                stride = self.strides[role]
                read_all(slab.ctypes.data + first * stride, TOP_K * stride)

        return work

    def _tensor(self, role: str) -> torch.Tensor:
        matrix = self.matrices[role]
        raw = torch.from_numpy(self.slabs[role].view(np.uint16)).view(torch.bfloat16)
        return raw.view(self.num_experts, matrix.rows, matrix.columns)


def huge(nbytes: int) -> np.ndarray:
    """Return memory in huge pages, as far as there are any."""
    memory = mmap.mmap(-1, nbytes + _HUGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    return raw[-raw.ctypes.data % _HUGE :][:nbytes]


def random_rows(shape: tuple[int, int]) -> np.ndarray:
    """Return normal numbers, the same ones each time."""
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)
