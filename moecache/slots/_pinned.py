"""PinnedBuffers: memory of the host that experts pass through on their way to a GPU."""

import logging
from collections import deque

import numpy as np

from moecache.cuda import Device
from moecache.errors import MoeCacheError
from moecache.slots._memory import aligned_rows
from moecache.units import format_bytes

logger = logging.getLogger(__name__)


class PinnedBuffers:
    """Buffers of one size, made when first needed, at most `max_buffers`, kept until `close`.

    Each lies in huge pages, into which direct reads are fastest, and is pinned: copies from
    pageable memory pass through a buffer of the driver's, at a fraction of the speed, while the
    caller waits. If the system refuses to pin, buffers are pageable; one warning says so.

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
        self._permits = deque(range(max_buffers))  # buffers that may still be made
        self._made: set[int] = set()  # their addresses
        self._pinned: dict[int, np.ndarray] = {}
        self._refused = False

    @property
    def pinned_bytes(self) -> int:
        """Bytes pinned so far."""
        return len(self._pinned) * self.buffer_bytes

    def take(self) -> np.ndarray | None:
        """Return a buffer, an array of uint8, or None if all are in use.

        Raises
        ------
        MemoryError
            If the host has no memory for another one.
        """
        try:
            return self._free.popleft()
        except IndexError:
            pass
        try:
            permit = self._permits.popleft()
        except IndexError:
            return None
        try:
            buffer = aligned_rows(1, self.buffer_bytes)[0]
        except BaseException:
            self._permits.append(permit)
            raise
        self._made.add(buffer.ctypes.data)
        self._pin(buffer)
        return buffer

    def give_back(self, buffer: np.ndarray) -> None:
        """Take back a buffer that is no longer read or written; ignore one not made here."""
        if buffer.ctypes.data in self._made:
            self._free.append(buffer)

    def close(self) -> None:
        """Unpin all of them; none may be in use."""
        while self._pinned:
            address, _ = self._pinned.popitem()
            self._device.unpin(address)
        self._free.clear()
        self._permits.clear()
        self._made.clear()

    def _pin(self, buffer: np.ndarray) -> None:
        if self._refused:
            return
        address = buffer.ctypes.data
        try:
            self._device.pin(address, buffer.nbytes)
        except (MoeCacheError, MemoryError) as error:
            self._refused = True
            logger.warning(
                "cuda.not_pinned bytes=%s copies take longer: %s; "
                "free some of the host's memory, or raise what a cgroup or ulimit -l allows",
                format_bytes(buffer.nbytes),
                error,
            )
            return
        self._pinned[address] = buffer
