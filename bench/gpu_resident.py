"""A token's layers with slots for all, nine in ten and half of the experts, and as one CUDA graph.

48 layers of 128 experts in bfloat16, hidden 2048, width 768, as in `bench.gpu_decode`, policy
"echo". Of each share of the slots: a call per layer, and one graph of all layers, with the time
by the host's clock, the time by the device's, and what the host needs to issue a layer. Where not
everything is resident the graph is a token's: the device takes its steps, it is issued again when
one of them missed an expert, and the host's time has the waiting for it in it. With everything
resident the weights that a token reads per second are compared with one large copy inside the
device, whose bytes are read and written.

    python -m bench.gpu_resident [--runs 20] [--tokens 16] [--layers 48] [--json OUT]
"""

import gc
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.gpu import DeviceCopy, Timer, bound, parser_of, run_benchmark, turns
from bench.gpu_decode import TRACE, fit, read_trace, verify
from bench.gpu_stack import (
    Decoder,
    GraphDecoder,
    Inputs,
    StackSize,
    TokenGraphDecoder,
    check_bits,
    open_stack,
)
from moecache.cuda import Device, Stream
from moecache.errors import MoeCacheError
from moecache.units import format_bytes_per_s, parse_bytes

SHARES = (1.0, 0.9, 0.5)
# Of a copy inside the device, in bytes read and written; the aim is .8.
LEAST_OF_COPY = 0.55
# Microseconds of the host for a layer whose experts are all hits.
MOST_HOST_US = {"calls": 10.0, "graph": 1.0}


class Way:
    """One way to decode, and what it took, run by run."""

    def __init__(self, decoder: Decoder, stream: Stream, timer: Timer) -> None:
        self.decoder = decoder
        self.runs: list[dict[str, float]] = []
        self._stream = stream
        self._timer = timer

    def run(self, tokens: Sequence[int], num_layers: int) -> None:
        """Decode some tokens, one after the other, and note the medians over them."""
        runtime = self.decoder.runtime
        before = runtime.stats()
        start = time.perf_counter()
        for token in tokens:
            self.decoder.step(token)
        self.decoder.finish()
        seconds = time.perf_counter() - start
        made = runtime.stats() - before
        issued, computed = zip(*map(self._time, tokens), strict=True)
        asked = made.num_hits + made.num_misses
        self.runs.append(
            {
                "tokens_per_s": len(tokens) / seconds,
                "hit_rate": made.num_hits / asked if asked else 1.0,
                "host_us_per_layer": statistics.median(issued) / 1e3 / num_layers,
                "device_us_per_layer": statistics.median(computed) / 1e3 / num_layers,
            }
        )

    def _time(self, token: int) -> tuple[int, int]:
        """Return what the host takes to issue a token's layers, and the device to compute them."""
        self.decoder.bring_in(token)
        self.decoder.finish()
        issued = 0

        def compute() -> None:
            nonlocal issued
            start = time.perf_counter_ns()
            self.decoder.compute()
            issued = time.perf_counter_ns() - start

        computed = self._timer.time_ns(compute, self._stream)
        return issued, computed

    def figures(self, resident: "Way") -> dict[str, Any]:
        """Return medians over the runs, and what each run did."""
        pairs = zip(self.runs, resident.runs, strict=True)
        return {
            **{key: statistics.median(run[key] for run in self.runs) for key in self.runs[0]},
            "of_resident": statistics.median(
                run["tokens_per_s"] / other["tokens_per_s"] for run, other in pairs
            ),
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
) -> tuple[dict[str, dict[str, Any]], dict[str, str], list[float]]:
    """Return figures by way, why others were refused, and the rates of the device's copies."""
    found: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    expected: dict[int, str] = {}
    copies: list[float] = []
    total = size.num_layers * size.num_experts
    with ExitStack() as stack:
        inputs = stack.enter_context(Inputs(device, size, trace))
        stream = device.create_stream()
        stack.callback(device.destroy_stream, stream)
        stack.enter_context(device.using(stream))
        timer = Timer(device)
        stack.callback(timer.close)
        copy = stack.enter_context(DeviceCopy(device, stream, copy_bytes))
        whole = stack.enter_context(open_stack(device, size, total, policy="echo"))
        reference = stack.enter_context(Decoder("100%", device, inputs, stream, whole))
        verify(reference, inputs.num_tokens, expected)
        for share in SHARES:
            with ExitStack() as opened:
                runtime, ways = whole, [Way(reference, stream, timer)]
                if share < 1:
                    capacity = max(1, int(share * total))
                    runtime = opened.enter_context(
                        open_stack(device, size, capacity, policy="echo")
                    )
                for kind in (Decoder, GraphDecoder if share == 1 else TokenGraphDecoder):
                    name = f"{share:.0%}" + ("" if kind is Decoder else ", graph")
                    if name == reference.name:
                        continue
                    try:
                        decoder = kind(name, device, inputs, stream, runtime)
                    except MoeCacheError as error:
                        refused[name] = str(error)
                        continue
                    opened.enter_context(decoder)
                    verify(decoder, inputs.num_tokens, expected)
                    ways.append(Way(decoder, stream, timer))
                for run in range(num_runs):
                    first = run * num_tokens
                    tokens = [(first + i) % inputs.num_tokens for i in range(num_tokens)]
                    copies.append(copy.bytes_per_s())
                    for way in turns(ways, run):
                        way.run(tokens, size.num_layers)
                        check_bits(way.decoder, tokens[-1], expected)
                found = {**{way.decoder.name: way.figures(ways[0]) for way in ways}, **found}
            gc.collect()
    order = [f"{share:.0%}{kind}" for share in SHARES for kind in ("", ", graph")]
    return {name: found[name] for name in order if name in found}, refused, copies


