"""Pre-fault: bring a model's pages into memory before the first request needs them."""

import logging
from typing import Any, Literal, overload

from moecache.errors import ConfigError
from moecache.prefault._job import Job
from moecache.prefault.background import BackgroundSweep
from moecache.prefault.gate import decide
from moecache.prefault.regions import merge
from moecache.prefault.report import PrefaultReport
from moecache.prefault.sweep import Progress, check_method, check_threads
from moecache.sizing.host_memory import free_host_bytes, total_host_bytes
from moecache.units import parse_bytes

logger = logging.getLogger(__name__)

_INTERRUPT_TIMEOUT_S = 2


@overload
def warm(
    regions: Any,
    *,
    mode: object = ...,
    gate: str = ...,
    threads: int | None = ...,
    background: Literal[False] = ...,
    progress: Progress | None = ...,
    method: str | None = ...,
    keep_mapped: bool = ...,
    read_back: bool = ...,
    yielding: bool = ...,
    room_bytes: int | str | None = ...,
) -> PrefaultReport: ...
@overload
def warm(
    regions: Any,
    *,
    mode: object = ...,
    gate: str = ...,
    threads: int | None = ...,
    background: Literal[True],
    progress: Progress | None = ...,
    method: str | None = ...,
    keep_mapped: bool = ...,
    read_back: bool = ...,
    yielding: bool = ...,
    room_bytes: int | str | None = ...,
) -> BackgroundSweep: ...
def warm(
    regions: Any,
    *,
    mode: object = "auto",
    gate: str = "fits",
    threads: int | None = None,
    background: bool = False,
    progress: Progress | None = None,
    method: str | None = None,
    keep_mapped: bool = True,
    read_back: bool = True,
    yielding: bool = False,
    room_bytes: int | str | None = None,
) -> PrefaultReport | BackgroundSweep:
    """Bring every page of some mapped memory into memory, so that no later access waits.

    Blocks until the disk has served what was missing, unless `background`. Other
    Python threads keep running. A file that is cut short before or during the
    sweep is an error, not a SIGBUS; after one that is cut short later, an access to
    the mapping still kills the process.

    Parameters
    ----------
    regions : iterable of (address, nbytes) pairs or buffers, or one buffer
        The memory to fill: a store's `regions()`, arrays, `mmap.mmap`
        objects. Memory given by bare integers must stay mapped until the sweep ends.
    mode : {"auto", "off", "force"}, default "auto"
        "auto" asks the gate; "off" sweeps nothing; "force" sweeps without asking.
    gate : {"fits", "fits-free", "always"}, default "fits"
        More than 80 % of the room is not swept. "fits": the room is the memory of the
        machine or its cgroup. "fits-free": the free part of that. "always": sweep
        with any room.
    threads : int, optional
        Threads that read; by default found by a short calibration.
    background : bool, default False
        Return at once with a `BackgroundSweep`.
    progress : callable (done_bytes, total_bytes), optional
        Called by the sweep's own thread some ten times a second. Its error
        ends the sweep.
    method : {"populate", "read", "touch"}, optional
        How pages are read. "populate": by MADV_POPULATE_READ, the default where the
        kernel has it (Linux 5.14). "read": by pread of the file behind the memory, the
        default elsewhere. "touch": a byte of every page through the mapping; if the
        file is cut short meanwhile, the process dies.
    keep_mapped : bool, default True
        Whether the pages stay in this process's page table, and count as its
        memory. If not, they are only brought into the page cache, where the file
        behind them can be opened under its name.
    read_back : bool, default True
        In a virtual machine whose host takes back freed memory, the first access to
        a page costs microseconds although the page is in memory. Where samples show
        that, read what has arrived once more, so that no request pays for it.
    yielding : bool, default False
        Sweep with one thread, at idle priority of disk and processor, in chunks of
        2 MiB; begin none while `BackgroundSweep.yield_to` says that others read, and
        read nothing back.
    room_bytes : int or str, optional
        The room, in bytes or as "4GiB"; by default the gate asks the machine.

    Returns
    -------
    PrefaultReport or BackgroundSweep
        The latter with `background`.

    Raises
    ------
    ConfigError
        If an argument cannot be used.
    StoreError
        If a part could not be brought into memory, say because its file was cut
        short. All other parts were.

    Notes
    -----
    Private memory without a file, such as an array, gets pages of its own by any
    method. Its contents stay: zeros where nothing was written yet.
    """
    ranges, owners = merge(regions)
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress must be callable, got {progress!r}")
    method, threads = check_method(method), check_threads(threads)
    num_bytes = sum(nbytes for _, nbytes in ranges)
    # The machine is asked only if its room matters: with mode "off" nothing is read at all.
    verdict = decide(num_bytes, None, mode=mode, gate=gate)
    if verdict.reason == "room unknown":
        room = _room(gate) if room_bytes is None else parse_bytes(room_bytes)
        verdict = decide(num_bytes, room, gate=gate)
    logger.info("prefault.gate %s: %s", verdict.reason, verdict.message)
    job = Job(
        ranges,
        owners,
        verdict,
        progress,
        {
            "method": method,
            "threads": threads,
            "keep_mapped": keep_mapped,
            "read_back": read_back,
        },
        yielding=yielding,
    )
    # The foreground has a thread of its own, too: Ctrl-C never comes between it and its workers.
    job.level = logging.WARNING if background else logging.DEBUG
    if background:
        return BackgroundSweep(job)
    try:
        return BackgroundSweep(job).wait()
    except KeyboardInterrupt:
        # The job holds what it uses: so nothing has to wait for a read that hangs.
        job.sweep.cancel()
        job.join(_INTERRUPT_TIMEOUT_S)
        raise


def _room(gate: str) -> int | None:
    try:
        return free_host_bytes() if gate == "fits-free" else total_host_bytes()
    except (ImportError, OSError):
        return None
