"""Which rank owns which expert: shares, balance, files."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache.errors import ConfigError, FormatError, MoeCacheError, StoreError
from moecache.ranks import Placement
from tests.helpers.examples import num_examples


@st.composite
def uses(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Return counts [L, E], some of them alike and some far apart, and a number of ranks."""
    num_layers, num_experts = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    steepness = draw(st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    counts = np.round(1000 * rng.random((num_layers, num_experts)) ** steepness).astype(np.uint64)
    return counts, draw(st.integers(1, num_experts))


def slowest(placement: Placement, counts: np.ndarray) -> np.ndarray:
    """Return the largest load for its share of a rank, by layer."""
    return (placement.loads(counts) / placement.shares[:, None]).max(0) / placement.num_ranks


def in_turn(quota: list[int], first: int) -> list[int]:
    """Return the ranks of experts that are dealt in turn, the largest shares first."""
    left, ranks = list(quota), []
    order = sorted(range(len(quota)), key=lambda rank: (-quota[rank], (rank - first) % len(quota)))
    while any(left):
        for rank in order:
            if left[rank]:
                left[rank] -= 1
                ranks.append(rank)
    return ranks


@settings(max_examples=num_examples(80))
@given(given_uses=uses())
def test_even_shares_are_as_good_as_rounds(given_uses: tuple[np.ndarray, int]) -> None:
    """No worse than in turn, and within one expert's uses of the mean."""
    counts, num_ranks = given_uses
    placement = Placement.balanced(counts, num_ranks)
    even = Placement.even(*counts.shape, num_ranks)

    assert (slowest(placement, counts) <= slowest(even, counts) * (1 + 1e-12)).all()
    mean = counts.sum(1) / num_ranks
    assert (slowest(placement, counts) <= mean + counts.max(1) + 1e-6).all()
    for one in (placement, even):
        held = one.num_held()
        assert (held.sum(0) == counts.shape[1]).all()
        assert held.max() - held.min() <= 1


@settings(max_examples=num_examples(80))
@given(given_uses=uses(), seed=st.integers(0, 2**32))
def test_shares_are_kept_in_every_layer(given_uses: tuple[np.ndarray, int], seed: int) -> None:
    """To the next whole expert; and the busiest rank has no more than dealt in turn."""
    counts, num_ranks = given_uses
    rng = np.random.default_rng(seed)
    shares = 0.5 + rng.random(num_ranks)
    try:
        placement = Placement.balanced(counts, num_ranks, shares.tolist())
    except ConfigError as error:
        assert "owns no expert" in str(error)  # noqa: PT017 - both ends are right
        assert (shares / shares.sum() * counts.shape[1]).min() < 1
        return

    wanted = placement.shares[:, None] * counts.shape[1]
    assert (np.abs(placement.num_held() - wanted) < 1).all()
    assert (placement.num_held().sum(0) == counts.shape[1]).all()
    dealt = np.array(
        [in_turn(held, first) for first, held in enumerate(placement.num_held().T.tolist())]
    )
    in_turn_too = Placement(dealt, num_ranks, shares=shares)
    assert (slowest(placement, counts) <= slowest(in_turn_too, counts) * (1 + 1e-12)).all()
    assert np.isclose(placement.loads(counts).sum(), counts.sum())


def test_a_rank_with_twice_the_memory_takes_twice_as_much() -> None:
    """Of the experts, and of their uses."""
    counts = np.random.default_rng(0).zipf(1.5, (8, 120)).clip(max=50)
    placement = Placement.balanced(counts, 3, [2, 1, 1])

    assert placement.num_held().sum(1).tolist() == [480, 240, 240]
    loads = placement.loads(counts)
    assert np.allclose(loads[0], counts.sum(1) / 2, rtol=0.02)


def test_what_rounding_takes_later_layers_give_back() -> None:
    """513 experts on 4 ranks: one more for each rank in turn."""
    placement = Placement.balanced(np.ones((8, 513)), 4)

    assert placement.num_held().sum(1).tolist() == [1026] * 4
    assert Placement.even(8, 513, 4).num_held().sum(1).tolist() == [1026] * 4
    assert Placement.even(8, 513, 4).num_held()[:, 1].tolist() == [128, 129, 128, 128]


def test_one_rank_owns_everything() -> None:
    """And computes it."""
    placement = Placement.balanced(np.ones((2, 3)), 1)

    assert placement == Placement.even(2, 3, 1)
    assert placement.experts(0, 1).tolist() == [0, 1, 2]


def test_a_rank_holds_what_it_owns() -> None:
    """By layer, in order."""
    placement = Placement([[0, 0, 1, 1], [1, 0, 1, 1]], 2)

    assert placement.experts(0, 0).tolist() == [0, 1]
    assert placement.experts(1, 1).tolist() == [0, 2, 3]
    assert placement.num_held().tolist() == [[2, 1], [2, 3]]
    assert placement.loads([[90, 10, 5, 0], [1, 2, 3, 4]]).tolist() == [[100, 2], [5, 8]]


def test_a_file_gives_back_the_placement(tmp_path: Path) -> None:
    """Bit for bit, shares that no decimal fraction has among it."""
    placement = Placement.balanced(np.random.default_rng(1).random((3, 9)), 3, [0.1, 0.7, 1 / 3])
    path = tmp_path / "placement.json"
    placement.save(path)

    assert Placement.load(path) == placement
    assert Placement.load(path).shares.tolist() == placement.shares.tolist()
    assert pickle.loads(pickle.dumps(placement)) == placement
    assert hash(Placement.load(path)) == hash(placement)
    assert placement != Placement.even(3, 9, 3)
    placement.save(path)


def test_a_file_of_another_kind_is_kept(tmp_path: Path) -> None:
    """Unless it is forced."""
    path = tmp_path / "notes.json"
    path.write_text('{"notes": 1}')
    with pytest.raises(ConfigError, match="would be lost"):
        Placement.even(1, 2, 2).save(path)
    Placement.even(1, 2, 2).save(path, force=True)
    assert Placement.load(path) == Placement.even(1, 2, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"owners": [[0, 0, 1, 1]]}, "digest differs"),
        ({"owners": [[0, 1], [0]]}, "placement.json"),
        ({"owners": "all"}, "owners must be integers"),
        ({"owners": [[0, 1, 2, 7]]}, "from 0 to 1"),
        ({"num_ranks": "2"}, "num_ranks must be a whole number"),
        ({"num_ranks": 10**30}, "from 1 to 4,096"),
        ({"shares": [1, float("nan")]}, "positive numbers"),
        ({"shares": None}, "digest|placement.json"),
        ({"version": 2}, "of version 2"),
        ({"kind": "cake"}, "is no placement"),
    ],
)
def test_a_changed_file_is_no_placement(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """Whatever was changed."""
    path = tmp_path / "placement.json"
    Placement([[0, 1, 1, 0]], 2, shares=[1, 3]).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FormatError, match=message):
        Placement.load(path)


