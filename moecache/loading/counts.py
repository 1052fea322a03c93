"""LoadCounts: a loader's reads, and how long steps waited for them."""

import logging
from collections.abc import Callable

from moecache.loading.load import Cause, Load

logger = logging.getLogger(__name__)

_MAX_LOGGED_CAUSES = 100


class LoadCounts:
    """Counters of a loader; changed under its lock.

    Parameters
    ----------
    clock : callable () -> int
        Nanoseconds.

    Attributes
    ----------
    num_steps, num_resident_steps : int
        All steps, and those that missed nothing.
    num_reads, num_failed_reads : int
        Experts that were read, and experts that could not be.
    bytes_read : dict of Cause to int
        From the store, into slots.
    num_urgent_reads, urgent_ns : int
        Reads that a step waited for, and the time in which at least one was under way.
    num_prefetches, num_failed_prefetches, num_cancelled_prefetches : int
        Reads ahead that were begun; those that failed, or were taken back, before a step
        asked for them.
    num_prefetches_in_flight, prefetch_bytes_in_flight : int
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._logged: set[tuple[type, str]] = set()
        self._num_urgent = 0
        self._urgent_since = 0
        self.num_steps = 0
        self.num_resident_steps = 0
        self.num_reads = 0
        self.num_failed_reads = 0
        self.bytes_read = dict.fromkeys(Cause, 0)
        self.num_urgent_reads = 0
        self.urgent_ns = 0
        self.num_prefetches = 0
        self.num_failed_prefetches = 0
        self.num_cancelled_prefetches = 0
        self.num_prefetches_in_flight = 0
        self.prefetch_bytes_in_flight = 0

    def begin_urgent(self) -> None:
        """Note that a step waits for one more load."""
        if self._num_urgent == 0:
            self._urgent_since = self._clock()
        self._num_urgent += 1

    def end_urgent(self, *, read: bool) -> None:
        """Note that a load that a step waited for is over, and whether it was read."""
        self._num_urgent -= 1
        self.num_urgent_reads += read
        if self._num_urgent == 0:
            self.urgent_ns += self._clock() - self._urgent_since

    def begin_prefetch(self, num_bytes: int) -> None:
        """Note that a read ahead begins."""
        self.num_prefetches += 1
        self.num_prefetches_in_flight += 1
        self.prefetch_bytes_in_flight += num_bytes

    def end_prefetch(self, load: Load, num_bytes: int) -> None:
        """Note that a read ahead is over, or now the demand of a step."""
        if load.cause is not Cause.PREFETCH:
            return
        self.num_prefetches_in_flight -= 1
        self.prefetch_bytes_in_flight -= num_bytes
        if load.error is not None and not load.waiting:
            self.num_failed_prefetches += not load.is_cancelled
            self.num_cancelled_prefetches += load.is_cancelled

    def done(self, load: Load, num_bytes: int) -> None:
        """Note what became of a load."""
        if load.error is None:
            self.num_reads += 1
            self.bytes_read[load.cause] += num_bytes
        elif not load.is_cancelled:
            self.num_failed_reads += 1

    def log_failure(self, load: Load) -> None:
        """Log a failure that no step can be told of.

        Once per cause: a dead disk fails every read.
        """
        cause = (type(load.error), str(load.error))
        if cause not in self._logged and len(self._logged) < _MAX_LOGGED_CAUSES:
            self._logged.add(cause)
            logger.warning(
                "loader.read_failed layer=%d expert=%d error=%s",
                load.layer,
                load.expert,
                load.error,
            )
