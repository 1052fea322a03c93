"""Heartbeat: which rank is there, which is gone, and how far each has come."""

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from moecache.integrations.transformers._deadlines import CallThread

BEAT_S = 0.5
# Once an exchange has failed: a rank whose beats stop for so long is gone, or its process stopped.
SILENT_S = 3.0
# For a connection to the store.
CONNECT_S = 10.0
# For the end of the thread that calls it.
_END_S = 1.0


class Heartbeat:
    """A thread that tells the other ranks, through torch.distributed's store, that this one lives.

    Has a connection of its own: one that waits would keep the beats from being sent. One thread
    alone calls it, as torch's client waits without a time-out for a store that hangs. Methods raise
    TimeoutError then, after `timeout_s` at the latest.

    Parameters
    ----------
    store : Store
        That of the process group.
    name : str
        The same on all ranks, another for each model.
    rank, num_ranks : int
    timeout_s : float
        The store may take so long to answer.
    """

    def __init__(
        self, store: Any, name: str, rank: int, num_ranks: int, timeout_s: float = 60.0
    ) -> None:
        self._calls = CallThread("the ranks' store")
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._count = 0
        self._why = ""
        # The beats of each rank, and when they were seen to change.
        self._seen: dict[int, tuple[int, float]] = {}
        self._gone: list[int] = []
        self._progress = 0
        self._end = threading.Event()
        try:
            own, connection = self._calls.ask(lambda: _connect(store), max(timeout_s, CONNECT_S))
        except BaseException:
            self._calls.close()
            raise
        self._store = PrefixStore(f"moecache/{name}", own)
        # At the process's exit, too.
        self._hang_up = weakref.finalize(self, _hang_up, self._calls, self._end, connection)
        self._beat(timeout_s)
        self._thread = threading.Thread(target=self._run, name="moecache-heartbeat", daemon=True)
        self._thread.start()

    def note(self, progress: int) -> None:
        """Say how many exchanges this rank has come to; told with the next beat."""
        self._progress = progress

    def say(self, text: str) -> None:
        """Leave a text for the other ranks, until the next one; without a store, nothing."""
        with contextlib.suppress(RuntimeError, OSError):
            self._ask(lambda: self._store.set(f"said/{self._rank}", text), SILENT_S)

    def said(self, rank: int) -> str:
        """Return what a rank said last."""
        try:
            text: bytes = self._ask(lambda: self._store.get(f"said/{rank}"), SILENT_S)
        except (RuntimeError, OSError):
            return "it failed"
        return text.decode(errors="replace")

    def post(self, name: str, text: str) -> None:
        """Leave a text for all ranks under a name of its own."""
        self._ask(lambda: self._store.set(name, text))

    def remove(self, name: str) -> None:
        """Forget a text that was left under a name, if there is one."""
        self._ask(lambda: self._store.delete_key(name))

    def posted(self, name: str) -> str | None:
        """Return a text that a rank has left, or `None` if it is not there yet."""
        text: bytes | None = self._ask(
            lambda: self._store.get(name) if self._store.check([name]) else None
        )
        return None if text is None else text.decode()

    def end(self, reason: str) -> None:
        """Send no more beats, and say why; a second call does nothing."""
        if self._end.is_set():
            return
        self._why = reason or "it has closed its model"
        self._end.set()
        # The process that kept the store may be gone, and nobody is left to be told.
        with contextlib.suppress(RuntimeError, OSError):
            self._beat(SILENT_S)

    def close(self) -> None:
        """Ask the store nothing more."""
        self._hang_up()

    def wait_for_others(self, within_s: float) -> None:
        """Return once every other rank has ended, too, or is gone, or after `within_s` seconds."""
        until = time.monotonic() + within_s
        with contextlib.suppress(RuntimeError, OSError):
            while time.monotonic() < until:
                running = {rank for rank, (_, _, why) in enumerate(self._read(SILENT_S)) if not why}
                if not running.difference(self._gone):
                    return
                time.sleep(BEAT_S / 10)

    def missing(self, silent_s: float) -> str:
        """Return a sentence about ranks that have ended, or were silent for so long, or "".

        Silence is measured between calls of this method.
        """
        found, now = self._read(self._timeout_s), time.monotonic()
        silent = {}
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
                silent[rank] = now - since
        self._gone = list(silent)
        return _silence(self._gone, min(silent.values())) if silent else ""

    def diagnose(self, within_s: float) -> str:
        """Return a sentence about the ranks that are to blame if others wait in vain.

        Takes less than `SILENT_S` if a rank says why it ended or the store has hung for as long,
        and up to three times `within_s` else.
        """
        try:
            before, until = self._read(within_s), time.monotonic() + within_s
            while True:
                found = self._read(within_s)
                others = [rank for rank in range(self._num_ranks) if rank != self._rank]
                told = [f"rank {rank}: {found[rank][2]}" for rank in others if found[rank][2]]
                if told:
                    return "; ".join(told)
                if time.monotonic() > until:
                    break
                time.sleep(BEAT_S / 5)
        except TimeoutError as error:
            return (
                f"rank 0 or the launcher, which keeps the ranks' store, is stopped, or its machine "
                f"hangs or is not to be reached: {error}"
            )
        except (RuntimeError, OSError) as error:
            return (
                "rank 0 or the launcher, which kept the ranks' store, is gone "
                f"({str(error).splitlines()[0]:.100})"
            )
        gone = [rank for rank in others if found[rank][0] == before[rank][0]]
        self._gone = gone
        if gone:
            return _silence(gone, within_s)
        least = min(found[rank][1] for rank in others)
        late = [rank for rank in others if found[rank][1] == least]
        return (
            f"{_ranks(late)} alive, but did not come as far as this one; call the model on every "
            "rank, as often and with the same"
        )

    def _read(self, within_s: float) -> list[tuple[int, int, str]]:
        """Return (beats, exchanges, why it ended) of each rank."""
        keys = [str(rank) for rank in range(self._num_ranks)]
        # A rank that never began has no key, and a read would wait for it.
        found = self._ask(
            lambda: [self._store.get(key) if self._store.check([key]) else b"0 0 " for key in keys],
            within_s,
        )
        parts = [one.decode(errors="replace").split(" ", 2) for one in found]
        return [(int(count), int(progress), why) for count, progress, why in parts]

    def _beat(self, within_s: float) -> None:
        self._ask(self._send_beat, within_s)

    def _send_beat(self) -> None:
        # By one thread: no beat comes after the one that says why there are no more.
        self._count += 1
        self._store.set(str(self._rank), f"{self._count} {self._progress} {self._why}")

    def _ask(self, call: Callable[[], Any], within_s: float | None = None) -> Any:
        return self._calls.ask(call, self._timeout_s if within_s is None else within_s)

    def _run(self) -> None:
        while not self._end.wait(BEAT_S):
            # Without the store the next exchange fails, and asks. It may have been slow once.
            with contextlib.suppress(RuntimeError, OSError):
                self._beat(self._timeout_s)


