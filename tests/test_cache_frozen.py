"""A cache that evicts nothing for a while, and learns of hits afterwards."""

import numpy as np
import pytest

from moecache.cache._cache import ExpertCache
from moecache.cache._route_log import RouteLog
from moecache.errors import CapacityError
from moecache.settings import POLICIES

SCOPES = ("global", "layer")


def fill(cache: ExpertCache, layer: int, ids: np.ndarray, *, share: int = -1) -> None:
    """Run a step: acquire, publish, release."""
    slots = np.empty(ids.size, np.int32)
    misses = np.empty(ids.size, np.int32)
    count = cache.acquire(layer, ids, slots, misses, share=share)
    for index in misses[:count]:
        if index >= 0 and slots[index] >= 0:
            cache.publish(int(slots[index]))
    cache.release(slots)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_hits_that_are_counted_are_hits_that_were_leased(
    policy: str, scope: str, rows: int
) -> None:
    """The policy evicts the same experts from then on, and all counters agree."""
    caches = [ExpertCache(3, 16, 24, policy=policy, scope=scope) for _ in range(2)]
    logs = [RouteLog(3, 16) for _ in caches]
    for cache, log in zip(caches, logs, strict=True):
        cache.route_log = log
    rng = np.random.default_rng(0)
    num_all_hits = 0
    for turn in range(300):
        wide = turn % 2
        ids = np.stack(
            [
                np.stack([rng.permutation(16 if turn % 8 == 0 else 4)[:2] for _ in range(rows)])
                for _ in range(3)
            ]
        ).astype(np.int64 if wide else np.int32)
        sequences = np.arange(rows) if rows > 1 else None
        hits = all(caches[0].all_resident(layer, ids[layer]) for layer in range(3))
        if hits:
            num_all_hits += 1
            caches[0].count_hits(0, ids, sequences=sequences)
        for number, cache in enumerate(caches):
            for layer in range(3):
                if number == 0 and hits:
                    continue
                slots = np.empty(ids[layer].size, np.int32)
                misses = np.empty(ids[layer].size, np.int32)
                share = cache.fair_share(layer) if rows > 1 else 16
                count = cache.acquire(
                    layer, ids[layer], slots, misses, share=share, sequences=sequences
                )
                for index in misses[:count]:
                    if index >= 0 and slots[index] >= 0:
                        cache.publish(int(slots[index]))
                cache.release(slots)
        assert np.array_equal(caches[0].slot_table, caches[1].slot_table), turn
    assert num_all_hits > 5
    profilers = [cache.profiler for cache in caches]
    assert np.array_equal(profilers[0].counts, profilers[1].counts)
    assert profilers[0].hit_rate == profilers[1].hit_rate
    parts = [log.trace_parts() for log in logs]
    for one, other in zip(*parts, strict=True):
        assert np.array_equal(np.asarray(one, object), np.asarray(other, object))
    for cache in caches:
        cache.check()


def test_ids_that_are_no_hits_are_not_counted() -> None:
    """Out of range, or not resident any more."""
    cache = ExpertCache(2, 4, 3)
    fill(cache, 1, np.array([0, 1]))
    before = cache.profiler.counts.copy()
    cache.count_hits(1, np.array([[[0, 3], [-1, 2**40]]]))
    assert (cache.profiler.counts - before).tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
    cache.count_hits(0, np.empty((0, 1, 2), np.int64))
    for first, ids in ((1, np.zeros((2, 1, 1), int)), (-1, np.zeros((1, 1, 1), int))):
        with pytest.raises(ValueError, match="layer"):
            cache.count_hits(first, ids)
    with pytest.raises(ValueError, match="axes"):
        cache.count_hits(0, np.zeros((1, 2), int))
    with pytest.raises(TypeError):
        cache.count_hits(0, np.zeros((1, 1, 2)))


@pytest.mark.parametrize("policy", ["echo", "lru"])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_frozen_cache_changes_no_entry_of_its_table(policy: str, scope: str) -> None:
    """It claims what is free, and nothing else."""
    cache = ExpertCache(2, 8, 10, policy=policy, scope=scope)
    fill(cache, 0, np.arange(5 if scope == "global" else 4))
    fill(cache, 1, np.arange(4))
    cache.evicts = False
    table, changes = cache.slot_table.copy(), cache.num_changes
    slots, misses = np.empty(5, np.int32), np.empty(5, np.int32)
    missing = np.flatnonzero(table[0] < 0)
    with pytest.raises(CapacityError, match="are free or can be evicted"):
        cache.acquire(0, missing[:3], slots[:3], misses[:3])
    fill(cache, 0, missing[:1])
    assert cache.num_changes == changes + 1
    slot = cache.claim(1, int(np.flatnonzero(cache.slot_table[1] < 0)[0]))
    assert (slot >= 0) == (scope == "layer")
    if slot >= 0:
        cache.abandon(slot)
    # Those that a fair share would admit come without a slot.
    count = cache.acquire(0, missing[1:3], slots[:2], misses[:2], share=8)
    assert count == 2
    assert (slots[:2] < 0).all()
    cache.release(slots[:2])
    was = table >= 0
    assert np.array_equal(cache.slot_table[was], table[was])
    cache.evicts = True
    fill(cache, 0, missing[1:3])
    assert (cache.slot_table[0, missing[1:3]] >= 0).all()
    cache.check()
