"""How experts are read from their files: which way, and how much at once."""

import contextlib
import json
import logging
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moecache._reader import ENGINES, Reader
from moecache.errors import StoreError
from moecache.slots.base import SlotPool
from moecache.stores.base import FileStore
from moecache.units import format_bytes

logger = logging.getLogger(__name__)

STAGING_BYTES = 16 * 2**20
DEFAULT_DEPTH = 32
DEFAULT_PIECE_BYTES = 512 * 2**10
# Of the page cache the kernel itself reads ahead; longer pieces are fewer calls.
BUFFERED_PIECE_BYTES = 2**20
CANDIDATES = tuple(
    (depth, piece_bytes * 2**10)
    for piece_bytes, depth in (
        *((128, 32), (128, 64), (256, 16), (256, 32), (256, 64)),
        *((512, 8), (512, 16), (512, 32), (1024, 4), (1024, 8), (1024, 16)),
    )
)
_CALIBRATION_S = 0.3
_BURST_BYTES = 8 * 2**20
# What differs less is noise.
_NOISE = 1.05
_PROFILE_VERSION = 1


@dataclass(frozen=True)
class DiskSpeed:
    """What a calibration found out about a disk.

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
    store: FileStore, *, direct: bool, staging_bytes: int = STAGING_BYTES, engine: str | None = None
) -> Reader:
    """Return a reader of a store's files.

    Where direct reads were asked for and a file system takes none, or io_uring is
    refused, that is one line in the log, and it goes on without.
    """
    reader = Reader(
        [file.descriptor for file in store.files],
        direct=direct,
        engine=engine,
        depth=DEFAULT_DEPTH,
        piece_bytes=DEFAULT_PIECE_BYTES if direct else BUFFERED_PIECE_BYTES,
        staging_bytes=staging_bytes if direct else 0,
    )
    if direct and not reader.direct:
        logger.info(
            "reading.buffered path=%s its file system takes no direct reads", store.files[0].path
        )
        reader.tune(depth=DEFAULT_DEPTH, piece_bytes=BUFFERED_PIECE_BYTES, staging_bytes=0)
    if engine is None and reader.refusal:
        logger.info("reading.threads the kernel refuses io_uring: %s", os.strerror(reader.refusal))
    return reader


def calibrate(reader: Reader, store: FileStore, pool: SlotPool) -> DiskSpeed | None:
    """Find out how much to read at once, and tune the reader to it; takes a third of a second.

    Reads experts into slots, which must all be free, as requests will: bursts of
    some 8 MiB. A disk that is too slow for that keeps the default.

    Returns
    -------
    DiskSpeed or None
        None if nothing could be read: the requests will say why.
    """
    rng = np.random.default_rng(0)
    layout = store.layout
    widest = max(1, *(layout.expert_bytes(layer) for layer in range(layout.num_layers)))
    num_loads = max(1, min(_BURST_BYTES // widest, pool.num_slots, layout.total_experts, 256))
    staging_bytes = reader.staging_bytes
    rates: dict[tuple[int, int], list[float]] = {candidate: [] for candidate in CANDIDATES}
    if reader.engine == "threads":
        # As many reads as there are threads.
        rates = {(DEFAULT_DEPTH, piece_bytes): [] for _, piece_bytes in CANDIDATES}
    start = time.perf_counter()
    try:
        # The first reads pay for what is set up once.
        _burst(reader, store, pool, rng, num_loads)
        while time.perf_counter() - start < _CALIBRATION_S:
            for (depth, piece_bytes), found in rates.items():
                reader.tune(depth=depth, piece_bytes=piece_bytes, staging_bytes=staging_bytes)
                found.append(_burst(reader, store, pool, rng, num_loads))
                if time.perf_counter() - start > 2 * _CALIBRATION_S:
                    break
    except StoreError as error:
        logger.warning("reading.calibration_failed %s", error)
        rates = {}
    medians = {key: statistics.median(found) for key, found in rates.items() if found}
    if not medians:
        reader.tune(
            depth=DEFAULT_DEPTH, piece_bytes=DEFAULT_PIECE_BYTES, staging_bytes=staging_bytes
        )
        return None
    best = max(medians.values())
    default = (DEFAULT_DEPTH, DEFAULT_PIECE_BYTES)
    chosen = (
        default
        if medians.get(default, 0) * _NOISE >= best
        else max(medians, key=lambda key: medians[key])
    )
    reader.tune(depth=chosen[0], piece_bytes=chosen[1], staging_bytes=staging_bytes)
    speed = DiskSpeed(reader.engine, *chosen, bytes_per_s=best)
    logger.info(
        "reading.calibrated engine=%s depth=%d piece=%d disk=%s/s seconds=%.2f",
        *(speed.engine, speed.depth, speed.piece_bytes, format_bytes(best)),
        time.perf_counter() - start,
    )
    return speed


def apply(speed: DiskSpeed, reader: Reader) -> bool:
    """Tune a reader to what was found out before; False if that was for another engine."""
    if speed.engine != reader.engine:
        return False
    reader.tune(
        depth=speed.depth, piece_bytes=speed.piece_bytes, staging_bytes=reader.staging_bytes
    )
    return True


def disk_of(store: FileStore) -> str:
    """Return what tells a store's disk from others on this machine."""
    return ",".join(sorted({str(os.fstat(file.descriptor).st_dev) for file in store.files}))


