"""Foresight: which guesses came true, and which experts are worth a fetch."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache.cache._cache import ExpertCache
from moecache.prefetch._foresight import Foresight
from tests.helpers.examples import num_examples
from tests.helpers.oracle_foresight import OracleForesight

LAYERS = 2


def empty(num_experts: int = 64, capacity: int = 8) -> ExpertCache:
    """Return an empty cache."""
    return ExpertCache(LAYERS, num_experts, capacity, policy="lru")


def fill(cache: ExpertCache, layer: int, *experts: int) -> None:
    """Make experts resident."""
    for expert in experts:
        cache.publish(cache.claim(layer, expert))


def counters(foresight: Foresight) -> tuple[int, ...]:
    """Return everything that is counted."""
    return (
        foresight.num_used,
        *(foresight.num_predicted_k, foresight.num_found_k),
        *(foresight.num_predicted_2k, foresight.num_found_2k),
    )


def wanted(foresight: Foresight, *arguments: Any, **options: Any) -> list[int]:
    """Return the experts that `expect` names; no expert is None, never an empty array."""
    return named(foresight, *arguments, **options)[0]


def named(foresight: Foresight, *arguments: Any, **options: Any) -> tuple[list[int], int]:
    """Return them, and how many of them, the first ones, are likely."""
    found = foresight.expect(*arguments, **options)
    assert found is None or (found[0].dtype == np.int32 and 0 <= found[1] <= len(found[0]) > 0)
    return ([], 0) if found is None else (found[0].tolist(), found[1])


def taught(foresight: Foresight, *, right: int, wrong: int, score: float | None = 0.5) -> None:
    """Let guesses of one expert with a score be right and wrong so many times."""
    for index in range(right + wrong):
        foresight.expect(0, [3], None if score is None else [score])
        foresight.score(0, [3 if index < right else 4])


def test_who_is_there_or_on_its_way_is_not_wanted() -> None:
    """The others are, in the order of the prediction."""
    cache = empty()
    fill(cache, 0, 5)
    fill(cache, 1, 6)
    cache.claim(0, 7)

    assert wanted(Foresight(cache), 0, [9, 5, 7, 6, 2]) == [9, 6, 2]


def test_experts_that_are_more_likely_than_not_come_first() -> None:
    """By how often guesses of its class were right, and by scores as long as few were made."""
    assert named(Foresight(empty()), 0, [2, 1], [0.2, 0.9]) == ([1, 2], 1)
    foresight = Foresight(empty())
    assert named(foresight, 0, [1, 2, 3]) == ([1, 2, 3], 0)
    taught(foresight, right=0, wrong=20, score=0.2)
    taught(foresight, right=20, wrong=0, score=0.9)
    assert named(foresight, 0, [4, 5, 6], [0.2, 0.9, 0.9]) == ([5, 6, 4], 2)


def test_recall_and_precision_are_counted_at_k_and_2k() -> None:
    """Of two experts used one was among two guesses, both among four."""
    foresight = Foresight(empty())
    foresight.expect(0, [1, 2, 3, 4, 5])
    foresight.score(0, np.array([[1, 4]]))
    assert counters(foresight) == (2, 2, 1, 4, 2)

    foresight.expect(0, [1, 2, 3])
    foresight.score(0, [7, 8])
    assert counters(foresight) == (4, 4, 1, 7, 2)


def test_a_layer_that_was_not_predicted_is_not_scored() -> None:
    """Before any prediction, for another layer's, and a second time."""
    foresight = Foresight(empty())
    foresight.score(0, [1, 2])
    foresight.expect(1, [1, 2])
    foresight.score(0, [1, 2])
    assert counters(foresight) == (0, 0, 0, 0, 0)

    foresight.score(1, [1, 2])
    foresight.score(1, [1, 2])
    assert counters(foresight) == (2, 2, 2, 2, 2)


def test_a_prediction_of_nobody_is_none() -> None:
    """It is not counted as one that was wrong."""
    foresight = Foresight(empty())
    assert foresight.expect(0, np.empty(0, np.int32)) is None
    foresight.score(0, [1])
    assert counters(foresight) == (0, 0, 0, 0, 0)


def test_a_second_prediction_takes_the_place_of_the_first() -> None:
    """It alone is compared."""
    foresight = Foresight(empty())
    foresight.expect(0, [1, 2, 3, 4])
    foresight.expect(0, [5])
    foresight.score(0, [1, 2])
    assert counters(foresight) == (2, 1, 0, 1, 0)


