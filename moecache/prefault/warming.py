"""Pre-fault: bring a model's pages into memory before the first request needs them."""

import logging
import os
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, overload

from moecache._prefault import PAGE_SIZE, Sweep
from moecache.errors import ConfigError, MoeCacheError, StoreError
from moecache.prefault.gate import Verdict, decide
from moecache.prefault.regions import merge
from moecache.prefault.sweep import Progress, Sweeper, check_method, check_threads
from moecache.sizing.host_memory import free_host_bytes, total_host_bytes
from moecache.units import format_bytes, parse_bytes

logger = logging.getLogger(__name__)

_INTERRUPT_TIMEOUT_S = 2
_POLL_S = 0.1


class Done(NamedTuple):
    """How far a sweep has come."""

    done_bytes: int
    total_bytes: int

    @property
    def fraction(self) -> float:
        """The share that is done, from 0 to 1."""
        return self.done_bytes / self.total_bytes if self.total_bytes else 1.0


@dataclass(frozen=True)
class PrefaultReport:
    """The result of a sweep.

    Parameters
    ----------
    ran : bool
        Whether any page was swept.
    reason : str
        The reason of the verdict; "resident" if all was in memory already; "cancelled".
    num_bytes, num_pages : int
        Bytes asked for, in whole pages, each page once.
    already_resident_bytes : int
        Bytes that were in memory before (cachestat, mincore). 0 for files that this
        user neither owns nor may write: the kernel does not tell about those.
    done_bytes : int
        Bytes that were swept; less than `num_bytes` if cancelled.
    seconds : float
        0.0 if it did not run.
    gib_per_s : float
        `done_bytes` over `seconds`; 0.0 if it did not run.
    major_faults : int
        Page faults of the whole process, meanwhile, that waited for a disk.
    read_back_bytes : int
        Bytes that were read once more after they had arrived: in a virtual machine whose
        host takes back freed memory, the first access to a page costs
        microseconds although the page is in memory.
    num_threads : int
        The largest number of threads that swept at once.
    method : str
        "populate", "read" or "touch"; empty if the gate refused.
    message : str
        The reason in words.
    """

    ran: bool
    reason: str
    num_bytes: int
    num_pages: int
    already_resident_bytes: int = 0
    done_bytes: int = 0
    seconds: float = 0.0
    gib_per_s: float = 0.0
    major_faults: int = 0
    read_back_bytes: int = 0
    num_threads: int = 0
    method: str = ""
    message: str = ""

    def describe(self) -> str:
        """Return the report as one line."""
        if not self.ran:
            return f"not swept: {self.message}"
        text = (
            f"{format_bytes(self.done_bytes)} in {self.seconds:.2f} s, {self.gib_per_s:.2f} GiB/s"
        )
        if self.already_resident_bytes:
            text += f"; {format_bytes(self.already_resident_bytes)} were in memory before"
        if self.reason == "cancelled":
            text += f"; cancelled, of {format_bytes(self.num_bytes)}"
        return text