def load_profile(path: str | os.PathLike[str], store: FileStore) -> DiskSpeed | None:
    """Return what an earlier run noted of this store's disk; a damaged file is a warning."""
    document = _read_profile(Path(path))
    entry = document.get("disks", {}).get(disk_of(store))
    if entry is None:
        return None
    try:
        speed = DiskSpeed(**entry)
        known = {(DEFAULT_DEPTH, DEFAULT_PIECE_BYTES), *CANDIDATES}
        known |= {(DEFAULT_DEPTH, piece_bytes) for _, piece_bytes in CANDIDATES}
        if speed.engine not in ENGINES or (speed.depth, speed.piece_bytes) not in known:
            raise ValueError(f"{str(entry)[:200]} is no calibration")
        return DiskSpeed(**{**entry, "bytes_per_s": float(speed.bytes_per_s)})
    except (TypeError, ValueError, OverflowError) as error:
        logger.warning("reading.profile_ignored path=%s error=%s", path, error)
        return None


def save_profile(path: str | os.PathLike[str], store: FileStore, speed: DiskSpeed) -> None:
    """Note a calibration for later runs, atomically; a file that cannot be written is a warning."""
    path = Path(path)
    document = _read_profile(path)
    document["version"] = _PROFILE_VERSION
    document.setdefault("disks", {})[disk_of(store)] = asdict(speed)
    written = None
    try:
        written = path.with_name(f".{path.name}.{os.getpid()}")
        written.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(written, path)
    except (OSError, ValueError) as error:
        if written is not None:
            with contextlib.suppress(OSError):
                written.unlink()
        logger.warning("reading.profile_not_written path=%s error=%s", path, error)


def _read_profile(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file")
        document = json.loads(path.read_bytes())
        if document["version"] != _PROFILE_VERSION or not isinstance(document["disks"], dict):
            raise ValueError("it is of another version")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        logger.warning("reading.profile_ignored path=%s error=%s", path, str(error)[:200])
        return {}
    return dict(document)


def _burst(
    reader: Reader, store: FileStore, pool: SlotPool, rng: np.random.Generator, num_loads: int
) -> float:
    """Read experts at random into the first slots; return bytes per second."""
    layout = store.layout
    keys = rng.choice(layout.total_experts, num_loads, replace=False)
    places = [divmod(int(key), layout.num_experts) for key in keys]
    loads: list[Any] = [
        (slot, store.runs(*place), pool.buffers(slot, place[0]))
        for slot, place in enumerate(places)
    ]
    taken: list[tuple[int, tuple[int, int, int] | None]] = []
    start = time.perf_counter()
    try:
        reader.submit(loads)
        while len(taken) < num_loads:
            reader.wait(reader.epoch)
            reader.take(taken)
    except BaseException:
        # An interrupt. What is in flight must not be written into slots that are in use.
        reader.close()
        raise
    seconds = time.perf_counter() - start
    for slot in range(num_loads):
        pool.discard(slot)
    for _, failure in taken:
        if failure is not None:
            raise store.files[failure[1]].failure(failure[0], failure[2], "an expert", 0)
    return sum(layout.expert_bytes(layer) for layer, _ in places) / seconds
