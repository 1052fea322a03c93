"""ExpertCache, one rule at a time; `acquire` and the policies have files of their own."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moecache.cache._cache import ExpertCache
from moecache.cache._profiler import AccessProfiler
from moecache.errors import CapacityError, ConfigError
from moecache.settings import POLICIES

Int32s = npt.NDArray[np.int32]


def acquire(
    cache: ExpertCache, layer: int, ids: npt.ArrayLike, **options: Any
) -> tuple[Int32s, list[int]]:
    """Acquire a step and return its slots and what misses_out says."""
    size = np.asarray(ids).size
    slots, misses = np.full(size, -7, np.int32), np.full(size, -7, np.int32)
    num_misses = cache.acquire(layer, ids, slots, misses, **options)
    return slots, misses[:num_misses].tolist()


def serve(cache: ExpertCache, layer: int, *experts: int) -> None:
    """Do a whole step: acquire, fill, release."""
    slots, misses = acquire(cache, layer, list(experts))
    for index in misses:
        cache.publish(int(slots[index]))
    cache.release(slots)


def resident(cache: ExpertCache, layer: int = 0) -> list[int]:
    """Return a layer's resident experts."""
    return np.flatnonzero(cache.slot_table[layer] >= 0).tolist()


def test_a_miss_claims_a_slot_and_publish_makes_it_resident() -> None:
    """Until then the expert is in flight: no step may use it."""
    cache = ExpertCache(2, 4, 3)

    slots, misses = acquire(cache, 1, [2])

    assert misses == [0]
    assert cache.slot_table[1, 2] == -1
    assert cache.num_resident == 0
    cache.publish(int(slots[0]))
    assert cache.slot_table[1, 2] == slots[0]
    assert (cache.num_resident, cache.num_free) == (1, 2)
    cache.check()


def test_a_hit_is_leased_where_it_is() -> None:
    """No miss is reported."""
    cache = ExpertCache(1, 4, 3)
    serve(cache, 0, 2)

    slots, misses = acquire(cache, 0, [2])

    assert misses == []
    assert slots[0] == cache.slot_table[0, 2]
    assert (cache.profiler.num_hits, cache.profiler.num_misses) == (1, 1)


def test_release_twice_is_an_error_that_changes_nothing() -> None:
    """The leases of the other slots stay."""
    cache = ExpertCache(1, 4, 4)
    slots, _ = acquire(cache, 0, [0, 1])
    for slot in slots:
        cache.publish(int(slot))
    cache.release(slots[:1])

    with pytest.raises(ValueError, match=f"slot {slots[0]} is not leased; was it released twice"):
        cache.release(slots[::-1].copy())

    cache.release(slots[1:])
    cache.check()


@pytest.mark.parametrize("slot", [-2, 4])
def test_releasing_a_slot_that_does_not_exist_is_an_error(slot: int) -> None:
    """-1 alone is passed over."""
    cache = ExpertCache(1, 4, 4)

    cache.release(np.array([-1], np.int32))
    with pytest.raises(ValueError, match=rf"slot {slot} is not in \[0, 4\)"):
        cache.release(np.array([slot], np.int32))


@pytest.mark.parametrize(("verb", "done"), [("publish", "published"), ("abandon", "abandoned")])
def test_a_slot_is_filled_or_given_back_once(verb: str, done: str) -> None:
    """Twice, or without a claim, is an error that names the slot."""
    cache = ExpertCache(1, 4, 4)
    slot = cache.claim(0, 0)
    getattr(cache, verb)(slot)

    with pytest.raises(ValueError, match=f"slot {slot} cannot be {done}: it is not claimed"):
        getattr(cache, verb)(slot)
    with pytest.raises(ValueError, match=r"slot 4 is not in \[0, 4\)"):
        getattr(cache, verb)(4)
    cache.check()


def test_an_abandoned_slot_is_free_once_its_leases_end() -> None:
    """Its expert is neither resident nor in flight, and can be claimed anew."""
    cache = ExpertCache(1, 4, 2, policy="lru")
    slots, _ = acquire(cache, 0, [0])

    cache.abandon(int(slots[0]))

    assert (cache.num_free, cache.num_resident) == (1, 0)
    with pytest.raises(CapacityError):
        acquire(cache, 0, [1, 2])
    again, misses = acquire(cache, 0, [0])
    assert misses == [0]
    assert again[0] != slots[0]
    cache.release(slots)
    assert cache.num_free == 1
    cache.check()


def test_an_abandoned_prefetch_is_free_at_once() -> None:
    """No step leased it."""
    cache = ExpertCache(1, 4, 2)

    cache.abandon(cache.claim(0, 0))

    assert cache.num_free == 2
    cache.check()


