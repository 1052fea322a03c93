"""LRU, LFU and LFRU, one rule at a time."""

import pytest

from moecache.errors import CapacityError
from moecache.policies._lfu import LfruCache, LfuCache
from moecache.policies._policy import LruCache, Policy

KINDS = (LruCache, LfuCache, LfruCache)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[LruCache | LfuCache]:
    """Return each of the policies."""
    chosen: type[LruCache | LfuCache] = request.param
    return chosen


def access(policy: Policy, keys: list[int]) -> list[int]:
    """Admit the keys in turn and return those that left."""
    return [left for left in map(policy.admit, keys) if left >= 0]


def test_a_new_policy_is_empty(kind: type[LruCache | LfuCache]) -> None:
    """Nothing is in it, and its figures are those it was made with."""
    policy = kind(3, num_keys=8)

    assert len(policy) == 0
    assert policy.keys() == []
    assert 0 not in policy
    assert (policy.capacity, policy.num_keys, policy.num_pinned) == (3, 8, 0)


def test_touch_says_whether_the_key_is_there(kind: type[LruCache | LfuCache]) -> None:
    """A touch of an absent key admits nothing."""
    policy = kind(3, num_keys=8)
    policy.admit(4)

    assert policy.touch(4) is True
    assert policy.touch(5) is False
    assert policy.keys() == [4]


def test_keys_are_in_order_of_recency(kind: type[LruCache | LfuCache]) -> None:
    """The most recently used key comes first."""
    policy = kind(3, num_keys=8)

    access(policy, [0, 1, 2, 0])

    assert policy.keys() == [0, 2, 1]


def test_nobody_leaves_before_the_cache_is_full(kind: type[LruCache | LfuCache]) -> None:
    """Admissions return -1 while there is room."""
    policy = kind(3, num_keys=8)

    assert [policy.admit(key) for key in (0, 1, 2)] == [-1, -1, -1]
    assert policy.admit(3) == 0


def test_admitting_a_resident_key_is_a_touch(kind: type[LruCache | LfuCache]) -> None:
    """It refreshes the key and evicts none."""
    policy = kind(2, num_keys=8)
    access(policy, [0, 1])

    assert policy.admit(0) == -1
    assert policy.keys() == [0, 1]
    assert policy.admit(2) == 1


def test_pinned_keys_are_passed_over(kind: type[LruCache | LfuCache]) -> None:
    """The next in line leaves instead."""
    policy = kind(2, num_keys=8)
    access(policy, [0, 1])

    assert policy.pin(0) is True
    assert policy.is_pinned(0)
    assert policy.num_pinned == 1
    assert policy.admit(2) == 1
    assert policy.admit(3) == 2


def test_an_absent_key_is_not_pinned(kind: type[LruCache | LfuCache]) -> None:
    """Pinning what is not there is refused."""
    policy = kind(2, num_keys=8)

    assert policy.pin(5) is False
    assert not policy.is_pinned(5)


def test_pinning_twice_counts_once(kind: type[LruCache | LfuCache]) -> None:
    """So does unpinning."""
    policy = kind(2, num_keys=8)
    policy.admit(0)

    assert policy.pin(0)
    assert policy.pin(0)
    assert policy.num_pinned == 1
    policy.unpin(0)
    policy.unpin(0)
    assert policy.num_pinned == 0


def test_an_unpinned_key_takes_its_place_by_recency(kind: type[LruCache | LfuCache]) -> None:
    """Having been pinned does not make a key young."""
    policy = kind(3, num_keys=8)
    access(policy, [0, 1, 2])
    policy.pin(1)
    policy.unpin(1)

    assert access(policy, [3, 4, 5]) == [0, 1, 2]


def test_a_touch_refreshes_a_pinned_key(kind: type[LruCache | LfuCache]) -> None:
    """Its recency counts once it is unpinned."""
    policy = kind(2, num_keys=8)
    access(policy, [0, 1])
    policy.pin(0)
    policy.touch(0)
    policy.unpin(0)

    assert policy.admit(2) == 1


def test_admit_fails_when_everything_is_pinned(kind: type[LruCache | LfuCache]) -> None:
    """The message names the key and the pins, and nothing changes."""
    policy = kind(2, num_keys=8)
    access(policy, [0, 1])
    policy.pin(0)
    policy.pin(1)

    with pytest.raises(CapacityError, match="cannot admit key 7: all 2 keys are pinned"):
        policy.admit(7)
    assert policy.keys() == [1, 0]
    assert policy.admit(1) == -1


