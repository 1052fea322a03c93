"""Warm start: free slots filled with what earlier runs used, before a request asks."""

import logging
import os
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

from moecache.cache._cache import ExpertCache
from moecache.errors import MoeCacheError
from moecache.loading._loader import SlotLoader
from moecache.loading.load import Cause

logger = logging.getLogger(__name__)

# Experts: enough to keep a slow store busy, few enough for a request to get by.
_MAX_IN_FLIGHT = 4
_POLL_S = 0.001
# How often, and how long after, it tries again where requests were in the way.
_MAX_PASSES = 20
_PAUSE_S = 0.05


class Filled(NamedTuple):
    """How far a warm start is."""

    num_done: int
    num_experts: int

    @property
    def fraction(self) -> float:
        """From 0 to 1."""
        return self.num_done / self.num_experts if self.num_experts else 1.0


class WarmStart:
    """Experts on their way into free slots, in a thread of its own.

    Takes free slots only and evicts nothing: it ends when there are none left, as
    requests take them too. Experts that cannot be read are left out, and logged once per cause.

    Parameters
    ----------
    loader : SlotLoader
    cache : ExpertCache
    keys : sequence of int
        layer * num_experts + expert of what to bring in, in this order: the most valuable
        first, so that a request that comes meanwhile finds it. (The other way round, the
        last would be the most recent for policies that go by that: it was measured to
        change the hit rate of the first 32 tokens by less than .001.)
    """

    def __init__(self, loader: SlotLoader, cache: ExpertCache, keys: Sequence[int]) -> None:
        self._loader = loader
        self._cache = cache
        self._keys = keys
        self._max_in_flight = max(1, min(_MAX_IN_FLIGHT, cache.capacity // 8))
        self._num_done = 0
        self._cancelled = False
        self._ended = threading.Lock()
        self._done = False
        self._process = os.getpid()
        self._ended.acquire()
        self._thread = threading.Thread(target=self._run, name="moecache-warm-start", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads to be had: it starts cold
            logger.warning("warm_start.skipped no thread could be started")
            self._end()

    @property
    def progress(self) -> Filled:
        """How many of the experts were brought in, or left out."""
        return Filled(self._num_done, len(self._keys))

    @property
    def done(self) -> bool:
        """Whether it has ended: all is there, no slot is free, or it was cancelled."""
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most `timeout` seconds; return whether it has.

        Raises
        ------
        MoeCacheError
            In a forked child: the thread is the parent's.
        """
        if os.getpid() != self._process and not self._done:
            raise MoeCacheError("the warm start is the parent process's; open a runtime here")
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not self._done and (left := until - time.monotonic()) > 0:
            # Polls: a signal just before a lock is waited for does not end that wait.
            if self._ended.acquire(timeout=min(left, 0.1)):
                self._ended.release()
        return self._done

    def cancel(self, timeout: float | None = None) -> bool:
        """Stop it before its next expert; return whether it has stopped.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for that; by default as long as it takes.
        """
        self._cancelled = True
        if os.getpid() != self._process or threading.current_thread() is self._thread:
            return self._done
        return self.wait(timeout)

    def __enter__(self) -> Self:
        """Return the warm start."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancel it."""
        self.cancel()

    def _run(self) -> None:
        started = time.monotonic()
        try:
            refused = list(self._keys)
            for _ in range(_MAX_PASSES):
                seen = self._loader.counts.num_steps
                refused = [key for key in refused if self._is_refused(key)]
                self._num_done = len(self._keys) - len(refused)
                # A request may have been in the way; any other refusal means that there is no room.
                if not refused or self._is_over or seen == self._loader.counts.num_steps:
                    break
                time.sleep(_PAUSE_S)
            seen = self._loader.counts.num_steps
            # A thread that makes a request takes in arrived reads.
            while (
                (self._loader.num_in_flight or self._loader.pool.uploads.in_flight_bytes)
                and not self._cancelled
                and seen == self._loader.counts.num_steps
            ):
                self._look()
            logger.info(
                "warm_start.ended experts=%d of=%d resident=%d seconds=%.2f",
                self._num_done,
                len(self._keys),
                self._cache.num_resident,
                time.monotonic() - started,
            )
        except MoeCacheError as error:
            logger.warning("warm_start.failed %s", error)
        except BaseException:
            logger.exception("warm_start.interrupted")
        finally:
            self._end()

    @property
    def _is_over(self) -> bool:
        return self._cancelled or self._cache.num_free == 0

    def _is_refused(self, key: int) -> bool:
        """Bring an expert in; return whether it found no room although some slot is free."""
        if self._is_over:
            return True
        while self._loader.num_in_flight >= self._max_in_flight and not self._cancelled:
            self._look()
        place = divmod(key, self._cache.num_experts)
        if not self._loader.prefetch(*place, cause=Cause.WARM_START):
            return bool(self._cache.slot_table[place] < 0)
        self._num_done += 1
        return False

    def _look(self) -> None:
        self._loader.look()
        time.sleep(_POLL_S)

    def _end(self) -> None:
        self._done = True
        self._ended.release()
