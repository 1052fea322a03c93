"""Prefetching over a simulated device: overlap, overtaking and auto, without a real clock."""

import numpy as np
import pytest

from moecache.cache._cache import ExpertCache
from moecache.loading._loader import SlotLoader
from moecache.prefetch.modes import make_prefetcher
from moecache.prefetch.prefetcher import Prefetcher
from moecache.runtime.steps import waves
from moecache.slots import HostSlots
from moecache.study import Trace
from moecache.study.clock import VirtualClock
from moecache.study.device import TakingIn
from moecache.study.timing import simulate_time
from tests.helpers.devices import FaultyDevice, LockWatch
from tests.helpers.stores import WrappedStore, nothing, numbered_store

NUM_EXPERTS = 8
EXPERT_BYTES = 72  # of the numbered store: a nanosecond each


class House:
    """A loader and a prefetcher over a device of a byte per nanosecond."""

    def __init__(self, capacity: int, prefetch: str = "hints", *, policy: str = "lru") -> None:
        self.store = WrappedStore(numbered_store(), nothing)
        self.cache = ExpertCache(3, NUM_EXPERTS, capacity, policy=policy)
        self.pool = HostSlots(self.store.layout, capacity + 2)
        self.clock = VirtualClock()
        taking_in = TakingIn(self.clock)
        self.device = FaultyDevice(
            self.clock,
            self.store.layout.expert_bytes,
            bandwidth=10**9,
            latency_ns=10,
            chunk_bytes=16,
        )
        self.device.store = self.store
        self.loader = SlotLoader(self.store, self.pool, self.cache, self.device, clock=self.clock)
        taking_in.loader = self.loader
        LockWatch(self.clock, self.loader)
        found = make_prefetcher(self.loader, self.store, self.cache, prefetch, threaded=False)
        assert found is not None
        self.prefetcher: Prefetcher = found
        self.device.idle = self.prefetcher.run_one

    def step(self, layer: int, *experts: int, compute_ns: int = 0) -> int:
        """Run a token through a layer; return the time it waited."""
        waited, asked = 0, self.clock.now_ns
        ids = np.array([experts])
        for wave in waves(self.loader, self.cache, layer, ids, observe=self.prefetcher.step):
            waited += self.clock.now_ns - asked
            for slot, pairs in wave:
                expected = layer * NUM_EXPERTS + experts[int(pairs[0])]
                assert (self.pool.expert(slot, layer)["down"] == expected).all()
            self.clock.advance(compute_ns)
            asked = self.clock.now_ns
        return waited


def test_what_was_hinted_is_read_while_the_host_computes() -> None:
    """In time there is no wait; without time for all of it, the rest of one read."""
    house = House(6)
    assert house.step(0, 0) == 10 + EXPERT_BYTES
    house.prefetcher.hint(1, np.array([3]))
    house.clock.advance(200)
    assert house.step(1, 3) == 0
    house.prefetcher.hint(2, np.array([5]))
    house.clock.advance(50)
    assert house.step(2, 5) == 10 + EXPERT_BYTES - 50
    assert (house.cache.num_foreseen_hits, house.cache.num_foreseen_late) == (1, 1)


def test_a_demand_overtakes_every_prefetch() -> None:
    """It waits for a chunk at most: three reads are under way or queued before it."""
    house = House(6)
    house.prefetcher.hint(2, np.array([1, 2, 3]))
    house.clock.advance(30)
    assert house.step(1, 7) <= 10 + 16 + EXPERT_BYTES
    assert house.device.num_overtaken == 1


def test_what_a_layer_came_without_is_taken_back() -> None:
    """Its slot is free again, and the link: the other guess is read in half the time."""
    house = House(6)
    house.prefetcher.hint(1, np.array([1, 2]))
    house.clock.advance(60)
    assert house.step(1, 7) == 10 + EXPERT_BYTES
    assert house.loader.counts.num_cancelled_prefetches == 2
    assert house.loader.counts.prefetch_bytes_in_flight == 0
    assert house.cache.num_resident == 1
    house.cache.check()


