"""Uploads: copies into a GPU's slots, in streams of their own, ordered by events alone."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from moecache.cuda import Device, Stream
from moecache.errors import MoeCacheError
from moecache.slots.base import UploadCounts

# A refill waits so long for a capture in a stream that has used its slot.
_LONGEST_CAPTURE_S = 60.0


class Upload:
    """One expert on its way into one slot.

    Attributes
    ----------
    source : ndarray
        The buffer that is copied from, kept until the copy is done.
    """

    __slots__ = ("end", "num_bytes", "slot", "source", "start")

    def __init__(self, slot: int, num_bytes: int, source: np.ndarray, start: int, end: int) -> None:
        self.slot = slot
        self.num_bytes = num_bytes
        self.source: np.ndarray | None = source
        self.start = start
        self.end = end


class Events:
    """Events of one kind, to be used again and again; no method takes a lock."""

    def __init__(self, device: Device, *, timing: bool) -> None:
        self._device = device
        self._timing = timing
        self._free: deque[int] = deque()
        self._closed = False

    def take(self) -> int:
        """Return an event that is not in use."""
        try:
            return self._free.popleft()
        except IndexError:
            return self._device.create_event(timing=self._timing)

    def give_back(self, event: int) -> None:
        """Take an event back; all waits for it must have been issued already."""
        if self._closed:
            self._device.destroy_event(event)
        else:
            self._free.append(event)

    def close(self) -> None:
        """Destroy the free ones, and others when they come back."""
        self._closed = True
        with contextlib.ExitStack() as stack:
            while self._free:
                stack.callback(self._device.destroy_event, self._free.popleft())


class Use:
    """The work issued before some slots were released: an event for each stream.

    Its events are free for others once no slot refers to it.
    """

    __slots__ = ("_pool", "captured", "events")

    def __init__(self, pool: Events) -> None:
        self._pool = pool
        self.events: list[int] = []
        # Streams in which a graph was captured then: an event would have become part of it.
        self.captured: list[Stream] = []

    def __del__(self) -> None:
        """Give the events back."""
        while self.events:
            self._pool.give_back(self.events.pop())


class Uploads:
    """Two streams of copies: those that a step waits for, and the others.

    A copy into a slot waits, on the device, for the work issued before the slot's release, and
    for an earlier copy into it in the other stream. `release` takes no lock; all others may be
    called from any thread at once, and only `wait_for_one` and `close` wait.

    Parameters
    ----------
    device : Device
    base : int
        Address of the first slot.
    num_slots, slot_stride : int
    """

    def __init__(self, device: Device, base: int, num_slots: int, slot_stride: int) -> None:
        self._num_done = 0
        self._bytes_done = 0
        self._busy_ns = 0
        self._device = device
        self._base = base
        self._slot_stride = slot_stride
        self._lock = threading.Lock()
        self._copying = {False: device.create_stream()}
        try:
            self._copying[True] = device.create_stream()
        except BaseException:
            device.destroy_stream(self._copying[False])
            raise
        self._queues: dict[bool, deque[Upload]] = {False: deque(), True: deque()}
        self._latest: dict[int, tuple[Upload, bool]] = {}  # by slot, until it is known to be done
        self._uses: list[Use | None] = [None] * num_slots
        # Streams that each slot was handed out in since it was last filled, by pointer.
        self._users: list[dict[int, Stream]] = [{} for _ in range(num_slots)]
        self._closed = False
        self._timing = Events(device, timing=True)
        self._plain = Events(device, timing=False)

    def counts(self, pinned_bytes: int) -> UploadCounts:
        """Return what was copied so far, and how much memory is pinned for it."""
        in_flight = sum(one.num_bytes for queue in self._queues.values() for one in tuple(queue))
        return UploadCounts(
            self._num_done, self._bytes_done, self._busy_ns, in_flight, pinned_bytes
        )

    def begin(
        self, slot: int, source: np.ndarray, span: int, num_bytes: int, *, behind: bool
    ) -> None:
        """Begin to copy the first `span` bytes of a buffer, `num_bytes` of them an expert's.

        If that fails, no copy is under way any more when the error is raised.
        """
        device, stream = self._device, self._copying[behind]
        self._record_captured(slot)
        with self._lock:
            self._check_open()
            start = self._timing.take()
            try:
                end = self._timing.take()
            except BaseException:
                self._timing.give_back(start)
                raise
            upload = Upload(slot, num_bytes, source, start, end)
            try:
                use = self._uses[slot]
                if use is not None:
                    for event in use.events:
                        device.wait_event(stream, event)
                latest = self._latest.get(slot)
                if latest is not None and latest[1] != behind:
                    device.wait_event(stream, latest[0].end)
                device.record(start, stream)
                target = self._base + slot * self._slot_stride
                device.copy_in(target, source.ctypes.data, span, stream)
                device.record(end, stream)
            except BaseException:
                # A device that is lost does not even say that it is done.
                with contextlib.suppress(MoeCacheError, MemoryError):
                    device.synchronize(stream)
                self._timing.give_back(start)
                self._timing.give_back(end)
                raise
            self._uses[slot] = None
            self._users[slot] = {}
            self._latest[slot] = (upload, behind)
            self._queues[behind].append(upload)

    def order(self, stream: Stream, slots: Sequence[int]) -> None:
        """Let a stream wait until these slots are filled; it may use them from now on."""
        if not self._latest:
            for slot in slots:
                self._users[slot][stream.pointer] = stream
            return
        # Under the lock, no event is destroyed between looking it up and waiting for it.
        with self._lock:
            self._check_open()
            for slot in slots:
                self._users[slot][stream.pointer] = stream
                latest = self._latest.get(slot)
                if latest is not None:
                    self._device.wait_event(stream, latest[0].end)

    def release(self, slots: Sequence[int]) -> None:
        """Make refills of these slots wait for the work issued so far in streams that used them.

        The garbage collector may call this in the middle of anything: no lock, no waiting. Never
        fails. One caller at a time.
        """
        use = Use(self._plain)
        streams: dict[int, Stream] = {}
        for slot in slots:
            streams.update(self._users[slot])
        for stream in streams.values():
            try:
                if self._device.is_capturing(stream):
                    use.captured.append(stream)
                    continue
                event = self._plain.take()
                use.events.append(event)
                self._device.record(event, stream)
            except (MoeCacheError, MemoryError):
                # Without an event, the wait happens here. If that fails as well, the device is
                # lost, and refills will fail: the leases must end all the same.
                with contextlib.suppress(MoeCacheError, MemoryError):
                    self._device.synchronize(stream)
        if self._closed:
            return
        for slot in slots:
            self._uses[slot] = use

    @property
    def is_idle(self) -> bool:
        """Whether every copy is known to be done."""
        return not self._latest

    def settle(self) -> list[np.ndarray]:
        """Return the buffers of copies that are done; none if another thread is doing so now."""
        if not self._lock.acquire(blocking=False):
            return []
        try:
            return self._settle()
        finally:
            self._lock.release()

    def wait_for_one(self) -> bool:
        """Wait until the oldest copy is done; False if there is none."""
        with self._lock:
            oldest = [queue[0] for queue in self._queues.values() if queue]
        if not oldest:
            return False
        self._device.wait_for(oldest[0].end)
        return True

    def close(self) -> None:
        """Wait for all copies and computations, and give back events and streams."""
        device = self._device
        streams = {stream.pointer: stream for stream in self._copying.values()}
        for users in self._users:
            streams.update(users)
        # In reverse: an error of the device leaves none of it out.
        with self._lock, contextlib.ExitStack() as stack:
            self._closed = True
            for stream in self._copying.values():
                stack.callback(device.destroy_stream, stream)
            stack.callback(self._plain.close)
            stack.callback(self._timing.close)
            stack.callback(self._uses.clear)
            stack.callback(self._drop)
            stack.callback(self._settle)
            for stream in streams.values():
                stack.callback(self._synchronize, stream)

    def _record_captured(self, slot: int) -> None:
        """Record the events that a slot's release left out, once the captures are over."""
        use = self._uses[slot]
        until = time.monotonic() + _LONGEST_CAPTURE_S
        while use is not None and use.captured:
            # Slots that were released together share it.
            with self._lock:
                self._check_open()
                waiting = []
                while use.captured:
                    stream = use.captured.pop()
                    if self._device.is_capturing(stream):
                        waiting.append(stream)
                        continue
                    use.events.append(self._plain.take())
                    self._device.record(use.events[-1], stream)
                use.captured += waiting
            if use.captured and time.monotonic() > until:
                raise MoeCacheError(
                    f"a graph has been captured for {_LONGEST_CAPTURE_S} s in a stream that used "
                    f"slot {slot}, which is to be filled; end the capture"
                )
            if use.captured:
                time.sleep(0.001)

    def _drop(self) -> None:
        # All copies are done by then; those that could not be queried any more are not counted.
        for queue in self._queues.values():
            while queue:
                upload = queue.popleft()
                self._timing.give_back(upload.start)
                self._timing.give_back(upload.end)
        self._latest.clear()

    def _synchronize(self, stream: Stream) -> None:
        try:
            self._device.synchronize(stream)
        except MemoryError:
            # Memory may be short for a moment: the source of a copy must not be freed yet.
            self._device.synchronize(stream)

    def _check_open(self) -> None:
        if self._closed:
            raise MoeCacheError("the slots are closed")

    def _settle(self) -> list[np.ndarray]:
        buffers = []
        for queue in self._queues.values():
            while queue and self._device.is_done(queue[0].end):
                upload = queue.popleft()
                if upload.source is not None:
                    buffers.append(upload.source)
                upload.source = None
                self._num_done += 1
                self._bytes_done += upload.num_bytes
                self._busy_ns += self._device.elapsed_ns(upload.start, upload.end)
                # Before its events are used for another copy.
                latest = self._latest.get(upload.slot)
                if latest is not None and latest[0] is upload:
                    del self._latest[upload.slot]
                self._timing.give_back(upload.start)
                self._timing.give_back(upload.end)
        return buffers
