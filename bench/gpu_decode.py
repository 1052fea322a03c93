"""Decoding on a GPU with fewer slots than experts: 48 layers of 128 in bfloat16, random weights.

Hidden 2048, width 768, routing replayed from a recorded trace. All ways decode the same tokens, in
turns within each run, in the same stream, from ids that are on the device, and must leave the same
bits. The experts of all layers are the same few in other places: host memory holds one layer's.
Layers are left out where the GPU holds no two stacks; the figures say so.

`decode`: tokens per second with all, some and none of the experts resident. Beside each is the
share of everything resident, and the share of what the link allows: the time in which one large
copy from pinned memory would have brought the bytes that this way copied.

`resident`: slots for all, nine in ten and half of the experts, policy "echo". Of each share: a
call per layer, a call per layer between `begin_token` and `end_token`, and one graph of all layers
between them; with everything resident also a graph outside of a token. Tokens per second are by
the host's clock. A layer's time on the device is that of a token from its begin to its end, misses
included; a layer's time on the host is taken right after that, when the token's experts are there.
By calls, a layer that is not resident for good waits for its ids, and the host's time includes
that; tokens leave out waiting for the device. Each way with fewer slots than experts has a cache
of its own, and runs in turns with the resident one: none finds what another has read. With
everything resident the weights that a token reads per second are compared with one large copy
inside the device, whose bytes are read and written.

`mxfp4`: that with the shapes of gpt-oss-20b, experts in MXFP4 with biases.

    python -m bench.gpu decode|resident|mxfp4 [--runs 20] [--tokens 16] [--layers 48] [--json OUT]
"""

import gc
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.gpu import bound, parser_of, run_benchmark, turns
from bench.gpu_copies import DeviceCopy, PinnedCopy, Timer
from bench.gpu_stack import (
    TRACE,
    Decoder,
    GraphDecoder,
    Inputs,
    StackSize,
    TokenDecoder,
    TokenGraphDecoder,
    check_bits,
    open_stack,
    read_trace,
)
from moecache.cuda import Device, Stream
from moecache.errors import MoeCacheError
from moecache.units import format_bytes, format_bytes_per_s, parse_bytes

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
}
MOST_STALLS = 1.0
# Stacks that the device must hold: one for the slots of a group, one that is resident.
STACKS = 2
SPARE = 0.9
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
GPT_OSS_20B = StackSize(
    num_layers=24, num_experts=32, top_k=4, hidden=2880, width=2880, format="mxfp4"
)


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


def decode_ways(
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


def measure_decode(device: Device, arguments: Namespace) -> dict[str, Any]:
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
    found, refused = decode_ways(
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


def show_decode(found: dict[str, Any], console: Console) -> None:
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
            name,
            f"{way['tokens_per_s']:.2f}",
            f"{way['of_resident']:.3f}",
            f"{way['of_link']:.3f}",
            format_bytes(round(way["bytes_per_token"])),
            f"{way['stall_ns_per_token'] / 1e6:.3f} ms",
            f"{way['hit_rate']:.3f}",
        )
    console.print(table)
    rate = found["ways"][RESIDENT]["link_bytes_per_s"]
    console.print(f"one large copy from pinned memory: {format_bytes_per_s(rate)}")
    for name, reason in found["refused"].items():
        console.print(f"{name} was refused: {reason}", markup=False)


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


def decode_shares(
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


def measure_resident(device: Device, arguments: Namespace) -> dict[str, Any]:
    """Measure every way; return figures and bounds."""
    copy_bytes = parse_bytes(arguments.copy_bytes)
    wanted: StackSize = replace(arguments.size, num_layers=arguments.layers)
    size = fit(device, wanted, 2 * copy_bytes)
    trace, source = read_trace(arguments.trace, size, 128)
    size = replace(size, top_k=trace.shape[2])
    found, refused, copies = decode_shares(
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


def show_resident(found: dict[str, Any], console: Console) -> None:
    """Print a row for each way."""
    stack = {key: value for key, value in found["stack"].items() if key != "bytes"}
    console.print(f"{StackSize(**stack).describe()}; routing of {found['routing']}", markup=False)
    table = Table(
        "slots",
        "tokens/s",
        "of resident",
        "device us/layer",
        "host us/layer",
        "hits",
        "stalls/token",
        "waited/token",
    )
    for name, way in found["ways"].items():
        table.add_row(
            name,
            f"{way['tokens_per_s']:.2f}",
            f"{way['of_resident']:.3f}",
            f"{way['device_us_per_layer']:.1f}",
            f"{way['host_us_per_layer']:.1f}",
            f"{way['hit_rate']:.3f}",
            f"{way['stalls_per_token']:.2f}",
            f"{way['stall_ns_per_token'] / 1e6:.3f} ms",
        )
    console.print(table)
    rate = format_bytes_per_s(found["copy_bytes_per_s"])
    console.print(f"one large copy inside the device, read and written: {rate}")
    for name, reason in found["refused"].items():
        console.print(f"{name} was refused: {reason}", markup=False)


def decode(
    argv: Sequence[str] | None = None, device: Device | None = None, size: StackSize | None = None
) -> int:
    """Decode in several ways; 1 if a bound is not kept, 2 without a GPU."""
    size = size or StackSize()
    parser = _parser(decode.__doc__, size)
    parser.add_argument("--width", type=int, help="width of an expert, instead of 768")
    parser.add_argument("--threads", type=int, default=8, help="threads that fill pinned buffers")
    arguments = parser.parse_args(argv)
    arguments.size = size
    return run_benchmark(measure_decode, show_decode, arguments, device)


def resident(
    argv: Sequence[str] | None = None, device: Device | None = None, size: StackSize | None = None
) -> int:
    """Decode with slots for all, 90 and 50 %; 1 if a bound is not kept, 2 without a GPU."""
    size = size or StackSize()
    arguments = _parser(resident.__doc__, size).parse_args(argv)
    arguments.size = size
    return run_benchmark(measure_resident, show_resident, arguments, device)


def mxfp4(argv: Sequence[str] | None = None, device: Device | None = None) -> int:
    """Do what `resident` does with experts of gpt-oss-20b's shapes in MXFP4."""
    return resident(argv, device, GPT_OSS_20B)


def _parser(document: str | None, size: StackSize) -> ArgumentParser:
    parser = parser_of(document)
    parser.add_argument("--tokens", type=int, default=16, help="in each run")
    parser.add_argument("--layers", type=int, default=size.num_layers, help="at most")
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE")
    parser.add_argument("--copy-bytes", default="1GiB", help="bytes of the copy that is the limit")
    return parser
