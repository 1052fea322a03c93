"""ARC and LeCaR, one rule at a time."""

import math

import pytest

from moecache.errors import CapacityError
from moecache.policies._policy import LruCache, Policy
from moecache.policies.replayed._arc import ArcCache
from moecache.policies.replayed._lecar import LecarCache


def access(policy: Policy, keys: list[int]) -> list[int]:
    """Admit the keys in turn and return those that left."""
    return [left for left in map(policy.admit, keys) if left >= 0]


def test_arc_is_lru_until_a_key_is_used_again() -> None:
    """With nothing in T2 the oldest leaves."""
    policy = ArcCache(3, num_keys=8)

    assert access(policy, [0, 1, 2, 3, 4]) == [0, 1]


def test_arc_evicts_keys_used_once_before_those_used_again() -> None:
    """As long as the target is 0, T1 gives the victims."""
    policy = ArcCache(3, num_keys=8)

    assert access(policy, [0, 0, 1, 1, 2, 3, 4, 5]) == [2, 3, 4]
    assert sorted(policy.keys()) == [0, 1, 5]


def test_a_miss_on_b1_raises_the_target() -> None:
    """2 was evicted from T1 too early; T2 gives the victim, 0 the older one."""
    policy = ArcCache(3, num_keys=8)
    assert access(policy, [0, 0, 1, 1, 2, 3]) == [2]
    assert policy.recency_target == 0.0

    assert access(policy, [2]) == [0]
    assert policy.recency_target == 1.0


def test_a_miss_on_b2_lowers_the_target() -> None:
    """0 was evicted from T2 too early; T1 gives the victim again."""
    policy = ArcCache(3, num_keys=8)
    access(policy, [0, 0, 1, 1, 2, 3, 2])

    assert access(policy, [0]) == [3]
    assert policy.recency_target == 0.0


def test_the_target_moves_by_the_ratio_of_the_ghost_lists() -> None:
    """Two keys in B2 against one in B1 raise it by 2."""
    policy = ArcCache(6, num_keys=16)
    assert access(policy, [0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7]) == [3, 4]
    assert access(policy, [3, 4]) == [5, 0]
    assert policy.recency_target == 2.0
    # T1: 8 7 6, T2: 4 3 2, B1: 5, B2: 1 0
    assert access(policy, [8]) == [1]

    assert access(policy, [5]) == [2]
    assert policy.recency_target == 4.0


def test_the_target_stays_within_the_capacity() -> None:
    """However many misses on B1 there are."""
    policy = ArcCache(2, num_keys=8)
    for _ in range(20):
        access(policy, [0, 0, 1, 2, 1, 3, 2, 4, 3, 5, 4])
        assert 0.0 <= policy.recency_target <= 2.0


def test_a_ghost_comes_back_as_a_key_used_again() -> None:
    """In T2 it outlives the keys used once."""
    policy = ArcCache(3, num_keys=16)
    assert access(policy, [0, 0, 1, 2, 3]) == [1]
    assert access(policy, [1]) == [2]

    # T1 is as large as its target, 1, so that T2 gives one victim first: 0, not 1.
    assert access(policy, [4, 5, 6]) == [0, 3, 4]
    assert 1 in policy


def test_a_discarded_key_moves_no_target() -> None:
    """It is no ghost of ARC's, and in no history of LeCaR's."""
    arc, lecar = ArcCache(2, num_keys=8), LecarCache(2, num_keys=8)
    for policy in (arc, lecar):
        access(policy, [0, 0, 1])
        policy.discard(1)
        access(policy, [2, 1])

    assert arc.recency_target == 0.0
    assert lecar.weights == (0.5, 0.5)


def test_arc_falls_back_on_the_other_list() -> None:
    """If all of T1 is pinned, T2 gives the victim, and none is found when both are."""
    policy = ArcCache(2, num_keys=8)
    access(policy, [0, 0, 1])
    policy.pin(1)

    assert access(policy, [2]) == [0]
    policy.pin(2)
    with pytest.raises(CapacityError, match="all 2 keys are pinned"):
        policy.admit(3)


def test_arc_resists_a_scan() -> None:
    """Keys used twice survive a hundred used once; LRU keeps none of them."""
    arc, lru = ArcCache(8, num_keys=120), LruCache(8, num_keys=120)
    for policy in (arc, lru):
        access(policy, [0, 1, 2, 3] * 2 + list(range(10, 110)))

    assert {0, 1, 2, 3} <= set(arc.keys())
    assert not {0, 1, 2, 3} & set(lru.keys())


def lecar_after_eviction() -> LecarCache:
    """Return a cache in which LRU would evict 0, which is used often, and LFU 3."""
    policy = LecarCache(4, num_keys=16)
    access(policy, [0, 0, 0, 1, 1, 2, 2, 3])
    return policy


def test_lecar_draws_an_expert_by_weight() -> None:
    """The first draw of seed 0 is 0.88, above LRU's half: LFU decides."""
    policy = lecar_after_eviction()

    assert policy.weights == (0.5, 0.5)
    assert access(policy, [4]) == [3]


def test_a_miss_on_a_history_moves_weight_to_the_other_expert() -> None:
    """LFU evicted 3, which is missed one access later."""
    policy = lecar_after_eviction()
    access(policy, [4])

    access(policy, [3])

    gain = math.exp(0.45 * policy.discount_rate)
    lru, lfu = policy.weights
    assert policy.discount_rate == pytest.approx(0.005 ** (1 / 4))
    assert lru == pytest.approx(0.5 * gain / (0.5 * gain + 0.5))
    assert lru + lfu == pytest.approx(1.0)


def test_regret_fades_with_the_accesses_since() -> None:
    """Three accesses later it is the discount rate to the fourth power."""
    policy = lecar_after_eviction()
    access(policy, [4, 0, 1, 2])

    access(policy, [3])

    gain = math.exp(0.45 * policy.discount_rate**4)
    assert policy.weights[0] == pytest.approx(gain / (gain + 1.0))


def test_a_weight_is_never_below_a_hundredth() -> None:
    """So that an expert can win trust back."""
    policy = LecarCache(8, num_keys=64, learning_rate=50.0)
    for turn in range(300):
        policy.admit((turn * 7) % 20)

    assert min(policy.weights) >= 0.01 - 1e-12


def test_lecar_decides_the_same_on_every_run() -> None:
    """And otherwise with another seed."""
    trace = [(turn * turn) % 61 % 24 for turn in range(2000)]
    runs = [access(LecarCache(8, num_keys=24, seed=seed), trace) for seed in (0, 0, 1)]

    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_clear_starts_the_draws_anew() -> None:
    """A cleared cache decides as it did the first time."""
    trace = [(turn * turn) % 61 % 24 for turn in range(500)]
    policy = LecarCache(8, num_keys=24)
    first = access(policy, trace)

    policy.clear()

    assert access(policy, trace) == first


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("learning_rate", 0.0, "learning_rate must be above 0, got 0.0"),
        ("discount_rate", 1.5, r"discount_rate must be in \(0, 1\], got 1.5"),
    ],
)
def test_lecar_refuses_a_rate_out_of_range(option: str, value: float, message: str) -> None:
    """The message names the option and the figure."""
    with pytest.raises(ValueError, match=message):
        LecarCache(4, num_keys=8, **{option: value})