def test_a_dropped_prediction_is_compared_with_nothing() -> None:
    """Of that layer only."""
    foresight = Foresight(empty())
    foresight.expect(0, [1])
    foresight.expect(1, [1])
    foresight.drop(0)
    foresight.score(0, [1])
    assert counters(foresight) == (0, 0, 0, 0, 0)
    foresight.score(1, [1])
    assert counters(foresight) == (1, 1, 1, 1, 1)


def test_repeated_and_foreign_ids_count_once_and_never() -> None:
    """In the prediction and in what comes: recall is at most 1."""
    foresight = Foresight(empty(num_experts=8))
    assert wanted(foresight, 0, [3, 3, -1, 8, 2**31 - 1, 3, 5]) == [3, 5]
    foresight.score(0, [3, 3, 8, -1, 6])
    assert counters(foresight) == (2, 2, 1, 2, 1)


def test_no_more_than_128_guesses_are_kept() -> None:
    """The first of them."""
    foresight = Foresight(empty(num_experts=513))
    ids = np.arange(512, -1, -1)
    assert wanted(foresight, 0, ids) == list(range(512, 384, -1))
    foresight.score(0, np.arange(513))
    assert counters(foresight) == (513, 128, 128, 128, 128)


def test_a_guess_is_believed_as_often_as_its_class_was_right() -> None:
    """Eight guesses' worth of the score at first, then what was seen."""
    foresight = Foresight(empty())
    score = 15 / 31  # the bottom of its class
    assert wanted(foresight, 0, [3], [score], min_likelihood=score) == [3]
    assert wanted(foresight, 0, [3], [score], min_likelihood=score + 0.01) == []

    taught(foresight, right=10, wrong=30, score=score)
    likelihood = (10 + 8 * score) / (40 + 8)
    assert wanted(foresight, 0, [3], [score], min_likelihood=likelihood - 1e-6) == [3]
    assert wanted(foresight, 0, [3], [score], min_likelihood=likelihood + 1e-6) == []
    # Another class saw none of it.
    assert wanted(foresight, 0, [3], [0.9], min_likelihood=0.8) == [3]


def test_without_scores_places_are_the_classes() -> None:
    """The first was always right, the second never."""
    foresight = Foresight(empty())
    for _ in range(40):
        foresight.expect(0, [3, 4])
        foresight.score(0, [3])
    assert wanted(foresight, 0, [8, 9], min_likelihood=0.9) == [8]
    assert wanted(foresight, 0, [8, 9], min_likelihood=0.08) == [8, 9]
    assert wanted(foresight, 0, [8, 9], min_likelihood=0.0) == [8, 9]


def test_guesses_of_who_was_there_teach_nothing() -> None:
    """Resident experts are used more often, and are not fetched; they count for recall."""
    cache = empty()
    fill(cache, 0, 3)
    foresight = Foresight(cache)
    taught(foresight, right=40, wrong=0, score=0.5)

    assert counters(foresight) == (40, 40, 40, 40, 40)
    assert wanted(foresight, 0, [4], [0.5], min_likelihood=0.6) == []


def test_a_class_forgets() -> None:
    """A thousand guesses that were wrong are outweighed by as many that are right."""
    foresight = Foresight(empty())
    taught(foresight, right=0, wrong=3000)
    assert wanted(foresight, 0, [3], [0.5], min_likelihood=0.01) == []
    taught(foresight, right=1024, wrong=0)
    assert wanted(foresight, 0, [3], [0.5], min_likelihood=0.5) == [3]


@pytest.mark.parametrize("score", [math.nan, -0.01, -math.inf, math.inf])
def test_a_score_that_is_no_probability_is_refused(score: float) -> None:
    """And the earlier prediction stays."""
    foresight = Foresight(empty())
    foresight.expect(0, [1])
    with pytest.raises(ValueError, match="is no probability"):
        foresight.expect(0, [2, 3], [0.5, score])
    foresight.score(0, [1])
    assert counters(foresight) == (1, 1, 1, 1, 1)


def test_a_score_above_one_counts_as_one() -> None:
    """Logits are not refused, as far as they are not negative."""
    assert wanted(Foresight(empty()), 0, [1, 2], [7.5, 1], min_likelihood=1.0) == [1, 2]


