"""How experts are read from their files: which way, and how much at once."""

import logging
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from moecache.errors import StoreError
from moecache.reader._reader import Reader
from moecache.slots.base import SlotPool
from moecache.stores.base import FileStore
from moecache.units import format_bytes

logger = logging.getLogger(__name__)

STAGING_BYTES = 16 * 2**20
# (reads in flight, bytes of each), for reads that go straight to their slots. With more in flight
# all come back at once, at the end: the first of three experts of 2.6 MiB came after 4.1 of 4.6 ms
# with 8 MiB in flight, after 2.2 ms with 4 MiB, and is computed while the others are read.
STRAIGHT_QUEUE = (4, 2**20)
# For reads that are copied: 8 MiB were measured to be a fifth slower.
STAGED_QUEUE = (16, 256 * 2**10)
CANDIDATES = tuple(
    (depth, size * 2**10)
    for size, depth in (
        *((128, 16), (256, 8), (256, 16), (256, 32), (512, 4), (512, 8), (512, 16)),
        *((1024, 4), (1024, 8)),
    )
)
# The kernel itself reads ahead into the page cache; longer pieces are fewer calls.
BUFFERED_QUEUE = (32, 2**20)
# For threads that copy parts of one expert out of the page cache: 12 of them brought 9 MiB to a GPU
# in .8 ms; io_uring, which sets one of the kernel's threads to it, took 3.3 (16 cores).
SHARED_QUEUE = (32, 256 * 2**10)
# A queue that shows the disk's full speed in any order of reads.
_DEEP_QUEUE = (32, 512 * 2**10)
_DEEP_BYTES = 32 * 2**20
_CALIBRATION_S = 0.3
# A smaller difference is noise.
_NOISE = 1.1
_BLOCK = 4096


@dataclass(frozen=True)
class DiskSpeed:
    """A calibration's findings about a disk.

    Parameters
    ----------
    engine : {"io_uring", "threads"}
    depth : int
        Reads in flight.
    piece_bytes : int
        Largest read.
    bytes_per_s : float
        The best rate that any depth and size of reads gave.
    """

    engine: str
    depth: int
    piece_bytes: int
    bytes_per_s: float


def open_reader(
    store: FileStore,
    *,
    direct: bool,
    staging_bytes: int = STAGING_BYTES,
    engine: str | None = None,
    shares_copies: bool = False,
) -> Reader:
    """Return a reader of a store's files.

    If direct reads were asked for and a file system takes none, or io_uring is
    refused, that is one line in the log, and it goes on without.

    Parameters
    ----------
    store : FileStore
    direct : bool
        Read around the page cache.
    staging_bytes : int, default 16 MiB
        Memory for direct reads that do not fit their targets.
    engine : {"io_uring", "threads"}, optional
        By default io_uring, if the kernel has it.
    shares_copies : bool, default False
        Without `engine`: what goes through the page cache is copied by threads, each a part of an
        expert.
    """
    copying = "threads" if shares_copies and engine is None else engine
    cached = BUFFERED_QUEUE if copying == engine else SHARED_QUEUE

    def opened(engine: str | None, queue: tuple[int, int], *, direct: bool) -> Reader:
        return Reader(
            [file.descriptor for file in store.files],
            direct=direct,
            engine=engine,
            depth=queue[0],
            piece_bytes=queue[1],
            staging_bytes=staging_bytes if direct else 0,
        )

    if direct:
        reader = opened(engine, STAGED_QUEUE, direct=True)
    else:
        reader = opened(copying, cached, direct=False)
    if direct and reader.num_direct_files < len(store.files):
        logger.info(
            "reading.buffered path=%s files=%d of=%d: their file system takes no direct reads",
            store.files[0].path,
            len(store.files) - reader.num_direct_files,
            len(store.files),
        )
    if direct and not reader.direct:
        if copying != engine:
            reader.close()
            reader = opened(copying, cached, direct=False)
        else:
            _tune(reader, BUFFERED_QUEUE, 0)
    if engine is None and reader.refusal:
        logger.info("reading.threads the kernel refuses io_uring: %s", os.strerror(reader.refusal))
    return reader


