"""ReaderEngine: reads by a compiled reader of the store's files, many at once."""

import threading
from collections.abc import Sequence
from errno import ECANCELED, EILSEQ
from functools import partial
from typing import Any

from moecache.errors import ConfigError
from moecache.loading.engine import Read
from moecache.loading.load import ReadCancelledError, interrupted
from moecache.loading.store_engine import join_threads, start_threads
from moecache.reader._reader import Reader
from moecache.stores import ExpertStore, FileStore
from moecache.stores._file import ReadOnlyFile

_JOIN_S = 0.2


class ReaderEngine:
    """Give all reads to a reader at once; a thread that waits takes in what has arrived.

    Parameters
    ----------
    reader : Reader
        Reader of the store's files, in their order. Closed with this.
    store : FileStore
    num_threads : int
        Threads that read, if there is no io_uring; with it, one thread or none:
        it takes part when there is more to read than twice the queue takes.
    fills : bool, default False
        Have these threads bring experts into compute form, too; else callers do that.

    Raises
    ------
    ConfigError
        If the store does not say where experts lie.
    MoeCacheError
        If the system has no thread to give.
    """

    fills = True

    def __init__(
        self, reader: Reader, store: ExpertStore, num_threads: int, *, fills: bool = False
    ) -> None:
        if not isinstance(store, FileStore):
            raise ConfigError(f"a {type(store).__name__} has no files that a reader could read")
        self._reader = reader
        self._store = store
        # Open until the last read is back.
        self._files: Sequence[ReadOnlyFile] = store.files
        # The kernel copies what is in the page cache when it is asked to.
        self.reads_in_submit = reader.engine == "io_uring" and not reader.direct
        if reader.engine == "io_uring":
            num_threads = min(num_threads, 1)
        self._threads: list[threading.Thread] = []
        serve = partial(reader.serve, fills=fills)
        self._threads += start_threads(serve, num_threads, lambda: reader.close(0))

    @property
    def quantum_bytes(self) -> int | None:
        """Bytes that the kernel has at most: a demand goes before the rest."""
        return self._reader.depth * self._reader.piece_bytes

    @property
    def epoch(self) -> int:
        """Number of calls of `announce` so far."""
        return self._reader.epoch

    def submit(self, reads: list[Read], *, deferred: bool = False) -> None:
        """Hand reads to the reader, all of them at once."""
        runs = self._store.runs
        loads: list[Any] = [
            (one, runs(one.layer, one.expert), one.parts, one.fills) for one in reads
        ]
        try:
            self._reader.submit(loads, deferred=deferred)
        finally:
            if not loads:
                reads.clear()

    def hasten(self, read: Read) -> None:
        """Let a deferred read go with the urgent ones."""
        self._reader.hasten(read)

    def cancel(self, read: Read) -> None:
        """Drop the part of a deferred read that has not reached the kernel."""
        self._reader.cancel(read)

    def poll(self) -> bool:
        """Take in what the kernel has finished; return whether a read is over."""
        return self._reader.poll()

    def wait(self, seen: int) -> bool:
        """Read, or wait in the kernel."""
        return self._reader.wait(seen)

    def take(self, done: list[tuple[Read, Exception | None]]) -> None:
        """Append (read, error) of one that is over to `done`, if there is one."""
        taken: list[tuple[Read, tuple[int, int, int] | None]] = []
        try:
            self._reader.take(taken)
        finally:
            for read, failure in taken:
                error: Exception | None = interrupted(read)
                try:
                    error = self._outcome(read, failure)
                finally:
                    done.append((read, error))

    def announce(self) -> None:
        """Make every `wait` return."""
        self._reader.announce()

    def close(self, timeout_s: float) -> int:
        """Drop what has not reached the kernel, and wait for the rest."""
        drained = self._reader.close(timeout_s)
        num_stuck = 0 if drained else self._reader.num_in_flight
        join_threads(self._threads, _JOIN_S)
        if drained:
            self._files = ()
        return num_stuck

    def _outcome(self, read: Read, failure: tuple[int, int, int] | None) -> Exception | None:
        if failure is not None and failure[0] == EILSEQ:
            read.is_wrong, failure = True, None
        if failure is None:
            try:
                for number in {run[0] for run in self._store.runs(read.layer, read.expert)}:
                    self._files[number].check_unchanged()
            except Exception as error:  # noqa: BLE001 - a waiting step raises it
                return error.with_traceback(None)
            return None
        reason, file, offset = failure
        if reason == ECANCELED:
            return ReadCancelledError("the read was taken back")
        return self._files[file].failure(
            reason,
            offset,
            f"expert {read.expert} of layer {read.layer}",
            self._store.layout.expert_bytes(read.layer),
        )
