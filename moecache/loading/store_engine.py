"""StoreEngine: reads by a store's own `read_into`, in threads and in callers that wait."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

from moecache.errors import MoeCacheError
from moecache.interrupts import uninterrupted
from moecache.loading._guard import Guard
from moecache.loading.engine import Read
from moecache.loading.load import ReadCancelledError, interrupted
from moecache.stores.base import ExpertStore

_TICK_S = 0.1

_Done = tuple[Read, Exception | None]


class StoreEngine:
    """Read with `store.read_into`, one expert after the other in each thread.

    A deferred read is carried out at once by the thread that submits it: such a
    thread has nothing else to do.

    Parameters
    ----------
    store : ExpertStore
    num_threads : int
        0: only callers that wait read.

    Raises
    ------
    MoeCacheError
        If the system has no thread to give.
    """

    quantum_bytes = None
    reads_in_submit = False
    fills = False

    def __init__(self, store: ExpertStore, num_threads: int) -> None:
        self._store = store
        # The garbage collector may call `cancel` and `announce` in the middle of a section.
        self._changed = threading.Condition(threading.RLock())
        self._queue: deque[Read] = deque()
        self._done: SimpleQueue[_Done] = SimpleQueue()
        self._epoch = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._threads += start_threads(self._serve, num_threads, lambda: self.close(0))

    @property
    def epoch(self) -> int:
        """Number of calls of `announce` so far."""
        return self._epoch

    def submit(self, reads: list[Read], *, deferred: bool = False) -> None:
        """Queue reads for the first thread that is free; carry deferred ones out."""
        if deferred:
            while reads:
                self._carry_out(Guard(self._done, (reads[-1], interrupted(reads.pop()))))
            return
        with self._changed:
            if self._closed:
                raise ReadCancelledError("the engine is closed")
            self._queue.extend(reads)
            self._changed.notify(len(reads))
            reads.clear()

    def hasten(self, read: Read) -> None:
        """Do nothing: it is being read."""

    def cancel(self, read: Read) -> None:
        """Drop a read that no thread has begun."""
        with self._changed:
            if read in self._queue:
                self._queue.remove(read)
                self._done.put((read, ReadCancelledError("the read was taken back")))
                self._changed.notify_all()

    def poll(self) -> bool:
        """Return whether a read is over."""
        return not self._done.empty()

    def wait(self, seen: int) -> bool:
        """Read what is queued, else wait for what others read.

        The caller has nothing better to do: reading itself spares it the hop to
        another thread, and needs none if there are none.
        """
        guard = None
        try:
            # Python's own conditions cannot be interrupted safely: a tick is not long.
            with uninterrupted(), self._changed:
                if self._done.empty() and self._epoch == seen and not self._closed:
                    if self._queue:
                        read = self._queue.popleft()
                        guard = Guard(self._done, (read, interrupted(read)))
                    else:
                        self._changed.wait(_TICK_S)
            if guard is not None:
                self._carry_out(guard)
        finally:
            # The first call here is made even if other errors are pending.
            if guard is not None:
                guard.close()
        return self.poll()

    def take(self, done: list[_Done]) -> None:
        """Append (read, error) of one that is over to `done`, if there is one."""
        with contextlib.suppress(Empty):
            done.append(self._done.get_nowait())

    def announce(self) -> None:
        """Make every `wait` return."""
        with self._changed:
            self._epoch += 1
            self._changed.notify_all()

    def close(self, timeout_s: float) -> int:
        """End what was not begun, and the threads."""
        with self._changed:
            self._closed = True
            while self._queue:
                self._done.put((self._queue.popleft(), ReadCancelledError("the engine is closed")))
            self._changed.notify_all()
        return join_threads(self._threads, timeout_s)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                read = self._queue.popleft()
            self._carry_out(Guard(self._done, (read, interrupted(read))))
            del read

    def _carry_out(self, guard: Guard) -> None:
        """Read; the guard reports it wherever an interrupt comes."""
        read: Read = guard.item[0]
        try:
            self._store.read_into(read.layer, read.expert, read.parts)
            guard.item = (read, None)
        except Exception as error:  # noqa: BLE001 - a waiting step raises it
            # Without its frames: they hold the read, a cycle with the slot's arrays in it.
            guard.item = (read, error.with_traceback(None))
        finally:
            guard.close()
            with uninterrupted(), self._changed:
                self._changed.notify_all()


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
    except RuntimeError as error:
        close()
        raise MoeCacheError(
            f"the system has no thread for reading experts ({error}); raise the limit of "
            "processes (ulimit -u), or open with loader_threads=0"
        ) from error
    return threads


def join_threads(threads: list[threading.Thread], timeout_s: float) -> int:
    """Wait for threads, `timeout_s` in all; return how many still run."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
    return sum(thread.is_alive() for thread in threads)
