"""ExpertCache.acquire, one rule at a time."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moecache.cache._cache import ExpertCache
from moecache.errors import CapacityError

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


def test_duplicates_are_one_access_and_one_lease() -> None:
    """A single release ends it."""
    cache = ExpertCache(1, 4, 3)

    slots, misses = acquire(cache, 0, [2, 1, 2, 2])

    assert slots[0] == slots[2] == slots[3] != slots[1]
    assert misses == [0, 1]
    assert cache.profiler.counts.tolist() == [[0, 1, 1, 0]]
    cache.release(slots)
    with pytest.raises(ValueError, match="not leased"):
        cache.release(slots)


def test_duplicate_hits_are_one_access_and_one_lease() -> None:
    """A single release ends it."""
    cache = ExpertCache(1, 4, 3)
    serve(cache, 0, 2)

    slots, _ = acquire(cache, 0, [2, 2, 2])

    assert cache.profiler.num_hits == 1
    cache.release(slots)
    with pytest.raises(ValueError, match="not leased"):
        cache.release(slots)


def test_the_most_used_missing_experts_come_first() -> None:
    """Ties stay in the order in which they first occur."""
    cache = ExpertCache(1, 8, 8)

    _, misses = acquire(cache, 0, [[5], [3], [4], [4], [3], [4], [7]])

    assert misses == [2, 1, 0, 6]


def test_an_expert_twice_in_a_row_is_used_once() -> None:
    """A row is one token: repeats that fill it up do not make an expert more wanted."""
    cache = ExpertCache(1, 8, 8)

    _, misses = acquire(cache, 0, [[5, 3, 3, 3], [4, 5, 3, 0], [5, 4, 0, 0]])

    assert misses == [0, 1, 4, 7]


def test_misses_are_claimed_then_joined_then_bypassed() -> None:
    """`misses_out` has a joined miss as its complement; a bypassed miss has no slot."""
    cache = ExpertCache(1, 8, 8)
    flying = cache.claim(0, 6)

    slots, misses = acquire(cache, 0, [[1, 6], [2, 2], [2, 2]], share=2)

    assert misses == [2, ~1, 0]
    assert slots[1] == flying
    assert slots[0] == -1
    assert slots[2] == slots[3] >= 0
    assert cache.profiler.num_misses == 3


def test_a_joined_expert_is_leased_and_published_by_who_claimed_it() -> None:
    """Its slot stays held until both steps have ended."""
    cache = ExpertCache(1, 4, 1, policy="lru")
    first, _ = acquire(cache, 0, [0])
    second, _ = acquire(cache, 0, [0])

    cache.publish(int(first[0]))
    cache.release(first)

    with pytest.raises(CapacityError):
        acquire(cache, 0, [1])
    cache.release(second)
    assert acquire(cache, 0, [1])[1] == [0]


def test_a_share_goes_to_the_most_used() -> None:
    """The others are misses without a slot."""
    cache = ExpertCache(1, 8, 8)

    slots, misses = acquire(cache, 0, [[1], [2], [3], [3], [2], [3]], share=2)

    assert misses == [2, 1, 0]
    assert slots[0] == -1
    assert cache.num_free == 6


def test_a_share_is_cut_to_the_room_there_is() -> None:
    """A bulk step never fails for want of slots."""
    cache = ExpertCache(1, 8, 2)
    held, _ = acquire(cache, 0, [0])

    slots, misses = acquire(cache, 0, [1, 2, 3], share=3)

    assert misses == [0, 1, 2]
    assert (slots >= 0).tolist() == [True, False, False]
    cache.release(held)


def test_too_many_misses_are_a_capacity_error_that_changes_nothing() -> None:
    """The message has the figures and the remedy."""
    cache = ExpertCache(2, 8, 4, policy="lru")
    serve(cache, 0, 0, 1)
    cache.pin(0, 0)
    held, _ = acquire(cache, 0, [1])
    table = cache.slot_table.copy()
    counts = cache.profiler.counts.copy()

    with pytest.raises(
        CapacityError,
        match=r"layer 1 asks for 3 experts .* of 4 slots only 2 .* \(1 pinned, 1 in use\)",
    ):
        acquire(cache, 1, [0, 1, 2, 2])

    assert np.array_equal(cache.slot_table, table)
    assert np.array_equal(cache.profiler.counts, counts)
    assert (cache.num_free, cache.num_evictions) == (2, 0)
    cache.check()
    cache.release(held)
    assert len(acquire(cache, 1, [0, 1, 2])[1]) == 3


def test_a_hit_of_the_same_step_is_no_room() -> None:
    """It is leased before a victim is chosen."""
    cache = ExpertCache(1, 8, 2, policy="lru")
    serve(cache, 0, 0)
    serve(cache, 0, 1)

    slots, misses = acquire(cache, 0, [5, 0])

    assert misses == [0]
    assert slots[1] == cache.slot_table[0, 0]
    assert resident(cache) == [0]
    with pytest.raises(CapacityError):
        acquire(cache, 0, [0, 6])


def test_a_hit_that_nobody_leased_yet_is_no_room_for_its_own_step() -> None:
    """The step fails before anything is leased."""
    cache = ExpertCache(1, 8, 1, policy="lru")
    serve(cache, 0, 0)

    with pytest.raises(CapacityError, match="asks for 1 experts"):
        acquire(cache, 0, [0, 1])

    assert cache.profiler.num_hits == 0
    cache.check()


@pytest.mark.parametrize("bad", [-1, 8, 2**40])
@pytest.mark.parametrize("position", [0, 2, 4])
def test_a_bad_id_is_named_and_changes_nothing(bad: int, position: int) -> None:
    """Wherever it stands among good ones."""
    cache = ExpertCache(1, 8, 4)
    serve(cache, 0, 0)
    ids = np.insert(np.array([0, 1, 2, 1]), position, bad)
    out = np.full(5, -7, np.int32)

    with pytest.raises(ValueError, match=rf"expert {bad} is not in \[0, 8\)"):
        cache.acquire(0, ids, out, out)

    assert (out == -7).all()
    assert cache.profiler.counts.sum() == 1
    assert resident(cache) == [0]
    cache.check()


def test_an_unsigned_id_beyond_int64_is_out_of_range() -> None:
    """It does not wrap to a negative id, nor to an expert's; it can be dropped."""
    cache = ExpertCache(1, 8, 4)
    ids = np.array([0, 2**64 - 1], np.uint64)

    with pytest.raises(ValueError, match=r"expert \d+ is not in \[0, 8\)"):
        acquire(cache, 0, ids)
    assert cache.num_free == 4

    slots, misses = np.empty(2, np.int32), np.empty(2, np.int32)
    assert cache.acquire(0, ids, slots, misses, ignore_out_of_range=True) == 1
    assert slots.tolist() == [0, -1]


