"""Copies to a GPU: how fast misses are, what reads ahead do to look-ups, and what memory is lost.

`upload`: experts of 1.5, 6 and 13 MB in bfloat16, every one a miss, from a file whose pages are
warm and from memory, through pinned buffers. By the host's clock, from the first request until the
last copy is done, as a share of one large copy from pinned memory, which the device times in the
same run. Then the time of a look-up of experts that are resident, beside the same while a thread
asks for reads ahead of other layers as fast as they are taken: the ratio of the two p99.

`memory`: free memory of the device, and RAM in use, before and after 100,000 evictions of small
experts, one token in a hundred computed, and 50 runtimes.

    python -m bench.gpu upload [--runs 20] [--bytes 1GiB] [--directory DIR] [--json OUT]
    python -m bench.gpu memory [--evictions 100000] [--rounds 50] [--json OUT]
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.gpu import bound, parser_of, run_benchmark, turns
from bench.gpu_stack import Decoder, Inputs, StackSize, open_runtime, open_stack
from bench.traces import routing_trace
from moecache import ExpertRuntime
from moecache.cuda import Device, Stream
from moecache.errors import MoeCacheError
from moecache.slots._memory import aligned_rows
from moecache.stores import ExpertStore, MemoryStore, open_store
from moecache.units import format_bytes, format_bytes_per_s, parse_bytes

# Bytes of the copy by which the others are measured.
COPY_BYTES = 2**30
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# (name, hidden size, width)
SIZES = (("1.5 MB", 512, 512), ("6 MB", 1024, 1024), ("13 MB", 2048, 1056))
WAYS = ("file", "memory")
# Of one large copy, by size: at 6 MB the host has 110 us and more for each expert, on any link of
# 55 GB/s or less; at 1.5 MB it has a quarter of that, which is what a miss costs it. No bound at
# 13 MB: it says nothing that 6 MB does not.
LEAST_SHARES = {"1.5 MB": 0.5, "6 MB": 0.9}
MOST_P99 = 3.0
NUM_LAYERS = 4
# Experts of a request, all of them misses; the slots hold two requests.
GROUP = 16
# Experts of a look-up; they are pinned.
TOP_K = 8
# The one policy by which a read ahead may take the place of what an earlier sequence used.
STORM_POLICY = "least-stale"
MEMORY_SIZE = StackSize(num_layers=4, num_experts=64, top_k=8, hidden=256, width=128)
# Growth of RAM that is allowed: what an allocator keeps, and the interpreter's own.
MOST_RSS_BYTES = 16 * 2**20
WARM_SHARE = 0.1
WARM_ROUNDS = 5
COMPUTE_EVERY = 100


class PinnedCopy:
    """One large copy from pinned memory: what the link can do. A context manager.

    Parameters
    ----------
    device : Device
    num_bytes : int
    """

    def __init__(self, device: Device, num_bytes: int = COPY_BYTES) -> None:
        self._device = device
        self._num_bytes = num_bytes
        self._undo = ExitStack()
        with ExitStack() as undo:
            self._source = aligned_rows(1, num_bytes)[0]
            self._source[:] = 1  # zeros that were never written are all the same page
            device.pin(self._source.ctypes.data, num_bytes)
            undo.callback(device.unpin, self._source.ctypes.data)
            self._target = device.allocate(num_bytes)
            undo.callback(device.free, self._target)
            self._stream = device.create_stream()
            undo.callback(device.destroy_stream, self._stream)
            self._timer = Timer(device)
            undo.callback(self._timer.close)
            self._undo = undo.pop_all()
        self.bytes_per_s()

    def bytes_per_s(self) -> float:
        """Copy once and return the rate by the device's own clock."""

        def copy() -> None:
            self._device.copy_in(
                self._target.address, self._source.ctypes.data, self._num_bytes, self._stream
            )

        return self._num_bytes / (self._timer.time_ns(copy, self._stream) / 1e9)

    def __enter__(self) -> Self:
        """Return the copy."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give everything back."""
        self._undo.close()


