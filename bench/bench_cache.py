"""What a request costs: `acquire` and `release` of eight experts, from the router's array.

The model has 48 x 128 experts, of which half fit. A round is a number of
requests in a plain Python loop, whose cost is included (about 1 ns per
expert). Beside it the caches that Python has do the look-ups alone: no
leases, no slots in an array, no counts per expert.
"""

import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import cachebox
import cachetools
import numpy as np
import pytest
from lru import LRU
from pytest_benchmark.fixture import BenchmarkFixture

from bench.conftest import Note
from bench.traces import NUM_EXPERTS, NUM_LAYERS, TOP_K, routing_trace
from moecache import ExpertCache

CAPACITY = NUM_LAYERS * NUM_EXPERTS // 2
POLICIES = ["lru", "slru", "slru-lfu", "lfu", "lfru", "haz2", "echo"]
LIBRARIES: dict[str, Callable[[int], Any]] = {
    "cachebox": cachebox.LRUCache,
    "cachetools": cachetools.LRUCache,
    "lru-dict": LRU,
}
# Long enough that branch predictors do not learn it, and that SLRU keeps promoting.
HIT_TOKENS = 32
MIXED_TOKENS = 4
MISSES = 2

Requests = list[tuple[int, np.ndarray]]


@functools.cache
def warm_experts() -> np.ndarray:
    """Draw the experts that are resident at the start, [layers, half of the experts]."""
    rng = np.random.default_rng(7)
    experts = np.tile(np.arange(NUM_EXPERTS), (NUM_LAYERS, 1))
    return rng.permuted(experts, axis=1)[:, : CAPACITY // NUM_LAYERS]


def warm_cache(policy: str) -> ExpertCache:
    """Make a cache that is full of the warm experts."""
    cache = ExpertCache(NUM_LAYERS, NUM_EXPERTS, CAPACITY, policy=policy)
    slots = np.empty(warm_experts().shape[1], np.int32)
    misses = np.empty_like(slots)
    for layer, experts in enumerate(warm_experts()):
        assert cache.acquire(layer, experts, slots, misses) == slots.size
        for slot in slots.tolist():
            cache.publish(slot)
        cache.release(slots)
    return cache


def warm_library(name: str) -> Any:
    """Make another library's cache, filled with the same keys in the same order."""
    cache = LIBRARIES[name](CAPACITY)
    for layer, experts in enumerate(warm_experts().tolist()):
        for expert in experts:
            key = layer * NUM_EXPERTS + expert
            cache[key] = key
    return cache


@functools.cache
def hit_requests(num_tokens: int, dtype: str) -> Requests:
    """Return requests for warm experts only, routed as in the synthetic trace."""
    trace = routing_trace(num_tokens, num_experts=CAPACITY // NUM_LAYERS)
    ids = warm_experts()[np.arange(NUM_LAYERS)[:, None], trace].astype(dtype)
    return [(layer, token[layer]) for token in ids for layer in range(NUM_LAYERS)]


@functools.cache
def mixed_requests(policy: str, num_tokens: int) -> Requests:
    """Return requests of six residents and then two experts that are not resident.

    Which experts are resident depends on what the policy evicted before, so a
    cache serves the requests while they are drawn. Any other cache that starts
    warm and serves them in order answers alike.
    """
    rng = np.random.default_rng(11)
    cache = warm_cache(policy)
    requests = []
    for layer in list(range(NUM_LAYERS)) * num_tokens:
        experts = rng.permutation(NUM_EXPERTS)
        resident = cache.slot_table[layer, experts] >= 0
        ids = np.concatenate([experts[resident][: TOP_K - MISSES], experts[~resident][:MISSES]])
        serve(cache, [(layer, ids)])
        requests.append((layer, ids))
    return requests


def rounds_of(requests: Requests) -> Iterator[Requests]:
    """Cut requests into rounds."""
    step = MIXED_TOKENS * NUM_LAYERS
    for start in range(0, len(requests), step):
        yield requests[start : start + step]


def as_keys(layer: int, ids: np.ndarray) -> list[int]:
    """Turn a request into the keys of one dictionary over all layers."""
    return (ids + layer * NUM_EXPERTS).tolist()  # type: ignore[no-any-return]


def serve_hits(cache: ExpertCache, requests: Requests) -> None:
    """Acquire and release each request; all of it is resident."""
    acquire, release = cache.acquire, cache.release
    slots = np.empty(TOP_K, np.int32)
    misses = np.empty(TOP_K, np.int32)
    for layer, ids in requests:
        acquire(layer, ids, slots, misses)
        release(slots)


def serve(cache: ExpertCache, requests: Requests) -> None:
    """Acquire each request, publish what is missing as if it were read, and release it."""
    acquire, publish, release = cache.acquire, cache.publish, cache.release
    slots = np.empty(TOP_K, np.int32)
    misses = np.empty(TOP_K, np.int32)
    # An element of a memoryview is a Python int; of an ndarray, a slower NumPy scalar.
    slot_at, miss_at = slots.data, misses.data
    for layer, ids in requests:
        for index in range(acquire(layer, ids, slots, misses)):
            publish(slot_at[miss_at[index]])
        release(slots)


def look_up_keys(cache: Any, requests: list[list[int]]) -> None:
    """Look up keys that were ready before; all are there."""
    for keys in requests:
        for key in keys:
            cache[key]


def look_up_ids(cache: Any, requests: Requests) -> None:
    """Look up what the router's arrays ask for; all of it is there."""
    for layer, ids in requests:
        for key in as_keys(layer, ids):
            cache[key]


def look_up_or_insert(cache: Any, requests: list[list[int]]) -> int:
    """Look up keys that were ready before and insert what is missing; return the hits."""
    num_hits = 0
    for keys in requests:
        for key in keys:
            if key in cache:
                cache[key]
                num_hits += 1
            else:
                cache[key] = key
    return num_hits


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("policy", POLICIES)
def test_hits(
    benchmark: BenchmarkFixture, policy: str, dtype: str, small: bool, note: Note
) -> None:
    """Everything is resident: the usual case."""
    cache = warm_cache(policy)
    requests = hit_requests(HIT_TOKENS, dtype)
    benchmark.group = "cache, all hits"
    benchmark.pedantic(serve_hits, (cache, requests), rounds=3 if small else 300, warmup_rounds=2)
    note(len(requests) * TOP_K, hit_rate=1.0)
    assert cache.profiler.num_misses == CAPACITY
    assert cache.profiler.num_hits % (len(requests) * TOP_K) == 0 < cache.profiler.num_hits


@pytest.mark.parametrize("source", ["keys", "ids"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_library_hits(
    benchmark: BenchmarkFixture, name: str, source: str, small: bool, note: Note
) -> None:
    """The same look-ups in a Python loop: from integers, and from the router's arrays."""
    cache = warm_library(name)
    requests = hit_requests(HIT_TOKENS, "int64")
    keys = [as_keys(layer, ids) for layer, ids in requests]
    benchmark.group = "cache, all hits"
    benchmark.pedantic(
        look_up_keys if source == "keys" else look_up_ids,
        (cache, keys if source == "keys" else requests),
        rounds=3 if small else 60,
        warmup_rounds=2,
    )
    note(len(requests) * TOP_K, hit_rate=1.0)
    assert len(cache) == CAPACITY


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("policy", POLICIES)
def test_misses(
    benchmark: BenchmarkFixture, policy: str, dtype: str, small: bool, note: Note
) -> None:
    """Two of eight are missing: each takes a victim's slot and is published."""
    num_rounds = 2 if small else 100
    cache = warm_cache(policy)
    requests = mixed_requests(policy, num_rounds * MIXED_TOKENS)
    rounds = rounds_of([(layer, ids.astype(dtype)) for layer, ids in requests])
    benchmark.group = "cache, 25% misses"
    benchmark.pedantic(serve, setup=lambda: ((cache, next(rounds)), {}), rounds=num_rounds)
    num_misses = cache.profiler.num_misses - CAPACITY
    num_hits = cache.profiler.num_hits
    note(MIXED_TOKENS * NUM_LAYERS * TOP_K, hit_rate=num_hits / (num_hits + num_misses))
    assert num_hits * MISSES == num_misses * (TOP_K - MISSES) > 0


@pytest.mark.parametrize("name", LIBRARIES)
def test_library_misses(benchmark: BenchmarkFixture, name: str, small: bool, note: Note) -> None:
    """The same requests, from integers, and an insertion where a key is missing."""
    num_rounds = 2 if small else 100
    cache = warm_library(name)
    requests = mixed_requests("lru", num_rounds * MIXED_TOKENS)
    rounds = ([as_keys(layer, ids) for layer, ids in chunk] for chunk in rounds_of(requests))
    benchmark.group = "cache, 25% misses"
    num_hits = benchmark.pedantic(
        look_up_or_insert, setup=lambda: ((cache, next(rounds)), {}), rounds=num_rounds
    )
    num_accesses = MIXED_TOKENS * NUM_LAYERS * TOP_K
    note(num_accesses, hit_rate=num_hits / num_accesses)
    assert num_hits * TOP_K == num_accesses * (TOP_K - MISSES)


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_a_request_is_four_times_as_fast_as_a_loop_over_cachebox(
    policy: str, small: bool, record_property: Callable[[str, object], None]
) -> None:
    """From the router's array to eight found experts, ours against a cachebox loop.

    Both start from the same arrays and answer all of them: the loop has to make
    the keys. `test_library_hits[cachebox-keys]` shows its look-ups alone, for
    integers that are at hand already. The two take turns and the least of many
    repeats counts, so that a busy machine slows both.
    """
    ours, other = warm_cache(policy), warm_library("cachebox")
    requests = hit_requests(HIT_TOKENS, "int64")
    num_repeats = 3 if small else 60
    hits_before, misses_before = ours.profiler.num_hits, ours.profiler.num_misses
    our_ns, other_ns = [], []
    gc.disable()
    try:
        for _ in range(num_repeats):
            our_ns.append(_timed(serve_hits, ours, requests))
            other_ns.append(_timed(look_up_ids, other, requests))
    finally:
        gc.enable()
    num_hits = sum(key in other for layer, ids in requests for key in as_keys(layer, ids))
    assert num_hits == len(requests) * TOP_K
    assert ours.profiler.num_hits - hits_before == num_hits * num_repeats
    assert ours.profiler.num_misses == misses_before
    ratio = min(other_ns) / min(our_ns)
    record_property("ratio", round(ratio, 2))
    if not small:
        assert ratio >= 4.0, (
            f"a request costs {min(our_ns) / num_hits:.1f} ns per expert, "
            f"cachebox {min(other_ns) / num_hits:.1f} ns: {ratio:.2f} times as much"
        )


def _timed(function: Callable[[Any, Any], None], cache: Any, requests: Requests) -> int:
    start = time.perf_counter_ns()
    function(cache, requests)
    return time.perf_counter_ns() - start