def test_all_resident_looks_at_every_id() -> None:
    """An absent expert does not hide a bad id behind it."""
    with pytest.raises(ValueError, match="expert 99"):
        ExpertCache(1, 8, 4).all_resident(0, np.array([1, 99]))


def test_foreign_ids_can_be_dropped() -> None:
    """They get no slot and are no miss."""
    cache = ExpertCache(1, 4, 4)

    slots, misses = acquire(cache, 0, [4, 1, -1, 2**31 - 1], ignore_out_of_range=True)

    assert (slots >= 0).tolist() == [False, True, False, False]
    assert misses == [1]
    assert cache.profiler.counts.sum() == 1


@pytest.mark.parametrize(
    "ids",
    [
        np.array([[3, 1], [1, 0]], np.int32),
        np.array([[3, 1], [1, 0]], np.int64),
        np.asfortranarray(np.array([[3, 1], [1, 0]], np.int64)),
        np.array([[3, 9, 1, 9], [1, 9, 0, 9]], np.int32)[:, ::2],
        np.array([[[3, 1]], [[1, 0]]], ">i4"),
        np.array([[3], [1], [1], [0]], np.int16),
        np.array([[3, 1], [1, 0]], np.uint8),
        [[3, 1], [1, 0]],
    ],
    ids=["int32", "int64", "fortran", "strided", "big-endian", "int16", "uint8", "list"],
)
def test_ids_may_be_integers_of_any_shape_and_layout(ids: npt.ArrayLike) -> None:
    """They are read in C order."""
    cache = ExpertCache(1, 4, 4)

    slots, misses = acquire(cache, 0, ids)

    assert misses == [1, 0, 3]
    assert slots[1] == slots[2]


@pytest.mark.parametrize("ids", [np.ones(2), np.ones(2, bool), ["a"]])
def test_ids_that_are_not_integers_are_a_type_error(ids: npt.ArrayLike) -> None:
    """Nothing is converted silently."""
    cache = ExpertCache(1, 4, 4)

    with pytest.raises(TypeError, match="ids must be int32 or int64"):
        acquire(cache, 0, ids)


def test_no_ids_are_no_misses() -> None:
    """An empty step is legal, whatever its dtype."""
    cache = ExpertCache(1, 4, 4)

    assert acquire(cache, 0, [])[1] == []
    assert acquire(cache, 0, np.empty((0, 8), np.int32))[1] == []


def read_only(size: int) -> Int32s:
    """Return an array that cannot be written."""
    array = np.zeros(size, np.int32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "unfit",
    [
        np.zeros(3, np.int64),
        np.zeros(2, np.int32),
        np.zeros(6, np.int32)[::2],
        read_only(3),
    ],
    ids=["dtype", "size", "stride", "read-only"],
)
@pytest.mark.parametrize("name", ["slots_out", "misses_out"])
def test_unfit_output_arrays_are_errors(name: str, unfit: npt.NDArray[Any]) -> None:
    """The message names the array, what it must be and what it is."""
    cache = ExpertCache(1, 4, 4)
    outputs = {"slots_out": np.zeros(3, np.int32), "misses_out": np.zeros(3, np.int32)}
    outputs[name] = unfit

    with pytest.raises(ValueError, match=f"{name} must be writable C-contiguous int32 of at"):
        cache.acquire(0, np.arange(3), outputs["slots_out"], outputs["misses_out"])
    assert cache.num_free == 4


def test_misses_out_needs_no_more_than_the_number_of_experts() -> None:
    """A long prompt has many ids and few experts."""
    cache = ExpertCache(1, 2, 2)
    ids = np.tile([0, 1], 50)

    assert cache.acquire(0, ids, np.zeros(100, np.int32), np.zeros(2, np.int32)) == 2


def test_the_views_are_live_and_read_only() -> None:
    """A host may keep them, a kernel may index them."""
    cache = ExpertCache(1, 4, 4)
    table, mask = cache.slot_table, cache.resident_mask(0)
    serve(cache, 0, 2)

    assert table.dtype == np.int32
    assert table[0, 2] >= 0
    assert mask.tolist() == [4]
    for view in (table, mask):
        with pytest.raises(ValueError, match="read-only"):
            view[:] = 0
