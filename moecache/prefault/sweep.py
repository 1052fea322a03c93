"""Sweeper: brings extents into memory, with as many threads as pay."""

import contextlib
import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

from moecache._prefault import (
    CHUNK_BYTES,
    METHODS,
    OWN_MEMORY,
    PAGE_SIZE,
    Sweep,
    advise_huge,
    can_populate,
    read_when_idle,
)
from moecache.errors import ConfigError
from moecache.prefault.extents import Extent, ExtentFinder
from moecache.prefault.mappings import is_mapped_in
from moecache.units import whole_number

MAX_THREADS = 64
# Which number of threads is fastest depends on disk, read-ahead and neighbours: 1, 2 and 4
# were each best somewhere. Below a GiB it does not pay to find out.
_CALIBRATE_FROM_BYTES = 2**30
_SAMPLE_BYTES = 4 * CHUNK_BYTES
_DEFAULT_THREADS = 2
# A read that arrives while a chunk is read waits for it, and for the kernel's read-ahead. Not
# smaller: a large folio has this size.
YIELDING_CHUNK_BYTES = 2 * 2**20
# To poll more often would take the GIL from threads that wait for a read.
_YIELD_POLL_S = 0.005
_POLL_S = 0.1
_REASONS = {
    errno.EFAULT: "the kernel could not read it",
    errno.ENOMEM: "it is not mapped any more",
    errno.EINVAL: "this kind of memory cannot be swept",
}

Progress = Callable[[int, int], object]


