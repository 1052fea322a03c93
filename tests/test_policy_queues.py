"""FIFO, SIEVE, S3-FIFO and W-TinyLFU, one rule at a time."""

import random
from typing import Any

import pytest

from moecache.policies._policy import LruCache, Policy
from moecache.policies.replayed._arc import ArcCache
from moecache.policies.replayed._fifo import FifoCache, S3FifoCache, SieveCache
from moecache.policies.replayed._tinylfu import WTinyLfuCache


def access(policy: Policy, keys: list[int]) -> list[int]:
    """Admit the keys in turn and return those that left."""
    return [left for left in map(policy.admit, keys) if left >= 0]


def scan_hits(policy: Policy) -> int:
    """Return the hits on 10 hot keys, a cold key that never returns after each of them."""
    rng = random.Random(5)
    cold = iter(range(10, policy.num_keys))
    hits = 0
    for _ in range(400):
        key = rng.randrange(10)
        hits += key in policy
        access(policy, [key, next(cold)])
    return hits


@pytest.mark.parametrize("kind", [ArcCache, S3FifoCache, WTinyLfuCache])
def test_a_scan_does_not_flush_the_hot_keys(kind: Any) -> None:
    """While LRU misses four in ten."""
    assert scan_hits(LruCache(14, num_keys=410)) < 240
    assert scan_hits(kind(14, num_keys=410)) > 330


def test_fifo_evicts_in_the_order_of_admission() -> None:
    """Uses play no part."""
    policy = FifoCache(3, num_keys=8)

    assert access(policy, [0, 1, 2, 0, 0, 3, 4]) == [0, 1]
    assert policy.keys() == [4, 3, 2]


def test_a_pinned_key_keeps_its_place_in_the_queue() -> None:
    """It is the next to leave once it is unpinned."""
    policy = FifoCache(3, num_keys=8)
    access(policy, [0, 1, 2])
    policy.pin(0)

    assert access(policy, [3]) == [1]
    policy.unpin(0)
    assert access(policy, [4]) == [0]


def test_sieve_keeps_a_visited_key_and_its_place() -> None:
    """The hand clears the mark of 0 and goes on from there, past the newer keys."""
    policy = SieveCache(3, num_keys=8)

    # 0 is spared for its use; then the hand stands at 2, and 3 is behind it.
    assert access(policy, [0, 1, 2, 0, 3]) == [1]
    assert access(policy, [4]) == [2]
    assert access(policy, [5]) == [3]


def test_sieve_returns_to_the_oldest_key() -> None:
    """Having cleared every mark, the hand finds the oldest without one."""
    policy = SieveCache(3, num_keys=8)

    assert access(policy, [0, 1, 2, 0, 1, 2, 3]) == [0]
    assert access(policy, [4, 5]) == [1, 2]


def test_sieve_follows_the_example_of_its_paper() -> None:
    """A, B, ..., G in a queue of seven, of which A, B and G were visited."""
    policy = SieveCache(7, num_keys=12)
    a, b, c, d, e, f, g, h, i, j = range(10)
    access(policy, [g, f, e, d, c, b, a, a, b, g])

    assert access(policy, [h]) == [f]
    access(policy, [a, d])
    assert access(policy, [i]) == [e]
    access(policy, [b])
    assert access(policy, [j]) == [c]


def test_the_hand_moves_on_when_its_key_is_discarded() -> None:
    """Also when it is the newest."""
    policy = SieveCache(3, num_keys=8)
    access(policy, [0, 1, 2, 0, 1, 3])  # evicts 2: the hand is at 3
    policy.discard(3)

    assert access(policy, [4, 5]) == [0]


def test_s3_fifo_demotes_one_hit_wonders_quickly() -> None:
    """Keys used once pass through the small queue while the main one stays."""
    policy = S3FifoCache(10, num_keys=100)
    assert (policy.small, policy.main) == (1, 9)
    # Used twice more, 0 to 8 move on to the main queue when room is wanted.
    access(policy, [key for key in range(9) for _ in range(3)])

    assert access(policy, list(range(20, 40))) == list(range(20, 39))
    assert sorted(policy.keys()) == [*range(9), 39]


def test_one_use_does_not_take_a_key_to_the_main_queue() -> None:
    """Two do."""
    policy = S3FifoCache(4, num_keys=16)

    assert access(policy, [0, 0, 1, 1, 1, 2, 3, 4]) == [0]
    assert access(policy, [5]) == [2]


