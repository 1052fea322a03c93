"""SLRU, one rule at a time."""

import numpy as np
import numpy.typing as npt
import pytest

from moecache._slru import SlruCache

NUM_KEYS = 16


def make(
    probationary: int,
    protected: int,
    *,
    counts: npt.NDArray[np.uint64] | None = None,
    strict: bool = False,
    admitted: tuple[int, ...] = (),
    promoted: tuple[int, ...] = (),
) -> SlruCache:
    """Return a cache after some admissions and then some promotions."""
    cache = SlruCache(probationary, protected, num_keys=NUM_KEYS, counts=counts, strict=strict)
    for key in admitted:
        cache.admit(key)
    for key in promoted:
        cache.touch(key)
    return cache


def segments(cache: SlruCache) -> tuple[list[int], list[int]]:
    """Return both segments."""
    return cache.probationary_keys(), cache.protected_keys()


def test_a_new_key_goes_to_the_probationary_head() -> None:
    """The most recent comes first."""
    cache = make(2, 2, admitted=(0, 1))

    assert segments(cache) == ([1, 0], [])
    assert len(cache) == 2
    assert 0 in cache
    assert 5 not in cache


def test_a_touch_promotes_a_probationary_key() -> None:
    """It becomes the protected head."""
    cache = make(2, 2, admitted=(0, 1))

    assert cache.touch(0) is True

    assert segments(cache) == ([1], [0])


def test_a_touch_moves_a_protected_key_to_the_head() -> None:
    """It stays protected."""
    cache = make(2, 2, admitted=(0, 1), promoted=(0, 1))
    assert segments(cache) == ([], [1, 0])

    cache.touch(0)

    assert segments(cache) == ([], [0, 1])


def test_a_touch_of_an_absent_key_admits_nothing() -> None:
    """It returns False."""
    cache = make(2, 2)

    assert cache.touch(3) is False
    assert len(cache) == 0


def test_admitting_a_resident_key_is_a_touch() -> None:
    """It promotes the key and evicts none."""
    cache = make(1, 1, admitted=(0, 1))

    assert cache.admit(0) == -1
    assert segments(cache) == ([1], [0])


def test_a_full_protected_segment_demotes_its_tail_to_the_probationary_head() -> None:
    """The demoted key counts as newer than the keys that are on probation already."""
    cache = make(2, 2, admitted=(0, 1, 2, 3), promoted=(0, 1))

    cache.touch(2)

    assert segments(cache) == ([0, 3], [2, 1])
    assert cache.admit(4) == 3


def test_demotion_passes_over_pinned_keys() -> None:
    """The tail-most unpinned key is demoted."""
    cache = make(2, 2, admitted=(0, 1, 2), promoted=(0, 1))
    cache.pin(0)

    cache.touch(2)

    assert segments(cache) == ([1], [2, 0])


def test_a_touch_refreshes_recency_when_all_protected_keys_are_pinned() -> None:
    """No key can be demoted, so the touched one stays on probation, as its head."""
    cache = make(2, 1, admitted=(0, 1, 2))
    cache.pin(0)

    assert cache.touch(1)

    assert segments(cache) == ([1, 2], [0])


def test_elastic_probation_uses_the_room_of_the_protected_segment() -> None:
    """By default a key leaves only once the whole cache is full."""
    cache = make(1, 3)

    assert [cache.admit(key) for key in (0, 1, 2, 3)] == [-1] * 4
    assert cache.admit(4) == 0
    assert not cache.strict


def test_strict_probation_evicts_as_soon_as_it_overflows() -> None:
    """Room in the protected segment does not help."""
    cache = make(1, 3, strict=True)

    assert [cache.admit(key) for key in (0, 1, 2)] == [-1, 0, 1]
    assert cache.strict


def test_elastic_probation_gives_room_back_as_keys_are_protected() -> None:
    """A promotion moves a key and evicts none."""
    cache = make(1, 3, admitted=(0, 1, 2, 3), promoted=(0, 1, 2))

    assert segments(cache) == ([3], [2, 1, 0])
    assert cache.admit(4) == 3


def test_the_oldest_probationary_key_leaves() -> None:
    """Protected keys stay, however old."""
    cache = make(2, 1, admitted=(0, 1, 2), promoted=(0,))

    assert cache.admit(3) == 1
    assert cache.admit(4) == 2


def test_with_counts_the_least_accessed_leaves() -> None:
    """Age decides only between equals."""
    counts = np.zeros(NUM_KEYS, np.uint64)
    counts[:3] = [5, 3, 4]
    cache = make(2, 1, counts=counts, admitted=(0, 1, 2))

    assert cache.admit(3) == 1


def test_equal_counts_evict_the_older() -> None:
    """The order of admission breaks the tie."""
    counts = np.zeros(NUM_KEYS, np.uint64)
    counts[:3] = [5, 3, 3]
    cache = make(2, 1, counts=counts, admitted=(0, 2, 1))

    assert cache.admit(3) == 2


def test_a_demoted_key_ties_as_the_newest() -> None:
    """Its place on probation counts from its demotion."""
    counts = np.ones(NUM_KEYS, np.uint64)
    cache = make(2, 1, counts=counts, admitted=(0,), promoted=(0,))
    for key in (1, 2, 1):
        cache.admit(key)
    assert segments(cache) == ([0, 2], [1])

    assert cache.admit(3) == 2


def test_a_promoted_key_is_more_recent_than_the_one_it_demotes() -> None:
    """`keys` has the one that was just used first."""
    cache = make(2, 1, admitted=(0, 1), promoted=(0, 1))

    assert segments(cache) == ([0], [1])
    assert cache.keys() == [1, 0]


