"""Uploads: copies into a GPU's slots, in streams of their own, ordered by events alone."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

from moecache.cuda import Device, Stream
from moecache.errors import MoeCacheError
from moecache.slots.base import UploadCounts

# (where in the slot, where on the host, bytes)
Piece = tuple[int, int, int]


class Upload:
    """One expert on its way into one slot; what `wait` takes.

    Attributes
    ----------
    source : object
        What is copied from, kept until the copy is done.
    done : bool
        Whether that is known.
    """

    __slots__ = ("done", "end", "num_bytes", "slot", "source", "start")

    def __init__(self, slot: int, num_bytes: int, source: object, start: int, end: int) -> None:
        self.slot = slot
        self.num_bytes = num_bytes
        self.source = source
        self.start = start
        self.end = end
        self.done = False


class Use:
    """What was issued until some slots were released: an event for each stream.

    Its events are free for others once no slot refers to it.
    """

    __slots__ = ("_free", "events")

    def __init__(self, free: "deque[int]") -> None:
        self._free = free
        self.events: list[int] = []

    def __del__(self) -> None:
        """Give the events back: whoever waits for them was told so already."""
        self._free.extend(self.events)


class Uploads:
    """Two streams of copies: those that somebody waits for, and the others.

    A copy into a slot waits, on the device, for what was issued before the slot's release, and
    for an earlier copy into it in the other stream. `release` takes no lock; all others may be
    called from any thread, and only `wait_for_one` and `close` wait.

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
        self._events: deque[int] = deque()  # all of them
        self._timing: deque[int] = deque()  # free ones
        self._plain: deque[int] = deque()

    def counts(self, pinned_bytes: int) -> UploadCounts:
        """Return what was copied so far, and how much memory is pinned for it."""
        in_flight = sum(one.num_bytes for queue in self._queues.values() for one in tuple(queue))
        return UploadCounts(
            self._num_done, self._bytes_done, self._busy_ns, in_flight, pinned_bytes
        )

    def begin(
        self, slot: int, pieces: Sequence[Piece], num_bytes: int, source: object, *, behind: bool
    ) -> Upload:
        """Begin to copy pieces into a slot.

        If that fails, nothing is being copied any more when the error comes.
        """
        device, stream = self._device, self._copying[behind]
        with self._lock:
            if self._closed:
                raise MoeCacheError("the slots are closed")
            start = self._take_timing()
            try:
                end = self._take_timing()
            except BaseException:
                self._timing.append(start)
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
                for offset, address, size in pieces:
                    target = self._base + slot * self._slot_stride + offset
                    device.copy_in(target, address, size, stream)
                device.record(end, stream)
            except BaseException:
                # A device that is lost does not even say that it is done.
                with contextlib.suppress(MoeCacheError, MemoryError):
                    device.synchronize(stream)
                    self._timing.extend((start, end))
                raise
            self._uses[slot] = None
            self._users[slot] = {}
            self._latest[slot] = (upload, behind)
            self._queues[behind].append(upload)
        return upload

    def order(self, stream: Stream, slots: Sequence[int]) -> None:
        """Let a stream wait until these slots are filled; it may use them from now on."""
        for slot in slots:
            self._users[slot][stream.pointer] = stream
            latest = self._latest.get(slot)
            if latest is not None:
                self._device.wait_event(stream, latest[0].end)

    def release(self, slots: Sequence[int]) -> None:
        """Let refills of these slots wait for what was issued so far where they were used.

        The garbage collector may call this in the middle of anything: no lock, no waiting. Never
        fails.
        """
        use = Use(self._plain)
        streams: dict[int, Stream] = {}
        for slot in slots:
            streams.update(self._users[slot])
        for stream in streams.values():
            try:
                self._record(use, stream)
            except (MoeCacheError, MemoryError):
                # Without an event it is waited for here. If that fails as well the device is
                # lost, and refills will be told: the leases must end all the same.
                with contextlib.suppress(MoeCacheError, MemoryError):
                    self._device.synchronize(stream)
        for slot in slots:
            self._uses[slot] = use

    def settle(self) -> list[object]:
        """Return the sources of copies that are done; nothing if another thread is about it."""
        if not self._latest or not self._lock.acquire(blocking=False):
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
            stack.callback(_drain, self._events, device.destroy_event)
            stack.callback(self._settle)
            for stream in streams.values():
                stack.callback(device.synchronize, stream)

    def _settle(self) -> list[object]:
        sources = []
        for queue in self._queues.values():
            while queue and self._device.is_done(queue[0].end):
                upload = queue.popleft()
                sources.append(upload.source)
                upload.source = None
                self._num_done += 1
                self._bytes_done += upload.num_bytes
                self._busy_ns += self._device.elapsed_ns(upload.start, upload.end)
                # Before its events stand for something else.
                upload.done = True
                latest = self._latest.get(upload.slot)
                if latest is not None and latest[0] is upload:
                    del self._latest[upload.slot]
                self._timing.extend((upload.start, upload.end))
        return sources

    def _record(self, use: Use, stream: Stream) -> None:
        try:
            event = self._plain.popleft()
        except IndexError:
            event = self._create_event(timing=False)
        use.events.append(event)
        self._device.record(event, stream)

    def _take_timing(self) -> int:
        try:
            return self._timing.popleft()
        except IndexError:
            return self._create_event(timing=True)

    def _create_event(self, *, timing: bool) -> int:
        event = self._device.create_event(timing=timing)
        self._events.append(event)
        return event


def _drain(events: "deque[int]", destroy: Callable[[int], None]) -> None:
    with contextlib.ExitStack() as stack:
        while events:
            stack.callback(destroy, events.popleft())
