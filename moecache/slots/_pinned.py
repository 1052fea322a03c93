"""PinnedBuffers: memory of the host that experts pass through on their way to a GPU."""

import contextlib
import logging
import threading
from collections import deque

import numpy as np

from moecache.cuda import Device
from moecache.errors import MoeCacheError
from moecache.slots._memory import BLOCK_BYTES, aligned_rows
from moecache.units import format_bytes

logger = logging.getLogger(__name__)

# Bytes that the background pins at once: some milliseconds, after which `close` is heard.
_CHUNK_BYTES = 32 * 2**20


class PinnedBuffers:
    """Buffers of one size, at most `max_buffers`, kept until `close`.

    All lie in one slab of huge pages, into which direct reads are fastest, and are pinned: copies
    from pageable memory pass through a buffer of the driver's, at a fraction of the speed, while
    the caller waits. Pinning takes a millisecond for some megabytes, so `pin_ahead` does it in the
    background; a buffer that is needed earlier is pinned by itself. If the system refuses to pin,
    buffers are pageable; one warning says so.

    Every method but `close` may be called from any thread.

    Parameters
    ----------
    device : Device
    buffer_bytes : int
    max_buffers : int
    """

    def __init__(self, device: Device, buffer_bytes: int, max_buffers: int) -> None:
        self.buffer_bytes = buffer_bytes
        self.max_buffers = max_buffers
        self._device = device
        self._free: deque[np.ndarray] = deque()
        # Reentrant: the garbage collector may close a dropped pool in the middle of a section.
        self._lock = threading.RLock()
        self._slab: np.ndarray | None = None
        self._left = deque(range(max_buffers))  # rows of the slab that are not made
        self._made: set[int] = set()  # addresses of buffers
        self._pinned: dict[int, int] = {}  # how many buffers each registered address has
        self._refused = False
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def pinned_bytes(self) -> int:
        """Bytes of buffers that are pinned."""
        return sum(tuple(self._pinned.values())) * self.buffer_bytes

    def pin_ahead(self) -> None:
        """Make all buffers in the background, so that none is pinned while a step waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._make_all, name="moecache-pin", daemon=True)
            self._thread.start()

    def take(self) -> np.ndarray | None:
        """Return a buffer, an array of uint8, or None if all are in use.

        Raises
        ------
        MemoryError
            If the host has no memory for another one.
        """
        while True:
            try:
                return self._free.popleft()
            except IndexError:
                if not self._make(1):
                    return None

    def give_back(self, buffer: np.ndarray) -> None:
        """Take back a buffer that is no longer read or written; ignore one not made here."""
        if buffer.ctypes.data in self._made:
            self._free.append(buffer)

    def close(self) -> None:
        """Unpin all of them; none may be in use."""
        with self._lock:
            self._closed = True
            self._left.clear()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        while self._pinned:
            address, _ = self._pinned.popitem()
            self._device.unpin(address)
        self._free.clear()
        self._made.clear()
        self._slab = None

    def _make_all(self) -> None:
        per_chunk = max(1, _CHUNK_BYTES // self.buffer_bytes)
        with contextlib.suppress(MemoryError):  # whoever needs a buffer is told
            while self._make(per_chunk, ahead=True):
                pass

    def _make(self, count: int, *, ahead: bool = False) -> int:
        """Make up to that many buffers and pin them as one; return how many were made."""
        with self._lock:
            if self._slab is None and self._left:
                self._slab = self._make_slab()
            # From the end, so that the rows ahead stay next to each other.
            taken = min(count, len(self._left))
            rows = [self._left.pop() if ahead else self._left.popleft() for _ in range(taken)]
            slab = self._slab
        if not rows or slab is None:
            return 0
        first = min(rows)
        self._pin(slab[first : first + len(rows)])
        with self._lock:
            if self._closed:
                return 0
            buffers = [slab[row][: self.buffer_bytes] for row in rows]
            self._made.update(buffer.ctypes.data for buffer in buffers)
            self._free.extend(buffers)
        return len(rows)

    def _make_slab(self) -> np.ndarray:
        """Return memory for all buffers, or for as many as the host gives."""
        # Whole pages each: memory pinned by itself must share no page with other memory.
        stride = -(-self.buffer_bytes // BLOCK_BYTES) * BLOCK_BYTES
        while True:
            try:
                slab = aligned_rows(len(self._left), stride)
            except MemoryError:
                if len(self._left) == 1:
                    raise
                self._left = deque(range(len(self._left) // 2))
            else:
                return slab

    def _pin(self, rows: np.ndarray) -> None:
        if self._refused:
            return
        address = rows.ctypes.data
        try:
            self._device.pin(address, rows.nbytes)
        except (MoeCacheError, MemoryError) as error:
            self._refused = True
            logger.warning(
                "cuda.not_pinned bytes=%s copies take longer: %s; "
                "free some of the host's memory, or raise what a cgroup or ulimit -l allows",
                format_bytes(rows.nbytes),
                error,
            )
            return
        with self._lock:
            if not self._closed:
                self._pinned[address] = len(rows)
                return
        self._device.unpin(address)