class DeviceCopy:
    """One large copy inside the device: what its memory can do. A context manager.

    Parameters
    ----------
    device : Device
    stream : Stream
        The calling thread's current one whenever this is used.
    num_bytes : int
    """

    def __init__(self, device: Device, stream: Stream, num_bytes: int = COPY_BYTES) -> None:
        self._device = device
        self._stream = stream
        self._timer = Timer(device)
        words = num_bytes // 16
        self._num_bytes = 16 * words
        with ExitStack() as undo:
            undo.callback(self._timer.close)
            memories = [device.allocate(self._num_bytes) for _ in range(2)]
            for memory in memories:
                undo.callback(device.free, memory)
            kind = np.dtype(np.complex128)  # the widest word that a thread can copy
            self._arrays = [device.array(memory, 0, (words,), kind) for memory in memories]
            undo.callback(self._arrays.clear)
            undo.callback(device.synchronize, stream)
            self._undo = undo.pop_all()
        self.bytes_per_s()

    def bytes_per_s(self) -> float:
        """Copy once; return the bytes read and written per second, by the device's own clock."""
        source, target = self._arrays

        def copy() -> None:
            target[...] = source

        return 2 * self._num_bytes / (self._timer.time_ns(copy, self._stream) / 1e9)

    def __enter__(self) -> Self:
        """Return the copy."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give everything back."""
        self._undo.close()