def calibrate(reader: Reader, store: FileStore, pool: SlotPool) -> DiskSpeed | None:
    """Find out how much to read at once, and tune the reader to it, in about a third of a second.

    Reads experts into slots, which must all be free, as steps will: half of a
    token's experts at once. That queue is chosen in which they arrive the earliest on average: each
    is computed while the next are read. A disk that is too slow for that keeps the default.

    Returns
    -------
    DiskSpeed or None
        None if nothing could be read: the requests will say why.
    """
    rng = np.random.default_rng(0)
    layout = store.layout
    widest = max(1, *(layout.expert_bytes(layer) for layer in range(layout.num_layers)))
    most = min(pool.num_slots, layout.total_experts)
    default = default_queue(reader, store)
    usual = max(1, min(layout.top_k // 2 or 4, most))
    deep = max(1, min(_DEEP_BYTES // widest, 256, most))
    # Without io_uring there are as many reads in flight as threads: sizes alone differ.
    others = CANDIDATES if reader.engine == "io_uring" else ((16, 2**17), (16, 2**19))
    arrivals: dict[tuple[int, int], list[float]] = {queue: [] for queue in (default, *others)}
    deep_rates: list[float] = []
    best = 0.0
    staging_bytes = reader.staging_bytes
    start = time.perf_counter()
    try:
        # The first reads pay for setup.
        _burst(reader, store, pool, rng, usual)
        while not deep_rates or time.perf_counter() - start < _CALIBRATION_S:
            _tune(reader, _DEEP_QUEUE, staging_bytes)
            deep_rates.append(_burst(reader, store, pool, rng, deep)[0])
            for queue, found in arrivals.items():
                if time.perf_counter() - start > 2 * _CALIBRATION_S:
                    break
                _tune(reader, queue, staging_bytes)
                rate, arrival_s = _burst(reader, store, pool, rng, usual)
                found.append(arrival_s)
                best = max(best, rate)
    except StoreError as error:
        logger.warning("reading.calibration_failed %s", error)
        _tune(reader, default, staging_bytes)
        return None
    medians = {queue: statistics.median(found) for queue, found in arrivals.items() if found}
    chosen = min(medians, key=lambda queue: medians[queue], default=default)
    if default in medians and medians[default] <= medians[chosen] * _NOISE:
        chosen = default
    _tune(reader, chosen, staging_bytes)
    rate = max(statistics.median(deep_rates), best)
    speed = DiskSpeed(reader.engine, *chosen, bytes_per_s=rate)
    logger.info(
        "reading.calibrated engine=%s depth=%d piece=%d disk=%s/s seconds=%.2f",
        speed.engine,
        speed.depth,
        speed.piece_bytes,
        format_bytes(rate),
        time.perf_counter() - start,
    )
    return speed


def apply(speed: DiskSpeed, reader: Reader) -> bool:
    """Tune a reader to what was found out before; False if that was for another engine."""
    if speed.engine != reader.engine:
        return False
    _tune(reader, (speed.depth, speed.piece_bytes), reader.staging_bytes)
    return True


def default_queue(reader: Reader, store: FileStore) -> tuple[int, int]:
    """Return the depth and size of reads that suit a store, on a disk that nothing is known of."""
    aligned = all(offset % reader.alignment == 0 for _, offset, _ in store.runs(0, 0))
    return STRAIGHT_QUEUE if aligned else STAGED_QUEUE


def disk_of(store: FileStore) -> str:
    """Return a name for a store's disk and the way its experts lie, unique on this machine."""
    devices = sorted({str(os.fstat(file.descriptor).st_dev) for file in store.files})
    aligned = all(offset % _BLOCK == 0 for _, offset, _ in store.runs(0, 0))
    return ",".join(devices) + (" aligned" if aligned else "")


def _tune(reader: Reader, queue: tuple[int, int], staging_bytes: int) -> None:
    reader.tune(depth=queue[0], piece_bytes=queue[1], staging_bytes=staging_bytes)


def _burst(
    reader: Reader, store: FileStore, pool: SlotPool, rng: np.random.Generator, num_loads: int
) -> tuple[float, float]:
    """Read experts at random into the first slots.

    Returns
    -------
    (float, float)
        Bytes per second, and after how many seconds experts were there, on average for a byte.
    """
    layout = store.layout
    keys = rng.choice(layout.total_experts, num_loads, replace=False)
    places = [divmod(int(key), layout.num_experts) for key in keys]
    loads: list[Any] = [
        (slot, store.runs(*place), pool.buffers(slot, place[0]))
        for slot, place in enumerate(places)
    ]
    taken: list[tuple[int, tuple[int, int, int] | None]] = []
    waited_s = 0.0
    start = time.perf_counter()
    try:
        reader.submit(loads)
        while (before := len(taken)) < num_loads:
            reader.wait(reader.epoch)
            reader.take(taken)
            waited_s += (len(taken) - before) * (time.perf_counter() - start)
    except BaseException:
        # An interrupt. What is in flight must not be written into slots that are in use.
        reader.close()
        raise
    seconds = time.perf_counter() - start
    for slot in range(num_loads):
        pool.reclaim(slot)
    for _, failure in taken:
        if failure is not None:
            raise store.files[failure[1]].failure(failure[0], failure[2], "an expert", 0)
    nbytes = sum(layout.expert_bytes(layer) for layer, _ in places)
    # Layers differ in the bytes of their experts.
    return nbytes / seconds, waited_s / nbytes
