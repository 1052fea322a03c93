"""LRFU and Least-Stale, one rule at a time; a cache tells them of layers."""

import random

import numpy as np
import pytest

from moecache.cache._cache import ExpertCache
from moecache.policies._lfu import LfuCache
from moecache.policies._policy import LruCache, Policy
from moecache.policies.replayed._lrfu import LrfuCache
from moecache.policies.replayed._stale import LeastStaleCache


def access(policy: Policy, keys: list[int]) -> list[int]:
    """Admit the keys in turn and return those that left."""
    return [left for left in map(policy.admit, keys) if left >= 0]


def serve(cache: ExpertCache, layer: int, *experts: int) -> None:
    """Do a whole step: acquire, fill, release."""
    slots, misses = np.empty((2, len(experts)), np.int32)
    for index in misses[: cache.acquire(layer, list(experts), slots, misses)].tolist():
        cache.publish(int(slots[index]))
    cache.release(slots)


def resident(cache: ExpertCache, layer: int = 0) -> list[int]:
    """Return a layer's resident experts."""
    return np.flatnonzero(cache.slot_table[layer] >= 0).tolist()


@pytest.mark.parametrize(("half_life", "kind"), [(float("inf"), LfuCache), (1e-2, LruCache)])
def test_lrfu_lies_between_lfu_and_lru(half_life: float, kind: type[LfuCache | LruCache]) -> None:
    """Without decay and with a very short half-life it is one of them."""
    rng = random.Random(3)
    trace = [int(40 * rng.random() ** 2) for _ in range(3000)]

    policy = LrfuCache(12, num_keys=40, half_life=half_life)

    assert access(policy, trace) == access(kind(12, num_keys=40), trace)


def test_lrfu_evicts_the_lowest_decayed_count() -> None:
    """The count is the sum over a key's uses of what each is worth by then."""
    rng = random.Random(4)
    policy = LrfuCache(10, num_keys=30, half_life=17.0)
    uses: dict[int, list[int]] = {key: [] for key in range(30)}

    def worth(key: int, now: int) -> float:
        return sum(0.5 ** ((now - then) / 17.0) for then in uses[key])

    for now in range(2000):
        key = int(30 * rng.random() ** 2)
        before = policy.keys()
        evicted = policy.admit(key)
        if evicted >= 0:
            lowest = min(worth(other, now) for other in before)
            assert worth(evicted, now) == pytest.approx(lowest, rel=1e-9)
        uses[key].append(now)


def test_lrfu_measures_time_in_tokens() -> None:
    """Two uses are worth less than one after 128 tokens, however many layers they visit."""
    one_layer, two_layers = ExpertCache(1, 8, 3, policy="lrfu"), ExpertCache(2, 8, 3, policy="lrfu")
    for cache in (one_layer, two_layers):
        serve(cache, 0, 0)
        serve(cache, 0, 0)
    for _ in range(130):
        serve(one_layer, 0, 1)
    for _ in range(65):
        serve(two_layers, 0, 1)
        serve(two_layers, 1, 1)
    two_layers.check()
    assert resident(two_layers) == [0, 1]

    # Expert 2 takes the last slot of the one cache; of the other, the slot of the expert that
    # 65 tokens devalued less.
    serve(one_layer, 0, 2)
    serve(one_layer, 0, 3)
    serve(two_layers, 0, 2)

    assert resident(one_layer) == [1, 2, 3]
    assert resident(two_layers, 0) == [1, 2]


def test_lrfu_counts_survive_eviction() -> None:
    """A key that comes back is as valuable as it was, less what time took."""
    policy = LrfuCache(2, num_keys=8, half_life=100.0)

    assert access(policy, [0, 0, 0, 1, 2]) == [1]
    policy.discard(0)
    assert access(policy, [0, 1]) == [2]


