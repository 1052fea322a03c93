"""A simulated device without a loader, one that moves bytes and fails, and what it did."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moecache.loading._load import Load
from moecache.loading._loader import SlotLoader
from moecache.loading.engine import Read
from moecache.loading.load import Cause
from moecache.stores import ExpertStore
from moecache.study.clock import VirtualClock
from moecache.study.device import SimulatedDevice

# A byte takes a nanosecond.
NS_PER_BYTE = 10**9
SIZES = (1000, 400)  # of an expert, by layer; if nothing else is said


class FaultyDevice(SimulatedDevice):
    """Moves a store's bytes at the end of each read, delays reads, fails them, and counts.

    Attributes
    ----------
    store : ExpertStore or None
        Read from as a read ends; what that raises fails the read.
    disturb : callable (read) -> int, or None
        Called at the beginning of each read: returns nanoseconds to be added to its
        latency, or raises what the read is to fail with after its latency.
    num_overtaken : int
        Transfers that were interrupted for a demand.
    """

    store: ExpertStore | None = None
    disturb: Callable[[Read], int] | None = None
    num_overtaken = 0

    def take(self, done: list[tuple[Read, Exception | None]]) -> None:
        """Bring the bytes of what is over where they belong."""
        found: list[tuple[Read, Exception | None]] = []
        super().take(found)
        for read, error in found:
            if error is None and self.store is not None:
                try:
                    self.store.read_into(read.layer, read.expert, read.parts)
                except Exception as caught:  # noqa: BLE001
                    error = caught
            done.append((read, error))

    def _latency_of(self, read: Read) -> int:
        return 0 if self.disturb is None else self.disturb(read)

    def _end_span(self, transfer: object) -> None:
        super()._end_span(transfer)  # type: ignore[arg-type]
        self.num_overtaken += bool(transfer.left_bytes)  # type: ignore[attr-defined]


class LockWatch:
    """A timeline on which the loader's lock is free whenever time is about to pass."""

    next_ns = float("inf")

    def __init__(self, clock: VirtualClock, loader: SlotLoader) -> None:
        self.loader = loader
        clock.follow(self)

    def prepare(self) -> None:
        """Look at the lock."""
        assert not self.loader._table.lock.locked(), "the lock is held while time passes"

    def deliver(self) -> None:
        """Do nothing."""


@dataclass
class Bench:
    """A device without a loader, and what it did."""

    clock: VirtualClock
    device: FaultyDevice
    finished: list[tuple[int, int]] = field(default_factory=list)  # expert, time
    spans: list[tuple[int, int, int]] = field(default_factory=list)  # expert, from, to
    next_ns = float("inf")

    def demand(self, *experts: int, layer: int = 0) -> None:
        """Begin reads that a step waits for."""
        self.device.submit([Load(layer, expert, expert, Cause.DEMAND) for expert in experts])

    def prefetch(self, expert: int, layer: int = 0) -> Load:
        """Begin a read that no step waits for."""
        load = Load(layer, expert, expert, Cause.PREFETCH)
        self.device.submit([load], deferred=True)
        return load

    def prepare(self) -> None:
        """Note what is over, at the time at which it is."""
        done: list[tuple[Load, Exception | None]] = []
        before = -1
        while len(done) != before:
            before = len(done)
            self.device.take(done)  # type: ignore[arg-type]
        for load, error in done:
            load.error = error
            self.finished.append((load.expert, self.clock()))

    def deliver(self) -> None:
        """Do nothing."""

    def wait(self) -> int:
        """Return the next expert that arrives."""
        before = len(self.finished)
        while len(self.finished) == before:
            self.device.wait(self.device.epoch)
            self.prepare()
        return self.finished[before][0]

    def run_out(self) -> None:
        """Let everything happen."""
        while self.clock.skip():
            pass


def bench(sizes: Sequence[int] = SIZES, **options: object) -> Bench:
    """Return a device of a byte per nanosecond, latency 100 ns, chunks of 250 bytes."""
    given: dict[str, object] = {"bandwidth": NS_PER_BYTE, "latency_ns": 100, "chunk_bytes": 250}
    clock = VirtualClock()
    device = FaultyDevice(clock, sizes.__getitem__, **{**given, **options})  # type: ignore[arg-type]
    made = Bench(clock, device)
    clock._timelines.insert(0, made)
    device.observe = lambda load, start, end: made.spans.append((load.expert, start, end))
    return made