@pytest.mark.parametrize("storm", [False, True])
def test_a_storm_delays_no_look_up(storm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """p99 of a step's wait is at most a chunk longer, and no lock is held while time passes.

    The watch fails if the loader's lock is held while the clock moves.
    """
    # Whatever became of the guesses before.
    monkeypatch.setattr("moecache.prefetch.break_even._MAX_LIKELIHOOD", 0.0)
    router, rng = np.random.default_rng(0), np.random.default_rng(1)
    skew = 0.7 ** np.arange(NUM_EXPERTS)
    house = House(12, policy="echo")
    waits = []
    for number in range(2000):
        layer = number % 3
        if storm:
            for _ in range(12):
                wild = rng.permutation(NUM_EXPERTS)[:6]
                house.prefetcher.hint(int(rng.integers(3)), wild)
        expert = int(router.choice(NUM_EXPERTS, p=skew / skew.sum()))
        waits.append(house.step(layer, expert, compute_ns=100))
        assert house.loader.counts.prefetch_bytes_in_flight <= 16 * 2**20
    house.cache.check()
    if storm:
        # It does rage: guesses evict others, and each other, and are in the way of demands.
        assert house.prefetcher.num_issued > 2000
        assert house.cache.num_evictions > 2000
        assert house.cache.num_foreseen_unused > 1000
        assert house.device.num_overtaken > 100
    quiet_ns = 10 + EXPERT_BYTES
    assert np.percentile(waits, 99) <= quiet_ns + 16 < 3 * quiet_ns


def test_closing_leaves_no_slot_behind() -> None:
    """What is under way ends; nothing more begins."""
    house = House(6)
    house.prefetcher.hint(1, np.array([1, 2, 3, 4]))
    house.clock.advance(1)
    house.prefetcher.close()
    assert not house.prefetcher.run_one()
    house.loader.close()
    house.cache.check()


def alternating(num_tokens: int, *, num_layers: int = 4) -> Trace:
    """Return a trace in which what a layer uses follows from the layer before."""
    rng = np.random.default_rng(1)
    topics = rng.integers(0, 16, num_tokens)
    table = np.stack(
        [np.stack([rng.permutation(64)[:4] for _ in range(16)]) for _ in range(num_layers)]
    )
    return Trace(table[:, topics].swapaxes(0, 1).astype(np.int16), num_experts=64)


def test_auto_keeps_what_is_faster() -> None:
    """Experts that follow from the layer before, and time to read them."""
    trace = alternating(600)
    timing = {
        mode: simulate_time(
            trace, "echo", mode, capacity="25%", bandwidth="25GB/s", expert_bytes="2MB"
        )
        for mode in ("off", "echo", "auto")
    }
    assert timing["echo"].stall_ns < 0.7 * timing["off"].stall_ns
    assert timing["auto"].stall_ns < 0.85 * timing["off"].stall_ns
    assert timing["auto"].prefetch_stats is not None
    assert timing["auto"].prefetch_stats.active
    assert "of the time at equal misses" in timing["auto"].prefetch_stats.reason


def test_auto_leaves_off_what_gains_nothing() -> None:
    """Routing that cannot be foreseen: a layer may use any expert."""
    rng = np.random.default_rng(2)
    experts = np.stack([[rng.permutation(64)[:4] for _ in range(4)] for _ in range(600)])
    trace = Trace(experts.astype(np.int16), num_experts=64)
    off, auto = (
        simulate_time(trace, "echo", mode, capacity="25%", bandwidth="2GB/s", expert_bytes="2MB")
        for mode in ("off", "auto")
    )
    assert auto.prefetch_stats is not None
    assert not auto.prefetch_stats.active
    assert auto.total_ns <= 1.005 * off.total_ns
