"""Decoding on a GPU with fewer slots than experts.

48 layers of 128 experts in bfloat16, hidden 2048, width 768, random weights, with routing replayed
from a recorded trace. All ways decode the same tokens, in turns within each run, in the same
stream, from ids that are on the device, and must leave the same bits. The experts of all layers
are the same few in other places: host memory holds one layer's. Layers are left out where the GPU
holds no two stacks; the figures say so.

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
"""

import statistics
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from bench.checkpoint import StackSize
from bench.gpu import bound
from bench.gpu_contest import Contest, Way, verify
from bench.gpu_copies import DeviceCopy, PinnedCopy, Timer
from bench.gpu_stack import (
    TRACE,
    Decoder,
    GraphDecoder,
    TokenDecoder,
    TokenGraphDecoder,
    open_place,
    open_stack,
    read_trace,
)
from moecache.cuda import Device
from moecache.units import format_bytes, parse_bytes

# Stacks that the device must hold: one for the slots of a group, one that is resident.
STACKS = 2
SPARE = 0.9
GPT_OSS_20B = StackSize(
    num_layers=24,
    num_experts=32,
    top_k=4,
    hidden=2880,
    width=2880,
    format="mxfp4",
    is_gpt_oss=True,
)


RESIDENT, GRAPH = "all resident", "all resident, graph"
AUTO = "25%, echo, prefetch auto"
# Groups of ways that are open at once, beside the one with everything resident. No group has more
# slots than a stack.
GROUPS = {
    "half": (
        Way("50%, echo", 0.5, "echo"),
        Way("50%, lru", 0.5, "lru"),
        Way("no cache", 0.0, "lru"),
    ),
    "quarter": (
        Way("25%, echo", 0.25, "echo"),
        Way("25%, lru", 0.25, "lru"),
        Way("25%, echo, prefetch echo", 0.25, "echo", prefetch="echo"),
        Way(AUTO, 0.25, "echo", prefetch="auto"),
    ),
}
MOST_STALLS = 1.0
SHARES = (1.0, 0.9, 0.5)
KINDS: dict[str, type[Decoder]] = {
    "": Decoder,
    ", graph": GraphDecoder,
    ", tokens": TokenDecoder,
    ", token graph": TokenGraphDecoder,
}
# Of a copy inside the device, in bytes read and written; the aim is .8.
LEAST_OF_COPY = 0.55
# Microseconds of the host for a layer whose experts are all hits: what is aimed at, and bounds that
# a regression would break: 1.5 times what 8 layers took beside an H200 (48, 30 and 8.9), and 2.5
# times for a graph (.8).
AIMED_HOST_US = {"": 10.0, ", graph": 1.0, ", tokens": 10.0, ", token graph": 1.0}
MOST_HOST_US = {"": 75.0, ", graph": 2.0, ", tokens": 45.0, ", token graph": 14.0}


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


