"""A sweep from its verdict to its report."""

import logging
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

from moecache._prefault import PAGE_SIZE, Sweep
from moecache.errors import StoreError
from moecache.prefault.gate import Verdict
from moecache.prefault.report import Done, PrefaultReport
from moecache.prefault.sweep import Progress, Sweeper

logger = logging.getLogger(__name__)

_POLL_S = 0.1


class Job:
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