def test_discard_takes_out_pinned_keys_too(kind: type[LruCache | LfuCache]) -> None:
    """Discarding an absent key does nothing."""
    policy = kind(2, num_keys=8)
    access(policy, [0, 1])
    policy.pin(0)

    policy.discard(0)
    policy.discard(0)
    policy.discard(5)

    assert policy.keys() == [1]
    assert policy.num_pinned == 0
    assert not policy.is_pinned(0)


def test_clear_forgets_everything(kind: type[LruCache | LfuCache]) -> None:
    """A cleared policy behaves like a new one."""
    policy = kind(2, num_keys=8)
    access(policy, [0, 0, 0, 1])
    policy.pin(0)

    policy.clear()

    assert (policy.keys(), policy.num_pinned) == ([], 0)
    assert access(policy, [0, 1, 2]) == [0]


@pytest.mark.parametrize("key", [-1, 8, 2**40, -(2**40)])
@pytest.mark.parametrize("call", ["touch", "admit", "discard", "pin", "unpin", "is_pinned"])
def test_a_key_out_of_range_is_named(kind: type[LruCache | LfuCache], call: str, key: int) -> None:
    """Every call refuses it."""
    policy = kind(2, num_keys=8)

    with pytest.raises(ValueError, match=rf"key {key} is not in \[0, 8\)"):
        getattr(policy, call)(key)


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_below_one_is_an_error(kind: type[LruCache | LfuCache], capacity: int) -> None:
    """The message names the figure."""
    with pytest.raises(ValueError, match=f"capacity must be at least 1, got {capacity}"):
        kind(capacity, num_keys=8)


def test_without_keys_there_is_no_policy(kind: type[LruCache | LfuCache]) -> None:
    """At least one key is needed."""
    with pytest.raises(ValueError, match="num_keys must be at least 1, got 0"):
        kind(1, num_keys=0)


def test_lru_evicts_the_least_recently_used() -> None:
    """How often a key was used plays no part."""
    policy = LruCache(2, num_keys=8)

    assert access(policy, [0, 0, 0, 1, 2, 3]) == [0, 1]


def test_lfu_evicts_the_least_often_used() -> None:
    """How recently plays no part."""
    policy = LfuCache(2, num_keys=8)

    assert access(policy, [0, 0, 0, 1, 2, 3]) == [1, 2]


def test_lfu_ties_go_to_the_least_recently_used() -> None:
    """Of equal counts the older leaves."""
    policy = LfuCache(3, num_keys=8)

    assert access(policy, [0, 1, 2, 1, 0, 2, 3]) == [1]


def test_lfu_counts_survive_eviction() -> None:
    """A key that comes back is as valuable as it was."""
    policy = LfuCache(2, num_keys=8)
    access(policy, [0, 0, 1, 1, 1, 2])
    assert policy.keys() == [2, 1]

    # 0 returns with its third use and ties with 1, which is older.
    assert access(policy, [0, 3]) == [2, 1]


def test_lfru_weighs_counts_by_age() -> None:
    """Two uses long ago are worth less than one just now, three recent ones more."""
    stale = LfruCache(3, num_keys=8)
    busy = LfruCache(2, num_keys=8)

    # 2 / 7 < 1 / 2 < 4 / 3
    assert access(stale, [0, 0, 2, 2, 2, 2, 1, 3]) == [0]
    # 1 / 2 < 3 / 3
    assert access(busy, [0, 0, 0, 1, 2]) == [1]


def test_lfru_ties_go_to_the_least_recently_used() -> None:
    """Two uses at age 4 are worth one at age 2: the older leaves."""
    policy = LfruCache(3, num_keys=8)

    assert access(policy, [2, 2, 2, 0, 0, 2, 1, 3]) == [0]


def test_lfru_counts_survive_eviction() -> None:
    """A key that comes back keeps its count."""
    policy = LfruCache(2, num_keys=8)
    assert access(policy, [0, 0, 0, 1, 1, 1, 1, 2, 0]) == [0, 2]

    # 4 / 2 and 4 / 4 rather than 1 / 2 and 4 / 4
    assert policy.admit(3) == 1


@pytest.mark.parametrize("kind", [LfuCache, LfruCache])
def test_every_key_may_have_a_count_of_its_own(kind: type[LfuCache]) -> None:
    """A cache of all keys needs room for one count more while a key moves on."""
    policy = kind(4, num_keys=4)
    access(policy, [0, 1, 1, 2, 2, 2, 3, 3, 3, 3])

    for key in (3, 3, 2, 1, 0, 3, 2, 1, 0) * 20:
        assert policy.touch(key)

    assert policy.keys() == [0, 1, 2, 3]
