"""The usage of experts that a profile keeps, and the experts worth bringing in by it."""

import numpy as np
import pytest

import moecache
from moecache.profiles.file import ModelUsage
from moecache.profiles.usage import usage_of, valuable_keys


def usage(
    counts: list[list[int]], there: list[int], echo: dict[str, np.ndarray] | None = None
) -> ModelUsage:
    """Return a usage of 2 layers."""
    return ModelUsage("lru", np.array(counts, np.uint64), np.array(there, np.int32), echo or {})


def test_residents_come_first_then_the_most_used() -> None:
    """As many as there is room; what was never used is left out; ties by key."""
    kept = usage([[5, 0, 1, 1], [9, 2, 0, 3]], [2, 1, 7])

    def keys(capacity: int, scope: str = "global") -> list[int]:
        return valuable_keys(kept, moecache.ExpertCache(2, 4, capacity, policy="lru", scope=scope))

    assert keys(8) == [7, 2, 1, 4, 0, 5, 3]
    assert keys(4) == [7, 2, 1, 4]
    assert keys(1) == [7]
    assert keys(4, "layer") == [7, 2, 1, 4]
    assert keys(2, "layer") == [7, 2]
    assert keys(3, "layer") == [7, 2, 1]


def test_echos_values_say_who_is_worth_more() -> None:
    """By ECHO's values, rather than by how often an expert was used."""
    values = np.array([[0.1, 0.9, 0.3, 0], [0.2, 0.5, 0.5, 0]], np.float32)
    kept = usage([[5, 1, 1, 0], [9, 2, 2, 0]], [0, 4], {"values": values})
    cache = moecache.ExpertCache(2, 4, 8)

    assert valuable_keys(kept, cache) == [4, 0, 1, 5, 6, 2]


@pytest.mark.parametrize(
    "kept",
    [
        usage([[1, 2, 3]] * 2, []),
        usage([[1, 2, 3, 4]] * 3, []),
        usage([[1, 2, 3, 4]] * 2, [8]),
        usage([[1, 2, 3, 4]] * 2, [-1]),
        ModelUsage("lru", np.ones((2, 4), np.uint64), np.zeros((1, 1), np.int32)),
        ModelUsage("lru", np.ones((2, 4), np.uint64), np.zeros(1, np.float32)),
        usage([[1, 2, 3, 4]] * 2, [], {"values": np.zeros((4, 2), np.float32)}),
    ],
)
def test_a_usage_of_other_shapes_is_refused(kept: ModelUsage) -> None:
    """Before anything is done with it."""
    with pytest.raises(ValueError, match=r"its (counts|residents) are"):
        valuable_keys(kept, moecache.ExpertCache(2, 4, 4))


def test_counts_of_earlier_runs_fade() -> None:
    """They count half as much with every run; no number is too large."""
    cache = moecache.ExpertCache(1, 3, 2, policy="lru")
    cache.profiler.record_hit(0, 1)

    found = usage_of(
        cache, ModelUsage("lru", np.array([[9, 2, 2**64 - 1]], np.uint64), np.zeros(0, np.int32))
    )

    assert found.counts.tolist() == [[4, 2, 2**39]]