class BackgroundSweep:
    """A sweep in the background: wait for it, cancel it, or ask how far it has come.

    Made by `warm(..., background=True)`. It keeps what it sweeps mapped until it
    ends, and goes on if no reference to it is left. A failure is logged as a warning.
    It is a context manager: leaving the block cancels.
    """

    def __init__(self, job: "_Job") -> None:
        self._job = job
        self._process = os.getpid()
        self._thread = threading.Thread(target=job.run, name="moecache-prefault", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads to be had
            job.run()

    @property
    def progress(self) -> Done:
        """How far the sweep has come."""
        return self._job.progress()

    def yield_to(self, is_busy: Callable[[], bool]) -> None:
        """Begin no chunk while `is_busy()`, from now on; no effect without `yielding`.

        Parameters
        ----------
        is_busy : callable () -> bool
            Whether other reads are under way. The sweep's own thread calls it before each
            chunk, and every five milliseconds of a pause; its error ends the sweep.
        """
        self._job.is_busy = is_busy

    @property
    def done(self) -> bool:
        """Whether the sweep has ended: complete, cancelled, or with an error."""
        # Not `is_alive`: after a join that Ctrl-C interrupts, Python takes the thread for dead.
        return self._job.ended

    def wait(self, timeout: float | None = None) -> PrefaultReport:
        """Wait until the sweep has ended, and return the report.

        Raises
        ------
        TimeoutError
            If it has not ended after `timeout` seconds; the sweep goes on.
        StoreError
            If a part could not be brought into memory. All other parts were.
        MoeCacheError
            In a forked child: the threads are the parent's.
        """
        if not self.join(timeout):
            raise TimeoutError(f"the sweep has not ended after {timeout} s")
        return self._job.result()

    def join(self, timeout: float | None = None) -> bool:
        """Wait, and return whether the sweep has ended; an error of the sweep is not raised."""
        if os.getpid() != self._process and not self.done:
            raise MoeCacheError("the sweep was started by the parent process; start one here")
        return self._job.join(timeout)

    def cancel(self, timeout: float | None = None) -> bool:
        """Stop the sweep before its next chunk; return whether it has stopped.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait until it has stopped; by default as long as it takes, which
            is for ever if the disk hangs.
        """
        self._job.sweep.cancel()
        if os.getpid() != self._process or threading.current_thread() is self._thread:
            return self.done
        return self.join(timeout)

    def __enter__(self) -> Self:
        """Return the sweep."""
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel the sweep."""
        self.cancel()


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
    job = _Job(
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


class _Job:
    """A sweep from its verdict to its report, in any thread."""

    def __init__(
        self,
        ranges: list[tuple[int, int]],
        owners: list[object],
        verdict: Verdict,
        progress: Progress | None,
        options: dict[str, Any],
        *,
        yielding: bool,
    ) -> None:
        self.sweep = Sweep()
        self.is_busy: Callable[[], bool] = _never
        self._yielding = yielding
        self.num_bytes = sum(nbytes for _, nbytes in ranges)
        self._ranges = ranges
        self._owners = owners
        self._verdict = verdict
        self._progress = progress
        self._options = options
        self.ended = False
        self._running = threading.Lock()
        self._running.acquire()
        self.level = logging.DEBUG
        self._report: PrefaultReport | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    def run(self) -> None:
        """Sweep, and log a failure at `level`; never raises, `result` does."""
        try:
            self._report = self._run()
            logger.info("prefault.ended %s", self._report.describe())
        except BaseException as error:  # noqa: BLE001 - kept for `result`
            self._error, self._traceback = error, error.__traceback__
            logger.log(self.level, "prefault.failed %s", str(error) or type(error).__name__)
        finally:
            # Cleared, not replaced: tracebacks of an error refer to this very list.
            self._owners.clear()
            self.ended = True
            self._running.release()

    def join(self, timeout: float | None) -> bool:
        """Wait for the end, at most `timeout` seconds; return whether it has come.

        Not an Event: Ctrl-C inside one may leave it locked for ever. This polls: a signal
        that arrives just before the wait for a lock does not end that wait.
        """
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not self.ended and (left := until - time.monotonic()) > 0:
            if self._running.acquire(timeout=min(left, _POLL_S)):
                self._running.release()
        return self.ended

    def progress(self) -> Done:
        """Return how far the sweep has come; all of it if all was in memory before."""
        resident = self._report is not None and self._report.reason == "resident"
        done = self.num_bytes if resident else min(self.sweep.done_bytes, self.num_bytes)
        return Done(done, self.num_bytes)

    def result(self) -> PrefaultReport:
        """Return the report, or raise the error of the sweep."""
        if self._error is not None:
            # With the traceback of the first raise: each raise would lengthen it.
            raise self._error.with_traceback(self._traceback)
        assert self._report is not None
        return self._report

    def _ask(self) -> bool:
        # Looked up each time: `yield_to` may come when the sweep has begun.
        return self.is_busy()

    def _run(self) -> PrefaultReport:
        report = PrefaultReport(
            ran=False,
            reason=self._verdict.reason,
            num_bytes=self.num_bytes,
            num_pages=self.num_bytes // PAGE_SIZE,
            message=self._verdict.message,
        )
        if not self._verdict.run:
            return report
        is_busy = self._ask if self._yielding else None
        sweeper = Sweeper(self._ranges, sweep=self.sweep, is_busy=is_busy, **self._options)
        try:
            resident = sweeper.resident_bytes()
            report = replace(report, already_resident_bytes=resident, method=sweeper.method)
            if sweeper.has_nothing_to_do(resident):
                message = "all of it is in memory already"
                return replace(report, reason="resident", message=message)
            faults, start = _major_faults(), time.perf_counter()
            sweeper.run(self._progress, resident_bytes=resident)
            seconds = time.perf_counter() - start
            if sweeper.failures:
                more = f" (and {len(sweeper.failures) - 1} more)" if sweeper.failures[1:] else ""
                raise StoreError(sweeper.failures[0] + more)
        finally:
            sweeper.close()
        done = min(self.sweep.done_bytes, self.num_bytes)
        return replace(
            report,
            ran=True,
            reason="cancelled" if self.sweep.cancelled else report.reason,
            done_bytes=done,
            seconds=seconds,
            gib_per_s=done / 2**30 / seconds,
            major_faults=_major_faults() - faults,
            read_back_bytes=self.sweep.read_back_bytes,
            num_threads=sweeper.num_threads,
        )


def _never() -> bool:
    """Return False: no other reads are known of."""
    return False


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _room(gate: str) -> int | None:
    try:
        return free_host_bytes() if gate == "fits-free" else total_host_bytes()
    except (ImportError, OSError):
        return None
