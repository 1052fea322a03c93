"""Memory of a trunk, and of bytes on their way to it."""

import threading

import numpy as np

from moecache.slots._memory import aligned_rows

_ALIGNMENT = 64
CHUNK_BYTES = 64 * 2**20


class Memory:
    """Memory of a trunk, and of bytes on their way to it.

    Fresh memory costs more time than what is read into it, most of all where it comes in pages of
    4 KiB: weights are in huge pages, one behind the other, and other bytes where the last were.
    Any number of threads may call.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._chunk = np.empty(0, np.uint8)
        self._lock = threading.Lock()

    def passing(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` of scratch memory; this thread's next call may overwrite it."""
        found: np.ndarray | None = getattr(self._of_thread, "bytes", None)
        if found is None or len(found) < nbytes:
            found = self._of_thread.bytes = aligned_rows(1, nbytes)[0]
        return found[:nbytes]

    def lasting(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` of zeros, aligned to 64 bytes, which live as long as they are used."""
        taken = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if taken > CHUNK_BYTES // 4:
            return aligned_rows(1, nbytes)[0]
        with self._lock:
            if len(self._chunk) < taken:
                self._chunk = aligned_rows(1, CHUNK_BYTES)[0]
            found, self._chunk = self._chunk[:nbytes], self._chunk[taken:]
        return found
