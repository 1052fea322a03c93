"""Engine: the interface that carries out reads for a loader."""

from collections.abc import Mapping
from typing import Any, Protocol


class Read(Protocol):
    """An expert to be read; the loader's `Load` is one."""

    layer: int
    expert: int
    parts: Mapping[str, Any]
    fills: tuple[tuple[Any, str, int, Any], ...]
    is_wrong: bool


class Engine(Protocol):
    """Carries out reads, many at once; any thread may call.

    Knows files, arrays and time, but no slot, no cache and no lock of a loader's, and
    calls nothing back: `take` returns finished reads. Every read that was
    submitted is taken once, with or without an error.
    """

    @property
    def quantum_bytes(self) -> int | None:
        """Bytes of a deferred read that an urgent one may have to wait for; `None`: all."""

    @property
    def reads_in_submit(self) -> bool:
        """Whether `submit` itself reads what is in memory already."""

    @property
    def fills(self) -> bool:
        """Whether it brings what was read into compute form, as `Read.fills` says."""

    @property
    def epoch(self) -> int:
        """Number of calls of `announce` so far."""

    def submit(self, reads: list[Any], *, deferred: bool = False) -> None:
        """Begin to read; returns as soon as that has begun.

        Parameters
        ----------
        reads : list of Read
            Emptied once all are begun, and not before. `parts` must not be touched until the
            read is taken.
        deferred : bool, default False
            Let everything else go first, until `hasten`. An engine that cannot wait its
            turn reads now, in the calling thread.

        Raises
        ------
        Exception
            Reads that are still in the list were not begun.
        """

    def hasten(self, read: Any) -> None:
        """Let a deferred read wait no longer; never waits."""

    def cancel(self, read: Any) -> None:
        """Take a read back as far as it has not begun; never waits.

        It is taken like any other, with `ReadCancelledError` if it was not read to its end.
        """

    def poll(self) -> bool:
        """Return whether a read is over, without waiting."""

    def wait(self, seen: int) -> bool:
        """Wait until a read is over or `epoch` is not `seen` any more, a tenth of a second at most.

        Takes part in the reading meanwhile. Returns whether a read is over.
        """

    def take(self, done: list[tuple[Any, Exception | None]]) -> None:
        """Append (read, error) of one that is over to `done`, if there is one."""

    def announce(self) -> None:
        """Make every `wait` return: something happened that others wait for."""

    def close(self, timeout_s: float) -> int:
        """Begin nothing more, and wait for what is being read; a second call does nothing.

        Returns the number of reads that did not come back in time.
        """
