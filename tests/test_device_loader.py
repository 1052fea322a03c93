"""A real loader over the simulated device: real bytes at simulated times."""

import numpy as np
import pytest

from moecache.cache._cache import ExpertCache
from moecache.errors import StoreError
from moecache.loading._loader import SlotLoader
from moecache.runtime.steps import waves
from moecache.slots import HostSlots
from moecache.stores import ExpertStore
from moecache.study.clock import VirtualClock
from tests.helpers.devices import FaultyDevice, LockWatch
from tests.helpers.stores import FailEachOnce, WrappedStore, nothing, numbered_store


def make_loader(
    store: ExpertStore, pool: HostSlots, cache: ExpertCache, clock: VirtualClock, **options: int
) -> SlotLoader:
    """Return a loader over a device that moves a store's bytes, a byte per nanosecond."""
    device = FaultyDevice(clock, store.layout.expert_bytes, bandwidth=10**9, **options)
    device.store = store
    loader = SlotLoader(store, pool, cache, device, clock=clock)
    LockWatch(clock, loader)
    return loader


def step_slots(loader: SlotLoader, cache: ExpertCache, layer: int, ids: np.ndarray) -> list[int]:
    """Run a step; return the slots in the order in which they were handed out."""
    return [slot for wave in waves(loader, cache, layer, ids) for slot, _ in wave]


def test_with_a_fill_real_bytes_arrive_under_the_virtual_clock() -> None:
    """In the slots that a real loader hands out."""
    store = numbered_store()
    cache = ExpertCache(3, 8, 4, policy="lru")
    with HostSlots(store.layout, 6) as pool:
        clock = VirtualClock()
        loader = make_loader(store, pool, cache, clock)
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
        loader = make_loader(store, pool, cache, clock)
        with pytest.raises(StoreError, match="expert 2 of layer 0"):
            step_slots(loader, cache, 0, np.array([2]))
        assert len(step_slots(loader, cache, 0, np.array([2]))) == 1
        assert (loader.counts.num_reads, loader.counts.num_failed_reads) == (1, 1)
        cache.check()
        loader.close()


def test_steps_of_many_tokens_go_through_staging() -> None:
    """With one slot and one for staging, each wave waits for its own read."""
    store = WrappedStore(numbered_store(), nothing)
    cache = ExpertCache(3, 8, 1, policy="lru")
    with HostSlots(store.layout, 2) as pool:
        clock = VirtualClock()
        loader = make_loader(store, pool, cache, clock, latency_ns=0)
        ids = np.arange(8).reshape(4, 2)
        assert len(step_slots(loader, cache, 1, ids)) == 8
        assert clock() == 8 * store.layout.expert_bytes(1)
        loader.close()