def _connect(store: Any) -> tuple[Any, socket.socket | None]:
    """Return a connection of our own to a process group's store, and its socket if it is known."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return store, None
    before = _connections(store.port)
    own = TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=CONNECT_S))
    now = _connections(store.port)
    made = [now[name] for name in now.keys() - before.keys()]
    # Two that were made at once cannot be told apart.
    return own, _socket_of(made[0]) if len(made) == 1 else None


def _connections(port: int) -> dict[str, int]:
    """Return this process's connections to a port: their descriptors, by what never changes."""
    found = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if not name.startswith("socket:"):
                continue
            with _socket_of(number) as one:
                is_ip = one.family in {socket.AF_INET, socket.AF_INET6}
                if is_ip and one.getpeername()[1] == port:
                    found[name] = number
    return found


def _socket_of(number: int) -> socket.socket:
    """Return another descriptor of a socket, which stays as it is for all others."""
    is_blocking = os.get_blocking(number)
    found = socket.socket(fileno=os.dup(number))
    # A default time-out of the host's would make it one that does not block, for all.
    os.set_blocking(number, is_blocking)
    return found


def _hang_up(calls: CallThread, end: threading.Event, connection: socket.socket | None) -> None:
    """End a thread that calls a store, even in a call that waits for ever.

    The process would be aborted if such a call returned while the interpreter is being finalized.
    A forked process has no such thread, and leaves the connection alone.
    """
    end.set()
    is_ended = calls.close(_END_S)
    if connection is None:
        return
    if not is_ended:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        calls.close(_END_S)
    connection.close()


def _ranks(ranks: list[int]) -> str:
    names = " and ".join(str(rank) for rank in ranks)
    return f"rank {names} is" if len(ranks) == 1 else f"ranks {names} are"


def _silence(ranks: list[int], for_s: float) -> str:
    return f"{_ranks(ranks)} gone, or its process is stopped: no sign of life for {for_s:.0f} s"
