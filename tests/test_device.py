"""The simulated device: times as reckoned by hand, demands first, one transfer at a time."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecache._cache import ExpertCache
from moecache.errors import ConfigError, MoeCacheError, StoreError
from moecache.fetch import Cause, Load
from moecache.loader import SlotLoader
from moecache.slots import HostSlots
from moecache.steps import waves
from moecache.study.device import SimulatedDevice, VirtualClock, fill_from
from tests.helpers.stores import FailEachOnce, WrappedStore, nothing, numbered_store

# A byte takes a nanosecond.
NS_PER_BYTE = 10**9
SIZES = (1000, 400)  # of an expert, by layer


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


def bench(**options: object) -> Bench:
    """Return a device of a byte per nanosecond, latency 100 ns, chunks of 250 bytes."""
    given: dict[str, object] = {"bandwidth": NS_PER_BYTE, "latency_ns": 100, "chunk_bytes": 250}
    clock = VirtualClock()
    device = SimulatedDevice(clock, SIZES.__getitem__, **{**given, **options})  # type: ignore[arg-type]
    made = Bench(clock, device)

    def finish(load: Load) -> None:
        load.done = True
        made.finished.append((load.expert, clock()))
        for arrived in load.waiting:
            arrived.put(load)

    device.attach(threading.Lock(), finish)
    device.observe = lambda load, start, end: made.spans.append((load.expert, start, end))
    return made


def test_a_clock_goes_only_where_it_is_told() -> None:
    """Forwards, by what is asked."""
    clock = VirtualClock()
    clock.advance(7)
    clock.advance(0)
    assert clock() == clock.now_ns == 7
    assert not clock.skip()
    with pytest.raises(ValueError, match="back by 1 ns"):
        clock.advance(-1)


def test_reads_begun_together_pay_their_latency_at_once() -> None:
    """Transfers follow each other; 100 ns, then 1000, 1000 and 400."""
    made = bench()
    made.demand(1, 2)
    made.demand(3, layer=1)

    made.run_out()

    assert made.spans == [(1, 100, 1100), (2, 1100, 2100), (3, 2100, 2500)]
    assert made.finished == [(1, 1100), (2, 2100), (3, 2500)]
    assert made.device.busy_ns == 2400
    assert made.device.num_under_way == 0


def test_reads_arrive_while_the_host_computes_each_at_its_time() -> None:
    """And nobody who computes longer waits."""
    made = bench()
    made.demand(1, 2)

    made.clock.advance(1500)
    assert made.finished == [(1, 1100)]
    assert made.device.wait(made.arrived).expert == 1
    assert made.clock() == 1500
    assert made.device.wait(made.arrived).expert == 2
    assert made.clock() == 2100


def test_looking_takes_no_time() -> None:
    """What is due is taken in, the rest is not."""
    made = bench(bandwidth=math.inf, latency_ns=0)
    made.demand(1)
    assert made.finished == []
    made.device.look()
    assert made.finished == [(1, 0)]
    slow = bench()
    slow.demand(1)
    slow.device.look()
    assert (slow.finished, slow.clock()) == ([], 0)


def test_a_demand_overtakes_at_the_end_of_the_chunk() -> None:
    """The prefetch's first 500 bytes are there at 600, when a demand of 480 begins."""
    made = bench()
    made.prefetch(1)
    made.clock.advance(380)
    made.demand(2)

    made.run_out()

    assert made.spans == [(1, 100, 600), (2, 600, 1600), (1, 1600, 2100)]
    assert made.device.num_overtaken == 1
    assert made.device.busy_ns == 2000


def test_a_demand_that_is_ready_at_a_chunk_s_end_takes_it() -> None:
    """Not the next one's."""
    made = bench()
    made.prefetch(1)
    made.clock.advance(250)
    made.demand(2)

    made.run_out()

    assert made.spans[:2] == [(1, 100, 350), (2, 350, 1350)]


def test_nothing_is_cut_in_its_last_chunk() -> None:
    """The prefetch is done before the demand begins."""
    made = bench()
    made.prefetch(1)
    made.clock.advance(800)
    made.demand(2)

    made.run_out()

    assert made.spans == [(1, 100, 1100), (2, 1100, 2100)]
    assert made.device.num_overtaken == 0


