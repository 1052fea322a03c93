"""What a miss costs of a GGUF as llama.cpp has it, packed, and packed in compute form.

    python -m bench.packed_gguf DIR --json FILE
    python -m bench.packed_gguf DIR --types IQ2_XXS --experts 16 --rounds 3

DIR, on the disk that is measured, gets a model of random blocks and what is packed of it. Every
expert is read into slots by direct reads, the three in turns. Shown are milliseconds of wall time
and of CPU time for an expert, and the bytes of the file. By default it is Q4_K_M: Q4_K, and half
of down Q6_K.
"""

import argparse
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import moecache
from bench.runs import begin, write_figures
from moecache import packing
from moecache.units import format_bytes

TOP_K = 8
# The down projections of layer 0 and 1, as in llama.cpp's mixes.
DOWN = ("Q6_K", "Q4_K")


def write_model(path: Path, num_experts: int, hidden: int, width: int, kind: str = "") -> None:
    """Write two layers of random experts in one of ggml's types, by default those of Q4_K_M."""
    import gguf

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    said = {"block_count": 2, "expert_count": num_experts, "expert_used_count": TOP_K}
    for key, value in said.items():
        writer.add_uint32(f"qwen3moe.{key}", value)
    for layer, down in enumerate((kind, kind) if kind else DOWN):
        first = kind or "Q4_K"
        matrices = (("gate", first, width, hidden), ("up", first, width, hidden))
        for piece, name, rows, columns in (*matrices, ("down", down, hidden, width)):
            number = gguf.GGMLQuantizationType[name]
            block, nbytes = gguf.GGML_QUANT_SIZES[number]
            shape = num_experts, rows, columns // block * nbytes
            # Scales below 1.
            raw = rng.integers(0, 0x3C, shape, dtype=np.uint8)
            writer.add_tensor(f"blk.{layer}.ffn_{piece}_exps.weight", raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_all(path: Path) -> tuple[float, float]:
    """Return the wall and the CPU time, in milliseconds, of an expert that is missing."""
    options: dict[str, Any] = {"read": "direct", "prefetch": "off", "prefault": "off"}
    with moecache.open(path, slots=3 * TOP_K, **options) as runtime:
        num_experts, count = runtime.layout.num_experts, 0
        wall, cpu = time.perf_counter(), time.process_time()
        for layer in range(runtime.layout.num_layers):
            for first in range(0, num_experts, TOP_K):
                ids = np.arange(first, min(first + TOP_K, num_experts))
                for wave in runtime.waves(layer, ids[None]):
                    count += len(wave.slots)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return 1e3 * wall / count, 1e3 * cpu / count


def measure(kind: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of a model, packed or not."""
    work = arguments.directory / "packed_gguf"
    work.mkdir(parents=True)
    try:
        places = {name: work / name for name in ("model.gguf", "packed", "compute form")}
        model = places["model.gguf"]
        write_model(model, arguments.experts, *arguments.shape, kind)
        packing.pack(model, places["packed"])
        packing.pack(model, places["compute form"], compute_form=True)
        sizes = {name: file_bytes(path) for name, path in places.items()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in places}
        for _ in range(arguments.rounds):
            for name, path in places.items():
                times[name].append(read_all(path))
    finally:
        shutil.rmtree(work)
    figures = []
    for name, rounds in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
        figure = {"type": kind or "Q4_K_M", "file": name, "wall_ms": wall, "cpu_ms": cpu}
        figures.append({**figure, "file_bytes": sizes[name], "rounds": rounds})
        print(
            f"{figure['type']:8} {name:12} {wall:7.2f} ms an expert, {cpu:7.2f} ms of CPU time, "
            f"{format_bytes(sizes[name])}",
            flush=True,
        )
    return figures


def file_bytes(path: Path) -> int:
    """Return the bytes of a file, or of the parts in a directory: next to all are experts'."""
    return sum(part.stat().st_size for part in (path.glob("*.gguf") if path.is_dir() else [path]))


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.packed_gguf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument(
        "--types",
        nargs="+",
        default=[""],
        metavar="TYPE",
        help="of ggml, such as Q8_0 or IQ3_S, one model each",
    )
    parser.add_argument("--experts", type=int, default=64, help="of each of two layers")
    parser.add_argument("--shape", type=int, nargs=2, default=(2048, 768), help="hidden, width")
    arguments = begin(parser, argv, rounds=7)
    figures = []
    for kind in arguments.types:
        figures += measure(kind, arguments)
    write_figures(arguments, shape=arguments.shape, experts=arguments.experts, figures=figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
