"""Decode in every format that a GPU has kernels for, beside a copy inside its memory.

Layers of 128 experts, hidden 2048, width 768, top-8, all resident, as one CUDA graph: what a layer
takes on the device, and its weights' bytes over that time as a share of one large copy inside the
device, whose bytes are read and written. Weights are random codes with scales of a fixed size; an
expert's bytes stand at several places. Kernels of all formats are compiled first, side by side.

A format's outputs as a graph are compared with those by calls, bit for bit.
"""

import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from bench.checkpoint import StackSize
from bench.gpu import bound, turns
from bench.gpu_copies import DeviceCopy, Timer
from bench.gpu_stack import (
    Decoder,
    GraphDecoder,
    check_bits,
    open_place,
    open_stack,
)
from bench.traces import routing_trace
from moecache.compute import on_device
from moecache.cuda import Device
from moecache.cuda._kinds import check_experts
from moecache.errors import MoeCacheError
from moecache.units import parse_bytes

FORMATS = (
    *("bf16", "fp8[128x128,f32]", "fp8[1x32,e8m0]", "mxfp4", "nvfp4", "int4[1x32,bf16]"),
    *("int8[1x*,f32]", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "mxfp4_gguf"),
)
# Shares of a copy inside the device: bounds that a regression would break, and what is aimed at. On
# an H200 a launch takes 7 us whatever it reads, half of what the aim leaves for four bits.
LEAST_BF16, LEAST_QUANTIZED, AIM_QUANTIZED = 0.55, 0.25, 0.45


def measure_formats(device: Device, arguments: Namespace) -> dict[str, Any]:
    """Decode a few layers in each format; return figures and bounds."""
    size = replace(arguments.size or StackSize(), num_layers=arguments.layers)
    names = arguments.only or FORMATS
    rows: dict[str, dict[str, Any]] = {}
    arguments.progress["formats"] = rows
    trace = routing_trace(
        arguments.tokens,
        num_layers=size.num_layers,
        num_experts=size.num_experts,
        top_k=size.top_k,
    )
    with ExitStack() as stack:
        place = stack.enter_context(open_place(device, size, trace))
        timer = stack.enter_context(Timer(device))
        copy_bytes = parse_bytes(arguments.copy_bytes)
        copy = stack.enter_context(DeviceCopy(device, place.stream, copy_bytes))
        decoders: dict[str, Decoder] = {}
        total = size.num_layers * size.num_experts
        for name in names:
            try:
                runtime = stack.enter_context(open_stack(device, replace(size, format=name), total))
                check_experts(runtime.layout)
                decoders[name] = stack.enter_context(Decoder(name, place, runtime))
            except (MoeCacheError, MemoryError) as error:
                rows[name] = {"refused": str(error)}
        _compile(decoders)
        graphs = {}
        for name, decoder in decoders.items():
            graph = GraphDecoder(f"{name}, graph", place, decoder.runtime)
            graphs[name] = stack.enter_context(graph)
            expected: dict[int, str] = {}
            for one in (decoder, graph):
                for token in range(len(trace)):
                    one.step(token)
                    check_bits(one, token, expected)
        times: dict[str, list[float]] = {name: [] for name in graphs}
        copies = []
        for run in range(arguments.runs):
            copies.append(copy.bytes_per_s())
            for name in turns(list(graphs), run):
                found = [graphs[name].device_ns(token, timer) for token in range(len(trace))]
                times[name].append(statistics.median(found) / 1e3 / size.num_layers)
                # As it comes: an interrupt leaves what is done.
                expert_bytes = replace(size, format=name).expert_bytes
                rows[name] = _row(size.top_k * expert_bytes, times[name], copies)
    copied = statistics.median(copies)
    rows = {name: rows[name] for name in names}
    bounds = [
        bound(
            f"decode in {name}, of a copy inside the device",
            ">=",
            LEAST_BF16 if name == "bf16" else LEAST_QUANTIZED,
            row.get("of_copy"),
            row.get("refused", ""),
        )
        for name, row in rows.items()
    ]
    return {
        "runs": arguments.runs,
        "stack": asdict(size),
        "copy_bytes_per_s": copied,
        "aimed_of_copy": {"bf16": LEAST_BF16, "quantized": AIM_QUANTIZED},
        "formats": rows,
        "bounds": bounds,
    }


def _row(num_bytes: int, took_us: Sequence[float], copies: Sequence[float]) -> dict[str, Any]:
    """Return a format's figures; `num_bytes` are those that a layer reads."""
    took = statistics.median(took_us)
    rate = num_bytes / (took / 1e6)
    return {
        "layer_bytes": num_bytes,
        "device_us_per_layer": took,
        "weight_bytes_per_s": rate,
        "of_copy": rate / statistics.median(copies),
        "runs": list(took_us),
    }


def _compile(decoders: Mapping[str, Decoder]) -> None:
    """Compile the kernels of all formats, side by side."""
    with ThreadPoolExecutor() as pool:
        for made in [pool.submit(on_device, one.runtime) for one in decoders.values()]:
            made.result()
