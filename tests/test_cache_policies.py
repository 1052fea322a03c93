"""What ExpertCache asks of its policy: scopes, pins, prefetch claims, fair shares."""

import numpy as np
import pytest

from moecache.cache._cache import ExpertCache
from moecache.cache._profiler import AccessProfiler
from moecache.errors import CapacityError
from moecache.settings import POLICIES


def serve(cache: ExpertCache, layer: int, *experts: int) -> None:
    """Do a whole step per expert: acquire, fill, release."""
    for expert in experts:
        slots, misses = np.empty(1, np.int32), np.empty(1, np.int32)
        if cache.acquire(layer, [expert], slots, misses):
            cache.publish(int(slots[0]))
        cache.release(slots)


def lease(cache: ExpertCache, layer: int, *experts: int) -> None:
    """Acquire resident experts and keep them."""
    slots = np.empty(len(experts), np.int32)
    assert cache.acquire(layer, list(experts), slots, slots.copy()) == 0


def resident(cache: ExpertCache, layer: int = 0) -> list[int]:
    """Return a layer's resident experts."""
    return np.flatnonzero(cache.slot_table[layer] >= 0).tolist()


def test_global_scope_lets_layers_compete() -> None:
    """A busy layer may take every slot."""
    cache = ExpertCache(2, 4, 4, policy="lru")

    serve(cache, 1, 0)
    serve(cache, 0, 0, 1, 2, 3)

    assert resident(cache, 0) == [0, 1, 2, 3]
    assert resident(cache, 1) == []


def test_layer_scope_gives_each_layer_its_share() -> None:
    """The remainder goes to the first layers."""
    cache = ExpertCache(3, 4, 5, policy="lru", scope="layer")

    for layer in range(3):
        serve(cache, layer, 0, 1, 2, 3)

    assert [len(resident(cache, layer)) for layer in range(3)] == [2, 2, 1]
    assert [cache.fair_share(layer) for layer in range(3)] == [2, 2, 1]


def test_layer_scope_fails_by_the_layer_not_by_the_whole() -> None:
    """Free slots of another layer do not help."""
    cache = ExpertCache(2, 4, 4, policy="lru", scope="layer")
    slots = np.empty(3, np.int32)

    with pytest.raises(CapacityError, match="of 2 slots only 2 are free"):
        cache.acquire(0, [0, 1, 2], slots, slots.copy())
    assert cache.num_free == 4


def test_the_fair_share_is_the_same_for_all_layers_and_at_least_one() -> None:
    """With fewer slots than layers too."""
    assert ExpertCache(2, 8, 7, policy="lru").fair_share(0) == 3
    assert ExpertCache(8, 4, 2, policy="lru").fair_share(5) == 1


def test_experts_that_are_there_count_in_a_share() -> None:
    """A step of many tokens whose layer has its share admits no more."""
    cache = ExpertCache(2, 8, 6, policy="lru")
    serve(cache, 0, 0, 1)
    slots, misses = np.empty(4, np.int32), np.empty(4, np.int32)

    assert cache.acquire(0, [0, 1, 2, 3], slots, misses, share=3) == 2
    assert (slots >= 0).tolist() == [True, True, True, False]


def test_residents_that_a_step_does_not_use_do_not_count_in_its_share() -> None:
    """When the routing changes, a batch takes the place of what it no longer needs."""
    cache = ExpertCache(1, 8, 3, policy="lru")
    serve(cache, 0, 0, 1, 2)
    slots, misses = np.empty(3, np.int32), np.empty(3, np.int32)

    assert cache.acquire(0, [5, 6, 7], slots, misses, share=3) == 3
    assert (slots >= 0).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_expert_stays(policy: str) -> None:
    """Until it is unpinned."""
    cache = ExpertCache(1, 16, 4, policy=policy)
    serve(cache, 0, 0)
    assert cache.pin(0, 0)
    assert cache.is_pinned(0, 0)

    serve(cache, 0, *list(range(1, 16)) * 3)
    assert 0 in resident(cache)
    cache.check()
    cache.unpin(0, 0)
    assert not cache.is_pinned(0, 0)
    # Used once more: the latest key leaves first by some policies, the oldest by others.
    serve(cache, 0, 0)
    serve(cache, 0, *[e for e in range(1, 16) for _ in range(3)] * 3)

    assert 0 not in resident(cache)


