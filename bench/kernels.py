"""How fast the kernels multiply, beside torch's products, and as a share of what memory can do.

    python -m bench.kernels                                   # one layer, one token, one thread
    python -m bench.kernels --json bench/results/kernels.json
    python -m bench.kernels --errors                          # of products, beside float64
    python -m bench.kernels --scaling                         # two threads beside one, by the clock

One layer's gated experts, 8 of them for one token, from weights that are in no cache: of many
experts in huge pages, each time others. Contestants take turns, in another order each round; shown
are medians of a thread's CPU time, and of rounds' ratios. "bandwidth" reads the same bytes
and does nothing with them. "torch" multiplies expert by expert, as transformers does on a CPU.
A level's name is that of other instructions than the best.
"ggml" is what llama.cpp computes with, if llama-cpp-python is installed (extra `bench-llama`): the
same products of the same weights; it rounds activations to 8 bits unless weights are bf16;
"repacked" with an interleaved order of its own, where it has one. "tile" brings a matrix of a file
into its compute form, counted by what it reads; "expand" makes bfloat16 of a form, counted by what
it writes. A prompt is 512 tokens through 128 experts, 8 for each.
"""

import argparse
import contextlib
import itertools
import mmap
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

from bench.ggml import GgmlLayer, NotRepackedError, has_format, parts_of
from bench.runs import begin, write_figures
from moecache import kernels
from moecache.errors import ConfigError
from moecache.formats import find_format
from moecache.kernels import _kernels
from moecache.kernels.matrices import matrix_of

TOP_K = 8
SHAPES = ((1024, 512), (2048, 768))
FORMATS = (
    *("bf16", "q8_0", "q4_0", "mxfp4", "fp8[128x128,f32]", "int4[1x32,bf16]"),
    *("gptq4[128,f16]", "awq4[128,f16]", "q4_k", "q5_k", "q6_k", "iq4_xs", "q4_1", "q5_0", "q5_1"),
    *("q2_k", "q3_k", "iq4_nl", "nvfp4"),
)
NUM_TOKENS, NUM_EXPERTS = 512, 128
_HUGE = 2 * 2**20

Work = Callable[[int], None]


