"""BackgroundSweep: a sweep that goes on beside the program."""

import os
import threading
from collections.abc import Callable
from typing import Self

from moecache.errors import MoeCacheError
from moecache.prefault._job import Job
from moecache.prefault.report import Done, PrefaultReport


class BackgroundSweep:
    """A sweep in the background: wait for it, cancel it, or ask how far it has come.

    Made by `warm(..., background=True)`. It keeps what it sweeps mapped until it
    ends, and goes on if no reference to it is left. A failure is logged as a warning.
    It is a context manager: leaving the block cancels.
    """

    def __init__(self, job: Job) -> None:
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
