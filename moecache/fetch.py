"""StoreFetch: loads carried out by a store's own reads, in threads and in callers that wait."""

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from moecache.errors import MoeCacheError
from moecache.slots.base import SlotPool
from moecache.stores.base import ExpertStore

logger = logging.getLogger(__name__)


class Cause(enum.Enum):
    """Why an expert is read."""

    DEMAND = "demand"  # a token chose it
    BULK = "bulk"  # one of many tokens did
    PREFETCH = "prefetch"  # nobody did so far, but somebody may
    WARM_START = "warm start"  # an earlier run used it


class Load:
    """One expert on its way into one slot."""

    __slots__ = (
        "cause",
        "done",
        "error",
        "expert",
        "layer",
        "orphaned",
        "slot",
        "staged",
        "waiting",
    )

    def __init__(
        self, layer: int, expert: int, slot: int, cause: Cause, *, staged: bool = False
    ) -> None:
        self.layer = layer
        self.expert = expert
        self.slot = slot
        self.cause = cause
        self.staged = staged
        self.orphaned = False  # staged, and nobody waits for it any more
        self.done = False
        self.waiting: list[SimpleQueue[Load]] = []
        self.error: BaseException | None = None

    def interrupt(self) -> None:
        """Fail for steps that wait: the interrupt itself belongs to another caller."""
        self.error = MoeCacheError(
            f"reading expert {self.expert} of layer {self.layer} was interrupted; call again"
        )


class Fetch(Protocol):
    """Who carries out loads. `finish` of the loader is called once for each, in any thread."""

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

    def begin(self) -> None:
        """Begin what is queued, without waiting for it; never under the loader's lock."""

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
        finish: Callable[[Load], None],
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
        self._threads += start_threads(self._work_loop, num_threads, self.close)

    def add(self, load: Load) -> None:
        """Queue a load for the first thread that is free."""
        super().add(load)
        self._work.notify()

    def begin(self) -> None:
        """Do nothing: the threads take what is queued."""

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
                with self._lock:
                    load = self._queue.popleft() if self._queue else None
                if load is None:
                    return arrived.get()
                self._fill(load)
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

    def _work_loop(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
                load = self._queue.popleft()
            try:
                self._fill(load)
            except BaseException:
                logger.exception("loader.interrupted expert=%d layer=%d", load.expert, load.layer)
            # Not kept alive until the next one comes.
            del load

    def _fill(self, load: Load) -> None:
        try:
            parts = self._pool.buffers(load.slot, load.layer)
            self._store.read_into(load.layer, load.expert, parts)
            self._pool.wait(self._pool.upload(load.slot, load.layer, parts))
        except Exception as error:  # noqa: BLE001 - a waiting step raises it
            # Without its frames: they hold this load, a cycle with the slot's arrays in it.
            load.error = error.with_traceback(None)
            self._pool.discard(load.slot)
        except BaseException:
            load.interrupt()
            self._pool.discard(load.slot)
            raise
        finally:
            self._finish(load)


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
