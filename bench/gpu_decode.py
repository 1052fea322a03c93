"""Tokens per second of a 30B-shaped stack of experts on a GPU, with all, some and none resident.

48 layers of 128 experts in bfloat16, hidden 2048, width 768, of random weights; routing replayed
from a recorded trace (top-6). Every way decodes the same tokens, in turns within each run, in the
same stream, from ids that are on the device, and must leave the same bits. Beside each is the
share of everything resident, and the share of what the link allows: the time in which one large
copy from pinned memory would have brought the bytes that this way copied.

The experts of all layers are the same few in other places: host memory holds one layer's. Layers
are left out where the GPU holds no two stacks; the figures say so.

    python -m bench.gpu_decode [--runs 20] [--tokens 16] [--layers 48] [--json OUT]
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.gpu import PinnedCopy, bound, parser_of, run_benchmark, turns
from bench.gpu_stack import Decoder, GraphDecoder, Inputs, StackSize, check_bits, open_stack
from bench.hit_rates import TRACES
from bench.traces import routing_trace
from moecache.cuda import Device, Stream
from moecache.errors import MoeCacheError
from moecache.study import Trace
from moecache.units import format_bytes, format_bytes_per_s, parse_bytes

# Beside the checkout or, where it was copied with what it needs, in it.
PLACES = (TRACES, Path(__file__).parents[1] / "shared" / "traces")
TRACE = next((place for place in PLACES if place.is_dir()), TRACES) / "bigmoe-qwen.npz"
RESIDENT, GRAPH = "all resident", "all resident, graph"
# Groups of ways that are open at once, beside the one with everything resident: the share of the
# experts that have slots (0: one slot), and further options. No group has more slots than a stack.
GROUPS: dict[str, dict[str, tuple[float, dict[str, Any]]]] = {
    "half": {
        "50%, echo": (0.5, {"policy": "echo"}),
        "50%, lru": (0.5, {"policy": "lru"}),
        "no cache": (0.0, {"policy": "lru"}),
    },
    "quarter": {
        "25%, echo": (0.25, {"policy": "echo"}),
        "25%, lru": (0.25, {"policy": "lru"}),
        "25%, echo, prefetch echo": (0.25, {"policy": "echo", "prefetch": "echo"}),
        "25%, echo, prefetch auto": (0.25, {"policy": "echo", "prefetch": "auto"}),
    },
    "registered": {
        "50%, echo, registered": (0.5, {"policy": "echo", "registered": True}),
        "25%, echo, registered": (0.25, {"policy": "echo", "registered": True}),
        "no cache, registered": (0.0, {"policy": "lru", "registered": True}),
    },
}
MOST_STALLS = 1.0
# Stacks that the device must hold: one for the slots of a group, one that is resident.
STACKS = 2
SPARE = 0.9


def read_trace(path: Path, size: StackSize, num_tokens: int) -> tuple[np.ndarray, str]:
    """Return routing [num_tokens, num_layers, top_k] and where it is from."""
    if path.is_file():
        trace = Trace.load(path).whole_tokens()
        if trace.num_experts == size.num_experts and trace.num_layers >= size.num_layers:
            return trace.experts[:, : size.num_layers], path.name
    drawn = routing_trace(
        num_tokens, num_layers=size.num_layers, num_experts=size.num_experts, top_k=size.top_k
    )
    return drawn, "synthetic: Zipf's law, four in ten kept"


def fit(device: Device, size: StackSize, spare_bytes: int) -> StackSize:
    """Return the stack with as many layers as the device has room for twice.

    Raises
    ------
    SystemExit
        If the device has no room for two stacks of one layer.
    """
    layer_bytes = size.total_bytes // size.num_layers
    room = int(SPARE * device.free_bytes()) - spare_bytes
    layers = min(size.num_layers, room // (STACKS * layer_bytes))
    if layers < 1:
        raise SystemExit(
            f"{device.description} has {format_bytes(device.free_bytes())} free, too little for "
            f"two layers of {format_bytes(layer_bytes)}: say --width"
        )
    return replace(size, num_layers=layers)


class Row:
    """What one way did, run by run."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.runs: list[dict[str, float]] = []

    def run(self, tokens: Sequence[int], link_bytes_per_s: float) -> float:
        """Decode some tokens; return how many per second."""
        decoder, runtime = self.decoder, self.decoder.runtime
        before = runtime.stats()
        start = time.perf_counter()
        for token in tokens:
            decoder.step(token)
        decoder.finish()
        seconds = time.perf_counter() - start
        made = runtime.stats() - before
        copied = 0 if made.uploads is None else made.uploads.bytes_uploaded
        self.runs.append(
            {
                "tokens": len(tokens),
                "tokens_per_s": len(tokens) / seconds,
                "bytes_per_token": copied / len(tokens),
                "link_bytes_per_s": link_bytes_per_s,
                "of_link": copied / link_bytes_per_s / seconds,
                "stall_ns_per_token": made.stall_ns / len(tokens),
                "hits": made.num_hits,
                "misses": made.num_misses,
            }
        )
        return len(tokens) / seconds

    def figures(self, resident: "Row") -> dict[str, Any]:
        """Return medians over the runs, and what each run did."""

        def median(key: str) -> float:
            return statistics.median(run[key] for run in self.runs)

        pairs = zip(self.runs, resident.runs, strict=True)
        hits, misses = (sum(run[key] for run in self.runs) for key in ("hits", "misses"))
        prefetch = self.decoder.runtime.stats().prefetch
        return {
            "tokens_per_s": median("tokens_per_s"),
            "of_resident": statistics.median(
                run["tokens_per_s"] / other["tokens_per_s"] for run, other in pairs
            ),
            "of_link": median("of_link"),
            "bytes_per_token": median("bytes_per_token"),
            "stall_ns_per_token": median("stall_ns_per_token"),
            "hit_rate": hits / (hits + misses) if hits + misses else 1.0,
            "misses_per_token": misses / sum(run["tokens"] for run in self.runs),
            "prefetch": None
            if prefetch is None
            else {
                "active": prefetch.active,
                "reason": prefetch.reason,
                "num_issued": prefetch.num_issued,
                "num_useful": prefetch.num_useful,
            },
            "runs": self.runs,
        }


