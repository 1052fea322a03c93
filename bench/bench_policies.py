"""Policies against the caches that Python has, over the identical sequence of accesses.

Every contender sees the same keys in the same order, in each request the hits
of an LRU before its misses, at a quarter and at half of all experts. Each is
driven through the calls that are fastest for it. All LRUs must agree on every hit.
"""

import functools
from collections.abc import Callable
from typing import Any

import cachebox
import cachetools
import pytest
from lru import LRU
from pytest_benchmark.fixture import BenchmarkFixture

from bench.conftest import Note
from bench.traces import NUM_EXPERTS, NUM_LAYERS, lru_order, routing_trace
from moecache import AccessProfiler, LfruCache, LfuCache, LruCache, SlruCache

NUM_KEYS = NUM_LAYERS * NUM_EXPERTS

Replay = Callable[[Any, list[int]], int]


@pytest.fixture(params=[0.25, 0.5], ids=["25%", "50%"])
def capacity(request: pytest.FixtureRequest) -> int:
    """Slots: a quarter, or half, of all experts."""
    return int(request.param * NUM_KEYS)


@functools.cache
def accesses(num_tokens: int, capacity: int) -> tuple[list[int], int]:
    """Return the keys to access, and how many of them an LRU answers."""
    return lru_order(routing_trace(num_tokens), NUM_EXPERTS, capacity)


def replay_policy(policy: Any, keys: list[int]) -> int:
    """Drive a policy of moecache; return its hits."""
    touch, admit = policy.touch, policy.admit
    num_hits = 0
    for key in keys:
        if touch(key):
            num_hits += 1
        else:
            admit(key)
    return num_hits


def replay_counted(counted: tuple[SlruCache, AccessProfiler], keys: list[int]) -> int:
    """Drive an SLRU with counts, counting each access before it is reported."""
    policy, profiler = counted
    touch, admit, count = policy.touch, policy.admit, profiler.record_hit
    num_hits = 0
    for key in keys:
        count(0, key)
        if touch(key):
            num_hits += 1
        else:
            admit(key)
    return num_hits


def replay_contains(cache: Any, keys: list[int]) -> int:
    """Drive a mapping by `in` and `[]`: the fastest for lru-dict and cachetools."""
    num_hits = 0
    for key in keys:
        if key in cache:
            cache[key]
            num_hits += 1
        else:
            cache[key] = key
    return num_hits


def replay_get(cache: Any, keys: list[int]) -> int:
    """Drive a mapping by `get`: the fastest for cachebox."""
    get = cache.get
    num_hits = 0
    for key in keys:
        if get(key) is None:
            cache[key] = key
        else:
            num_hits += 1
    return num_hits


def replay_function(function: Any, keys: list[int]) -> int:
    """Drive a function behind `functools.lru_cache`."""
    for key in keys:
        function(key)
    return int(function.cache_info().hits)


def slru(capacity: int) -> SlruCache:
    """Make an SLRU with a quarter on probation."""
    probationary = capacity // 4
    return SlruCache(probationary, capacity - probationary, num_keys=NUM_KEYS)


def counted_slru(capacity: int) -> tuple[SlruCache, AccessProfiler]:
    """Make an SLRU that evicts the least accessed, and the counts it reads."""
    profiler = AccessProfiler(1, NUM_KEYS)
    probationary = capacity // 4
    policy = SlruCache(
        probationary, capacity - probationary, num_keys=NUM_KEYS, counts=profiler.counts
    )
    return policy, profiler


def cached_function(capacity: int) -> Callable[[int], int]:
    """Make a function whose results the standard library keeps."""

    @functools.lru_cache(maxsize=capacity)
    def fetch(key: int) -> int:
        return key

    return fetch


LRUS: dict[str, tuple[Callable[[int], Any], Replay]] = {
    "moecache-lru": (lambda capacity: LruCache(capacity, num_keys=NUM_KEYS), replay_policy),
    "cachebox-lru": (cachebox.LRUCache, replay_get),
    "cachetools-lru": (cachetools.LRUCache, replay_contains),
    "functools-lru": (cached_function, replay_function),
    "lru-dict": (LRU, replay_contains),
}

OTHERS: dict[str, tuple[Callable[[int], Any], Replay]] = {
    "moecache-slru": (slru, replay_policy),
    "moecache-slru-counts": (counted_slru, replay_counted),
    "moecache-lfu": (lambda capacity: LfuCache(capacity, num_keys=NUM_KEYS), replay_policy),
    "moecache-lfru": (lambda capacity: LfruCache(capacity, num_keys=NUM_KEYS), replay_policy),
    "cachetools-lfu": (cachetools.LFUCache, replay_contains),
}


def measure(
    benchmark: BenchmarkFixture, name: str, capacity: int, small: bool, note: Note
) -> tuple[int, int]:
    """Replay the trace through a new cache in each round; return its hits and an LRU's."""
    keys, lru_hits = accesses(24 if small else 400, capacity)
    make, replay = (LRUS | OTHERS)[name]
    benchmark.group = f"policies, capacity {capacity} of {NUM_KEYS}"
    num_hits = benchmark.pedantic(
        replay, setup=lambda: ((make(capacity), keys), {}), rounds=2 if small else 7
    )
    note(len(keys), hit_rate=num_hits / len(keys))
    return num_hits, lru_hits


@pytest.mark.parametrize("name", LRUS)
def test_every_lru_hits_alike(
    benchmark: BenchmarkFixture, name: str, capacity: int, small: bool, note: Note
) -> None:
    """Every LRU answers exactly the accesses that the reference answers."""
    num_hits, lru_hits = measure(benchmark, name, capacity, small, note)
    assert num_hits == lru_hits


@pytest.mark.parametrize("name", OTHERS)
def test_policy(
    benchmark: BenchmarkFixture, name: str, capacity: int, small: bool, note: Note
) -> None:
    """The policies that look at more than recency answer some accesses, too."""
    num_hits, _ = measure(benchmark, name, capacity, small, note)
    assert num_hits > 0
