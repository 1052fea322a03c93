"""Decode of quantized checkpoints: with all slots, with a quarter, and with bfloat16's bytes.

    python -m bench.qwen3_moe bf16                     # a model of 3.2 GB
    python -m bench.quantized fp8 fp8 --of bf16        # and what it is in other formats
    python -m bench.quantized int4 int4 --of bf16
    python -m bench.quantized mxfp4 mxfp4              # gpt-oss's shapes
    python -m bench.formats bf16 fp8 int4 mxfp4 --gguf q8_0.gguf q4_k_m.gguf --json FILE

The first checkpoint is in bfloat16. All are given the same tokens, one at a time after a prompt of
16, computed by the kernels and warm; they take turns, in another order each round. Shown are
medians: tokens per second of CPU time of all threads and of the clock, hit rate, bytes read per
token. Ratios are medians of rounds' ratios: of a checkpoint's own 100 %, and of bfloat16 in as many
bytes.
`bench.kernels` has the kernels of each format beside the memory's bandwidth. GGUF files are decoded
by llama.cpp (the extra bench-llama), whose library makes them of one in bfloat16
(bench.against_llama_cpp --convert): python -m bench.formats --quantize bf16.gguf q4_k_m.gguf
"""

import argparse
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench import against_llama_cpp as models
from bench.runs import begin, write_figures
from moecache.stores import open_store
from moecache.units import format_bytes

PROMPT, NEW_TOKENS = 16, 48
QUARTER = "25%"


@dataclass
class Contestant:
    """A checkpoint with some memory for its experts, and what it did in each round."""

    name: str
    memory: str
    model: models.Contestant
    cpu: list[float] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    read_bytes: list[float] = field(default_factory=list)
    hit_rate: list[float] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.formats",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoints", type=Path, nargs="*", help="bfloat16 first")
    parser.add_argument("--gguf", type=Path, nargs="*", default=[])
    parser.add_argument("--quantize", type=Path, nargs=2, metavar=("GGUF", "OUT"))
    arguments = begin(parser, argv, rounds=5)
    if arguments.quantize:
        return quantize(*arguments.quantize)
    with open_store(arguments.checkpoints[0]) as store:
        quarter = store.layout.total_bytes // 4
    tokens = np.random.default_rng(0).integers(5, 200, PROMPT + NEW_TOKENS).tolist()
    with ExitStack() as opened:
        contestants = []
        for path in arguments.checkpoints:
            memories = ["100%", QUARTER]
            is_same_model = path != arguments.checkpoints[0] and _shape(path) == _shape(
                arguments.checkpoints[0]
            )
            for memory in [*memories, quarter] if is_same_model else memories:
                one = models.ours(path, memory, "fast", arguments.threads)
                shown = memory if isinstance(memory, str) else format_bytes(memory)
                contestants.append(Contestant(path.name, shown, opened.enter_context(one)))
        for path in arguments.gguf:
            theirs = opened.enter_context(models.llama(path, arguments.threads))
            contestants.append(Contestant(path.name, "100%", theirs))
        for number in range(arguments.rounds + 1):
            order = list(contestants)
            random.Random(number).shuffle(order)
            for one in order:
                run(one, tokens, counted=number > 0)
    figures = compare(contestants)
    for figure in figures:
        print(describe(figure), flush=True)
    write_figures(arguments, figures=figures)
    return 0


def _shape(path: Path) -> tuple[int, ...]:
    with open_store(path) as store:
        shapes = [role.shape for role in store.layout.layers[0]]
        return (store.layout.num_layers, store.layout.num_experts, *sum(shapes, ()))


def run(one: Contestant, tokens: list[int], *, counted: bool) -> None:
    """Decode tokens after a prompt."""
    model = one.model
    model.prompt(tokens[:PROMPT])
    before = model.offload.stats() if model.offload else None
    cpu, clock = time.process_time(), time.perf_counter()
    for token in tokens[PROMPT:]:
        model.token(token)
    cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
    if not counted:
        return
    one.cpu.append(NEW_TOKENS / cpu)
    one.clock.append(NEW_TOKENS / clock)
    if model.offload:
        during = model.offload.stats() - before
        read_bytes = during.bytes_demand + during.bytes_bulk + during.bytes_prefetch
        one.read_bytes.append(read_bytes / NEW_TOKENS)
        one.hit_rate.append(during.num_hits / max(during.num_hits + during.num_misses, 1))


def quantize(source: Path, out: Path) -> int:
    """Write a GGUF file in the type that its name has; return the exit code."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{out.stem.upper()}")
    return int(
        llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), options) != 0
    )


def compare(contestants: list[Contestant]) -> list[dict[str, Any]]:
    """Return medians, and medians of rounds' ratios."""
    by_name = {(one.name, one.memory): one for one in contestants}
    first = contestants[0].name
    figures = []
    for one in contestants:
        whole, plain = by_name[one.name, "100%"], by_name[first, QUARTER]
        is_same_bytes = one.memory not in ("100%", QUARTER)
        figures.append(
            {
                "name": one.name,
                "memory": one.memory,
                "tokens_per_cpu_s": statistics.median(one.cpu),
                "tokens_per_s": statistics.median(one.clock),
                "hit_rate": statistics.median(one.hit_rate or [1.0]),
                "read_bytes_per_token": statistics.median(one.read_bytes or [0.0]),
                "of_all_slots_cpu": _ratio(one.cpu, whole.cpu),
                "of_all_slots": _ratio(one.clock, whole.clock),
                "of_bf16_in_as_many_bytes": _ratio(one.clock, plain.clock)
                if is_same_bytes
                else None,
            }
        )
    return figures


def _ratio(values: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(values, others, strict=True))


def describe(figure: dict[str, Any]) -> str:
    """Return a figure as a line."""
    same = figure["of_bf16_in_as_many_bytes"]
    return (
        f"{figure['name']:12} {figure['memory']:>9} {figure['tokens_per_cpu_s']:6.1f} tokens/CPU-s "
        f"{figure['tokens_per_s']:6.1f} tokens/s, {figure['of_all_slots_cpu']:.2f} and "
        f"{figure['of_all_slots']:.2f} of all slots; hit rate {figure['hit_rate']:.2f}, "
        f"{format_bytes(figure['read_bytes_per_token'])} read a token"
        + (f"; {same:.2f} of bf16 in as many bytes" if same else "")
    )


if __name__ == "__main__":
    raise SystemExit(main())