def test_the_key_just_admitted_never_leaves() -> None:
    """Not even as the least accessed."""
    counts = np.zeros(NUM_KEYS, np.uint64)
    counts[:3] = 9
    cache = make(2, 1, counts=counts, admitted=(0, 1, 2))

    assert cache.admit(3) == 0
    assert 3 in cache


def test_counts_are_read_when_a_key_enters_probation() -> None:
    """Later changes count from the key's next access on."""
    counts = np.zeros(NUM_KEYS, np.uint64)
    counts[:3] = [1, 2, 3]
    cache = make(2, 1, counts=counts, admitted=(0, 1, 2))
    counts[0] = 99

    assert cache.admit(3) == 0


def test_counts_may_be_a_table_of_layers() -> None:
    """The profiler's [L, E] view is taken as it is, read-only too."""
    counts = np.zeros((4, 4), np.uint64)
    counts[0, 1] = 7
    counts.flags.writeable = False
    cache = make(1, 1, counts=counts, admitted=(1, 2))

    assert cache.admit(3) == 2


def test_pin_moves_a_probationary_key_to_the_protected_head() -> None:
    """There it stays."""
    cache = make(2, 2, admitted=(0, 1, 2), promoted=(0,))

    assert cache.pin(1) is True

    assert segments(cache) == ([2], [1, 0])
    assert cache.is_pinned(1)
    assert cache.num_pinned == 1


def test_a_pinned_key_is_never_evicted() -> None:
    """Whatever is admitted or promoted."""
    cache = make(1, 1, admitted=(0,))
    cache.pin(0)

    for key in range(1, NUM_KEYS):
        cache.admit(key)
        cache.touch(key)

    assert segments(cache) == ([NUM_KEYS - 1], [0])


def test_an_absent_key_is_not_pinned() -> None:
    """The call returns False."""
    cache = make(1, 1)

    assert cache.pin(3) is False
    assert cache.num_pinned == 0


def test_a_pin_demotes_when_the_protected_segment_is_full() -> None:
    """The tail-most unpinned key makes room."""
    cache = make(2, 1, admitted=(0, 1), promoted=(0,))

    assert cache.pin(1)

    assert segments(cache) == ([0], [1])


def test_a_pin_that_cannot_be_honoured_is_refused() -> None:
    """Pins never fill more than the protected segment."""
    cache = make(2, 1, admitted=(0, 1, 2))
    assert cache.pin(0)

    assert cache.pin(1) is False

    assert segments(cache) == ([2, 1], [0])
    assert cache.num_pinned == 1
    assert cache.admit(3) == 1


def test_an_unpinned_key_takes_its_place_by_recency() -> None:
    """A touch while it was pinned counts, the pin itself does not."""
    cache = make(1, 3, admitted=(0, 1, 2, 3), promoted=(0, 1, 2))
    cache.pin(0)
    cache.pin(1)
    cache.touch(0)
    cache.unpin(0)
    cache.unpin(1)

    assert segments(cache) == ([3], [0, 2, 1])


def test_discard_takes_out_pinned_keys_too() -> None:
    """Room for another pin is there again."""
    cache = make(2, 1, admitted=(0, 1))
    cache.pin(0)

    cache.discard(0)
    cache.discard(0)

    assert segments(cache) == ([1], [])
    assert cache.num_pinned == 0
    assert cache.pin(1)


def test_clear_forgets_everything_but_the_counts() -> None:
    """The counts belong to the caller."""
    counts = np.zeros(NUM_KEYS, np.uint64)
    counts[:4] = [4, 2, 3, 1]
    cache = make(2, 1, counts=counts, admitted=(0, 1, 2))
    cache.pin(0)

    cache.clear()

    assert segments(cache) == ([], [])
    assert (len(cache), cache.num_pinned) == (0, 0)
    assert [cache.admit(key) for key in (0, 1, 2, 4)] == [-1, -1, -1, 1]


def test_admission_goes_on_when_the_protected_segment_is_all_pins() -> None:
    """Probation is never pinned, so a victim is always found."""
    cache = make(1, 2, admitted=(0, 1, 2))
    assert cache.pin(0)
    assert cache.pin(1)

    assert cache.pin(2) is False
    assert cache.admit(3) == 2


@pytest.mark.parametrize(("probationary", "protected"), [(0, 1), (1, 0), (-1, 3)])
def test_segments_below_one_are_errors(probationary: int, protected: int) -> None:
    """The message names both figures."""
    with pytest.raises(ValueError, match=f"at least 1 key, got {probationary} and {protected}"):
        make(probationary, protected)


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        (np.zeros(15, np.uint64), "15 of uint64"),
        (np.zeros(16, np.int64), "16 of int64"),
        (np.zeros(32, np.uint64)[::2], "16 of uint64"),
    ],
    ids=["size", "dtype", "stride"],
)
def test_unfit_counts_are_errors(counts: npt.NDArray[np.uint64], found: str) -> None:
    """The message says what is needed and what was found."""
    with pytest.raises(ValueError, match=f"16 contiguous uint64, got {found}"):
        make(1, 1, counts=counts)


@pytest.mark.parametrize("key", [-1, 16])
@pytest.mark.parametrize("call", ["touch", "admit", "discard", "pin", "unpin", "is_pinned"])
def test_a_key_out_of_range_is_named(call: str, key: int) -> None:
    """Every call refuses it."""
    with pytest.raises(ValueError, match=rf"key {key} is not in \[0, 16\)"):
        getattr(make(1, 1), call)(key)


def test_figures_are_those_it_was_made_with() -> None:
    """The capacity is the sum of the segments."""
    cache = make(2, 5)

    assert (cache.probationary, cache.protected, cache.capacity) == (2, 5, 7)