class Timer:
    """Times work in a stream by the device's own clock; `close` gives its events back."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._undo = ExitStack()
        with ExitStack() as undo:
            self._events = []
            for _ in range(2):
                self._events.append(device.create_event(timing=True))
                undo.callback(device.destroy_event, self._events[-1])
            self._undo = undo.pop_all()

    def time_ns(self, work: Callable[[], None], stream: Stream) -> int:
        """Issue work in a stream, wait for it, and return what it took there."""
        device, (start, end) = self._device, self._events
        device.record(start, stream)
        work()
        device.record(end, stream)
        device.wait_for(end)
        return device.elapsed_ns(start, end)

    def close(self) -> None:
        """Give the events back."""
        self._undo.close()


def write_experts(path: Path, num_experts: int, hidden: int, width: int) -> None:
    """Write a checkpoint of experts alone, gate, up and down side by side as in real ones."""
    tensors: dict[str, Any] = {}
    end = 0
    for layer in range(NUM_LAYERS):
        for expert in range(num_experts):
            for piece, shape in (
                ("gate", (width, hidden)),
                ("up", (width, hidden)),
                ("down", (hidden, width)),
            ):
                start, end = end, end + 2 * hidden * width
                name = f"model.layers.{layer}.mlp.experts.{expert}.{piece}_proj.weight"
                tensors[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(tensors).encode()
    header += b" " * (-len(header) % 4096 - 8 % 4096)
    one = np.random.default_rng(0).bytes(6 * hidden * width)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(NUM_LAYERS * num_experts):
            file.write(one)


def memory_store(num_experts: int, hidden: int, width: int) -> MemoryStore:
    """Return as many experts in memory."""
    shape = (NUM_LAYERS, num_experts)
    gate_up = np.full((*shape, 2 * width, hidden), 0x3C01, np.uint16).view(BFLOAT16)
    down = np.full((*shape, hidden, width), 0x3C02, np.uint16).view(BFLOAT16)
    return MemoryStore({"gate_up": gate_up, "down": down}, top_k=TOP_K)


def upload_bytes_per_s(device: Device, runtime: ExpertRuntime, group: int = GROUP) -> float:
    """Return the rate at which all experts, each a miss, come into slots."""
    layout = runtime.layout
    before = runtime.stats().num_hits
    start = time.perf_counter()
    for layer in range(layout.num_layers):
        for first in range(0, layout.num_experts, group):
            ids = np.arange(first, min(first + group, layout.num_experts), dtype=np.int32)
            with runtime.lease(layer, ids):
                pass
    # A lease lets this stream wait for its copies.
    device.synchronize(device.current_stream())
    seconds = time.perf_counter() - start
    if runtime.stats().num_hits != before:
        raise SystemExit("some experts were there already: fewer slots, or more experts")
    return layout.total_bytes / seconds


def uploads(
    device: Device,
    sizes: Sequence[tuple[str, int, int]],
    *,
    total_bytes: int,
    num_runs: int,
    directory: Path,
    copy_bytes: int,
    group: int = GROUP,
) -> list[dict[str, Any]]:
    """Return the share of the link's rate for each size and way; refused ways say why."""
    rows = []
    for name, hidden, width in sizes:
        num_experts = max(group, total_bytes // (NUM_LAYERS * 6 * hidden * width))
        path = directory / "experts.safetensors"
        write_experts(path, num_experts, hidden, width)
        open_ways: dict[str, Callable[[], ExpertStore]] = {
            "file": lambda path=path: open_store(path, top_k=TOP_K),  # type: ignore[misc]
            "memory": lambda n=num_experts, h=hidden, w=width: memory_store(n, h, w),  # type: ignore[misc]
        }
        with ExitStack() as stack:
            link = stack.enter_context(PinnedCopy(device, copy_bytes))
            runtimes: dict[str, ExpertRuntime] = {}
            for way in WAYS:
                row: dict[str, Any] = {"size": name, "way": way, "refused": None}
                row["expert_bytes"] = 6 * hidden * width
                row["num_experts"] = NUM_LAYERS * num_experts
                rows.append(row)
                try:
                    runtimes[way] = stack.enter_context(
                        open_runtime(device, open_ways[way](), 2 * group)
                    )
                except (MoeCacheError, MemoryError) as error:
                    row["refused"] = str(error)
                    continue
                # Warms the file's pages, too, and pins the buffers.
                upload_bytes_per_s(device, runtimes[way], group)
                row |= {"bytes_per_s": [], "shares": [], "link_bytes_per_s": []}
            mine = {row["way"]: row for row in rows if row["size"] == name}
            for run in range(num_runs):
                for way in turns(list(runtimes), run):
                    limit = link.bytes_per_s()
                    rate = upload_bytes_per_s(device, runtimes[way], group)
                    mine[way]["bytes_per_s"].append(rate)
                    mine[way]["link_bytes_per_s"].append(limit)
                    mine[way]["shares"].append(rate / limit)
            for way, runtime in runtimes.items():
                counted = runtime.pool.uploads
                mine[way]["share"] = statistics.median(mine[way]["shares"])
                mine[way]["busy_bytes_per_s"] = counted.num_bytes / (counted.busy_ns / 1e9)
                mine[way]["pinned_bytes"] = counted.pinned_bytes
        path.unlink()
    return rows


def look_up_ns(runtime: ExpertRuntime, ids: np.ndarray, num_look_ups: int) -> np.ndarray:
    """Return what each of some look-ups of resident experts took, leased and given back."""
    layer = runtime.layout.num_layers - 1
    times = np.empty(num_look_ups, np.int64)
    for number in range(num_look_ups):
        start = time.perf_counter_ns()
        runtime.lease(layer, ids).close()
        times[number] = time.perf_counter_ns() - start
    return times


class Storm:
    """A thread that asks for reads ahead of all layers but the last, as fast as they are taken.

    A context manager. Between requests it sleeps: one that spins would only show how long
    Python's threads wait for each other.
    """

    def __init__(self, runtime: ExpertRuntime, pause_s: float) -> None:
        self._runtime = runtime
        self._pause_s = pause_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="storm", daemon=True)

    def _run(self) -> None:
        draw = np.random.default_rng(0)
        layout = self._runtime.layout
        while not self._over.is_set():
            # What was brought in before may give way from now on.
            self._runtime.begin_sequence()
            for layer in range(layout.num_layers - 1):
                ids = draw.permutation(layout.num_experts)[:GROUP]
                self._runtime.hint(layer, ids, np.ones(len(ids)))
            self._over.wait(self._pause_s)

    def __enter__(self) -> Self:
        """Begin, and return when the first read ahead has come."""
        before = self._runtime.stats().bytes_prefetch
        self._thread.start()
        until = time.monotonic() + 10
        while self._runtime.stats().bytes_prefetch == before:
            if time.monotonic() > until:
                self.__exit__()
                raise SystemExit("nothing was read ahead within 10 s: there is no storm")
            time.sleep(0.001)
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._over.set()
        self._thread.join()


