"""ExpertCache under threads: every call is atomic."""

import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from moecache.cache._cache import ExpertCache

NUM_THREADS = 4
NUM_STEPS = 600
NUM_LAYERS, NUM_EXPERTS, CAPACITY = 3, 70, 24


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Let threads take turns far more often than by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Worker:
    """One thread's steps, prefetches and failures, from a fixed seed."""

    def __init__(self, cache: ExpertCache, seed: int) -> None:
        self.cache = cache
        self.random = random.Random(seed)
        self.slots = np.empty(8, np.int32)
        self.misses = np.empty(8, np.int32)
        self.num_accesses = 0
        self.leased: list[npt.NDArray[np.int32]] = []

    def run(self) -> int:
        """Return the number of distinct accesses made."""
        for _ in range(NUM_STEPS):
            self.step()
            self.prefetch()
            while len(self.leased) > self.random.randrange(3):
                self.cache.release(self.leased.pop(0))
        for slots in self.leased:
            self.cache.release(slots)
        return self.num_accesses

    def step(self) -> None:
        """Acquire some experts, and fill or give back what is to be filled."""
        layer = self.random.randrange(NUM_LAYERS)
        ids = np.array(self.random.choices(range(NUM_EXPERTS), k=6), np.int32)
        # With a share, slots that other threads lease are no error here.
        num_misses = self.cache.acquire(layer, ids, self.slots, self.misses, share=6)
        slots = self.slots[: ids.size].copy()
        self.num_accesses += len(set(ids.tolist()))
        self.leased.append(slots)
        for index in self.misses[:num_misses].tolist():
            if index >= 0 and slots[index] >= 0:
                self.finish(int(slots[index]))

    def prefetch(self) -> None:
        """Claim an expert that no step asked for, perhaps."""
        slot = self.cache.claim(
            self.random.randrange(NUM_LAYERS), self.random.randrange(NUM_EXPERTS)
        )
        if slot >= 0:
            self.finish(slot)

    def finish(self, slot: int) -> None:
        """Publish most claims and abandon some."""
        if self.random.random() < 0.2:
            self.cache.abandon(slot)
        else:
            self.cache.publish(slot)


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("policy", ["echo", "lru"])
def test_threads_leave_a_cache_that_adds_up(policy: str, scope: str) -> None:
    """The invariants hold at any moment, and no access is lost or counted twice."""
    cache = ExpertCache(NUM_LAYERS, NUM_EXPERTS, CAPACITY, policy=policy, scope=scope)
    workers = [Worker(cache, seed) for seed in range(NUM_THREADS)]
    done = threading.Event()

    def audit() -> int:
        num_audits = 0
        while not done.is_set():
            cache.check()
            assert cache.num_resident <= CAPACITY
            num_audits += 1
        return num_audits

    with ThreadPoolExecutor(NUM_THREADS + 1) as pool:
        auditor = pool.submit(audit)
        try:
            futures = [pool.submit(worker.run) for worker in workers]
            num_accesses = sum(future.result() for future in futures)
        finally:
            done.set()
        num_audits = auditor.result()

    cache.check()
    profiler = cache.profiler
    assert num_audits > 0
    assert profiler.num_hits + profiler.num_misses == num_accesses
    assert int(profiler.counts.sum()) == num_accesses
    assert cache.num_resident + cache.num_free == CAPACITY
    assert cache.num_evictions > 0
    # No lease is left over: every slot that holds something can be evicted.
    for layer in range(NUM_LAYERS):
        room = cache.capacity if scope == "global" else CAPACITY // NUM_LAYERS
        everything = np.arange(room, dtype=np.int32)
        slots = np.empty(room, np.int32)
        misses = np.empty(room, np.int32)
        for index in misses[: cache.acquire(layer, everything, slots, misses)]:
            cache.publish(int(slots[index]))
        cache.release(slots)
    cache.check()