def test_only_resident_experts_are_pinned() -> None:
    """Neither an absent expert nor one in flight can be pinned."""
    cache = ExpertCache(1, 4, 4)
    cache.claim(0, 1)

    assert not cache.pin(0, 0)
    assert not cache.pin(0, 1)
    assert not cache.is_pinned(0, 1)


def test_slru_refuses_pins_beyond_the_protected_segment() -> None:
    """A quarter of the slots stays on probation."""
    cache = ExpertCache(1, 8, 4, policy="slru")
    serve(cache, 0, 0, 1, 2, 3)

    assert [cache.pin(0, expert) for expert in range(4)] == [True, True, True, False]
    serve(cache, 0, 4, 5)
    assert resident(cache) == [0, 1, 2, 5]


def test_pins_count_as_no_room() -> None:
    """When all is pinned every miss is a CapacityError."""
    cache = ExpertCache(1, 8, 2, policy="lru")
    serve(cache, 0, 0, 1)
    cache.pin(0, 0)
    cache.pin(0, 1)

    with pytest.raises(CapacityError, match=r"only 0 are free .*\(2 pinned, 0 in use\)"):
        serve(cache, 0, 2)
    assert cache.claim(0, 2) == -1


def test_a_claim_takes_a_free_slot() -> None:
    """And is neither a hit nor a miss, nor leased."""
    cache = ExpertCache(1, 4, 2)

    slot = cache.claim(0, 3)

    assert slot >= 0
    assert cache.profiler.counts.sum() == 0
    with pytest.raises(ValueError, match="not leased"):
        cache.release(np.array([slot], np.int32))
    cache.publish(slot)
    assert resident(cache) == [3]


def test_what_is_there_or_in_flight_is_not_claimed() -> None:
    """The claim returns -1."""
    cache = ExpertCache(1, 4, 4)
    serve(cache, 0, 0)
    cache.claim(0, 1)

    assert cache.claim(0, 0) == -1
    assert cache.claim(0, 1) == -1
    assert cache.num_free == 2


@pytest.mark.parametrize("policy", ["arc", "fifo", "lecar", "lru", "s3-fifo", "sieve", "slru"])
def test_recency_never_evicts_for_a_prefetch(policy: str) -> None:
    """Recency says nothing in favour of an expert that is not there."""
    cache = ExpertCache(1, 8, 2, policy=policy)
    serve(cache, 0, 7, 7, 7, 0, 1)

    assert cache.claim(0, 2) == -1
    assert cache.claim(0, 5) == -1
    assert cache.num_evictions == 1


@pytest.mark.parametrize("policy", ["lfu", "lrfu", "slru-lfu", "w-tinylfu"])
def test_a_claim_evicts_only_who_was_used_less(policy: str) -> None:
    """An expert that was used as often stays."""
    cache = ExpertCache(1, 8, 2, policy=policy)
    serve(cache, 0, 0, 0, 0, 2, 1)

    assert cache.claim(0, 2) == -1
    serve(cache, 0, 2, 3)
    cache.publish(cache.claim(0, 2))

    assert resident(cache) == [0, 2]


def test_lfru_claims_for_the_higher_score() -> None:
    """Its score is count over age, as of now: 2 / 4 does not beat 1 / 2, but 3 / 4 does."""
    equal = ExpertCache(1, 8, 1, policy="lfru")
    higher = ExpertCache(1, 8, 1, policy="lfru")
    serve(equal, 0, 2, 2, 1, 0)
    serve(higher, 0, 2, 2, 2, 1, 0)

    assert equal.claim(0, 2) == -1
    assert higher.claim(0, 2) == 0


def test_a_claim_does_not_count_as_a_use() -> None:
    """A prefetched expert that no step asked for is the first to leave."""
    cache = ExpertCache(1, 8, 2, policy="lfu")
    serve(cache, 0, 0)
    cache.publish(cache.claim(0, 1))

    serve(cache, 0, 2)

    assert resident(cache) == [0, 2]