def look_ups(
    device: Device,
    size: tuple[str, int, int],
    *,
    total_bytes: int,
    num_runs: int,
    num_look_ups: int,
    directory: Path,
    pause_s: float,
) -> dict[str, Any]:
    """Return the p99 of look-ups in quiet and in a storm, and how much the storm copied."""
    name, hidden, width = size
    num_experts = max(2 * GROUP, total_bytes // (NUM_LAYERS * 6 * hidden * width))
    path = directory / "experts.safetensors"
    write_experts(path, num_experts, hidden, width)
    capacity = NUM_LAYERS * num_experts // 2
    quiet_ns, storm_ns, ratios, storm_bytes, storm_s = [], [], [], 0, 0.0
    store = open_store(path, top_k=TOP_K)
    with open_runtime(device, store, capacity, policy=STORM_POLICY, prefetch="hints") as runtime:
        ids = np.arange(TOP_K, dtype=np.int32)
        runtime.lease(NUM_LAYERS - 1, ids).close()
        for expert in ids.tolist():
            runtime.cache.pin(NUM_LAYERS - 1, expert)
        look_up_ns(runtime, ids, num_look_ups)
        for _ in range(num_runs):
            quiet = look_up_ns(runtime, ids, num_look_ups)
            before, start = runtime.stats(), time.perf_counter()
            with Storm(runtime, pause_s):
                stormy = look_up_ns(runtime, ids, num_look_ups)
            storm_s += time.perf_counter() - start
            storm_bytes += (runtime.stats() - before).bytes_prefetch
            quiet_ns.append(float(np.percentile(quiet, 99)))
            storm_ns.append(float(np.percentile(stormy, 99)))
            ratios.append(storm_ns[-1] / quiet_ns[-1])
            device.synchronize(device.current_stream())
        pinned_bytes = runtime.pool.uploads.pinned_bytes
    path.unlink()
    return {
        "size": name,
        "num_look_ups": num_look_ups,
        "pause_s": pause_s,
        "quiet_p99_ns": quiet_ns,
        "storm_p99_ns": storm_ns,
        "ratio": statistics.median(ratios),
        "storm_bytes": storm_bytes,
        "storm_bytes_per_s": storm_bytes / storm_s,
        "pinned_bytes": pinned_bytes,
    }


def measure_upload(device: Device, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both parts; return figures and bounds."""
    total_bytes = parse_bytes(arguments.bytes)
    with tempfile.TemporaryDirectory(prefix="moecache-gpu-", dir=arguments.directory) as name:
        rows = uploads(
            device,
            arguments.sizes,
            total_bytes=total_bytes,
            num_runs=arguments.runs,
            directory=Path(name),
            copy_bytes=parse_bytes(arguments.copy_bytes),
        )
        storm = look_ups(
            device,
            arguments.sizes[0],
            total_bytes=total_bytes,
            num_runs=arguments.runs,
            num_look_ups=arguments.look_ups,
            directory=Path(name),
            pause_s=arguments.pause_us / 1e6,
        )
    bounds = [
        bound(
            f"upload, {row['size']}, {row['way']}, of one large pinned copy",
            ">=",
            LEAST_SHARES[row["size"]],
            row.get("share"),
            row["refused"] or "",
        )
        for row in rows
        if row["size"] in LEAST_SHARES
    ]
    bounds.append(bound("look-up's p99 in a storm, of quiet", "<=", MOST_P99, storm["ratio"]))
    return {"runs": arguments.runs, "uploads": rows, "look_ups": storm, "bounds": bounds}


def show_upload(found: dict[str, Any], console: Console) -> None:
    """Print a row for each size and way, and the look-ups."""
    table = Table("experts", "way", "of the link", "rate", "while copying", "link", "pinned")
    for row in found["uploads"]:
        if row["refused"]:
            table.add_row(row["size"], row["way"], "refused")
            continue
        table.add_row(
            row["size"],
            row["way"],
            f"{row['share']:.3f}",
            format_bytes_per_s(statistics.median(row["bytes_per_s"])),
            format_bytes_per_s(row["busy_bytes_per_s"]),
            format_bytes_per_s(statistics.median(row["link_bytes_per_s"])),
            format_bytes(row["pinned_bytes"]),
        )
    console.print(table)
    storm = found["look_ups"]
    quiet, stormy = (statistics.median(storm[f"{kind}_p99_ns"]) for kind in ("quiet", "storm"))
    console.print(
        f"look-up p99: quiet {quiet / 1e3:.1f} us, in a storm of "
        f"{format_bytes_per_s(storm['storm_bytes_per_s'])} {stormy / 1e3:.1f} us"
    )


def upload(
    argv: Sequence[str] | None = None,
    device: Device | None = None,
    sizes: Sequence[tuple[str, int, int]] = SIZES,
) -> int:
    """How fast misses reach a GPU; 1 if a bound is not kept, 2 without a GPU."""
    parser = parser_of(upload.__doc__)
    parser.add_argument("--bytes", default="1GiB", help="bytes of experts, copied in each run")
    parser.add_argument("--copy-bytes", default="1GiB", help="bytes of the copy that is the limit")
    parser.add_argument("--look-ups", type=int, default=5000, help="in each run")
    parser.add_argument("--pause-us", type=float, default=100, help="between the storm's requests")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="for the file of experts")
    arguments = parser.parse_args(argv)
    arguments.sizes = sizes
    return run_benchmark(measure_upload, show_upload, arguments, device)


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
    trace = _small_trace(size)
    with Inputs(device, size, trace) as inputs:
        stream = device.create_stream()
        try:
            with (
                device.using(stream),
                open_stack(device, size, size.num_layers * size.num_experts // 4) as runtime,
                Decoder("evicting", device, inputs, stream, runtime) as decoder,
            ):
                warm = max(1, int(WARM_SHARE * num_evictions))
                before, free_before, rss_before = evict(device, decoder, warm, size)
                after, free_after, rss_after = evict(device, decoder, num_evictions, size)
        finally:
            device.destroy_stream(stream)
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
    stream = device.create_stream()
    try:
        with (
            Inputs(device, size, trace) as inputs,
            device.using(stream),
            open_stack(device, size, capacity, policy="echo") as runtime,
            Decoder("opened", device, inputs, stream, runtime) as decoder,
        ):
            for token in range(inputs.num_tokens):
                decoder.step(token)
            decoder.finish()
    finally:
        device.destroy_stream(stream)


def _small_trace(size: StackSize) -> np.ndarray:
    return routing_trace(
        4, num_layers=size.num_layers, num_experts=size.num_experts, top_k=size.top_k
    )


def rss_bytes() -> int:
    """Return how much of this process is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure_memory(device: Device, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both parts; return figures and bounds."""
    size: StackSize = arguments.size
    evicted = evictions(device, size, arguments.evictions)
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


def show_memory(found: dict[str, Any], console: Console) -> None:
    """Print what was lost."""
    for name in ("evictions", "rounds"):
        part = found[name]
        console.print(
            f"{name}: {part[f'num_{name}']}, device bytes lost {part['device_bytes_lost']}, "
            f"RAM grown by {part['rss_bytes_grown']} bytes"
        )


def memory(
    argv: Sequence[str] | None = None, device: Device | None = None, size: StackSize = MEMORY_SIZE
) -> int:
    """Whether memory of GPU and host stays the same; 1 if it does not, 2 without a GPU."""
    parser = parser_of(memory.__doc__, runs=False)
    parser.add_argument("--evictions", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args(argv)
    arguments.size = size
    return run_benchmark(measure_memory, show_memory, arguments, device)
