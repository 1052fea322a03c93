"""Whether memory of a GPU and of its host stays the same.

Free memory of the device, and RAM in use, before and after 100,000 evictions of small experts, one
token in a hundred computed, and 50 runtimes that are opened, used and closed.
"""

import gc
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from bench.checkpoint import StackSize
from bench.gpu import bound
from bench.gpu_stack import Decoder, open_place, open_stack
from bench.traces import routing_trace
from moecache.cuda import Device
from moecache.units import format_bytes

MEMORY_SIZE = StackSize(num_layers=4, num_experts=64, top_k=8, hidden=256, width=128)
# Growth of RAM that is allowed: what an allocator keeps, and the interpreter's own.
MOST_RSS_BYTES = 16 * 2**20
WARM_SHARE = 0.1
WARM_ROUNDS = 5
COMPUTE_EVERY = 100


def measure_memory(device: Device, arguments: Namespace) -> dict[str, Any]:
    """Evict experts, open and close runtimes; return what was lost, and bounds."""
    size: StackSize = arguments.size or MEMORY_SIZE
    evicted = evictions(device, size, arguments.evictions)
    arguments.progress["evictions"] = evicted
    opened = rounds(device, size, arguments.rounds)
    bounds = []
    for found, what in (
        (evicted, f"{evicted['num_evictions']} evictions"),
        (opened, f"{opened['num_rounds']} runtimes"),
    ):
        lost = float(found["device_bytes_lost"])
        bounds.append(bound(f"device bytes lost after {what}", "<=", 0.0, lost))
        grown = found["rss_bytes_grown"] / MOST_RSS_BYTES
        note = f"{format_bytes(MOST_RSS_BYTES)} are 1"
        bounds.append(bound(f"RAM grown after {what}", "<=", 1.0, grown, note))
    return {"evictions": evicted, "rounds": opened, "bounds": bounds}


def evict(
    device: Device, decoder: Decoder, num_evictions: int, size: StackSize
) -> tuple[int, int, int]:
    """Go through all experts until so many were evicted; return that, device and host bytes."""
    runtime = decoder.runtime
    until = runtime.cache.num_evictions + num_evictions
    step = 0
    while runtime.cache.num_evictions < until:
        layer, place = step % size.num_layers, step // size.num_layers
        first = place * size.top_k % size.num_experts
        ids = (first + np.arange(size.top_k, dtype=np.int32)) % size.num_experts
        runtime.lease(layer, ids).close()
        if step % COMPUTE_EVERY == 0:
            decoder.step(step // COMPUTE_EVERY % decoder.num_tokens)
        step += 1
    decoder.finish()
    return runtime.cache.num_evictions, device.free_bytes(), rss_bytes()


def evictions(device: Device, size: StackSize, num_evictions: int) -> dict[str, Any]:
    """Return what is free, and how much RAM is in use, before and after so many evictions."""
    with (
        open_place(device, size, _small_trace(size)) as place,
        open_stack(device, size, size.num_layers * size.num_experts // 4) as runtime,
        Decoder("evicting", place, runtime) as decoder,
    ):
        warm = max(1, int(WARM_SHARE * num_evictions))
        before, free_before, rss_before = evict(device, decoder, warm, size)
        after, free_after, rss_after = evict(device, decoder, num_evictions, size)
    return {
        "num_evictions": after - before,
        "device_bytes_lost": free_before - free_after,
        "rss_bytes_grown": rss_after - rss_before,
    }


def rounds(device: Device, size: StackSize, num_rounds: int) -> dict[str, Any]:
    """Return what is lost over so many runtimes that are opened, used and closed."""
    trace = _small_trace(size)
    free_before = rss_before = 0
    for number in range(WARM_ROUNDS + num_rounds):
        if number == WARM_ROUNDS:
            free_before, rss_before = device.free_bytes(), rss_bytes()
        # By turns all resident and not: each has scratch memory of its own.
        _use_once(device, size, trace, size.num_layers * size.num_experts // (1 + number % 2))
        gc.collect()
    return {
        "num_rounds": num_rounds,
        "device_bytes_lost": free_before - device.free_bytes(),
        "rss_bytes_grown": rss_bytes() - rss_before,
    }


def _use_once(device: Device, size: StackSize, trace: np.ndarray, capacity: int) -> None:
    """Open a runtime, decode and close it; what refers to its memory is gone at the end."""
    with (
        open_place(device, size, trace) as place,
        open_stack(device, size, capacity, policy="echo") as runtime,
        Decoder("opened", place, runtime) as decoder,
    ):
        for token in range(decoder.num_tokens):
            decoder.step(token)
        decoder.finish()


def _small_trace(size: StackSize) -> np.ndarray:
    return routing_trace(
        4, num_layers=size.num_layers, num_experts=size.num_experts, top_k=size.top_k
    )


def rss_bytes() -> int:
    """Return how much of this process is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