def test_a_prefetch_that_a_demand_joined_is_overtaken_no_more() -> None:
    """Neither by the next prefetch in line nor by demands that came later."""
    made = bench()
    made.prefetch(1)
    second, third = made.prefetch(2), made.prefetch(3)
    made.clock.advance(150)
    made.device.hasten(third)
    made.demand(4)
    made.device.hasten(second)
    made.device.hasten(second)

    made.run_out()

    # The first is cut for the third; what is left of it comes last.
    assert [expert for expert, _, _ in made.spans] == [1, 3, 4, 2, 1]
    assert [expert for expert, _ in made.finished] == [3, 4, 2, 1]
    assert made.spans[0] == (1, 100, 350)


def test_a_prefetch_in_transfer_that_is_joined_goes_on() -> None:
    """A later demand does not cut it."""
    made = bench()
    load = made.prefetch(1)
    made.clock.advance(150)
    made.device.hasten(load)
    made.demand(2)

    made.run_out()

    assert made.spans == [(1, 100, 1100), (2, 1100, 2100)]


def test_a_prefetch_joined_in_its_latency_is_a_demand() -> None:
    """It cuts whom a demand would cut."""
    made = bench()
    made.prefetch(1)
    made.clock.advance(50)
    load = made.prefetch(2)
    made.device.hasten(load)

    made.run_out()

    assert made.finished == [(2, 1350), (1, 2100)]


def test_hastening_what_is_done_is_nothing() -> None:
    """It may arrive in between."""
    made = bench()
    load = made.prefetch(1)
    made.run_out()
    made.device.hasten(load)
    assert made.device.num_under_way == 0


def test_idle_is_called_while_no_demand_is_under_way() -> None:
    """When time is about to pass, and at the end of each read, at its time."""
    made = bench(prefetch_depth=1)
    asked: list[int] = []

    def idle() -> bool:
        asked.append(made.clock())
        if len(asked) > 2:
            return False
        made.prefetch(10 + len(asked))
        return True

    made.device.idle = idle
    made.demand(1)
    made.clock.advance(5000)

    assert asked == [1100, 2200, 3300]
    assert made.finished == [(1, 1100), (11, 2200), (12, 3300)]


def test_with_depth_two_a_latency_hides_behind_a_transfer() -> None:
    """The link has no gap."""
    made = bench()
    todo = [3, 2, 1]

    def idle() -> bool:
        if todo:
            made.prefetch(todo.pop())
            return True
        return False

    made.device.idle = idle
    made.clock.advance(10_000)

    assert made.spans == [(1, 100, 1100), (2, 1100, 2100), (3, 2100, 3100)]


def test_a_disturbance_delays_or_fails_a_read() -> None:
    """The others go on; what fails fails after its latency."""

    def disturb(load: Load) -> int:
        if load.expert == 2:
            raise StoreError("unreadable")
        return 50 if load.expert == 1 else 0

    made = bench(disturb=disturb)
    made.demand(1, 2, 3)

    arrived = [made.device.wait(made.arrived) for _ in range(3)]

    assert made.finished == [(2, 100), (3, 1100), (1, 2100)]
    assert [str(load.error) for load in arrived] == ["unreadable", "None", "None"]


def test_what_was_not_begun_can_be_taken_back() -> None:
    """What was cannot."""
    made = bench()
    load = made.load(1, 0, Cause.DEMAND)
    made.device.add(load)
    assert made.device.remove(load)
    made.device.add(load)
    made.device.begin()
    assert not made.device.remove(load)


def test_waiting_for_nothing_is_an_error_not_a_hang() -> None:
    """With one thread nobody else can help."""
    made = bench()
    with pytest.raises(MoeCacheError, match="it would for ever"):
        made.device.wait(made.arrived)
    with pytest.raises(MoeCacheError, match="it would for ever"):
        made.device.help(made.device.epoch)
    seen = made.device.epoch
    made.device.announce()
    made.device.help(seen)
    assert made.clock() == 0


