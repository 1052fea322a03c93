"""HeadStart: disk and memory at work while Python imports, and while a model is built.

Imports of torch and transformers take seconds in which the disk and, on most machines, a core are
idle. What `load` needs first is brought in meanwhile: the trunk's pages, into the page cache, and
the memory that slots will take. In a virtual machine memory that has been free for a while is the
host's, and costs some two seconds a GiB to have back; pages that were freed a moment ago do not.
"""

import contextlib
import mmap
import os
import threading
from dataclasses import replace
from weakref import WeakKeyDictionary

from moecache._prefault import address_of
from moecache.errors import MoeCacheError
from moecache.prefault import BackgroundSweep, Region, warm
from moecache.runtime.options import Options
from moecache.runtime.plan import plan_store
from moecache.settings import Settings, parse_prefault
from moecache.sizing.host_memory import free_host_bytes
from moecache.stores import CheckpointStore

# What the libraries that are imported meanwhile, and the model's first steps, take.
_OTHERS_BYTES = 2**30
_LEAST_BYTES = 64 * 2**20


class HeadStart:
    """Reads of a trunk and memory of slots, begun before anybody asks for them.

    Nothing here is handed on: pages are found in the page cache, and memory is given back just
    before slots take it. What fails is left to those who need it. Threads end with `end`.

    Parameters
    ----------
    store : CheckpointStore
    options : Options
        Those that `moecache.open` will get; what they do not say is measured.
    """

    def __init__(self, store: CheckpointStore, options: Options) -> None:
        self._sweeps: list[BackgroundSweep] = []
        self._memory: mmap.mmap | None = None
        self._process = os.getpid()
        with contextlib.suppress(MoeCacheError, OSError, ImportError):
            settings = Settings.from_environ()
            if parse_prefault(settings.choose("prefault", options.prefault).value) != "off":
                self._begin(store, options, settings)

    def _begin(self, store: CheckpointStore, options: Options, settings: Settings) -> None:
        regions = store.trunk_regions()
        trunk = max(store.trunk_bytes, sum(nbytes for _, nbytes in regions))
        # The trunk is there twice for a while, as pages of the file and as weights.
        room = free_host_bytes() - 2 * trunk - _OTHERS_BYTES
        if room < 0:
            return
        if regions:
            self._sweep(regions, keep_mapped=False)
        if options.device != "cpu" or options.share is not None:
            return
        needed = options.host_bytes or trunk + _OTHERS_BYTES
        slots = plan_store(store, replace(options, host_bytes=needed), settings).slots_bytes
        nbytes = min(slots, room) // mmap.PAGESIZE * mmap.PAGESIZE
        if nbytes < _LEAST_BYTES:
            return
        self._memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._sweep([Region(*address_of(self._memory), self._memory)], keep_mapped=True)

    def _sweep(self, regions: list[Region], *, keep_mapped: bool) -> None:
        sweep = warm(
            regions,
            gate="always",
            threads=1,
            background=True,
            keep_mapped=keep_mapped,
            read_back=False,
        )
        self._sweeps.append(sweep)

    def end(self) -> None:
        """Stop, and give all memory back; a second call does nothing. Pages stay cached."""
        if os.getpid() != self._process:
            return
        sweeps, self._sweeps = self._sweeps, []
        for sweep in sweeps:
            sweep.cancel()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


_lock = threading.Lock()
_begun: WeakKeyDictionary[CheckpointStore, HeadStart] = WeakKeyDictionary()


def begin(store: CheckpointStore, options: Options) -> None:
    """Begin a store's head start, unless it has begun."""
    with _lock:
        if store not in _begun:
            _begun[store] = HeadStart(store, options)


def end(store: CheckpointStore) -> None:
    """End a store's head start, if it has begun."""
    with _lock:
        begun = _begun.pop(store, None)
    if begun is not None:
        begun.end()