def measure(device: Device, arguments: Namespace) -> dict[str, Any]:
    """Measure every way; return figures and bounds."""
    copy_bytes = parse_bytes(arguments.copy_bytes)
    wanted: StackSize = replace(arguments.size, num_layers=arguments.layers)
    size = fit(device, wanted, 2 * copy_bytes)
    trace, source = read_trace(arguments.trace, size, 128)
    size = replace(size, top_k=trace.shape[2])
    found, refused, copies = decode(
        device,
        size,
        trace,
        num_runs=arguments.runs,
        num_tokens=arguments.tokens,
        copy_bytes=copy_bytes,
    )
    copied = statistics.median(copies)
    for name in ("100%", "100%, graph"):
        if name in found:
            read = size.top_k * size.expert_bytes / (found[name]["device_us_per_layer"] / 1e6)
            found[name] |= {"weight_bytes_per_s": read, "of_copy": read / copied}
    graph = found.get("100%, graph", {})
    reason = refused.get("100%, graph", "")
    decoded = bound(
        "decode kernel in a graph, of a copy inside the device",
        ">=",
        LEAST_OF_COPY,
        graph.get("of_copy"),
        reason,
    )
    bounds = [
        # What is quantised reads fewer bytes for as many products.
        *([decoded] if size.format == "bf16" else []),
        bound(
            "host us per layer, all hits, calls",
            "<=",
            MOST_HOST_US["calls"],
            found["100%"]["host_us_per_layer"],
        ),
        bound(
            "host us per layer, all hits, graph",
            "<=",
            MOST_HOST_US["graph"],
            graph.get("host_us_per_layer"),
            reason,
        ),
    ]
    return {
        "runs": arguments.runs,
        "stack": asdict(size) | {"bytes": size.total_bytes},
        "routing": source,
        "tokens_per_run": arguments.tokens,
        "copy_bytes_per_s": copied,
        "ways": found,
        "refused": refused,
        "bounds": bounds,
    }


def show(found: dict[str, Any], console: Console) -> None:
    """Print a row for each way."""
    stack = {key: value for key, value in found["stack"].items() if key != "bytes"}
    console.print(f"{StackSize(**stack).describe()}; routing of {found['routing']}", markup=False)
    table = Table("slots", "tokens/s", "of resident", "device us/layer", "host us/layer", "hits")
    for name, way in found["ways"].items():
        table.add_row(
            *(name, f"{way['tokens_per_s']:.2f}", f"{way['of_resident']:.3f}"),
            *(f"{way['device_us_per_layer']:.1f}", f"{way['host_us_per_layer']:.1f}"),
            f"{way['hit_rate']:.3f}",
        )
    console.print(table)
    rate = format_bytes_per_s(found["copy_bytes_per_s"])
    console.print(f"one large copy inside the device, read and written: {rate}")
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
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE")
    parser.add_argument("--copy-bytes", default="1GiB", help="bytes of the copy that is the limit")
    arguments = parser.parse_args(argv)
    arguments.size = size
    return run_benchmark(measure, show, arguments, device)


if __name__ == "__main__":
    sys.exit(main())