def test_closing_finishes_what_is_under_way_within_the_time() -> None:
    """What takes longer is counted."""
    made = bench(bandwidth=1000)
    made.demand(1, 2, 3)
    assert made.device.close(2.0) == 2
    assert made.clock() < 2 * 10**9
    assert [expert for expert, _ in made.finished] == [1]


def test_a_lock_held_while_time_passes_is_found() -> None:
    """By advancing, waiting and looking."""
    made = bench()
    made.demand(1)
    lock = made.device._lock
    assert lock is not None
    calls: tuple[Callable[[], object], ...] = (
        lambda: made.clock.advance(1),
        lambda: made.device.wait(made.arrived),
        made.device.look,
    )
    with lock:
        for call in calls:
            with pytest.raises(MoeCacheError, match="lock is held while time passes"):
                call()
    assert made.device.wait(made.arrived).expert == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"latency_ns": -1}, "latency_ns must not be negative, got -1"),
        ({"chunk_bytes": 0}, "at least 1, got 0 and 2"),
        ({"prefetch_depth": 0}, "at least 1, got 250 and 0"),
        ({"bandwidth": "fast"}, "'fast' is no rate"),
        ({"bandwidth": 0}, "0 is no rate"),
    ],
)
def test_impossible_figures_are_refused(options: dict[str, object], message: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=message):
        bench(**options)


def test_a_device_serves_one_loader() -> None:
    """Whose lock it watches."""
    made = bench()
    with pytest.raises(ConfigError, match="one loader"):
        made.device.attach(threading.Lock(), lambda load: None)


def reckon(
    reads: list[tuple[int, int, bool]], latency_ns: int, chunk: int
) -> tuple[dict[int, int], int]:
    """Return when each read ends, and how often one is overtaken, nanosecond by nanosecond.

    `reads` are (begun at, bytes, whether it is a demand); a byte takes a nanosecond.
    """
    left = [size for _, size, _ in reads]
    ends: dict[int, int] = {}
    holder: int | None = None
    sent = overtaken = now = 0
    while len(ends) < len(reads):
        ready = [
            (not urgent, number)
            for number, (begun, _, urgent) in enumerate(reads)
            if begun + latency_ns <= now and number not in ends
        ]
        first_is_demand = bool(ready) and not min(ready)[0]
        if holder is None:
            holder, sent = (min(ready)[1] if ready else None), 0
        elif first_is_demand and not reads[holder][2] and sent and sent % chunk == 0:
            overtaken += 1
            holder, sent = min(ready)[1], 0
        now += 1
        if holder is not None:
            sent += 1
            left[holder] -= 1
            if left[holder] == 0:
                ends[holder] = now
                holder = None
    return ends, overtaken


timelines = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 200), st.booleans()), min_size=1, max_size=12
).map(sorted)


def play(reads: list[tuple[int, int, bool]], latency_ns: int, chunk: int) -> Bench:
    """Begin reads at their times and let everything happen."""
    made = bench(latency_ns=latency_ns, chunk_bytes=chunk)
    made.device._expert_bytes = lambda layer: reads[layer][1]
    for number, (begun, _, urgent) in enumerate(reads):
        made.clock.advance(begun - made.clock())
        if urgent:
            made.demand(number, layer=number)
        else:
            made.prefetch(number, layer=number)
    made.run_out()
    return made


@given(reads=timelines, latency_ns=st.integers(0, 60), chunk=st.integers(1, 80))
def test_every_read_ends_when_reckoned(
    reads: list[tuple[int, int, bool]], latency_ns: int, chunk: int
) -> None:
    """To the nanosecond, and the same each time."""
    ends, overtaken = reckon(reads, latency_ns, chunk)

    made = play(reads, latency_ns, chunk)

    assert dict(made.finished) == ends
    assert made.device.num_overtaken == overtaken
    assert play(reads, latency_ns, chunk).spans == made.spans


