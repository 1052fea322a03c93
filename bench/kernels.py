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
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

from bench.ggml import parts_of
from bench.kernel_layer import TOP_K, Layer, Work, huge, random_rows
from bench.runs import begin, write_figures
from moecache import kernels
from moecache.errors import ConfigError
from moecache.formats import find_format
from moecache.kernels._matrix import Matrix
from moecache.kernels.matrices import matrix_of

SHAPES = ((1024, 512), (2048, 768))
FORMATS = (
    *("bf16", "q8_0", "q4_0", "mxfp4", "fp8[128x128,f32]", "int4[1x32,bf16]"),
    *("gptq4[128,f16]", "awq4[128,f16]", "q4_k", "q5_k", "q6_k", "iq4_xs", "q4_1", "q5_0", "q5_1"),
    *("q2_k", "q3_k", "iq4_nl", "nvfp4"),
)
NUM_TOKENS, NUM_EXPERTS = 512, 128


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
    normal = random_rows((16, columns))
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
        slab = huge(copies * one.size).reshape(copies, one.size)
        slab[:] = one
        matrices = [Matrix(each.ctypes.data, name, rows, 2048, None, slab) for each in slab]
        given, out = random_rows((1, 2048)), np.empty((1, rows), np.float32)

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
    hidden = random_rows((1, hidden_size)).astype(ml_dtypes.bfloat16)
    works: dict[str, tuple[int, Work]] = {}
    for name in names:
        layer = Layer(name, hidden_size, width, num_experts)
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
    hidden = random_rows((num_tokens, hidden_size)).astype(ml_dtypes.bfloat16)
    works: dict[str, tuple[int, Work]] = {}
    for name in names:
        layer = Layer(name, hidden_size, width, num_experts)
        nbytes = layer.nbytes // TOP_K * num_experts
        works |= {own: (nbytes, work) for own, work in layer.kernel_works(hidden).items()}
        if name == "bf16":
            works["torch bf16"] = nbytes, layer.torch_work(hidden)
    return _figures(works, hidden_size, width, num_tokens, rounds, repeats=1)


def _storing(names: Sequence[str], *columns: int) -> list[str]:
    """Return the formats that have matrices of so many columns."""
    found = []
    for name in names:
        with contextlib.suppress(ConfigError):
            if all(find_format(name).nbytes(32, each) for each in columns):
                found.append(name)
    return found


def _check_equal(layer: Layer, hidden: np.ndarray) -> None:
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


if __name__ == "__main__":
    raise SystemExit(main())