def test_a_slot_released_before_it_is_published_is_held_until_then() -> None:
    """No other load may fill it meanwhile."""
    cache = ExpertCache(1, 4, 1)
    slots, _ = acquire(cache, 0, [0])
    cache.release(slots)

    with pytest.raises(CapacityError):
        acquire(cache, 0, [1])
    cache.publish(int(slots[0]))
    assert acquire(cache, 0, [1])[1] == [0]


def test_evictions_are_counted() -> None:
    """To take a free slot is no eviction."""
    cache = ExpertCache(1, 8, 2, policy="lru")

    for expert in range(5):
        serve(cache, 0, expert)

    assert cache.num_evictions == 3
    assert resident(cache) == [3, 4]


def test_there_are_never_more_slots_than_experts() -> None:
    """More could not be used."""
    assert ExpertCache(2, 3, 100).capacity == 6


def test_slots_are_within_the_capacity_and_distinct() -> None:
    """They index the slabs."""
    cache = ExpertCache(2, 8, 10, policy="lru")

    first, _ = acquire(cache, 0, np.arange(5))
    second, _ = acquire(cache, 1, np.arange(5))

    assert sorted([*first.tolist(), *second.tolist()]) == list(range(10))


def test_the_mask_has_a_bit_for_each_of_513_experts() -> None:
    """Nine words, and the last bit is alone in its own."""
    cache = ExpertCache(2, 513, 8)
    serve(cache, 1, 0, 63, 64, 256, 512)

    mask = cache.resident_mask(1)

    assert mask.dtype == np.uint64
    assert mask.tolist() == [1 << 63 | 1, 1, 0, 0, 1, 0, 0, 0, 1]
    assert not cache.resident_mask(0).any()
    cache.check()


def test_all_resident_looks_without_leasing_or_counting() -> None:
    """An expert in flight is not resident."""
    cache = ExpertCache(1, 4, 4)
    serve(cache, 0, 0, 1)
    cache.claim(0, 2)

    assert cache.all_resident(0, np.array([[0, 1], [1, 0]]))
    assert not cache.all_resident(0, [0, 2])
    assert cache.all_resident(0, [])
    assert cache.profiler.num_hits == 0
    with pytest.raises(ValueError, match="expert 4 is not in"):
        cache.all_resident(0, [4])


def test_acquire_refuses_an_unknown_layer() -> None:
    """So does everything that takes one."""
    cache = ExpertCache(2, 4, 4)

    for call in (
        lambda: acquire(cache, 2, [0]),
        lambda: cache.claim(2, 0),
        lambda: cache.pin(2, 0),
        lambda: cache.resident_mask(2),
        lambda: cache.fair_share(2),
        lambda: cache.all_resident(2, [0]),
    ):
        with pytest.raises(ValueError, match=r"layer 2 is not in \[0, 2\)"):
            call()


@pytest.mark.parametrize(
    ("numbers", "options", "message"),
    [
        ((0, 4, 4), {}, "at least 1, got 0, 4 and 4"),
        ((2, 4, 0), {}, "at least 1, got 2, 4 and 0"),
        ((2, 4, 4), {"policy": "mru"}, "policy 'mru' is not one of .*lru"),
        ((2, 4, 4), {"scope": "expert"}, "scope 'expert' is not one of global, layer"),
        ((4, 4, 3), {"scope": "layer"}, "3 slots cannot be split over 4 layers"),
        ((2, 4, 4), {"profiler": AccessProfiler(2, 5)}, "profiler is for 2 x 5 experts"),
        ((2**16, 2**15, 4), {}, "are more than 1073741820"),
    ],
)
def test_arguments_that_cannot_be_used_are_config_errors(
    numbers: tuple[int, int, int], options: dict[str, Any], message: str
) -> None:
    """The message names what was asked."""
    with pytest.raises(ConfigError, match=message):
        ExpertCache(*numbers, **options)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_manages_with_a_single_slot(policy: str) -> None:
    """Each expert replaces the one before."""
    cache = ExpertCache(2, 4, 1, policy=policy)

    for layer, expert in ((0, 0), (1, 3), (0, 0), (0, 2)):
        serve(cache, layer, expert)
        assert cache.slot_table[layer, expert] == 0
        cache.check()

    assert cache.policy == policy
    assert cache.num_evictions == 3


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_states_say_what_becomes_of_each_expert(scope: str) -> None:
    """Resident 1, being read 2, leased 4, pinned 8; what is evicted or abandoned is 0."""
    cache = ExpertCache(2, 4, 6, policy="lru", scope=scope)
    serve(cache, 0, 0, 1, 2)
    serve(cache, 0, 3)
    assert cache.pin(0, 3)

    slots, _ = acquire(cache, 1, [1, 2])
    cache.publish(int(slots[0]))

    kept = int(scope == "global")
    assert cache.expert_states().tolist() == [[kept, 1, 1, 9], [0, 5, 6, 0]]
    cache.abandon(int(slots[1]))
    cache.release(slots)
    assert cache.expert_states()[1].tolist() == [0, 1, 0, 0]