@pytest.mark.parametrize("scores", [[], [0.5], [0.5] * 3])
def test_as_many_scores_as_ids_are_wanted(scores: list[float]) -> None:
    """With both numbers."""
    with pytest.raises(ValueError, match=f"2 ids have {len(scores)} scores"):
        Foresight(empty()).expect(0, [1, 2], scores)


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_a_wrong_layer_is_refused(layer: int) -> None:
    """By every method."""
    foresight = Foresight(empty())
    words = f"layer {layer} is not in"
    with pytest.raises(ValueError, match=words):
        foresight.expect(layer, [1])
    with pytest.raises(ValueError, match=words):
        foresight.score(layer, [1])
    with pytest.raises(ValueError, match=words):
        foresight.drop(layer)


def test_ids_that_are_no_integers_are_refused() -> None:
    """As by the cache."""
    with pytest.raises(TypeError):
        Foresight(empty()).expect(0, np.array([0.5]))


@st.composite
def calls(draw: st.DrawFn) -> tuple[int, list[tuple[Any, ...]]]:
    """Draw a number of experts and what is done with them."""
    num_experts = draw(st.sampled_from([1, 2, 9, 64, 513]))
    expert = st.one_of(
        st.integers(0, min(num_experts, 12) - 1), st.integers(-1, num_experts), st.just(2**31 - 1)
    )
    layer = st.integers(0, LAYERS - 1)
    ids = st.one_of(
        st.lists(expert, max_size=12), st.just(list(range(num_experts)) + list(range(num_experts)))
    )
    score = st.floats(0, 1.5, width=32)
    found: list[tuple[Any, ...]] = []
    for _ in range(draw(st.integers(1, 30))):
        kind = draw(
            st.sampled_from(["expect", "expect", "score", "score", "drop", "fill", "claim"])
        )
        if kind == "expect":
            guess = draw(ids)
            scores = None
            if draw(st.booleans()):
                scores = [draw(score) for _ in guess[:20]] + [0.25] * (len(guess) - 20)
            found.append((kind, draw(layer), guess, scores, draw(st.floats(0, 1))))
        elif kind == "score":
            found.append((kind, draw(layer), draw(ids)))
        else:
            found.append((kind, draw(layer), draw(st.integers(0, min(num_experts, 12) - 1))))
    return num_experts, found


@settings(max_examples=num_examples(200))
@given(calls(), st.sampled_from([np.int32, np.int64]))
def test_everything_is_as_in_plain_python(
    plan: tuple[int, list[tuple[Any, ...]]], dtype: type[np.integer[Any]]
) -> None:
    """The wanted experts and every counter agree after every call."""
    num_experts, made = plan
    cache = empty(num_experts, capacity=6)
    on_their_way: set[tuple[int, int]] = set()

    def is_absent(layer: int, expert: int) -> bool:
        return cache.slot_table[layer, expert] < 0 and (layer, expert) not in on_their_way

    foresight, oracle = Foresight(cache), OracleForesight(num_experts, is_absent)
    for kind, layer, *rest in made:
        if kind == "expect":
            ids, scores, least = rest
            found = named(foresight, layer, np.array(ids, dtype), scores, min_likelihood=least)
            assert found == oracle.expect(layer, ids, scores, least)
        elif kind == "score":
            foresight.score(layer, np.array(rest[0], dtype))
            oracle.score(layer, rest[0])
        elif kind == "drop":
            foresight.drop(layer)
            oracle.drop(layer)
        elif (slot := cache.claim(layer, rest[0])) >= 0:
            if kind == "fill":
                cache.publish(slot)
            else:
                on_their_way.add((layer, rest[0]))
        assert counters(foresight) == oracle.counters


def test_likelihoods_are_those_of_plain_python_over_a_long_time() -> None:
    """With scores and without, far beyond where a class forgets."""
    cache = empty(num_experts=16)
    foresight = Foresight(cache)
    oracle = OracleForesight(16, lambda layer, expert: True)
    rng = np.random.default_rng(0)
    for _ in range(4000):
        ids = rng.permutation(16)[:6].tolist()
        scores = rng.choice([0.1, 0.5, 0.9], 6).tolist() if rng.random() < 0.7 else None
        least = float(rng.random())
        found = named(foresight, 0, ids, scores, min_likelihood=least)
        assert found == oracle.expect(0, ids, scores, least)
        used = [expert for expert in ids if rng.random() < 0.4]
        foresight.score(0, np.array(used, np.int32))
        oracle.score(0, used)
    assert max(oracle.trials.values()) <= 1025
    assert counters(foresight) == oracle.counters