@pytest.mark.parametrize("text", ["", "[1", "3", "\xff", "[" * 100_000, '{"kind": 1}'])
def test_what_is_no_json_is_no_placement(tmp_path: Path, text: str) -> None:
    """And a file that is not there cannot be read."""
    path = tmp_path / "placement.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match="is no placement"):
        Placement.load(path)
    with pytest.raises(StoreError, match="cannot be read"):
        Placement.load(tmp_path / "absent.json")
    fields = {"kind": "moecache placement", "version": 1}
    path.write_text(json.dumps(fields))
    with pytest.raises(FormatError, match="has no 'num_ranks'"):
        Placement.load(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement.even(2, 4, 5), "5 ranks are more than the 4 experts .* at most 4 ranks"),
        (lambda: Placement.even(2, 4, 0), "num_ranks must be from 1 to 4,096, got 0"),
        (lambda: Placement.even(2, 4, 2.0), "whole number, got 2.0"),  # type: ignore[arg-type]
        (lambda: Placement.even(0, 4, 2), "layers and experts, got 0 x 4"),
        (lambda: Placement.balanced(np.ones((2, 4)), 5), "5 ranks are more"),
        (lambda: Placement.balanced(np.ones((2, 4)), 2, [1, -1]), "2 positive numbers"),
        (lambda: Placement.balanced(np.ones((2, 4)), 2, [1, 1, 1]), "one for each rank, got"),
        (lambda: Placement.balanced(np.ones((2, 4)), 2, [1, 1e-9]), "rank 1 of 2 owns no expert"),
        (lambda: Placement.balanced(np.ones(4), 2), "num_layers, num_experts"),
        (lambda: Placement.balanced([["a"]], 1), "counts must be numbers"),
        (lambda: Placement.balanced([[1, -1]], 1), "not negative"),
        (lambda: Placement.balanced([[1, np.nan]], 1), "finite"),
        (lambda: Placement([[0, 0]], 2), "rank 1 of 2 owns no expert; use fewer ranks"),
        (lambda: Placement.even(1, 2, 2).experts(2, 0), "rank 2 is not in"),
        (lambda: Placement.even(1, 2, 2).experts(0, 1), "layer 1 is not in"),
        (lambda: Placement.even(1, 2, 2).loads([[1]]), "the placement is of"),
    ],
)
def test_wrong_arguments_are_named(make: Any, message: str) -> None:
    """With what they may be."""
    with pytest.raises(MoeCacheError, match=message):
        make()


def test_a_placement_cannot_be_changed() -> None:
    """Neither its names nor its arrays."""
    placement = Placement.even(1, 2, 2)
    with pytest.raises(AttributeError, match="make another"):
        placement.num_ranks = 3
    with pytest.raises(ValueError, match="read-only"):
        placement.owners[0, 0] = 1
    assert repr(placement).endswith("1 x 2 experts on 2 ranks>")