def decode_ways(
    device: Device,
    size: StackSize,
    trace: np.ndarray,
    *,
    num_runs: int,
    num_tokens: int,
    copy_bytes: int,
    loader_threads: int = 8,
    progress: dict[str, Any],
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the figures of every way, by name, and those that were refused with the reason."""
    with ExitStack() as stack:
        copy = stack.enter_context(PinnedCopy(device, copy_bytes))
        place = stack.enter_context(open_place(device, size, trace))
        total = size.num_layers * size.num_experts
        whole = stack.enter_context(open_stack(device, size, total, loader_threads=loader_threads))
        contest = Contest(place, copy, num_runs, num_tokens, loader_threads)
        progress["ways"] = contest.found
        always = [
            stack.enter_context(Decoder(RESIDENT, place, whole)),
            stack.enter_context(GraphDecoder(GRAPH, place, whole)),
        ]
        for decoder in always:
            verify(decoder, contest.expected)
        for group, ways in GROUPS.items():
            contest.run(always if group == "half" else always[:1], ways)
    found = contest.found
    rate = statistics.median(run["link_bytes_per_s"] for run in found[RESIDENT]["runs"])
    found[RESIDENT]["link_bytes_per_s"] = rate
    order = [RESIDENT, GRAPH, *(way.name for ways in GROUPS.values() for way in ways)]
    return {name: found[name] for name in order if name in found}, contest.refused


def measure_decode(device: Device, arguments: Namespace) -> dict[str, Any]:
    """Decode with all, some and none of the experts resident; return figures and bounds."""
    size, trace, source = _stack_for(device, arguments, num_copies=1)
    full = StackSize(top_k=size.top_k)
    found, refused = decode_ways(
        device,
        size,
        trace,
        num_runs=arguments.runs,
        num_tokens=arguments.tokens,
        copy_bytes=parse_bytes(arguments.copy_bytes),
        loader_threads=arguments.threads,
        progress=arguments.progress,
    )
    return {
        "runs": arguments.runs,
        "stack": asdict(size) | {"bytes": size.total_bytes},
        "scaled": "" if size == full else f"scaled down from {full.describe()}",
        "routing": source,
        "tokens_per_run": arguments.tokens,
        "ways": found,
        "refused": refused,
        "bounds": bounds_of(found, refused),
    }


def _stack_for(
    device: Device, arguments: Namespace, *, num_copies: int
) -> tuple[StackSize, np.ndarray, str]:
    """Return the stack, as far as it fits, its routing, and where that is from."""
    wanted: StackSize = arguments.size or StackSize()
    if arguments.layers:
        wanted = replace(wanted, num_layers=arguments.layers)
    if arguments.width:
        wanted = replace(wanted, width=arguments.width)
    size = fit(device, wanted, num_copies * parse_bytes(arguments.copy_bytes))
    trace, source = read_trace(arguments.trace or TRACE, size, 128)
    return replace(size, top_k=trace.shape[2]), trace, source


def bounds_of(found: dict[str, dict[str, Any]], refused: dict[str, str]) -> list[dict[str, Any]]:
    """Return the bounds that the figures must keep.

    None says what share of everything resident half the slots reach: a layer with all its experts
    resident takes tens of microseconds, so that the host's part of a miss alone is several times
    that, and what is left depends on the link.
    """
    off = found["25%, echo"]
    for way in found.values():
        if way["prefetch"] is not None:
            way["stalls_of_off"] = _ratio(way["stall_ns_per_token"], off["stall_ns_per_token"])
            way["tokens_of_off"] = way["tokens_per_s"] / off["tokens_per_s"]
    auto = found.get(AUTO)
    if auto is None:
        one = bound(f"stalls, {AUTO}, of off's", "<=", MOST_STALLS, None, refused[AUTO])
    else:
        prefetch = auto["prefetch"]
        note = f"{'on' if prefetch['active'] else 'off'}: {prefetch['reason']}"
        one = bound(f"stalls, {AUTO}, of off's", "<=", MOST_STALLS, auto["stalls_of_off"], note)
        one["holds"] |= not prefetch["active"]
    return [one]


def _ratio(one_ns: float, other_ns: float) -> float:
    """Return one waiting time over the other; less than a microsecond counts as one."""
    return max(one_ns, 1e3) / max(other_ns, 1e3)


def decode_shares(
    device: Device,
    size: StackSize,
    trace: np.ndarray,
    *,
    num_runs: int,
    num_tokens: int,
    copy_bytes: int,
    progress: dict[str, Any],
) -> tuple[dict[str, dict[str, Any]], dict[str, str], list[float]]:
    """Return figures by way, why others were refused, and the rates of the device's copies."""
    total = size.num_layers * size.num_experts
    with ExitStack() as stack:
        place = stack.enter_context(open_place(device, size, trace))
        timer = stack.enter_context(Timer(device))
        copy = stack.enter_context(DeviceCopy(device, place.stream, copy_bytes))
        whole = stack.enter_context(open_stack(device, size, total, policy="echo"))
        contest = Contest(place, copy, num_runs, num_tokens, timer=timer)
        progress["ways"] = contest.found
        reference = stack.enter_context(Decoder("100%", place, whole))
        verify(reference, contest.expected)
        for ways in share_groups():
            contest.run([reference], ways)
    found = contest.found
    order = [f"{share:.0%}{kind}" for share in SHARES for kind in KINDS]
    return {name: found[name] for name in order if name in found}, contest.refused, contest.rates


def share_groups() -> list[list[Way]]:
    """Return the ways that are run in turns with everything resident.

    With fewer slots each is alone: where it misses, the next would find what it has read.
    """

    def way(share: float, kind: str) -> Way:
        return Way(f"{share:.0%}{kind}", share, "echo", kind=KINDS[kind])

    kinds = [kind for kind in KINDS if kind != ", graph"]
    fewer = [[way(share, kind)] for share in SHARES if share < 1 for kind in kinds]
    return [[way(1.0, kind) for kind in KINDS if kind], *fewer]


def measure_resident(device: Device, arguments: Namespace) -> dict[str, Any]:
    """Decode with slots for all, nine in ten and half of the experts; return figures and bounds."""
    size, trace, source = _stack_for(device, arguments, num_copies=2)
    found, refused, copies = decode_shares(
        device,
        size,
        trace,
        num_runs=arguments.runs,
        num_tokens=arguments.tokens,
        copy_bytes=parse_bytes(arguments.copy_bytes),
        progress=arguments.progress,
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
        "aimed_host_us_per_layer": {f"100%{kind}": us for kind, us in AIMED_HOST_US.items()},
        "ways": found,
        "refused": refused,
        "bounds": bounds,
    }


def measure_mxfp4(device: Device, arguments: Namespace) -> dict[str, Any]:
    """Do what `measure_resident` does with experts of gpt-oss-20b's shapes in MXFP4."""
    arguments.size = arguments.size or GPT_OSS_20B
    return measure_resident(device, arguments)
