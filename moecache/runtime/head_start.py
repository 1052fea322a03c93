"""HeadStart: disk and memory at work while Python imports, and while a model is built.

Imports of torch and transformers take seconds in which the disk and, on most machines, a core are
idle. What `load` needs first is brought in meanwhile: the trunk's pages, into the page cache, and
the memory that trunk and slots will take. In a virtual machine memory that has been free for a
while is the host's, and costs some two seconds a GiB to have back; pages that were freed a moment
ago do not.
"""

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from moecache.errors import MoeCacheError
from moecache.prefault import BackgroundSweep, Done, holding, warm
from moecache.settings import prefaults
from moecache.sizing.host_memory import cgroup_limits, free_host_bytes
from moecache.stores import CheckpointStore

# What the libraries that are imported meanwhile, and the model's first steps, take.
OTHERS_BYTES = 2**30
# Hosts take back what has been free for some two seconds.
_STAYS_S = 2.0


class HeadStart:
    """Reads of a trunk and memory for it and for slots, begun before anybody asks for them.

    Nothing here is handed on: pages are found in the page cache, and memory is given back just
    before it is taken. What fails is not told: whoever needs it meets the error. Threads end with
    `end`.
    """

    def __init__(self) -> None:
        self._read: BackgroundSweep | None = None
        self._held: _Held | None = None
        self._has_trunk = False
        self._given_s = -math.inf
        self._process = os.getpid()

    def begin(self, store: CheckpointStore, prefault: str, slots_bytes: int) -> None:
        """Begin; an interrupt leaves nothing that `end` would not end.

        Parameters
        ----------
        store : CheckpointStore
        prefault : str
            As `Options` has it: nothing is done where it is off.
        slots_bytes : int
            Memory that slots will take; 0 holds none, not even for the trunk.
        """
        with contextlib.suppress(MoeCacheError, OSError, ImportError, ValueError):
            if prefaults(prefault):
                self._begin(store, slots_bytes)

    def _begin(self, store: CheckpointStore, slots_bytes: int) -> None:
        regions = store.trunk_regions()
        trunk = max(store.trunk_bytes, sum(nbytes for _, nbytes in regions))
        # The trunk is there twice for a while, as pages of the file and as weights.
        room = free_host_bytes() - 2 * trunk - OTHERS_BYTES
        if room < 0:
            return
        if regions:
            # Not by way of a mapping: whoever maps memory would wait for the disk.
            self._read = warm(
                regions,
                gate="always",
                method="read",
                threads=1,
                background=True,
                keep_mapped=False,
                read_back=False,
            )
        if slots_bytes and _is_lent() and not _dies_whole():
            self._held = _Held([max(1, trunk), max(1, min(slots_bytes, room))])
            self._has_trunk = True

    @property
    def progress(self) -> Done | None:
        """How much of the trunk has been read; `None` if nobody knows."""
        return None if self._read is None else self._read.progress

    def give_trunk(self) -> None:
        """Give the memory back that is for the trunk, which is about to be read."""
        if self._has_trunk and self._held is not None and os.getpid() == self._process:
            self._has_trunk = False
            self._held.give()

    def end(self) -> None:
        """Stop, and give all memory back; a second call does nothing. Pages stay cached."""
        if os.getpid() != self._process:
            return
        held, self._held = self._held, None
        if held is not None:
            held.end()
            self._given_s = time.monotonic()
        if self._read is not None:
            self._read.cancel()

    @property
    def has_given(self) -> bool:
        """Whether memory was given back a moment ago, so that the host has not taken it yet."""
        return time.monotonic() - self._given_s < _STAYS_S


class _Held:
    """Memory that a process of its own takes from the system until it is given back."""

    def __init__(self, sizes: Sequence[int]) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("there is no interpreter to start")
        command = [sys.executable, "-I", "-S", holding.__file__, *map(str, (os.getpid(), *sizes))]
        self._process = subprocess.Popen(  # noqa: S603 - of this package
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )

    def give(self) -> None:
        """Give back the first part that is left."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.write(b".")

    def end(self) -> None:
        """Give all back; return once it is."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()


def _is_lent() -> bool:
    """Return whether memory is a virtual machine's, whose host may have it back."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as file:
        flags = next((line for line in file if line.startswith("flags")), "")
        return "hypervisor" in flags.split()
    return False


def _dies_whole() -> bool:
    """Return whether memory that runs out ends this process too, not only the one that holds it."""
    for group in cgroup_limits():
        with contextlib.suppress(OSError):
            if (Path(group.path) / "memory.oom.group").read_text().strip() == "1":
                return True
    return False


_lock = threading.Lock()
_begun: WeakKeyDictionary[CheckpointStore, HeadStart] = WeakKeyDictionary()


def begin(store: CheckpointStore, prefault: str, slots_bytes: int = 0) -> None:
    """Begin a store's head start, unless it has begun; see `HeadStart`."""
    with _lock:
        if store in _begun:
            return
        begun = _begun[store] = HeadStart()
    begun.begin(store, prefault, slots_bytes)


def progress(store: CheckpointStore) -> Done | None:
    """Return how much of a store's trunk its head start has read; `None` if nobody knows."""
    begun = _begun.get(store)
    return None if begun is None else begun.progress


def give_trunk(store: CheckpointStore) -> None:
    """Give back what was taken for a store's trunk, if its head start has begun."""
    begun = _begun.get(store)
    if begun is not None:
        begun.give_trunk()


def end(store: CheckpointStore) -> None:
    """End a store's head start, if it has begun."""
    begun = _begun.get(store)
    if begun is not None:
        begun.end()


def has_given(store: CheckpointStore) -> bool:
    """Return whether a store's head start has given memory back a moment ago."""
    begun = _begun.get(store)
    return begun is not None and begun.has_given
