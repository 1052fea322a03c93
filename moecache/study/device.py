"""SimulatedDevice: reads that take a set time of a clock which nobody has to wait for."""

import math
import threading
from collections.abc import Callable
from heapq import heappop, heappush
from queue import Empty, SimpleQueue

from moecache.errors import ConfigError, MoeCacheError
from moecache.fetch import Load, LoadQueue
from moecache.slots.base import SlotPool
from moecache.stores.base import ExpertStore
from moecache.study.clock import VirtualClock
from moecache.units import parse_bytes_per_s

CHUNK_BYTES = 256 * 1024
DEFAULT_LATENCY_NS = 10_000
PREFETCH_DEPTH = 2


class SimulatedDevice(LoadQueue):
    """A link that reads one expert after the other, under a virtual clock.

    Stands where threads or the kernel read: give `attach` to a loader as its
    `make_fetch`, and the clock as its `clock`. A read waits `latency_ns`, those
    of reads begun together at the same time, then for the link, which transfers one read
    at a time. Demands go first, in their order; one that becomes ready while a
    prefetch is transferred takes the link at the end of the chunk. The same calls
    take the same time, to the nanosecond. No byte moves unless `fill` moves it.

    Parameters
    ----------
    clock : VirtualClock
    expert_bytes : callable (layer) -> int
        Such as `ExpertLayout.expert_bytes`.
    bandwidth : int or str
        Bytes per second, "25GB/s"; infinity (a float) for no time at all.
    latency_ns : int, default 10,000
        From a read's beginning until its transfer may begin.
    chunk_bytes : int, default 262,144
        What of a prefetch is transferred before anything may overtake it.
    prefetch_depth : int, default 2
        Reads under way below which `idle` is called: with 2, the latency of the next
        prefetch passes during the transfer of the last.
    fill : callable (load), optional
        Called at the end of each read to bring the bytes into the slot (`fill_from`
        returns one); what it raises fails the load.
    disturb : callable (load) -> int, optional
        Called at the beginning of each read: returns nanoseconds to be added to its
        latency, or raises what the read is to fail with after its latency.

    Attributes
    ----------
    bandwidth, latency_ns, chunk_bytes, prefetch_depth
        As given, the bandwidth as a number.
    idle : callable () -> bool, or None
        Called before time passes while no demand is under way and there is room for a
        prefetch, until it returns False. Where a thread would run that prefetches.
    observe : callable (load, start_ns, end_ns), or None
        Called at the end of each uninterrupted transfer.
    busy_ns : int
        Time that the link spent on transfers that ended, or were interrupted.
    num_overtaken : int
        Transfers that were interrupted for a demand.
    """

    needs_callers = True
    begins_by_reading = False

    def __init__(
        self,
        clock: VirtualClock,
        expert_bytes: Callable[[int], int],
        *,
        bandwidth: float | str,
        latency_ns: int = DEFAULT_LATENCY_NS,
        chunk_bytes: int = CHUNK_BYTES,
        prefetch_depth: int = PREFETCH_DEPTH,
        fill: Callable[[Load], None] | None = None,
        disturb: Callable[[Load], int] | None = None,
    ) -> None:
        super().__init__()
        if latency_ns < 0:
            raise ConfigError(f"latency_ns must not be negative, got {latency_ns}")
        if chunk_bytes < 1 or prefetch_depth < 1:
            raise ConfigError(
                f"chunk_bytes and prefetch_depth must be at least 1, got {chunk_bytes} "
                f"and {prefetch_depth}"
            )
        self.bandwidth = parse_bytes_per_s(bandwidth)
        self.latency_ns = latency_ns
        self.chunk_bytes = chunk_bytes
        self.prefetch_depth = prefetch_depth
        self.idle: Callable[[], bool] | None = None
        self.observe: Callable[[Load, int, int], None] | None = None
        self.busy_ns = 0
        self.num_overtaken = 0
        self._clock = clock
        self._expert_bytes = expert_bytes
        self._fill = fill
        self._disturb = disturb
        self._lock: threading.Lock | None = None
        self._finish: Callable[[Load], bool] | None = None
        self._reads: dict[Load, _Read] = {}  # begun, and not finished
        self._num_demands = 0  # of them
        self._num_begun = 0
        self._num_announced = 0
        # Heaps: reads in their latency by its end, those that wait for the link by their order.
        self._latent: list[tuple[int, int, _Read]] = []
        self._demands: list[tuple[int, _Read]] = []
        self._prefetches: list[tuple[int, _Read]] = []
        self._active: _Read | None = None
        self._span_bytes = 0  # of the active read, until the link is free again
        self._start_ns = 0
        self._end_ns = 0
        clock.follow(self)

    def attach(self, lock: threading.Lock, finish: Callable[[Load], bool]) -> "SimulatedDevice":
        """Serve a loader: its `make_fetch`.

        Time never passes while anybody holds the loader's lock: a MoeCacheError
        says so if it would.
        """
        if self._lock is not None:
            raise ConfigError("a device serves one loader; make another one")
        self._lock = lock
        self._finish = finish
        return self

    @property
    def quantum_bytes(self) -> int:
        """What of a prefetch a demand may have to wait for: a chunk."""
        return self.chunk_bytes

    @property
    def num_under_way(self) -> int:
        """Reads that were begun and are not finished."""
        return len(self._reads)

    def begin(self) -> None:
        """Begin what is queued as demands."""
        for load in self.remove_all():
            self._issue(load, urgent=True)

    def prefetch(self, load: Load) -> None:
        """Begin a read that every demand may overtake."""
        self._issue(load, urgent=False)

    def hasten(self, load: Load) -> None:
        """Make a prefetch under way a demand: it keeps the link, or waits behind other demands."""
        read = self._reads.get(load)
        if read is None or read.urgent:
            return
        read.urgent = True
        self._num_demands += 1
        read.order = self._next_order()
        if read is self._active:
            self._send(read)
        elif read.is_ready:
            heappush(self._demands, (read.order, read))
            self._cut()

    def cancel(self, load: Load) -> bool:
        """Take back a prefetch; the link is free at once."""
        read = self._reads.pop(load, None)
        if read is None:
            return False
        self._num_demands -= read.urgent
        read.is_dropped = True
        if read is self._active:
            self.busy_ns += self._clock.now_ns - self._start_ns
            self._active = None
            self._start_next()
        return True

    def look(self) -> None:
        """Take in what is due, without any time passing."""
        self._check_unlocked()
        while self.next_ns <= self._clock.now_ns:
            self.deliver()

    def wait(self, arrived: "SimpleQueue[Load]") -> Load:
        """Return the next load that arrives, when its time has come."""
        while True:
            try:
                return arrived.get_nowait()
            except Empty:
                self._skip()

    @property
    def epoch(self) -> int:
        """Number of announcements so far."""
        return self._num_announced

    def help(self, seen: int) -> None:
        """Let the next thing happen, unless something was announced."""
        if seen == self._num_announced:
            self._skip()

    def announce(self) -> None:
        """Count it: nobody else can wait, with one thread."""
        self._num_announced += 1

    def close(self, timeout_s: float) -> int:
        """Finish what is under way, within so much time; return what is not."""
        self.idle = None
        until = self._clock.now_ns + int(timeout_s * 1e9)
        while self._reads and self._clock.skip(until):
            pass
        return len(self._reads)

    def prepare(self) -> None:
        """Let `idle` begin prefetches, if nothing is more urgent."""
        self._check_unlocked()
        if self.idle is not None:
            while not self._num_demands and len(self._reads) < self.prefetch_depth and self.idle():
                pass

    @property
    def next_ns(self) -> float:
        """When a transfer or a latency ends next; infinity if none is under way."""
        latent = self._latent[0][0] if self._latent else math.inf
        return latent if self._active is None else min(latent, self._end_ns)

    def deliver(self) -> None:
        """End the transfers and latencies that are due, and begin the next transfer."""
        now = self._clock.now_ns
        done = []
        active = self._active
        if active is not None and self._end_ns <= now:
            self._active = None
            self._end_span(active)
            if active.left_bytes:
                self.num_overtaken += 1
                self._enqueue(active)
            else:
                done.append(active)
        while self._latent and self._latent[0][0] <= now:
            read = heappop(self._latent)[2]
            if read.is_dropped:
                continue
            if read.error is None:
                self._enqueue(read)
            else:
                done.append(read)
        if self._active is None:
            self._start_next()
        else:
            self._cut()
        # Last: whoever hears of it may begin reads.
        for read in done:
            self._complete(read)

    def _issue(self, load: Load, *, urgent: bool) -> None:
        delay_ns, error = 0, None
        if self._disturb is not None:
            try:
                delay_ns = self._disturb(load)
            except Exception as raised:  # noqa: BLE001 - a waiting step raises it
                error = raised.with_traceback(None)
        read = _Read(load, self._next_order(), self._expert_bytes(load.layer), error, urgent=urgent)
        self._reads[load] = read
        self._num_demands += urgent
        ready_ns = self._clock.now_ns + self.latency_ns + delay_ns
        heappush(self._latent, (ready_ns, read.order, read))

    def _next_order(self) -> int:
        self._num_begun += 1
        return self._num_begun

    def _enqueue(self, read: "_Read") -> None:
        read.is_ready = True
        heappush(self._demands if read.urgent else self._prefetches, (read.order, read))

    def _start_next(self) -> None:
        read = None
        if self._demands:
            read = heappop(self._demands)[1]
        while read is None and self._prefetches:
            order, found = heappop(self._prefetches)
            # Those that became demands have another order now.
            read = found if order == found.order and not found.is_dropped else None
        if read is not None:
            self._active = read
            self._start_ns = self._clock.now_ns
            self._send(read)

    def _send(self, read: "_Read") -> None:
        """Let the link have a read to its end."""
        self._span_bytes = read.left_bytes
        self._end_ns = self._start_ns + self._transfer_ns(read.left_bytes)

    def _cut(self) -> None:
        """End the transfer of a prefetch with its chunk, if a demand waits for the link."""
        read = self._active
        if read is None or read.urgent or not self._demands or self.bandwidth == math.inf:
            return
        elapsed_ns = self._clock.now_ns - self._start_ns
        if elapsed_ns == 0:
            # Not a byte was sent: it is as if the demand had been there first.
            self._enqueue(read)
            self._start_next()
            return
        chunk = self.chunk_bytes
        num_chunks = int(elapsed_ns * self.bandwidth // (10**9 * chunk))
        while self._transfer_ns(num_chunks * chunk) < elapsed_ns:
            num_chunks += 1
        if num_chunks * chunk < self._span_bytes:
            self._span_bytes = num_chunks * chunk
            self._end_ns = self._start_ns + self._transfer_ns(self._span_bytes)

    def _end_span(self, read: "_Read") -> None:
        read.left_bytes -= self._span_bytes
        self.busy_ns += self._end_ns - self._start_ns
        if self.observe is not None:
            self.observe(read.load, self._start_ns, self._end_ns)

    def _complete(self, read: "_Read") -> None:
        load = read.load
        del self._reads[load]
        self._num_demands -= read.urgent
        load.error = read.error
        if self._fill is not None and load.error is None:
            try:
                self._fill(load)
            except Exception as error:  # noqa: BLE001 - a waiting step raises it
                load.error = error.with_traceback(None)
        if self._finish is not None and not self._finish(load):
            self._issue(load, urgent=True)

    def _transfer_ns(self, num_bytes: int) -> int:
        if self.bandwidth == math.inf:
            return 0
        return -(-num_bytes * 10**9 // int(self.bandwidth))

    def _skip(self) -> None:
        if not self._clock.skip():
            raise MoeCacheError("nothing is under way, and a step waits for it: it would for ever")

    def _check_unlocked(self) -> None:
        if self._lock is not None and self._lock.locked():
            raise MoeCacheError(
                f"at {self._clock.now_ns} ns the loader's lock is held while time passes: "
                "every look-up would wait for a read"
            )


class _Read:
    """A load under way: what is left of it, and who goes first."""

    __slots__ = ("error", "is_dropped", "is_ready", "left_bytes", "load", "order", "urgent")

    def __init__(
        self, load: Load, order: int, left_bytes: int, error: Exception | None, *, urgent: bool
    ) -> None:
        self.load = load
        self.order = order
        self.left_bytes = left_bytes
        self.error = error
        self.urgent = urgent
        self.is_ready = False  # its latency is over
        self.is_dropped = False


def fill_from(store: ExpertStore, pool: SlotPool) -> Callable[[Load], None]:
    """Return a `fill` that brings a store's bytes into a pool's slots."""

    def fill(load: Load) -> None:
        try:
            parts = pool.buffers(load.slot, load.layer)
            store.read_into(load.layer, load.expert, parts)
            pool.wait(pool.upload(load.slot, load.layer, parts))
        except BaseException:
            pool.discard(load.slot)
            raise

    return fill
