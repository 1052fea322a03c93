"""ExpertCache.claim: slots for experts that no step asked for, and what became of them."""

import numpy as np
import pytest

from moecache.cache._cache import ExpertCache
from moecache.settings import POLICIES


def acquire(cache: ExpertCache, *experts: int) -> np.ndarray:
    """Acquire experts of layer 0, fill those that are missing, and return the slots."""
    slots, misses = np.empty(len(experts), np.int32), np.empty(len(experts), np.int32)
    for index in misses[: cache.acquire(0, list(experts), slots, misses)].tolist():
        if index >= 0:
            cache.publish(int(slots[index]))
    return slots


def serve(cache: ExpertCache, *experts: int) -> None:
    """Do a whole step: acquire, fill, release."""
    cache.release(acquire(cache, *experts))


def outcomes(cache: ExpertCache) -> tuple[int, int, int]:
    """Return how many foreseen experts were hits, came late, left unused."""
    return cache.num_foreseen_hits, cache.num_foreseen_late, cache.num_foreseen_unused


def test_without_evict_only_a_free_slot_will_do() -> None:
    """With it the same claim takes the slot of an expert that is worth less."""
    cache = ExpertCache(1, 8, 2, policy="lfu")
    for expert in (7, 7, 0, 0, 0, 1):
        serve(cache, expert)
    assert cache.num_evictions == 1
    assert cache.claim(0, 7, evict=False) == -1
    assert cache.num_evictions == 1
    assert cache.claim(0, 7) >= 0
    assert cache.num_evictions == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_claim_without_evict_leaves_the_policy_as_it_was(policy: str) -> None:
    """However often it is called, the next victim stays the same."""
    asked, left = (ExpertCache(1, 8, 3, policy=policy) for _ in range(2))
    for cache in (asked, left):
        serve(cache, 0)
        serve(cache, 1)
        serve(cache, 2)
        serve(cache, 1)
    for expert in range(3, 8):
        assert asked.claim(0, expert, evict=False) == -1
    for cache in (asked, left):
        serve(cache, 5)
    assert np.array_equal(asked.slot_table, left.slot_table)


def test_a_likely_claim_takes_what_a_step_would_take() -> None:
    """But no expert of the layer whose step it is for, which a step would hold."""
    made = {scope: ExpertCache(2, 8, 2, policy="lru", scope=scope) for scope in ("global", "layer")}

    def step(scope: str, layer: int) -> None:
        slots, misses = np.empty(1, np.int32), np.empty(1, np.int32)
        if made[scope].acquire(layer, [1], slots, misses):
            made[scope].publish(int(slots[0]))
        made[scope].release(slots)

    for scope, cache in made.items():
        step(scope, 1)
        step(scope, 0)
        # The oldest is one of layer 1.
        assert cache.claim(1, 2) == cache.claim(1, 2, likely=True) == -1
        step(scope, 1)
        assert cache.claim(1, 2) == -1
    assert made["layer"].claim(1, 2, likely=True) == -1
    assert made["global"].claim(1, 2, likely=True) >= 0
    assert (made["global"].slot_table[0] < 0).all()


def test_a_slot_that_waits_for_its_lease_is_not_free() -> None:
    """The slot was claimed for an expert that could not be read."""
    cache = ExpertCache(1, 8, 1, policy="lru")
    slots = np.empty(1, np.int32)
    cache.acquire(0, [0], slots, slots.copy())
    cache.abandon(int(slots[0]))
    assert cache.claim(0, 1, evict=False) == -1
    cache.release(slots)
    assert cache.claim(0, 1, evict=False) >= 0


def test_a_foreseen_expert_that_is_used_is_a_hit_once() -> None:
    """It is not counted again when it leaves."""
    cache = ExpertCache(1, 8, 2, policy="lru")
    cache.publish(cache.claim(0, 3))
    assert outcomes(cache) == (0, 0, 0)
    serve(cache, 3)
    serve(cache, 3)
    assert outcomes(cache) == (1, 0, 0)
    serve(cache, 4)
    serve(cache, 5)
    assert cache.num_evictions == 1
    assert outcomes(cache) == (1, 0, 0)


def test_a_foreseen_expert_that_is_still_on_its_way_is_late() -> None:
    """Counted once, however many wait; it is no hit later."""
    cache = ExpertCache(1, 8, 2, policy="lru")
    flying = cache.claim(0, 3)
    leases = []
    for _ in range(2):
        slots = np.empty(1, np.int32)
        assert cache.acquire(0, [3], slots, slots.copy()) == 1
        leases.append(slots)
    cache.publish(flying)
    for slots in leases:
        cache.release(slots)
    serve(cache, 3)
    assert outcomes(cache) == (0, 1, 0)


def test_a_foreseen_expert_that_leaves_unused_is_counted() -> None:
    """When it is evicted, not before."""
    cache = ExpertCache(1, 8, 2, policy="lru")
    cache.publish(cache.claim(0, 3))
    serve(cache, 4)
    assert outcomes(cache) == (0, 0, 0)
    serve(cache, 5)
    assert outcomes(cache) == (0, 0, 1)


def test_what_could_not_be_filled_counts_as_nothing() -> None:
    """The next expert in its slot does not count either."""
    cache = ExpertCache(1, 8, 1, policy="lru")
    cache.abandon(cache.claim(0, 3))
    serve(cache, 4)
    serve(cache, 4)
    serve(cache, 5)
    assert outcomes(cache) == (0, 0, 0)


def test_what_is_filled_for_other_reasons_is_not_foreseen() -> None:
    """A warm start's experts are no predictions."""
    cache = ExpertCache(1, 8, 2, policy="lru")
    for expert in (3, 4):
        cache.publish(cache.claim(0, expert, foreseen=False))
    serve(cache, 3)
    serve(cache, 5)
    assert cache.num_evictions == 1
    late = ExpertCache(1, 8, 2, policy="lru")
    late.claim(0, 6, foreseen=False)
    slots = np.empty(1, np.int32)
    assert late.acquire(0, [6], slots, slots.copy()) == 1
    assert outcomes(late) == (0, 0, 0)
    assert outcomes(cache) == (0, 0, 0)


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_pins_are_counted_over_all_layers(scope: str) -> None:
    """Each expert once; one that is not resident has none."""
    cache = ExpertCache(2, 4, 8, policy="lru", scope=scope)
    for layer in range(2):
        for expert in range(3):
            cache.publish(cache.claim(layer, expert))
    assert cache.num_pinned == 0
    assert cache.pin(0, 0)
    assert cache.pin(0, 0)
    assert cache.pin(1, 2)
    assert not cache.pin(1, 3)
    assert cache.num_pinned == 2
    cache.unpin(0, 0)
    cache.unpin(0, 1)
    assert cache.num_pinned == 1


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_echo_has_learned_can_be_asked(policy: str, scope: str) -> None:
    """The policies that learn by ECHO give the very object by which they evict."""
    cache = ExpertCache(2, 8, 6, policy=policy, scope=scope)
    echo = cache.echo
    if policy not in {"echo", "haz2"}:
        assert echo is None
        return
    assert echo is not None
    assert (echo.num_layers, echo.num_experts, echo.ring) == (2, 8, policy == "echo")
    for layer in (0, 1):
        slots = np.empty(2, np.int32)
        cache.acquire(layer, [5, 2], slots, slots.copy())
    assert cache.echo is echo
    for layer in (0, 1):
        assert set(echo.predict(layer, 2)[0].tolist()) == {2, 5}
