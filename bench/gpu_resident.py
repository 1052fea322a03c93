"""A token's layers with slots for all, nine in ten and half of the experts, and as one CUDA graph.

48 layers of 128 experts in bfloat16, hidden 2048, width 768, as in `bench.gpu_decode`, policy
"echo". Of each share of the slots: a call per layer, a call per layer between `begin_token` and
`end_token`, and one graph of all layers between them; with everything resident also a graph
outside of a token. Tokens per second are by the host's clock. A layer's time on the device is
that of a token from its begin to its end, misses included; a layer's time on the host is taken
right after that, when the token's experts are there. By calls, a layer that is not resident for
good waits for its ids, and the host's time includes that; tokens leave out waiting for the device.

Each way with fewer slots than experts has a cache of its own, and the ways are run in turns with
the resident one: none finds what another has read. With everything resident the weights that a
token reads per second are compared with one large copy inside the device, whose bytes are read
and written.

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
from bench.gpu_stack import Decoder, GraphDecoder, Inputs, StackSize, check_bits, open_stack
from bench.gpu_tokens import TokenDecoder, TokenGraphDecoder
from moecache.cuda import Device, Stream
from moecache.errors import MoeCacheError
from moecache.units import format_bytes_per_s, parse_bytes

SHARES = (1.0, 0.9, 0.5)
KINDS: dict[str, type[Decoder]] = {
    "": Decoder,
    ", graph": GraphDecoder,
    ", tokens": TokenDecoder,
    ", token graph": TokenGraphDecoder,
}
# Of a copy inside the device, in bytes read and written; the aim is .8.
LEAST_OF_COPY = 0.55
# Microseconds of the host for a layer whose experts are all hits.
MOST_HOST_US = {"": 10.0, ", graph": 1.0, ", tokens": 10.0, ", token graph": 1.0}


class Way:
    """One way to decode, and what it took, run by run."""

    def __init__(self, decoder: Decoder, stream: Stream, timer: Timer) -> None:
        self.decoder = decoder
        self.runs: list[dict[str, float]] = []
        self._stream = stream
        self._timer = timer

    def run(self, tokens: Sequence[int], num_layers: int) -> None:
        """Decode some tokens, one after the other, and note the medians over them."""
        decoder, runtime = self.decoder, self.decoder.runtime
        stalls = decoder.num_stalls
        before = runtime.stats()
        start = time.perf_counter()
        for token in tokens:
            decoder.step(token)
        decoder.finish()
        seconds = time.perf_counter() - start
        made = runtime.stats() - before
        stalls = decoder.num_stalls - stalls
        computed, issued = zip(*map(self._time, tokens), strict=True)
        asked = made.num_hits + made.num_misses
        self.runs.append(
            {
                "tokens_per_s": len(tokens) / seconds,
                "hit_rate": made.num_hits / asked if asked else 1.0,
                "stalls_per_token": stalls / len(tokens),
                "stall_ns_per_token": made.stall_ns / len(tokens),
                "host_us_per_layer": statistics.median(issued) / 1e3 / num_layers,
                "device_us_per_layer": statistics.median(computed) / 1e3 / num_layers,
            }
        )

    def _time(self, token: int) -> tuple[int, int]:
        """Return what a token's layers take on the device, and on the host right after that."""
        self.decoder.bring_in(token)
        self.decoder.finish()
        computed = self._timer.time_ns(self.decoder.compute, self._stream)
        return computed, self.decoder.host_ns()

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
        for share, kinds in groups():
            with ExitStack() as opened:
                runtime, ways = whole, [Way(reference, stream, timer)]
                if share < 1:
                    capacity = max(1, int(share * total))
                    runtime = opened.enter_context(
                        open_stack(device, size, capacity, policy="echo")
                    )
                for kind in kinds:
                    name = f"{share:.0%}{kind}"
                    try:
                        decoder = KINDS[kind](name, device, inputs, stream, runtime)
                    except MoeCacheError as error:
                        refused[name] = str(error)
                        continue
                    opened.enter_context(decoder)
                    verify(decoder, inputs.num_tokens, expected)
                    ways.append(Way(decoder, stream, timer))
                for run in range(num_runs):
                    start = run * num_tokens
                    tokens = [(start + i) % inputs.num_tokens for i in range(num_tokens)]
                    copies.append(copy.bytes_per_s())
                    for way in turns(ways, run):
                        way.run(tokens, size.num_layers)
                        check_bits(way.decoder, tokens[-1], expected)
                found = {**{way.decoder.name: way.figures(ways[0]) for way in ways}, **found}
            # A device's memory is free when nothing refers to it.
            gc.collect()
    order = [f"{share:.0%}{kind}" for share in SHARES for kind in KINDS]
    return {name: found[name] for name in order if name in found}, refused, copies


def groups() -> list[tuple[float, tuple[str, ...]]]:
    """Return shares of the slots, each with the kinds of decoders that are run in turns.

    They have one runtime: where it misses, the second would find what the first has read.
    """
    kinds = [kind for kind in KINDS if kind != ", graph"]
    fewer = [(share, (kind,)) for share in SHARES if share < 1 for kind in kinds]
    return [(1.0, tuple(kind for kind in KINDS if kind)), *fewer]


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
    for kind in KINDS:
        way = found.get(f"100%{kind}")
        if way is not None:
            read = size.top_k * size.expert_bytes / (way["device_us_per_layer"] / 1e6)
            way |= {"weight_bytes_per_s": read, "of_copy": read / copied}
    name = "100%, graph"
    decoded = bound(
        "decode kernel in a graph, of a copy inside the device",
        ">=",
        LEAST_OF_COPY,
        found.get(name, {}).get("of_copy"),
        refused.get(name, ""),
    )
    bounds = [
        # What is quantised reads fewer bytes for as many products.
        *([decoded] if size.format == "bf16" else []),
        *(
            bound(
                f"host us per layer, all hits{kind or ', calls'}",
                "<=",
                limit,
                found.get(f"100%{kind}", {}).get("host_us_per_layer"),
                refused.get(f"100%{kind}", ""),
            )
            for kind, limit in MOST_HOST_US.items()
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
    table = Table(
        *("slots", "tokens/s", "of resident", "device us/layer", "host us/layer", "hits"),
        *("stalls/token", "waited/token"),
    )
    for name, way in found["ways"].items():
        table.add_row(
            *(name, f"{way['tokens_per_s']:.2f}", f"{way['of_resident']:.3f}"),
            *(f"{way['device_us_per_layer']:.1f}", f"{way['host_us_per_layer']:.1f}"),
            *(f"{way['hit_rate']:.3f}", f"{way['stalls_per_token']:.2f}"),
            f"{way['stall_ns_per_token'] / 1e6:.3f} ms",
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
