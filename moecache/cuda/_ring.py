"""CopyRing: small arrays on their way to a GPU, kept until their copies are done."""

import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

from moecache.cuda.device import Device, Stream
from moecache.errors import MoeCacheError

# A prompt of 4,096 tokens with 8 experts each has 128 KiB of places.
RING_BYTES = 2**20
_ALIGNMENT = 64


class CopyRing:
    """A ring of pinned memory that arrays are copied from, in the order in which they come.

    An asynchronous copy reads its source later, so the source has to stay. A place in the ring is
    written again once the event behind its copy is done. Where the system refuses to pin the ring,
    copies are slower, and just as right. Any number of threads may call.

    Parameters
    ----------
    device : Device
    num_bytes : int, default 1 MiB
    """

    def __init__(self, device: Device, num_bytes: int = RING_BYTES) -> None:
        self._device = device
        self._bytes = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        self._address = self._bytes.ctypes.data
        self._lock = threading.Lock()
        self._next = 0  # bytes taken since the beginning; modulo the ring's size that is a place
        self._in_use: deque[tuple[int, int]] = deque()  # (start, event), oldest first
        self._events: list[int] = []  # that stand for nothing
        self._closed = False
        pinned = False
        with contextlib.suppress(MoeCacheError, MemoryError):
            device.pin(self._address, num_bytes)
            pinned = True
        # A ring that is dropped without `close` would stay pinned while its pages are others'.
        self._end = weakref.finalize(
            self, _end, device, self._bytes, self._in_use, self._events, pinned, os.getpid()
        )
        self._end.atexit = False

    def to_device(self, array: np.ndarray, stream: Stream) -> Any:
        """Return a copy on the device, issued in a stream; the host's array may change at once.

        Waits only if the ring is full of copies that are not done, or too small for the array.
        """
        device = self._device
        array = np.ascontiguousarray(array)
        made = device.empty(array.shape, array.dtype, stream)
        address, num_bytes = device.locate(made).address, array.nbytes
        if num_bytes > self._bytes.size:
            # Rare and long: the caller waits until the last byte was read.
            device.copy_in(address, array.ctypes.data, num_bytes, stream)
            device.synchronize(stream)
            return made
        with self._lock:
            if self._closed:
                raise MoeCacheError("the runtime is closed")
            start = self._make_room(num_bytes)
            event = self._events.pop() if self._events else device.create_event()
            place = start % self._bytes.size
            self._bytes[place : place + num_bytes] = array.reshape(-1).view(np.uint8)
            try:
                device.copy_in(address, self._address + place, num_bytes, stream)
                device.record(event, stream)
            except BaseException:
                # The copy may be under way without an event behind it.
                with contextlib.suppress(MoeCacheError, MemoryError):
                    device.synchronize(stream)
                self._events.append(event)
                raise
            self._next = start + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            self._in_use.append((start, event))
        return made

    def close(self) -> None:
        """Wait for all copies, and give back events and pages; a second call does nothing."""
        with self._lock:
            self._closed = True
            self._end()

    def _make_room(self, num_bytes: int) -> int:
        """Return where bytes can be written, once nothing that is there is still to be copied."""
        size = self._bytes.size
        start = self._next
        if start % size + num_bytes > size:  # not across the end
            start += -start % size
        while self._in_use:
            oldest, event = self._in_use[0]
            if oldest < start + num_bytes - size:
                self._device.wait_for(event)
            elif not self._device.is_done(event):
                break
            self._in_use.popleft()
            self._events.append(event)
        return start


def _end(
    device: Device,
    memory: np.ndarray,
    in_use: deque[tuple[int, int]],
    events: list[int],
    pinned: bool,
    process: int,
) -> None:
    """Give everything back; in a forked child nothing, as the GPU is the parent's."""
    if os.getpid() != process:
        return
    # In reverse: an error of the device leaves none of it out.
    with contextlib.ExitStack() as stack:
        if pinned:
            stack.callback(device.unpin, memory.ctypes.data)
        while events:
            stack.callback(device.destroy_event, events.pop())
        while in_use:
            _, event = in_use.pop()
            stack.callback(device.destroy_event, event)
            stack.callback(_wait_for, device, event)


def _wait_for(device: Device, event: int) -> None:
    try:
        device.wait_for(event)
    except MemoryError:
        # Memory may be short for a moment: the source of a copy must not be freed yet.
        device.wait_for(event)