def test_a_claim_is_recent() -> None:
    """Its expert is not the next victim of a policy that looks at recency."""
    cache = ExpertCache(1, 8, 2, policy="lru")
    serve(cache, 0, 0)
    cache.publish(cache.claim(0, 1))

    serve(cache, 0, 2)

    assert resident(cache) == [1, 2]


def test_a_claim_never_evicts_who_is_leased() -> None:
    """It stays however little it was used."""
    cache = ExpertCache(1, 8, 1, policy="lfu")
    serve(cache, 0, 2, 2, 2, 0)
    lease(cache, 0, 0)

    assert cache.claim(0, 2) == -1


def test_a_leased_expert_is_never_evicted() -> None:
    """Nor one in flight: only the third slot changes hands."""
    cache = ExpertCache(1, 16, 3, policy="lru")
    serve(cache, 0, 0)
    lease(cache, 0, 0)
    cache.claim(0, 1)

    serve(cache, 0, *range(2, 16))

    assert resident(cache) == [0, 15]


def test_leases_on_all_of_probation_cost_a_protected_expert() -> None:
    """The victim is the tail-most protected expert."""
    cache = ExpertCache(1, 8, 4, policy="slru")
    serve(cache, 0, 0, 1, 2, 0, 1, 2, 3)
    slots, misses = np.empty(2, np.int32), np.empty(2, np.int32)

    # A hit on 3 promotes it and demotes 0, which stays free to leave; 1 follows.
    assert cache.acquire(0, [3, 5], slots, misses) == 1
    assert resident(cache) == [1, 2, 3]
    assert cache.acquire(0, [6], slots[:1].copy(), misses) == 1
    assert resident(cache) == [2, 3]


def test_slru_lfu_evicts_by_the_profilers_counts() -> None:
    """What a shared profiler counted before decides too."""
    profiler = AccessProfiler(1, 8)
    for _ in range(5):
        profiler.record_hit(0, 0)
    cache = ExpertCache(1, 8, 4, policy="slru-lfu", profiler=profiler)

    serve(cache, 0, 0, 1, 2, 3, 4)

    assert cache.profiler is profiler
    assert resident(cache) == [0, 2, 3, 4]


def test_after_a_reset_slru_lfu_chooses_by_the_new_counts() -> None:
    """The old ones are forgotten by the policy as well."""
    profiler = AccessProfiler(1, 8)
    for _ in range(5):
        profiler.record_hit(0, 0)
    cache = ExpertCache(1, 8, 4, policy="slru-lfu", profiler=profiler)
    serve(cache, 0, 0, 1, 2, 3)

    profiler.reset()
    serve(cache, 0, 4)

    assert resident(cache) == [1, 2, 3, 4]


def test_after_a_reset_a_claim_chooses_by_the_new_counts() -> None:
    """Even if no step has missed since."""
    profiler = AccessProfiler(1, 8)
    for _ in range(5):
        profiler.record_hit(0, 0)
    cache = ExpertCache(1, 8, 4, policy="slru-lfu", profiler=profiler)
    serve(cache, 0, 0, 1, 2, 3)

    profiler.reset()
    for expert in (1, 2, 3, 5):
        profiler.record_hit(0, expert)
    cache.publish(cache.claim(0, 5))

    assert resident(cache) == [1, 2, 3, 5]


def test_lfu_does_not_count_what_was_bypassed() -> None:
    """The profiler does: it is an access all the same."""
    cache = ExpertCache(1, 8, 2, policy="lfu")
    serve(cache, 0, 0, 1)
    out = np.empty(1, np.int32)
    for _ in range(3):
        cache.acquire(0, [5], out, out.copy(), share=0)

    assert cache.profiler.access_count(0, 5) == 3
    assert cache.claim(0, 5) == -1


def test_beginning_a_sequence_changes_nothing_for_recency_and_counts() -> None:
    """Only policies that follow tokens take notice."""
    cache = ExpertCache(2, 4, 4, policy="lru", scope="layer")
    serve(cache, 0, 0, 1)

    cache.begin_sequence()

    assert resident(cache) == [0, 1]
    cache.check()