@dataclass(frozen=True)
class Figure:
    """What one contestant did with one shape."""

    name: str
    hidden_size: int
    width: int
    num_tokens: int
    nbytes: int
    cpu_s: float
    of_bandwidth: float
    of_torch: float
    of_ggml: float

    @property
    def gib_per_s(self) -> float:
        """Weights read."""
        return self.nbytes / 2**30 / self.cpu_s


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels")
    parser.add_argument("--small", action="store_true", help="to see whether it runs")
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="those to compare")
    parser.add_argument("--errors", action="store_true", help="no times: errors beside float64")
    parser.add_argument("--scaling", action="store_true", help="two threads beside one")
    arguments = begin(parser, argv, rounds=15)
    if arguments.scaling:
        print("\n".join(scaling(arguments.formats, arguments.rounds)))
        return 0
    if arguments.errors:
        hidden_size, width = SHAPES[-1]
        names = _storing(arguments.formats, hidden_size, width)
        print("\n".join(errors(names, rows=width, columns=hidden_size)))
        return 0
    torch.set_num_threads(arguments.threads)
    figures: list[Figure] = []
    shapes, rounds = (((64, 32),), 1) if arguments.small else (SHAPES, arguments.rounds)
    num_experts = 2 * TOP_K if arguments.small else NUM_EXPERTS
    for hidden_size, width in shapes:
        names = _storing(arguments.formats, hidden_size, width)
        figures += one_token(names, hidden_size, width, num_experts, rounds)
        tokens = 16 if arguments.small else NUM_TOKENS
        figures += prompt(names, hidden_size, width, tokens, num_experts, max(1, rounds // 5))
    for line in describe(figures):
        print(line)
    write_figures(
        arguments,
        figures=[asdict(figure) | {"gib_per_s": figure.gib_per_s} for figure in figures],
    )
    return 0


def errors(names: Sequence[str], rows: int, columns: int) -> list[str]:
    """Return each format's error: of the kernels, and of activations rounded otherwise.

    Root of the mean square, as a share of the products'. In "tails" one activation of 32 is a
    hundred times the others.
    """
    normal = _random((16, columns))
    tails = normal * np.where(np.arange(columns) % 32 == 7, 100, 1).astype(np.float32)
    lines = [
        f"{'':20} {'normal':>8} {'bf16':>8} {'8 bits':>8} {'tails':>8} {'bf16':>8} {'8 bits':>8}"
    ]
    for name in names:
        values = np.random.default_rng(2).standard_normal((rows, columns)) / columns**0.5
        parts = parts_of(values.astype(np.float32), name)
        weights = parts["values"] if "values" in parts else find_format(name).dequantize(parts)
        exact, matrix = weights.astype(np.float64).T, matrix_of(parts, name)
        line = f"{name:20}"
        for given in (normal, tails):
            wide = given.astype(np.float64) @ exact
            bf16 = given.astype(ml_dtypes.bfloat16).astype(np.float64)
            for found in (
                kernels.products(given, matrix),
                bf16 @ exact,
                _eight_bits(given) @ exact,
            ):
                line += f" {np.sqrt(((found - wide) ** 2).mean() / (wide**2).mean()):8.1e}"
        lines.append(line)
    return lines


def _eight_bits(given: np.ndarray) -> np.ndarray:
    """Return activations as llama.cpp rounds them: integers of 8 bits, a scale for 32."""
    blocks = given.astype(np.float64).reshape(-1, 32)
    scales = np.abs(blocks).max(1, keepdims=True) / 127
    return (np.rint(blocks / scales) * scales).reshape(given.shape)


def scaling(names: Sequence[str], rounds: int) -> list[str]:
    """Return how many times as fast two threads are as one: products of one row, one after another.

    And after a pause of a millisecond each, in which threads fall asleep.
    """
    lines = [f"{'':20} {'MiB':>6} {'one, us':>9} {'two / one':>9} {'after a pause':>14}"]
    for name, wanted in itertools.product(names, (0.25, 1, 4, 16)):
        rows = 16 * max(1, round(wanted * 2**20 / find_format(name).nbytes(16, 2048)))
        parts = parts_of(np.random.default_rng(0).standard_normal((rows, 2048)) / 50, name)
        one = np.asarray(matrix_of(parts, name).owner).reshape(-1).view(np.uint8)
        copies = max(2, 2**28 // one.size)
        slab = _huge(copies * one.size).reshape(copies, one.size)
        slab[:] = one
        matrices = [
            _kernels.Matrix(each.ctypes.data, name, rows, 2048, None, slab) for each in slab
        ]
        given, out = _random((1, 2048)), np.empty((1, rows), np.float32)

        def calls(
            pause: float,
            matrices: list[Any] = matrices,
            given: np.ndarray = given,
            out: np.ndarray = out,
        ) -> float:
            spent = 0.0
            for matrix in matrices[:32] if pause else matrices:
                if pause:
                    time.sleep(pause)
                start = time.perf_counter()
                matrix.multiply(given.ctypes.data, "f32", 1, 8192, out.ctypes.data, "f32", 0)
                spent += time.perf_counter() - start
            return spent / (32 if pause and len(matrices) > 32 else len(matrices))

        times: dict[tuple[float, int], list[float]] = {}
        for _ in range(rounds):
            for pause, threads in itertools.product((0, 1e-3), (1, 2)):
                kernels.use_threads(threads)
                times.setdefault((pause, threads), []).append(calls(pause))
        median = {key: statistics.median(several) for key, several in times.items()}
        lines.append(
            f"{name:20} {one.size / 2**20:6.2f} {median[0, 1] * 1e6:9.0f} "
            f"{median[0, 1] / median[0, 2]:9.2f} {median[1e-3, 1] / median[1e-3, 2]:14.2f}"
        )
    return lines


def one_token(
    names: list[str], hidden_size: int, width: int, num_experts: int, rounds: int
) -> list[Figure]:
    """Return the figures of 8 experts and one token."""
    hidden = _random((1, hidden_size)).astype(ml_dtypes.bfloat16)
    works: dict[str, tuple[int, Work]] = {}
    for name in names:
        layer = _Layer(name, hidden_size, width, num_experts)
        works |= {own: (layer.nbytes, work) for own, work in layer.kernel_works(hidden).items()}
        works[f"bandwidth {name}"] = layer.nbytes, layer.read_work()
        if name == "bf16":
            works["torch bf16"] = layer.nbytes, layer.torch_work(hidden)
            _check_equal(layer, hidden)
        works |= {own: (layer.nbytes, work) for own, work in layer.ggml_works(hidden).items()}
        works |= layer.form_works()
    return _figures(works, hidden_size, width, 1, rounds, repeats=num_experts // TOP_K)


def prompt(
    names: list[str],
    hidden_size: int,
    width: int,
    num_tokens: int,
    num_experts: int,
    rounds: int,
) -> list[Figure]:
    """Return the figures of a prompt."""
    hidden = _random((num_tokens, hidden_size)).astype(ml_dtypes.bfloat16)
    works: dict[str, tuple[int, Work]] = {}
    for name in names:
        layer = _Layer(name, hidden_size, width, num_experts)
        nbytes = layer.nbytes // TOP_K * num_experts
        works |= {own: (nbytes, work) for own, work in layer.kernel_works(hidden).items()}
        if name == "bf16":
            works["torch bf16"] = nbytes, layer.torch_work(hidden)
    return _figures(works, hidden_size, width, num_tokens, rounds, repeats=1)


class _Layer:
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
            self.slabs[role] = slab = _huge(num_experts * flat.size)
            slab.reshape(num_experts, flat.size)[:] = flat
            self.matrices[role] = _kernels.Matrix(slab.ctypes.data, name, rows, columns, None, slab)
            del one
        self.width = width
        slab, half = self.slabs["up"], self.strides["up"] // 2
        places = (slab.ctypes.data + i * half for i in range(2))
        self.kernel = _kernels.Experts(
            [_kernels.Matrix(place, name, width, hidden_size, None, slab) for place in places],
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
                _kernels.read_all(slab.ctypes.data + first * stride, TOP_K * stride)

        return work

    def _tensor(self, role: str) -> torch.Tensor:
        matrix = self.matrices[role]
        raw = torch.from_numpy(self.slabs[role].view(np.uint16)).view(torch.bfloat16)
        return raw.view(self.num_experts, matrix.rows, matrix.columns)


def _storing(names: Sequence[str], *columns: int) -> list[str]:
    """Return the formats that have matrices of so many columns."""
    found = []
    for name in names:
        with contextlib.suppress(ConfigError):
            if all(find_format(name).nbytes(32, each) for each in columns):
                found.append(name)
    return found


def _check_equal(layer: _Layer, hidden: np.ndarray) -> None:
    """Raise AssertionError if kernels and torch did other work."""
    layer.kernel_work(hidden)(0)
    layer.torch_work(hidden)(0)
    ours, theirs = layer.rows, layer.torch_rows.float().numpy()
    assert np.abs(ours - theirs).max() < 0.02 * np.abs(ours).max()


def _figures(
    works: dict[str, tuple[int, Work]],
    hidden_size: int,
    width: int,
    num_tokens: int,
    rounds: int,
    *,
    repeats: int,
) -> list[Figure]:
    """Time each contestant in turns; return medians."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        names = list(works)
        random.Random(number).shuffle(names)
        for name in names:
            start = time.process_time()
            for step in range(repeats):
                works[name][1](step)
            spent = (time.process_time() - start) / repeats
            if number:  # the first round warms up
                times[name].append(spent)

    def share(name: str, other: str) -> float:
        if other not in times:
            return float("nan")
        pairs = zip(times[name], times[other], strict=True)
        # By bytes a second: formats differ in size.
        scale = works[name][0] / works[other][0] if other.startswith("bandwidth") else 1
        return statistics.median(b / a for a, b in pairs) * scale

    return [
        Figure(
            name,
            hidden_size,
            width,
            num_tokens,
            works[name][0],
            statistics.median(times[name]),
            share(name, f"bandwidth {name.split()[1]}"),
            share(name, "torch bf16"),
            _best_ggml(share, times, name),
        )
        for name in works
    ]


def _best_ggml(
    share: Callable[[str, str], float], times: dict[str, list[float]], name: str
) -> float:
    """Return how many times as fast as ggml's best way for the same format this is."""
    kind = name.split()[1]
    rivals = [rival for rival in times if rival.startswith(f"ggml {kind}")]
    return min((share(name, rival) for rival in rivals), default=float("nan"))


def describe(figures: list[Figure]) -> list[str]:
    """Return the figures as lines."""
    title = f"{'':28} {'hidden, width':>14} {'tokens':>6} {'CPU us':>9} {'GiB/s':>6}"
    lines = [f"{title} {'of bandwidth':>12} {'torch / this':>12} {'ggml / this':>11}"]
    lines += [
        f"{one.name:28} {one.hidden_size:>7}, {one.width:>5} {one.num_tokens:>6} "
        f"{one.cpu_s * 1e6:>9.0f} {one.gib_per_s:>6.1f} {one.of_bandwidth:>12.2f} "
        f"{one.of_torch:>12.2f} {one.of_ggml:>11.2f}"
        for one in figures
    ]
    return lines


def _huge(nbytes: int) -> np.ndarray:
    memory = mmap.mmap(-1, nbytes + _HUGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    return raw[-raw.ctypes.data % _HUGE :][:nbytes]


def _random(shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


if __name__ == "__main__":
    raise SystemExit(main())
