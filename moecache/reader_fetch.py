"""ReaderFetch: loads carried out by a compiled reader of the store's files, many at once."""

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from moecache._reader import Reader
from moecache.errors import MoeCacheError
from moecache.fetch import Load, LoadQueue, join_threads, start_threads
from moecache.interrupts import deferred
from moecache.slots.base import SlotPool
from moecache.stores import FileStore
from moecache.stores._file import ReadOnlyFile


class ReaderFetch(LoadQueue):
    """Give all loads to a reader at once; whoever waits takes in what has arrived.

    Parameters
    ----------
    reader : Reader
        Of the store's files, in their order. Closed with this.
    store : FileStore
    pool : SlotPool
    lock : threading.Lock
        The loader's.
    finish : callable (load)
    num_threads : int
        Threads that read, if there is no io_uring; with it, one thread or none:
        it takes part when there is more to read than twice the queue takes.
    """

    needs_callers = True
    _closed = True  # until everything is there

    def __init__(
        self,
        reader: Reader,
        store: FileStore,
        pool: SlotPool,
        lock: threading.Lock,
        finish: Callable[[Load], bool],
        num_threads: int,
    ) -> None:
        super().__init__()
        self._reader = reader
        self._store = store
        # Open until the last read is back.
        self._files: Sequence[ReadOnlyFile] = store.files
        self._pool = pool
        self._lock = lock
        self._finish = finish
        self._begun: set[Load] = set()
        self._ahead: set[Load] = set()  # of them, prefetches
        self._closed = False
        self._max_begun = pool.max_buffers
        # The kernel copies what is in the page cache when it is asked to.
        self.begins_by_reading = reader.engine == "io_uring" and not reader.direct
        if reader.engine == "io_uring":
            num_threads = min(num_threads, 1)
        self._threads: list[threading.Thread] = []
        self._threads += start_threads(reader.serve, num_threads, lambda: self.close(0))

    def begin(self) -> None:
        """Hand what is queued to the reader, all of it at once."""
        if self._queue:
            with deferred():
                self._begin_queued()

    def _begin_queued(self) -> None:
        while self._queue:
            batch: list[Load] = []
            entries: list[Any] = []
            complete = False
            try:
                with self._lock:
                    while self._queue and (
                        self._max_begun is None
                        or len(self._begun) - len(self._ahead) < self._max_begun
                    ):
                        batch.append(self._queue[0])
                        self._begun.add(self._queue.popleft())
                if not batch:
                    return
                for load in batch:
                    parts = self._pool.buffers(load.slot, load.layer)
                    runs = self._store.runs(load.layer, load.expert)
                    entries.append(((load, parts), runs, parts))
                complete = True
                self._reader.submit(entries)  # empties the list once all is begun
            except BaseException as error:
                if complete and not entries:
                    raise
                with self._lock:
                    # An interrupt may have come before the last one was taken out.
                    for load in batch:
                        self.remove(load)
                for load in batch:
                    if self._closed:
                        load.error = MoeCacheError("the runtime was closed")
                    elif isinstance(error, Exception):
                        load.error = error.with_traceback(None)
                    else:
                        load.interrupt()
                    self._end(load)
                if not isinstance(error, Exception):
                    raise

    @property
    def quantum_bytes(self) -> int | None:
        """Bytes that the kernel has at most: a demand goes before the rest."""
        return self._reader.depth * self._reader.piece_bytes

    def prefetch(self, load: Load) -> None:
        """Hand a load to the reader, behind all others; whoever looks takes it in."""
        with self._lock:
            self._begun.add(load)
            self._ahead.add(load)
        entries: list[Any] = []
        begun = False
        try:
            parts = self._pool.buffers(load.slot, load.layer)
            entries.append(((load, parts), self._store.runs(load.layer, load.expert), parts))
            begun = True
            self._reader.submit(entries, deferred=True)  # empties the list once it is begun
            # Joined, or of no use any more, before the reader had it.
            if load.urgent:
                self._reader.hasten(load)
            elif load.cancelled:
                self._reader.cancel(load)
        except BaseException as error:
            if not begun or entries:
                if isinstance(error, Exception):
                    load.error = error.with_traceback(None)
                else:
                    load.interrupt()
                self._end(load)
            if not isinstance(error, Exception):
                raise

    def hasten(self, load: Load) -> None:
        """Let it go with the demands."""
        self._reader.hasten(load)

    def cancel(self, load: Load) -> bool:
        """Drop what of it has not reached the kernel."""
        self._reader.cancel(load)
        return False

    def look(self) -> None:
        """Take in what has arrived."""
        if self._begun and self._reader.poll():
            while self._settle():
                pass
            self.begin()

    def wait(self, arrived: "SimpleQueue[Load]") -> Load:
        """Return the next load that arrives, and take in the others that are there by then."""
        while True:
            seen = self._reader.epoch
            while self._settle():
                pass
            self.begin()
            try:
                if self._closed:
                    return arrived.get(timeout=0.05)
                return arrived.get_nowait()
            except Empty:
                self._reader.wait(seen)

    @property
    def epoch(self) -> int:
        """Number of announcements so far."""
        return self._reader.epoch

    def help(self, seen: int) -> None:
        """Wait a moment for reads or an announcement, and take in what arrived."""
        self.begin()
        self._reader.wait(seen)
        while self._settle():
            pass

    def announce(self) -> None:
        """Make those that wait look again."""
        self._reader.announce()

    def close(self, timeout_s: float) -> int:
        """Drop what has not reached the kernel and wait for the rest; once."""
        with self._lock:
            if self._closed:
                return 0
            self._closed = True
        drained = self._reader.close(timeout_s)
        num_stuck = 0 if drained else self._reader.num_in_flight
        with self._lock:
            begun = list(self._begun)
        for load in begun:
            load.error = MoeCacheError("the runtime was closed")
            self._end(load)
        join_threads(self._threads, 0.2)
        if drained:
            self._files = ()
        return num_stuck

    def __del__(self) -> None:
        """Stop the reader of a runtime that was dropped without `close`."""
        if not self._closed:
            self._reader.close(0.5)

    def _settle(self) -> bool:
        """Bring one load that was read into its slot; return whether there was one."""
        with deferred():
            return self._settle_one()

    def _settle_one(self) -> bool:
        taken: list[tuple[tuple[Load, Any], tuple[int, int, int] | None]] = []
        try:
            self._reader.take(taken)
            if not taken:
                return False
            (load, parts), failure = taken[0]
            if failure is None:
                for number, _, _ in self._store.runs(load.layer, load.expert):
                    self._files[number].check_unchanged()
                self._pool.upload(load.slot, load.layer, parts, behind=not load.urgent)
            else:
                error, file, offset = failure
                load.error = self._files[file].failure(
                    error,
                    offset,
                    f"expert {load.expert} of layer {load.layer}",
                    self._store.layout.expert_bytes(load.layer),
                )
        except Exception as error:  # noqa: BLE001 - a waiting step raises it
            taken[0][0][0].error = error.with_traceback(None)
        except BaseException:
            if taken:
                taken[0][0][0].interrupt()
            raise
        finally:
            if taken:
                self._end(taken[0][0][0])
        return True

    def _end(self, load: Load) -> None:
        if load.error is not None:
            self._pool.discard(load.slot)
        self._begun.discard(load)
        self._ahead.discard(load)
        if not self._finish(load):
            with self._lock:
                self.add(load)
            self.begin()
            return
        # Another thread may wait for this very load, in the kernel.
        self._reader.announce()
