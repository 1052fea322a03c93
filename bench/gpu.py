"""What the benchmarks of a GPU share: the link's own speed, runtimes from parts, bounds, JSON.

The device is an argument everywhere, so that tests run all of it on one that they made.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from rich.console import Console

from bench.machine import describe_machine
from moecache import ExpertCache, ExpertRuntime
from moecache.cuda import Device, Stream, open_device
from moecache.errors import MoeCacheError
from moecache.reader.disk import open_reader
from moecache.sizing import num_staging_slots
from moecache.slots import CudaSlots
from moecache.slots._memory import aligned_rows
from moecache.stores import ExpertStore, FileStore

NUM_RUNS = 20
# Bytes of the copy by which the others are measured.
COPY_BYTES = 2**30

T = TypeVar("T")


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


def open_runtime(
    device: Device,
    store: ExpertStore,
    capacity: int,
    *,
    policy: str = "lru",
    prefetch: str = "off",
    loader_threads: int = 8,
    registered: bool = False,
    staging: int | None = None,
) -> ExpertRuntime:
    """Return a runtime whose slots are on a device; it closes the store.

    As `moecache.open` makes it, but for any device and any store: files are read through the page
    cache, unless they are `registered`; what is in memory is copied by threads, likewise.

    Raises
    ------
    MoeCacheError
        If the experts cannot be registered.
    """
    layout = store.layout
    capacity = min(capacity, layout.total_experts)
    if capacity == layout.total_experts:
        staging = 0
    elif staging is None:
        staging = num_staging_slots(layout.top_k, capacity)
    with ExitStack() as undo:
        undo.callback(store.close)
        pool = CudaSlots(layout, capacity, staging, device)
        undo.callback(pool.close)
        reader = None
        if registered:
            pool.register(store.regions())
        elif isinstance(store, FileStore):
            reader = open_reader(store, direct=False)
            undo.callback(reader.close)
        cache = ExpertCache(layout.num_layers, layout.num_experts, capacity, policy=policy)
        runtime = ExpertRuntime(
            store, pool, cache, loader_threads=loader_threads, reader=reader, prefetch=prefetch
        )
        undo.pop_all()
    return runtime


def rss_bytes() -> int:
    """Return how much of this process is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def bound(
    name: str, relation: str, limit: float, found: float | None, note: str = ""
) -> dict[str, Any]:
    """Return a bound and whether it holds; what could not be measured does not, and says why."""
    holds = found is not None and (found >= limit if relation == ">=" else found <= limit)
    return {
        "name": name,
        "relation": relation,
        "limit": limit,
        "found": found,
        "holds": holds,
        "note": note,
    }


def show_bounds(bounds: Iterable[Mapping[str, Any]], console: Console) -> bool:
    """Print each bound; return whether all hold."""
    holds = True
    for one in bounds:
        holds &= one["holds"]
        found = "     -" if one["found"] is None else f"{one['found']:6.3f}"
        console.print(
            f"{'yes' if one['holds'] else 'NO ':3} {found} {one['relation']} {one['limit']}  "
            f"{one['name']}{'  (' + one['note'] + ')' if one['note'] else ''}"
        )
    return holds


def parser_of(document: str | None, *, runs: bool = True) -> argparse.ArgumentParser:
    """Return a parser with what these benchmarks take: all of them, or those that have runs."""
    parser = argparse.ArgumentParser(description=(document or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda:0", metavar="NAME")
    if runs:
        parser.add_argument("--runs", type=int, default=NUM_RUNS, help="medians are over so many")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures there")
    return parser


def run_benchmark(
    measure: Callable[[Device, argparse.Namespace], dict[str, Any]],
    show: Callable[[dict[str, Any], Console], None],
    arguments: argparse.Namespace,
    device: Device | None,
) -> int:
    """Measure, print and write the figures; return 1 if a bound does not hold, 2 without a GPU."""
    console = Console(width=140, highlight=False)
    console.print(describe_machine())
    try:
        device = device or open_device(arguments.device)
    except MoeCacheError as error:
        console.print(f"skipped: {error}", markup=False)
        return 2
    console.print(device.description, markup=False)
    found = {
        "machine": describe_machine(),
        "device": device.description,
        **measure(device, arguments),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    show(found, console)
    return 0 if show_bounds(found["bounds"], console) else 1


def turns(contestants: Sequence[T], run: int) -> list[T]:
    """Return the order of the contestants in a run: each goes first once in a while."""
    first = run % len(contestants)
    return [*contestants[first:], *contestants[:first]]