@given(reads=timelines, latency_ns=st.integers(0, 60), chunk=st.integers(1, 80))
def test_the_link_transfers_one_read_at_a_time_and_never_rests(
    reads: list[tuple[int, int, bool]], latency_ns: int, chunk: int
) -> None:
    """Spans do not overlap, have every byte once, and leave no gap while a read is ready."""
    made = play(reads, latency_ns, chunk)

    sent = dict.fromkeys(range(len(reads)), 0)
    free_from = 0
    for number, start, end in made.spans:
        assert start >= free_from
        ready = [
            begun + latency_ns for other, (begun, size, _) in enumerate(reads) if sent[other] < size
        ]
        assert start == max(free_from, min(ready))
        sent[number] += end - start
        free_from = end
    assert list(sent.values()) == [size for _, size, _ in reads]
    assert made.device.busy_ns == sum(sent.values())


@given(reads=timelines, latency_ns=st.integers(0, 60), chunk=st.integers(1, 80))
def test_no_chunk_of_a_prefetch_begins_while_a_demand_is_ready(
    reads: list[tuple[int, int, bool]], latency_ns: int, chunk: int
) -> None:
    """It waits for the rest of one chunk at most."""
    made = play(reads, latency_ns, chunk)

    ends = dict(made.finished)
    for number, start, end in made.spans:
        if reads[number][2]:
            continue
        last_chunk = end - 1 - (end - 1 - start) % chunk
        assert not [
            other
            for other, (begun, _, urgent) in enumerate(reads)
            if urgent and begun + latency_ns <= last_chunk < ends[other]
        ]


def step_slots(loader: SlotLoader, cache: ExpertCache, layer: int, ids: np.ndarray) -> list[int]:
    """Run a step; return the slots in the order in which they were handed out."""
    return [slot for wave in waves(loader, cache, layer, ids) for slot, _ in wave]


def test_with_a_fill_real_bytes_arrive_under_the_virtual_clock() -> None:
    """In the slots that a real loader hands out."""
    store = numbered_store()
    cache = ExpertCache(3, 8, 4, policy="lru")
    with HostSlots(store.layout, 6) as pool:
        clock = VirtualClock()
        device = SimulatedDevice(
            clock, store.layout.expert_bytes, bandwidth=10**9, fill=fill_from(store, pool)
        )
        loader = SlotLoader(store, pool, cache, 0, make_fetch=device.attach, clock=clock)
        for layer in range(3):
            for wave in waves(loader, cache, layer, np.array([1, 5])):
                for slot, pairs in wave:
                    expert = (1, 5)[pairs[0]]
                    assert (pool.expert(slot, layer)["down"] == layer * 8 + expert).all()
        assert cache.profiler.miss_stall_ns == clock() > 0
        loader.close()


def test_what_a_fill_raises_fails_the_step_and_the_next_one_reads_again() -> None:
    """The loader sees a failed read like any other."""
    store = WrappedStore(numbered_store(), FailEachOnce())
    cache = ExpertCache(3, 8, 4, policy="lru")
    with HostSlots(store.layout, 6) as pool:
        clock = VirtualClock()
        device = SimulatedDevice(
            clock, store.layout.expert_bytes, bandwidth=10**9, fill=fill_from(store, pool)
        )
        loader = SlotLoader(store, pool, cache, 0, make_fetch=device.attach, clock=clock)
        with pytest.raises(StoreError, match="expert 2 of layer 0"):
            step_slots(loader, cache, 0, np.array([2]))
        assert len(step_slots(loader, cache, 0, np.array([2]))) == 1
        assert (loader.num_reads, loader.num_failed_reads) == (1, 1)
        cache.check()
        loader.close()


def test_steps_of_many_tokens_go_through_staging() -> None:
    """With one slot and one for staging, each wave waits for its own read."""
    store = WrappedStore(numbered_store(), nothing)
    cache = ExpertCache(3, 8, 1, policy="lru")
    with HostSlots(store.layout, 2) as pool:
        clock = VirtualClock()
        device = SimulatedDevice(
            clock,
            store.layout.expert_bytes,
            bandwidth=10**9,
            latency_ns=0,
            fill=fill_from(store, pool),
        )
        loader = SlotLoader(store, pool, cache, 0, make_fetch=device.attach, clock=clock)
        ids = np.arange(8).reshape(4, 2)
        assert len(step_slots(loader, cache, 1, ids)) == 8
        assert clock() == 8 * store.layout.expert_bytes(1)
        loader.close()
