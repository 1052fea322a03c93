"""StoreFetch: loads carried out by a store's own reads, in threads and in callers that wait."""

import enum
import functools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np

from moecache.errors import MoeCacheError
from moecache.interrupts import deferred
from moecache.slots.base import SlotPool
from moecache.stores.base import ExpertStore

logger = logging.getLogger(__name__)


# How often a thread looks whether it was forgotten, should nobody have told it.
_IDLE_S = 2.0


class Cause(enum.Enum):
    """Why an expert is read."""

    DEMAND = "demand"  # a token chose it
    BULK = "bulk"  # one of many tokens did
    PREFETCH = "prefetch"  # nobody did so far, but somebody may
    WARM_START = "warm_start"  # an earlier run used it


class Load:
    """One expert on its way into one slot."""

    __slots__ = (
        "cancelled",
        "cause",
        "done",
        "error",
        "expert",
        "layer",
        "orphaned",
        "slot",
        "staged",
        "told",
        "urgent",
        "waiting",
    )

    def __init__(
        self, layer: int, expert: int, slot: int, cause: Cause, *, staged: bool = False
    ) -> None:
        self.layer = layer
        self.expert = expert
        self.slot = slot
        self.cause = cause
        self.urgent = cause in (Cause.DEMAND, Cause.BULK)  # somebody waits for it, or did
        self.staged = staged
        self.cancelled = False  # a prefetch whose layer came without it
        self.orphaned = False  # staged, and nobody waits for it any more
        self.done = False
        self.waiting: list[SimpleQueue[Load]] = []
        self.told: list[SimpleQueue[Load]] = []  # when it is over, without asking for it
        self.error: BaseException | None = None

    def interrupt(self) -> None:
        """Fail for steps that wait: the interrupt itself belongs to another caller."""
        self.error = MoeCacheError(
            f"reading expert {self.expert} of layer {self.layer} was interrupted; call again"
        )


class Fetch(Protocol):
    """Who carries out loads. `finish` of the loader is called when one is done, in any thread.

    It returns False if the load has to be carried out once more, now urgently.
    """

    # Whether steps that wait for anything have to call `help`, or nothing would happen.
    needs_callers: bool
    # Whether `begin` itself reads what is in memory already.
    begins_by_reading: bool

    def add(self, load: Load) -> None:
        """Queue a load; under the loader's lock."""

    def remove(self, load: Load) -> bool:
        """Take a load back; under the loader's lock. False if it was begun."""

    def remove_all(self) -> list[Load]:
        """Take back every load that was not begun; under the loader's lock."""

    @property
    def quantum_bytes(self) -> int | None:
        """Bytes of a prefetch that a demand may have to wait for; None: all of it."""

    def begin(self) -> None:
        """Begin what is queued, without waiting for it; never under the loader's lock."""

    def prefetch(self, load: Load) -> None:
        """Carry out a load that nobody waits for, behind all others; never under the lock.

        Returns when it is begun, or done.
        """

    def hasten(self, load: Load) -> None:
        """Let a prefetch wait for others no more: somebody waits for it; under the lock."""

    def cancel(self, load: Load) -> bool:
        """Take back a prefetch, as far as it is not read; under the lock.

        True: it is gone, as if it had never begun. False: `finish` will be called for it,
        with an error if it was not read to its end.
        """

    def look(self) -> None:
        """Take in what has arrived, without waiting; never under the loader's lock."""

    def wait(self, arrived: "SimpleQueue[Load]") -> Load:
        """Return the next load that arrives; never under the loader's lock."""

    @property
    def epoch(self) -> int:
        """Number of announcements so far."""

    def help(self, seen: int) -> None:
        """Take part for a moment, unless `epoch` is not `seen` any more."""

    def announce(self) -> None:
        """Wake those in `help`: what they wait for may be there."""

    def close(self, timeout_s: float) -> int:
        """Stop; return the number of reads that did not come back in time."""


class LoadQueue:
    """Loads that were not begun; every method is called under the loader's lock."""

    def __init__(self) -> None:
        self._queue: deque[Load] = deque()

    def add(self, load: Load) -> None:
        """Queue a load."""
        self._queue.append(load)

    def remove(self, load: Load) -> bool:
        """Take a load back unless it was begun."""
        if load not in self._queue:
            return False
        self._queue.remove(load)
        return True

    def remove_all(self) -> list[Load]:
        """Take back every load that was not begun."""
        dropped = list(self._queue)
        self._queue.clear()
        return dropped