class Sweeper:
    """Brings address ranges into memory, once; `close` it afterwards.

    Parameters
    ----------
    ranges : sequence of (address, nbytes)
        Page-aligned, sorted, not overlapping. The caller keeps them mapped.
    method : {"populate", "read", "touch"}, optional
        By default "populate" where the kernel has it, else "read".
    threads : int, optional
        By default found by a short calibration.
    keep_mapped : bool, default True
        If false, sweep files through the sweeper's own mappings, which are emptied on
        the way: so only the page cache is filled.
    read_back : bool, default True
        Read chunks once more if their first read is slow, see `Sweep.run`.
    is_busy : callable () -> bool, optional
        Whether other reads are under way. If given, sweep with one thread, at idle
        priority of disk and processor, in small chunks, begin none while it returns
        True, and read nothing back.
    sweep : Sweep, optional
        Counts what is done; can be cancelled.

    Raises
    ------
    ConfigError
        If the kernel lacks the method, or the number of threads is out of range.
    """

    def __init__(
        self,
        ranges: Sequence[tuple[int, int]],
        *,
        method: str | None = None,
        threads: int | None = None,
        keep_mapped: bool = True,
        read_back: bool = True,
        is_busy: Callable[[], bool] | None = None,
        sweep: Sweep | None = None,
    ) -> None:
        self.method = check_method(method)
        self.threads = check_threads(threads)
        self.sweep = Sweep() if sweep is None else sweep
        self.num_threads = 0
        self._keep_mapped = keep_mapped
        # It would be the processor's time of a request that runs.
        self._read_back = read_back and is_busy is None
        self._is_busy = is_busy
        self._finder = ExtentFinder(own_mappings=not keep_mapped)
        try:
            self._extents, self.failures = self._finder.find(ranges)
        except BaseException:
            self._finder.close()
            raise
        if self.method == "read":
            self._drop_unreadable()

    @property
    def total_bytes(self) -> int:
        """Bytes that can be swept: less than asked for if some are not mapped."""
        return _total(self._extents)

    def resident_bytes(self) -> int:
        """Return how many bytes are in memory now, as far as the kernel tells."""
        pages = [(extent, extent.resident_pages()) for extent in self._extents]
        return sum(min(extent.nbytes, count * PAGE_SIZE) for extent, count in pages if count)

    def has_nothing_to_do(self, resident_bytes: int) -> bool:
        """Return whether all is in memory, and in the page table if it has to be."""
        if self.failures or resident_bytes < self.total_bytes:
            return False
        # A page that is present may be the shared page of zeros; to populate it costs little.
        if any(extent.descriptor == OWN_MEMORY for extent in self._extents):
            return False
        if not self._keep_mapped or self.method == "read":
            return True
        return all(is_mapped_in(extent.address, extent.nbytes) for extent in self._extents)

    def run(self, progress: Progress | None = None, *, resident_bytes: int = 0) -> None:
        """Sweep; afterwards `failures` describes what failed.

        Parameters
        ----------
        progress : callable (done_bytes, total_bytes), optional
            Called by this thread, some ten times a second and at the end. If it
            raises, the sweep ends.
        resident_bytes : int, default 0
            How much of it is in memory already.
        """
        # Advice for a part would split the mapping, and a process may have only 65,530: so for
        # the whole mapping. Not for memory without a file: there it would allocate more of it.
        if self.method != "read":
            files = (extent.mapping for extent in self._extents if extent.path)
            for address, nbytes in dict.fromkeys(files):
                advise_huge(address, nbytes)
        total = self.total_bytes

        def tick() -> None:
            if progress is not None:
                progress(min(self.sweep.done_bytes, total), total)

        rest = self._extents
        if resident_bytes * 10 > total * 9:
            # Only page tables are left to fill: no disk to learn about, no data that arrives.
            self.threads = self.threads or _DEFAULT_THREADS
            self._read_back = False
        if self._is_busy is not None:
            self.threads = 1
        elif self.threads is None:
            rest = self._calibrate(total, tick)
        self._run_threads(rest, self.threads or _DEFAULT_THREADS, tick)
        if not self._keep_mapped or self.method == "read":
            self._run_again(total, tick)
        tick()

    def close(self) -> None:
        """Give back files and mappings; call it only after `run` has returned."""
        self._extents = []
        self._finder.close()

    def _drop_unreadable(self) -> None:
        """Leave out extents whose file cannot be read: a touch could kill the process."""
        kept = []
        for extent in self._extents:
            if extent.descriptor < 0 and extent.path:
                self.failures.append(extent.describe_failure("it cannot be opened to be read"))
            else:
                kept.append(extent)
        self._extents = kept

    def _calibrate(self, total: int, tick: Callable[[], None]) -> list[Extent]:
        """Set `threads` by sweeping the first parts with several numbers; return the rest."""
        rest = self._extents
        self.threads = min(_DEFAULT_THREADS, max(1, total // CHUNK_BYTES))
        if total < _CALIBRATE_FROM_BYTES:
            return rest
        rates: dict[int, float] = {}
        # A single thread is tried only where more were slower: a disk that has to seek.
        while rest and (threads := _next_to_try(rates)):
            sample, rest = _cut(rest, _SAMPLE_BYTES)
            start = time.perf_counter()
            self._run_threads(sample, threads, tick)
            rates[threads] = _total(sample) / (time.perf_counter() - start)
        self.threads = max(rates, key=lambda threads: rates[threads])
        return rest

    def _run_again(self, total: int, tick: Callable[[], None]) -> None:
        """Sweep once more what the page cache has lost meanwhile.

        Some systems take back pages that no process maps although memory is free (DAMON;
        seen: 2 to 8 MiB of 4 GiB, once 26 MiB of one). If more than an eighth is gone
        memory is short, and the pages would only go again.
        """
        if self.failures or self.sweep.cancelled:
            return
        if 0 < (total - self.resident_bytes()) * 8 <= total:
            lost = [part for extent in self._extents for part in _lost_parts(extent)]
            self._run_threads(lost, 1, tick)

    def _run_threads(self, extents: list[Extent], threads: int, tick: Callable[[], None]) -> None:
        """Sweep extents, a contiguous part per thread; return when all threads have stopped."""
        parts = _deal(extents, threads)
        self.num_threads = max(self.num_threads, len(parts))
        results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        workers: list[threading.Thread] = []

        sweep_part = self._sweep_part if self._is_busy is None else self._sweep_yielding

        def work(part: list[Extent]) -> None:
            try:
                sweep_part(part)
                results.put(None)
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                results.put(error)

        try:
            for part in parts:
                worker = threading.Thread(
                    target=work, args=(part,), name="moecache-sweep", daemon=True
                )
                try:
                    worker.start()
                except RuntimeError:  # no more threads to be had
                    work(part)
                else:
                    workers.append(worker)
            for _ in parts:
                error = _next(results, tick)
                if error is not None:
                    raise error
        except BaseException:
            self.sweep.cancel()
            raise
        finally:
            # This is never the main thread, where Ctrl-C would make a join end too early.
            for worker in workers:
                worker.join()

    def _sweep_yielding(self, part: list[Extent]) -> None:
        """Sweep chunks that are not in memory yet; begin none while others read."""
        read_when_idle()
        _run_when_idle()
        for extent in part:
            for start in range(0, extent.nbytes, YIELDING_CHUNK_BYTES):
                chunk = extent.part(start, min(YIELDING_CHUNK_BYTES, extent.nbytes - start))
                if self._is_wanted(chunk):
                    self._sweep_part([chunk])
                elif self.sweep.cancelled:
                    return
                else:
                    self.sweep.skip(chunk.nbytes)

    def _is_wanted(self, chunk: Extent) -> bool:
        """Wait while others read; return whether to sweep: missing, not cancelled."""
        assert self._is_busy is not None
        # The others may read this very chunk meanwhile.
        while not self.sweep.cancelled and not (
            chunk.path and chunk.resident_pages() == chunk.num_pages
        ):
            if not self._is_busy():
                return True
            time.sleep(_YIELD_POLL_S)
        return False

    def _sweep_part(self, part: list[Extent]) -> None:
        pieces = [
            (extent.address, extent.nbytes, extent.descriptor, extent.offset) for extent in part
        ]
        failed = self.sweep.run(
            pieces, self.method, keep_mapped=self._keep_mapped, read_back=self._read_back
        )
        for index, start, nbytes, number in failed:
            reason = _REASONS.get(number, os.strerror(number))
            self.failures.append(part[index].part(start, nbytes).describe_failure(reason))


def check_method(method: str | None) -> str:
    """Return the method to use.

    Raises
    ------
    ConfigError
        If it is unknown, or this kernel lacks it.
    """
    if method is None:
        return "populate" if can_populate() else "read"
    if method not in METHODS:
        raise ConfigError(f"method {method!r} is not one of {', '.join(METHODS)}")
    if method == "populate" and not can_populate():
        raise ConfigError('method "populate" needs Linux 5.14 or later; use "read"')
    return method


def check_threads(threads: int | None) -> int | None:
    """Return the number of threads.

    Raises
    ------
    ConfigError
        If it is not between 1 and 64.
    """
    if threads is None:
        return None
    return whole_number(threads, "threads", 1, MAX_THREADS)


def _next(
    results: queue.SimpleQueue[BaseException | None], tick: Callable[[], None]
) -> BaseException | None:
    while True:
        try:
            return results.get(timeout=_POLL_S)
        except queue.Empty:
            tick()


def _next_to_try(rates: dict[int, float]) -> int:
    """Return the number of threads for the next sample, 0 if enough were tried."""
    if len(rates) < 2:
        return 4 if rates else 2
    return 1 if 1 not in rates and rates[4] < rates[2] else 0


def _run_when_idle() -> None:
    """Let the calling thread run where nothing else wants the processor; a hint.

    On two busy cores a cold request took 1.26 of its time beside a sweep at the usual priority,
    and .95 to 1.1 beside one at this priority.
    """
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _total(extents: list[Extent]) -> int:
    return sum(extent.nbytes for extent in extents)


def _lost_parts(extent: Extent) -> list[Extent]:
    pages = extent.resident_pages()
    if pages is None or pages >= extent.num_pages:
        return []
    if extent.nbytes <= CHUNK_BYTES:
        return [extent]
    starts = range(0, extent.nbytes, CHUNK_BYTES)
    chunks = [extent.part(start, min(CHUNK_BYTES, extent.nbytes - start)) for start in starts]
    return [part for chunk in chunks for part in _lost_parts(chunk)]


def _cut(extents: list[Extent], nbytes: int) -> tuple[list[Extent], list[Extent]]:
    """Return the first `nbytes` of the extents, and the rest."""
    head: list[Extent] = []
    for index, extent in enumerate(extents):
        if extent.nbytes > nbytes:
            first = [extent.part(0, nbytes)] if nbytes else []
            rest = extent.part(nbytes, extent.nbytes - nbytes)
            return head + first, [rest, *extents[index + 1 :]]
        head.append(extent)
        nbytes -= extent.nbytes
    return head, []


def _deal(extents: list[Extent], threads: int) -> list[list[Extent]]:
    """Return at most `threads` contiguous parts, in whole chunks, equal to within a chunk."""
    share = -(-_total(extents) // threads)
    share = -(-share // CHUNK_BYTES) * CHUNK_BYTES
    parts = []
    while extents:
        part, extents = _cut(extents, share)
        parts.append(part)
    return parts
