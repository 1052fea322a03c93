"""SimulatedDevice: reads that take a set time of a clock for which no one has to wait."""

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from moecache.errors import ConfigError, MoeCacheError
from moecache.loading._loader import SlotLoader
from moecache.loading.engine import Read
from moecache.loading.load import ReadCancelledError
from moecache.study.clock import VirtualClock
from moecache.units import parse_bytes_per_s

CHUNK_BYTES = 256 * 1024
DEFAULT_LATENCY_NS = 10_000
PREFETCH_DEPTH = 2


class SimulatedDevice:
    """A link that reads one expert after the other, under a virtual clock.

    An engine for a loader that has the same clock. A read waits `latency_ns`, those
    of reads begun together at the same time, then for the link, which transfers one read
    at a time. Demands go first, in their order; one that becomes ready while a
    prefetch is transferred takes the link at the end of the chunk. The same calls
    take the same time, to the nanosecond. No byte moves.

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
        Bytes of a prefetch that are transferred before anything may overtake it.
    prefetch_depth : int, default 2
        Reads under way below which `idle` is called: with 2, the latency of the next
        prefetch passes during the transfer of the last.

    Attributes
    ----------
    bandwidth, latency_ns, chunk_bytes, prefetch_depth
        As given, the bandwidth as a number.
    idle : callable () -> bool, or None
        Called before time passes while no demand is under way and there is room for a
        prefetch, until it returns False. It stands for a thread that prefetches.
    observe : callable (read, start_ns, end_ns), or None
        Called at the end of each uninterrupted transfer.
    busy_ns : int
        Time that the link spent on transfers that ended, or were interrupted.
    """

    reads_in_submit = False
    fills = False

    def __init__(
        self,
        clock: VirtualClock,
        expert_bytes: Callable[[int], int],
        *,
        bandwidth: float | str,
        latency_ns: int = DEFAULT_LATENCY_NS,
        chunk_bytes: int = CHUNK_BYTES,
        prefetch_depth: int = PREFETCH_DEPTH,
    ) -> None:
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
        self.observe: Callable[[Read, int, int], None] | None = None
        self.busy_ns = 0
        self._clock = clock
        self._expert_bytes = expert_bytes
        self._transfers: dict[Read, _Transfer] = {}  # begun, and not finished
        self._done: deque[tuple[Read, Exception | None]] = deque()
        self._num_demands = 0  # among the reads that have begun
        self._num_begun = 0
        self._num_announced = 0
        # Heaps: those in their latency by its end, those that wait for the link by their order.
        self._latent: list[tuple[int, int, _Transfer]] = []
        self._demands: list[tuple[int, _Transfer]] = []
        self._prefetches: list[tuple[int, _Transfer]] = []
        self._active: _Transfer | None = None
        self._span_bytes = 0  # of the active one, until the link is free again
        self._start_ns = 0
        self._end_ns = 0
        clock.follow(self)

    @property
    def quantum_bytes(self) -> int | None:
        """Bytes of a prefetch that a demand may have to wait for: a chunk."""
        return self.chunk_bytes

    def submit(self, reads: list[Read], *, deferred: bool = False) -> None:
        """Begin reads; every demand may overtake deferred ones."""
        for read in reads:
            delay_ns, error = 0, None
            try:
                delay_ns = self._latency_of(read)
            except Exception as raised:  # noqa: BLE001 - a waiting step raises it
                error = raised.with_traceback(None)
            transfer = _Transfer(
                read, self._next_order(), self._expert_bytes(read.layer), error, urgent=not deferred
            )
            self._transfers[read] = transfer
            self._num_demands += transfer.urgent
            ready_ns = self._clock.now_ns + self.latency_ns + delay_ns
            heappush(self._latent, (ready_ns, transfer.order, transfer))
        reads.clear()

    def hasten(self, read: Read) -> None:
        """Make a prefetch under way a demand: it keeps the link, or waits behind other demands."""
        transfer = self._transfers.get(read)
        if transfer is None or transfer.urgent:
            return
        transfer.urgent = True
        self._num_demands += 1
        transfer.order = self._next_order()
        if transfer is self._active:
            self._send(transfer)
        elif transfer.is_ready:
            heappush(self._demands, (transfer.order, transfer))
            self._cut()

    def cancel(self, read: Read) -> None:
        """Take back a prefetch; the link is free at once."""
        transfer = self._transfers.get(read)
        if transfer is None or transfer.urgent:
            return
        del self._transfers[read]
        transfer.is_dropped = True
        self._done.append((read, ReadCancelledError("the read was taken back")))
        if transfer is self._active:
            self.busy_ns += self._clock.now_ns - self._start_ns
            self._active = None
            self._start_next()

    def poll(self) -> bool:
        """Let happen what is due, without any time passing; return whether a read is over."""
        while self.next_ns <= self._clock.now_ns:
            self.deliver()
        return bool(self._done)

    def wait(self, seen: int) -> bool:
        """Let the next thing happen, unless a read is over or something was announced.

        Raises
        ------
        MoeCacheError
            If nothing is under way: with one thread, nothing can change that.
        """
        if not self._is_awaited(seen):
            return bool(self._done)
        if not self._clock.skip() and self._is_awaited(seen):
            raise MoeCacheError("a step waits, but nothing is under way: it would wait for ever")
        return bool(self._done)

    def take(self, done: list[tuple[Read, Exception | None]]) -> None:
        """Append (read, error) of one that is over to `done`, if there is one."""
        if self._done:
            done.append(self._done.popleft())

    @property
    def epoch(self) -> int:
        """Number of calls of `announce` so far."""
        return self._num_announced

    def announce(self) -> None:
        """Count it: with one thread, no other can wait."""
        self._num_announced += 1

    def close(self, timeout_s: float) -> int:
        """Finish what is under way, within so much time; return how many reads are not."""
        self.idle = None
        until = self._clock.now_ns + int(timeout_s * 1e9)
        while self._transfers and self._clock.skip(until):
            pass
        return len(self._transfers)

    def prepare(self) -> None:
        """Let `idle` begin prefetches, if nothing is more urgent."""
        if self.idle is not None:
            while (
                not self._num_demands and len(self._transfers) < self.prefetch_depth and self.idle()
            ):
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
                self._enqueue(active)
            else:
                done.append(active)
        while self._latent and self._latent[0][0] <= now:
            transfer = heappop(self._latent)[2]
            if transfer.is_dropped:
                continue
            if transfer.error is None:
                self._enqueue(transfer)
            else:
                done.append(transfer)
        if self._active is None:
            self._start_next()
        else:
            self._cut()
        for transfer in done:
            del self._transfers[transfer.read]
            self._num_demands -= transfer.urgent
            self._done.append((transfer.read, transfer.error))

    def _latency_of(self, read: Read) -> int:  # noqa: ARG002 - for tests, to delay and to fail
        """Return nanoseconds to be added to a read's latency, or raise what it fails with."""
        return 0

    def _is_awaited(self, seen: int) -> bool:
        return not self._done and seen == self._num_announced

    def _next_order(self) -> int:
        self._num_begun += 1
        return self._num_begun

    def _enqueue(self, transfer: "_Transfer") -> None:
        transfer.is_ready = True
        heappush(self._demands if transfer.urgent else self._prefetches, (transfer.order, transfer))

    def _start_next(self) -> None:
        transfer = None
        if self._demands:
            transfer = heappop(self._demands)[1]
        while transfer is None and self._prefetches:
            order, found = heappop(self._prefetches)
            # Those that became demands have another order now.
            transfer = found if order == found.order and not found.is_dropped else None
        if transfer is not None:
            self._active = transfer
            self._start_ns = self._clock.now_ns
            self._send(transfer)

    def _send(self, transfer: "_Transfer") -> None:
        """Let the link have a transfer to its end."""
        self._span_bytes = transfer.left_bytes
        self._end_ns = self._start_ns + self._transfer_ns(transfer.left_bytes)

    def _cut(self) -> None:
        """End the transfer of a prefetch with its chunk, if a demand waits for the link."""
        transfer = self._active
        if transfer is None or transfer.urgent or not self._demands or self.bandwidth == math.inf:
            return
        elapsed_ns = self._clock.now_ns - self._start_ns
        if elapsed_ns == 0:
            # Not a byte was sent: it is as if the demand had been there first.
            self._enqueue(transfer)
            self._start_next()
            return
        chunk = self.chunk_bytes
        num_chunks = int(elapsed_ns * self.bandwidth // (10**9 * chunk))
        while self._transfer_ns(num_chunks * chunk) < elapsed_ns:
            num_chunks += 1
        if num_chunks * chunk < self._span_bytes:
            self._span_bytes = num_chunks * chunk
            self._end_ns = self._start_ns + self._transfer_ns(self._span_bytes)

    def _end_span(self, transfer: "_Transfer") -> None:
        transfer.left_bytes -= self._span_bytes
        self.busy_ns += self._end_ns - self._start_ns
        if self.observe is not None:
            self.observe(transfer.read, self._start_ns, self._end_ns)

    def _transfer_ns(self, num_bytes: int) -> int:
        if self.bandwidth == math.inf:
            return 0
        return -(-num_bytes * 10**9 // int(self.bandwidth))


class _Transfer:
    """A read under way: the part that is left, and its turn."""

    __slots__ = ("error", "is_dropped", "is_ready", "left_bytes", "order", "read", "urgent")

    def __init__(
        self, read: Read, order: int, left_bytes: int, error: Exception | None, *, urgent: bool
    ) -> None:
        self.read = read
        self.order = order
        self.left_bytes = left_bytes
        self.error = error
        self.urgent = urgent
        self.is_ready = False  # its latency is over
        self.is_dropped = False


class TakingIn:
    """A timeline on which a loader takes in what has arrived, when it arrives.

    Follow the clock with it before the device is made: an arrived read is in its slot before
    more time passes.

    Parameters
    ----------
    clock : VirtualClock

    Attributes
    ----------
    loader : SlotLoader or None
    """

    next_ns = math.inf

    def __init__(self, clock: VirtualClock) -> None:
        self.loader: SlotLoader | None = None
        clock.follow(self)

    def prepare(self) -> None:
        """Take in what has arrived."""
        if self.loader is not None:
            self.loader.look()

    def deliver(self) -> None:
        """Do nothing: nothing is due here."""