def test_a_ghost_enters_the_main_queue() -> None:
    """0 comes back, stays through a scan, and leaves when the main queue overflows."""
    policy = S3FifoCache(4, num_keys=16)
    assert access(policy, [0, 1, 2, 3, 4]) == [0]

    assert access(policy, [0]) == [1]
    assert access(policy, [5, 6, 7, 8]) == [2, 3, 4, 5]
    assert 0 in policy


def test_ghosts_are_as_many_as_the_main_queue_holds() -> None:
    """With two places for them the third eviction forgets the first key."""
    policy = S3FifoCache(3, num_keys=16, small_ratio=0.4)
    assert (policy.small, policy.main) == (1, 2)
    access(policy, [0, 1, 2, 3, 4, 5])  # ghosts: 1 and 2
    access(policy, [0])  # new: ghosts 2 and 3
    access(policy, [2])  # a ghost: in the main queue

    assert access(policy, [6, 7, 8]) == [5, 0, 6]
    assert 2 in policy


def test_a_key_that_comes_back_is_not_forgotten_for_its_own_victim() -> None:
    """The full list of ghosts makes room by giving up the key that returns."""
    policy = S3FifoCache(3, num_keys=16, small_ratio=0.4)
    access(policy, [0, 1, 2, 3, 4])  # ghosts: 0 and 1
    access(policy, [0])  # 2 becomes a ghost

    assert access(policy, [5, 6, 7]) == [3, 4, 5]
    assert 0 in policy


def test_a_discarded_key_is_no_ghost() -> None:
    """It comes back as a new one and is the first to leave."""
    policy = S3FifoCache(4, num_keys=16)
    access(policy, [0, 1, 2])
    policy.discard(0)

    assert access(policy, [3, 0, 4, 5, 6, 7]) == [1, 2, 3, 0]


def test_the_main_queue_gives_another_round_for_every_use() -> None:
    """At most three count."""
    policy = S3FifoCache(2, num_keys=16)
    access(policy, [0] * 9)  # on its way to the main queue
    access(policy, [1, 1, 1, 2])
    # 0 and 1 moved on without uses, and 0, the older, left.
    assert sorted(policy.keys()) == [1, 2]
    access(policy, [1] * 9)

    assert access(policy, [3]) == [2]


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1])
def test_s3_fifo_refuses_a_ratio_out_of_range(ratio: float) -> None:
    """The message names it."""
    with pytest.raises(ValueError, match=rf"small_ratio must be in \(0, 1\], got {ratio}"):
        S3FifoCache(4, num_keys=8, small_ratio=ratio)


def test_tinylfu_turns_away_who_is_counted_less() -> None:
    """A newcomer stays in the window until the next one comes, and loses the contest."""
    policy = WTinyLfuCache(4, num_keys=16)
    assert (policy.window, policy.protected) == (1, 2)
    access(policy, [0, 1, 2, 0, 1, 2, 3])

    assert access(policy, [4, 5, 6]) == [3, 4, 5]


def test_tinylfu_admits_who_is_counted_more() -> None:
    """Counts survive eviction: 3 wins when it has come three times."""
    policy = WTinyLfuCache(4, num_keys=16)
    access(policy, [0, 1, 2, 0, 1, 2])

    assert access(policy, [3, 4, 3, 5, 3]) == [3, 4, 3, 5]
    # 3 to 2 against 2, the only one on probation: 0 and 1 are protected.
    assert access(policy, [6]) == [2]
    assert 3 in policy


def test_tinylfu_gives_a_tie_to_who_is_there() -> None:
    """The candidate leaves."""
    policy = WTinyLfuCache(3, num_keys=16)

    assert access(policy, [0, 1, 2, 3]) == [2]


def test_tinylfu_halves_its_counts() -> None:
    """After ten times the capacity, an old favourite is worth half."""
    fresh, aged = WTinyLfuCache(2, num_keys=8), WTinyLfuCache(2, num_keys=8)
    access(fresh, [0, 1] + [0] * 12 + [2] * 5)
    access(aged, [0, 1] + [0] * 12 + [2] * 6)  # the 20th use halves: 0 has 6 and 2 has 3

    assert access(fresh, [2] * 4 + [3]) == [2]
    assert access(aged, [2] * 4 + [3]) == [0]


@pytest.mark.parametrize(
    ("option", "ratio", "range_"),
    [("window_ratio", 0.0, r"\(0, 1\]"), ("protected_ratio", 1.5, r"\[0, 1\]")],
)
def test_tinylfu_refuses_a_ratio_out_of_range(option: str, ratio: float, range_: str) -> None:
    """The message names the option and the figure."""
    with pytest.raises(ValueError, match=rf"{option} must be in {range_}, got {ratio}"):
        WTinyLfuCache(4, num_keys=8, **{option: ratio})