def decode(
    device: Device,
    size: StackSize,
    trace: np.ndarray,
    *,
    num_runs: int,
    num_tokens: int,
    copy_bytes: int,
    loader_threads: int = 8,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the figures of every way, by name, and those that were refused with the reason."""
    found: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    expected: dict[int, str] = {}
    with ExitStack() as stack:
        link = stack.enter_context(PinnedCopy(device, copy_bytes))
        inputs = stack.enter_context(Inputs(device, size, trace))
        stream = device.create_stream()
        stack.callback(device.destroy_stream, stream)
        stack.enter_context(device.using(stream))
        total = size.num_layers * size.num_experts
        whole = stack.enter_context(open_stack(device, size, total, loader_threads=loader_threads))
        common = (device, inputs, stream, whole)
        resident = stack.enter_context(Decoder(RESIDENT, *common))
        graph = stack.enter_context(GraphDecoder(GRAPH, *common))
        for decoder in (resident, graph):
            verify(decoder, inputs.num_tokens, expected)
        for group, ways in GROUPS.items():
            rows = [Row(resident), *([Row(graph)] if group == "half" else [])]
            figures = _decode_group(
                rows, ways, inputs, device, stream, expected, link, refused,
                num_runs=num_runs, num_tokens=num_tokens, loader_threads=loader_threads,
            )  # fmt: skip
            found = {**figures, **found}
            # A device's memory is free when nothing refers to it.
            gc.collect()
        rate = statistics.median(run["link_bytes_per_s"] for run in found[RESIDENT]["runs"])
        found[RESIDENT]["link_bytes_per_s"] = rate
    order = [RESIDENT, GRAPH, *(name for ways in GROUPS.values() for name in ways)]
    return {name: found[name] for name in order if name in found}, refused


def _decode_group(
    always: Sequence[Row],
    ways: dict[str, tuple[float, dict[str, Any]]],
    inputs: Inputs,
    device: Device,
    stream: Stream,
    expected: dict[int, str],
    link: PinnedCopy,
    refused: dict[str, str],
    *,
    num_runs: int,
    num_tokens: int,
    loader_threads: int,
) -> dict[str, dict[str, Any]]:
    """Open some ways beside those always there, and return the figures of all, run in turns."""
    rows = [*always]
    total = inputs.size.num_layers * inputs.size.num_experts
    with ExitStack() as opened:
        for name, (share, options) in ways.items():
            capacity = max(1, int(share * total))
            options = {"loader_threads": loader_threads, **options}
            try:
                runtime = opened.enter_context(open_stack(device, inputs.size, capacity, **options))
                decoder = opened.enter_context(Decoder(name, device, inputs, stream, runtime))
            except (MoeCacheError, MemoryError) as error:
                refused[name] = str(error)
                continue
            # Warms its cache, too.
            verify(decoder, inputs.num_tokens, expected)
            rows.append(Row(decoder))
        first = 0
        for run in range(num_runs):
            tokens = [(first + i) % inputs.num_tokens for i in range(num_tokens)]
            first = tokens[-1] + 1
            limit = link.bytes_per_s()
            for row in turns(rows, run):
                row.run(tokens, limit)
                check_bits(row.decoder, tokens[-1], expected)
        return {row.decoder.name: row.figures(rows[0]) for row in rows}


def verify(decoder: Decoder, num_tokens: int, expected: dict[int, str]) -> None:
    """Compute every token and compare its bits."""
    for token in range(num_tokens):
        decoder.step(token)
        check_bits(decoder, token, expected)


def bounds_of(found: dict[str, dict[str, Any]], refused: dict[str, str]) -> list[dict[str, Any]]:
    """Return the bounds that the figures must keep.

    None says what share of everything resident half the slots reach: a layer with all its experts
    resident takes tens of microseconds, so that the host's part of a miss alone is several times
    that, and what is left depends on the link.
    """
    off, name = found["25%, echo"], "25%, echo, prefetch auto"
    for way in found.values():
        if way["prefetch"] is not None:
            way["stalls_of_off"] = _ratio(way["stall_ns_per_token"], off["stall_ns_per_token"])
            way["tokens_of_off"] = way["tokens_per_s"] / off["tokens_per_s"]
    auto = found.get(name)
    if auto is None:
        one = bound(f"stalls, {name}, of off's", "<=", MOST_STALLS, None, refused[name])
    else:
        prefetch = auto["prefetch"]
        note = f"{'on' if prefetch['active'] else 'off'}: {prefetch['reason']}"
        one = bound(f"stalls, {name}, of off's", "<=", MOST_STALLS, auto["stalls_of_off"], note)
        one["holds"] |= not prefetch["active"]
    return [one]


def _ratio(one_ns: float, other_ns: float) -> float:
    """Return one waiting time over the other; less than a microsecond counts as one."""
    return max(one_ns, 1e3) / max(other_ns, 1e3)


def measure(device: Device, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every way; return figures and bounds."""
    wanted: StackSize = replace(
        arguments.size, num_layers=arguments.layers, width=arguments.width or arguments.size.width
    )
    copy_bytes = parse_bytes(arguments.copy_bytes)
    size = fit(device, wanted, copy_bytes)
    trace, source = read_trace(arguments.trace, size, 128)
    size = replace(size, top_k=trace.shape[2])
    full = StackSize(top_k=size.top_k)
    scaled = "" if size == full else f"scaled down from {full.describe()}"
    found, refused = decode(
        device,
        size,
        trace,
        num_runs=arguments.runs,
        num_tokens=arguments.tokens,
        copy_bytes=copy_bytes,
        loader_threads=arguments.threads,
    )
    return {
        "runs": arguments.runs,
        "stack": asdict(size) | {"bytes": size.total_bytes},
        "scaled": scaled,
        "routing": source,
        "tokens_per_run": arguments.tokens,
        "ways": found,
        "refused": refused,
        "bounds": bounds_of(found, refused),
    }


def show(found: dict[str, Any], console: Console) -> None:
    """Print a row for each way."""
    stack = {key: value for key, value in found["stack"].items() if key != "bytes"}
    console.print(f"{StackSize(**stack).describe()}; routing of {found['routing']}", markup=False)
    if found["scaled"]:
        console.print(found["scaled"])
    table = Table(
        "", "tokens/s", "of resident", "of the link", "copied/token", "waited/token", "hit rate"
    )
    for name, way in found["ways"].items():
        table.add_row(
            *(name, f"{way['tokens_per_s']:.2f}", f"{way['of_resident']:.3f}"),
            *(f"{way['of_link']:.3f}", format_bytes(round(way["bytes_per_token"]))),
            *(f"{way['stall_ns_per_token'] / 1e6:.3f} ms", f"{way['hit_rate']:.3f}"),
        )
    console.print(table)
    rate = found["ways"][RESIDENT]["link_bytes_per_s"]
    console.print(f"one large copy from pinned memory: {format_bytes_per_s(rate)}")
    for name, reason in found["refused"].items():
        console.print(f"{name} was refused: {reason}", markup=False)


def main(
    argv: Sequence[str] | None = None,
    device: Device | None = None,
    size: StackSize | None = None,
) -> int:
    """Measure and print; 1 if a bound is not kept, 2 without a GPU."""
    size = size or StackSize()
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=16, help="in each run")
    parser.add_argument("--layers", type=int, default=size.num_layers, help="at most")
    parser.add_argument("--width", type=int, help="width of an expert, instead of 768")
    parser.add_argument("--threads", type=int, default=8, help="threads that fill pinned buffers")
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE")
    parser.add_argument("--copy-bytes", default="1GiB", help="bytes of the copy that is the limit")
    arguments = parser.parse_args(argv)
    arguments.size = size
    return run_benchmark(measure, show, arguments, device)


if __name__ == "__main__":
    sys.exit(main())
