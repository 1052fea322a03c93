"""A simulated device without a loader, and what it did."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from moecache.fetch import Cause, Load
from moecache.study.clock import VirtualClock
from moecache.study.device import SimulatedDevice

# A byte takes a nanosecond.
NS_PER_BYTE = 10**9
SIZES = (1000, 400)  # of an expert, by layer; if nothing else is said


@dataclass
class Bench:
    """A device without a loader, and what it did."""

    clock: VirtualClock
    device: SimulatedDevice
    arrived: "SimpleQueue[Load]" = field(default_factory=SimpleQueue)
    finished: list[tuple[int, int]] = field(default_factory=list)  # expert, time
    spans: list[tuple[int, int, int]] = field(default_factory=list)  # expert, from, to

    def demand(self, *experts: int, layer: int = 0) -> None:
        """Begin reads that somebody waits for."""
        for expert in experts:
            self.device.add(self.load(expert, layer, Cause.DEMAND))
        self.device.begin()

    def prefetch(self, expert: int, layer: int = 0) -> Load:
        """Begin a read that nobody waits for."""
        load = self.load(expert, layer, Cause.PREFETCH)
        self.device.prefetch(load)
        return load

    def load(self, expert: int, layer: int, cause: Cause) -> Load:
        """Return a load that is put into `arrived`."""
        load = Load(layer, expert, expert, cause)
        load.waiting.append(self.arrived)
        return load

    def run_out(self) -> None:
        """Let everything happen."""
        while self.clock.skip():
            pass


def bench(sizes: Sequence[int] = SIZES, **options: object) -> Bench:
    """Return a device of a byte per nanosecond, latency 100 ns, chunks of 250 bytes."""
    given: dict[str, object] = {"bandwidth": NS_PER_BYTE, "latency_ns": 100, "chunk_bytes": 250}
    clock = VirtualClock()
    device = SimulatedDevice(clock, sizes.__getitem__, **{**given, **options})  # type: ignore[arg-type]
    made = Bench(clock, device)

    def finish(load: Load) -> bool:
        load.done = True
        made.finished.append((load.expert, clock()))
        for arrived in load.waiting:
            arrived.put(load)
        return True

    device.attach(threading.Lock(), finish)
    device.observe = lambda load, start, end: made.spans.append((load.expert, start, end))
    return made
