"""Heartbeat: which rank is there, which is gone, and how far each has come."""

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

BEAT_S = 0.5
# Once an exchange has failed: a rank whose beats stop for so long is gone, or its process stopped.
SILENT_S = 3.0


class Heartbeat:
    """A thread that tells the other ranks, through torch.distributed's store, that this one lives.

    Has a connection of its own: one that waits would keep the beats from being sent.

    Parameters
    ----------
    store : Store
        That of the process group.
    name : str
        The same on all ranks, another for each model.
    rank, num_ranks : int
    """

    def __init__(self, store: Any, name: str, rank: int, num_ranks: int) -> None:
        self._store = PrefixStore(f"moecache/{name}", _connection(store))
        self._rank = rank
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._count = 0
        # Of each rank: its beats, and when they were seen to change.
        self._seen: dict[int, tuple[int, float]] = {}
        self._gone: list[int] = []
        self._progress = 0
        self._end = threading.Event()
        self._beat("")
        self._thread = threading.Thread(target=self._run, name="moecache-heartbeat", daemon=True)
        self._thread.start()

    def note(self, progress: int) -> None:
        """Say how many exchanges this rank has come to; told with the next beat."""
        self._progress = progress

    def say(self, text: str) -> None:
        """Leave a text for the other ranks, until the next one."""
        with self._lock:
            self._store.set(f"said/{self._rank}", text)

    def said(self, rank: int) -> str:
        """Return what a rank said last."""
        try:
            with self._lock:
                text: bytes = self._store.get(f"said/{rank}")
        except (RuntimeError, OSError):
            return "it failed"
        return text.decode(errors="replace")

    def post(self, name: str, text: str) -> None:
        """Leave a text for all ranks under a name of its own."""
        with self._lock:
            self._store.set(name, text)

    def remove(self, name: str) -> None:
        """Forget a text that was left under a name, if there is one."""
        with self._lock:
            self._store.delete_key(name)

    def posted(self, name: str) -> str | None:
        """Return a text that a rank has left, or `None` if it is not there yet."""
        with self._lock:
            if not self._store.check([name]):
                return None
            text: bytes = self._store.get(name)
        return text.decode()

    def end(self, reason: str) -> None:
        """Send no more beats, and say why; a second call does nothing."""
        if self._end.is_set():
            return
        self._end.set()
        # Whoever kept the store may be gone, and with it whom to tell.
        with contextlib.suppress(RuntimeError, OSError):
            self._beat(reason or "it has closed its model")

    def wait_for_others(self, within_s: float) -> None:
        """Return once every other rank has ended, too, or is gone, or after so many seconds."""
        until = time.monotonic() + within_s
        with contextlib.suppress(RuntimeError, OSError):
            while time.monotonic() < until:
                running = {rank for rank, (_, _, why) in enumerate(self._read()) if not why}
                if not running.difference(self._gone):
                    return
                time.sleep(BEAT_S / 10)

    def missing(self, silent_s: float) -> str:
        """Return a sentence about ranks that have ended, or were silent for so long, or "".

        Silence is measured between calls of this method.
        """
        found, now = self._read(), time.monotonic()
        silent = []
        for rank, (count, _, why) in enumerate(found):
            if rank == self._rank:
                continue
            if why:
                return f"rank {rank}: {why}"
            before, since = self._seen.get(rank, (-1, now))
            if count != before:
                since = now
            self._seen[rank] = (count, since)
            if now - since > silent_s:
                silent.append(rank)
        if not silent:
            return ""
        self._gone = silent
        return f"{_ranks(silent)} gone, or its process is stopped: no sign of life"

    def diagnose(self, within_s: float) -> str:
        """Return a sentence about the ranks that are to blame if others wait in vain.

        Takes `SILENT_S` at most if a rank says why it ended, or `within_s`.
        """
        try:
            before, until = self._read(), time.monotonic() + within_s
            while True:
                found = self._read()
                others = [rank for rank in range(self._num_ranks) if rank != self._rank]
                told = [f"rank {rank}: {found[rank][2]}" for rank in others if found[rank][2]]
                if told:
                    return "; ".join(told)
                if time.monotonic() > until:
                    break
                time.sleep(BEAT_S / 5)
        except (RuntimeError, OSError) as error:
            return (
                "rank 0 or the launcher, which kept the ranks' store, is gone "
                f"({str(error).splitlines()[0]:.100})"
            )
        gone = [rank for rank in others if found[rank][0] == before[rank][0]]
        self._gone = gone
        if gone:
            return f"{_ranks(gone)} gone, or its process is stopped: no sign of life"
        least = min(found[rank][1] for rank in others)
        late = [rank for rank in others if found[rank][1] == least]
        return (
            f"{_ranks(late)} alive, but did not come as far as this one; call the model on every "
            "rank, as often and with the same"
        )

    def _read(self) -> list[tuple[int, int, str]]:
        """Return (beats, exchanges, why it ended) of each rank."""
        keys = [str(rank) for rank in range(self._num_ranks)]
        with self._lock:
            # A rank that never began has no key, and a read would wait for it.
            found = [self._store.get(key) if self._store.check([key]) else b"0 0 " for key in keys]
        parts = [one.decode(errors="replace").split(" ", 2) for one in found]
        return [(int(count), int(progress), why) for count, progress, why in parts]

    def _beat(self, why: str) -> None:
        with self._lock:
            self._count += 1
            self._store.set(str(self._rank), f"{self._count} {self._progress} {why}")

    def _run(self) -> None:
        while not self._end.wait(BEAT_S):
            # Without the store the next exchange fails, and asks. It may have been slow once.
            with contextlib.suppress(RuntimeError, OSError):
                self._beat("")


def _connection(store: Any) -> Any:
    """Return a connection of our own to where a process group's store is."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return store
    return TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=10))


def _ranks(ranks: list[int]) -> str:
    names = " and ".join(str(rank) for rank in ranks)
    return f"rank {names} is" if len(ranks) == 1 else f"ranks {names} are"