class StoreFetch(LoadQueue):
    """Carry out loads with `store.read_into`, one after the other in each thread.

    Parameters
    ----------
    store : ExpertStore
    pool : SlotPool
    lock : threading.Lock
        The loader's.
    finish : callable (load)
    num_threads : int
        0: only callers that wait for experts read them.
    """

    needs_callers = False
    begins_by_reading = False

    def __init__(
        self,
        store: ExpertStore,
        pool: SlotPool,
        lock: threading.Lock,
        finish: Callable[[Load], bool],
        num_threads: int,
    ) -> None:
        super().__init__()
        self._store = store
        self._pool = pool
        self._lock = lock
        self._finish = finish
        self._work = threading.Condition(lock)
        self._closed = False
        self._threads: list[threading.Thread] = []
        work = functools.partial(_work, weakref.ref(self), self._work)
        self._threads += start_threads(work, num_threads, self.close)

    def add(self, load: Load) -> None:
        """Queue a load for the first thread that is free."""
        super().add(load)
        self._work.notify()

    def begin(self) -> None:
        """Do nothing: the threads take what is queued."""

    @property
    def quantum_bytes(self) -> int | None:
        """Nothing is cut: a read goes on to its end."""
        return None

    def prefetch(self, load: Load) -> None:
        """Read it here and now; the caller is a thread that has nothing else to do."""
        self._carry_out(load)

    def hasten(self, load: Load) -> None:
        """Do nothing: it is being read."""

    def cancel(self, load: Load) -> bool:  # noqa: ARG002 - no read is taken back
        """Do nothing: it is being read."""
        return False

    def look(self) -> None:
        """Do nothing: the threads hand on what they have read."""

    @property
    def epoch(self) -> int:
        """Nobody asks."""
        return 0

    def help(self, seen: int) -> None:
        """Do nothing: the threads need none."""

    def announce(self) -> None:
        """Do nothing: nobody waits here for anything but loads."""

    def wait(self, arrived: "SimpleQueue[Load]") -> Load:
        """Return the next load that is done, reading queued ones meanwhile.

        The caller has nothing better to do: reading itself spares it the hop to
        another thread, and needs none if there are none.
        """
        while True:
            try:
                return arrived.get_nowait()
            except Empty:
                pass
            load = None
            try:
                with deferred():
                    with self._lock:
                        load = self.take()
                    if load is not None:
                        self._carry_out(load)
                if load is None:
                    return arrived.get()
            except BaseException:
                # An interrupt between taking the load and filling it: others may wait.
                if load is not None and not load.done:
                    load.interrupt()
                    self._finish(load)
                raise

    def close(self, timeout_s: float = 2.0) -> int:
        """Stop the threads; a second call does nothing."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
        return join_threads(self._threads, timeout_s)

    def __del__(self) -> None:
        """End the threads of a runtime that was dropped without `close`."""
        # Whoever holds it is one of them, about to see for itself.
        if self._lock.acquire(blocking=False):
            try:
                self._work.notify_all()
            finally:
                self._lock.release()

    def take(self) -> Load | None:
        """Return the next load, None if there is none; under the loader's lock."""
        return self._queue.popleft() if self._queue else None

    @property
    def closed(self) -> bool:
        """Whether the threads are to end."""
        return self._closed

    def work_on(self, load: Load) -> None:
        """Carry out a load in a thread that has nobody to tell of an interrupt."""
        try:
            self._carry_out(load)
        except BaseException:
            logger.exception("loader.interrupted expert=%d layer=%d", load.expert, load.layer)

    def _carry_out(self, load: Load) -> None:
        # Again for a prefetch that failed, and that somebody waits for meanwhile.
        while not self._fill(load):
            pass

    def _fill(self, load: Load) -> bool:
        done = True
        try:
            parts: Mapping[str, np.ndarray]
            if self._pool.reads_views:
                parts = self._store.view(load.layer, load.expert)
            else:
                parts = self._pool.buffers(load.slot, load.layer)
                self._store.read_into(load.layer, load.expert, parts)
            self._pool.upload(load.slot, load.layer, parts, behind=not load.urgent)
        except Exception as error:  # noqa: BLE001 - a waiting step raises it
            # Without its frames: they hold this load, a cycle with the slot's arrays in it.
            load.error = error.with_traceback(None)
            self._pool.discard(load.slot)
        except BaseException:
            load.interrupt()
            self._pool.discard(load.slot)
            raise
        finally:
            done = self._finish(load)
        return done


def _work(reference: "weakref.ref[StoreFetch]", work: threading.Condition) -> None:
    # Neither a load nor who has the slots is kept while there is nothing to do.
    while True:
        with work:
            fetch = reference()
            if fetch is None or fetch.closed:
                return
            load = fetch.take()
            if load is None:
                del fetch
                work.wait(_IDLE_S)
                continue
        fetch.work_on(load)
        del load, fetch


def start_threads(
    target: Callable[[], None], num_threads: int, close: Callable[[], object]
) -> list[threading.Thread]:
    """Start threads that end with the process; `close` if the system has no more of them."""
    threads = [
        threading.Thread(target=target, name=f"moecache-loader-{index}", daemon=True)
        for index in range(num_threads)
    ]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:
        close()
        raise
    return threads


def join_threads(threads: list[threading.Thread], timeout_s: float) -> int:
    """Wait for threads, all in all so long; return how many still run."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return sum(thread.is_alive() for thread in threads)