@pytest.mark.parametrize("half_life", [0.0, -1.0, float("nan")])
def test_lrfu_needs_a_half_life(half_life: float) -> None:
    """Above 0 tokens."""
    with pytest.raises(ValueError, match="half_life must be above 0 tokens, got"):
        LrfuCache(4, num_keys=8, half_life=half_life)


def test_least_stale_without_steps_is_lru() -> None:
    """Nothing is known of layers then."""
    rng = random.Random(6)
    trace = [int(40 * rng.random() ** 2) for _ in range(1000)]

    policy = LeastStaleCache(12, num_keys=40, num_experts=10)

    assert access(policy, trace) == access(LruCache(12, num_keys=40), trace)


def test_what_a_pass_has_left_behind_leaves_first() -> None:
    """Not the least recently used expert, whose layer is still to come."""
    cache = ExpertCache(3, 4, 4, policy="least-stale")
    serve(cache, 2, 3)
    serve(cache, 0, 0)
    serve(cache, 1, 1)
    serve(cache, 2, 2)

    # A new pass: of layer 0 only expert 0 is stale, although layer 2's expert 3 is older.
    serve(cache, 0, 1)

    assert [resident(cache, layer) for layer in range(3)] == [[1], [1], [2, 3]]


def test_a_current_expert_leaves_before_one_of_a_layer_to_come() -> None:
    """So this pass misses no expert that it evicted."""
    cache = ExpertCache(3, 4, 3, policy="least-stale")
    for layer in range(3):
        serve(cache, layer, 0)
    serve(cache, 0, 0)

    serve(cache, 1, 1)
    assert [resident(cache, layer) for layer in range(3)] == [[0], [1], [0]]
    serve(cache, 1, 2)

    assert [resident(cache, layer) for layer in range(3)] == [[], [1, 2], [0]]


def test_of_layers_to_come_the_last_gives_the_victim() -> None:
    """Its experts wait for longest; there is no other key to evict."""
    cache = ExpertCache(3, 4, 3, policy="least-stale")
    serve(cache, 0, 0)
    serve(cache, 1, 0)
    serve(cache, 2, 0)

    serve(cache, 0, 1)
    serve(cache, 0, 1, 2)

    assert [resident(cache, layer) for layer in range(3)] == [[1, 2], [0], []]


def test_a_prefetched_expert_stays_until_its_layer_is_done() -> None:
    """Then, not used, it is the first to leave."""
    cache = ExpertCache(2, 4, 3, policy="least-stale")
    serve(cache, 0, 0)
    cache.publish(cache.claim(1, 3))
    serve(cache, 0, 0)
    serve(cache, 1, 0)
    assert resident(cache, 1) == [0, 3]

    serve(cache, 1, 1)

    assert resident(cache, 1) == [0, 1]


def test_a_prefetch_takes_the_slot_of_a_stale_expert_only() -> None:
    """Of one whose layer is done."""
    cache = ExpertCache(2, 4, 3, policy="least-stale")
    serve(cache, 0, 0, 1)
    serve(cache, 1, 0)
    assert cache.claim(1, 1) == -1
    serve(cache, 0, 0)

    cache.publish(cache.claim(1, 1))

    assert [resident(cache, layer) for layer in range(2)] == [[0], [0, 1]]
    assert cache.claim(1, 2) == -1


def test_with_a_policy_per_layer_a_layer_is_a_pass() -> None:
    """Whichever layer it is."""
    cache = ExpertCache(2, 8, 6, policy="least-stale", scope="layer")
    for layer in range(2):
        serve(cache, layer, 0, 1, 2)
        serve(cache, layer, 0)
        serve(cache, layer, 3)

    assert [resident(cache, layer) for layer in range(2)] == [[0, 2, 3], [0, 2, 3]]


@pytest.mark.parametrize("num_experts", [0, -3])
def test_least_stale_needs_an_expert_per_layer(num_experts: int) -> None:
    """At least one."""
    with pytest.raises(ValueError, match=f"num_experts must be at least 1, got {num_experts}"):
        LeastStaleCache(2, num_keys=8, num_experts=num_experts)
