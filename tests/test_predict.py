"""Predictors: what they say after what they saw."""

import numpy as np
import pytest

from moecache.cache._cache import ExpertCache
from moecache.errors import ConfigError
from moecache.policies._echo import Echo
from moecache.prefetch.predict import Frequency, LastSelection, Predictor, SharedEcho


def ids_of(predictor: Predictor, layer: int, n: int) -> list[int]:
    """Return the experts that a predictor names; their type is checked."""
    ids, scores = predictor.predict(layer, n)
    assert ids.dtype == np.int32
    assert scores is None or (scores.dtype == np.float32 and scores.shape == ids.shape)
    return [int(expert) for expert in ids]


@pytest.mark.parametrize(
    "predictor",
    [LastSelection(2), Frequency(2, 4), Echo(2, 4), SharedEcho(Echo(2, 4))],
    ids=lambda predictor: type(predictor).__name__,
)
def test_every_predictor_has_what_the_protocol_asks(predictor: object) -> None:
    """`Echo` satisfies it as it is."""
    assert isinstance(predictor, Predictor)


def test_a_layer_that_was_not_seen_gives_nothing() -> None:
    """Also where another one was."""
    predictor = LastSelection(3)
    assert ids_of(predictor, 1, 4) == []
    predictor.observe(0, [1, 2])
    assert ids_of(predictor, 1, 4) == []


def test_the_last_selection_is_recalled_in_its_order() -> None:
    """The router's first is the likeliest; without scores."""
    predictor = LastSelection(2)
    predictor.observe(1, np.array([5, 2, 9], np.int64))

    assert ids_of(predictor, 1, 8) == [5, 2, 9]
    assert ids_of(predictor, 1, 2) == [5, 2]
    assert ids_of(predictor, 1, 0) == []
    assert predictor.predict(1, 8)[1] is None


def test_the_latest_selection_wins() -> None:
    """Nothing is left of the one before."""
    predictor = LastSelection(1)
    predictor.observe(0, [1, 2, 3])
    predictor.observe(0, [7, 1])
    assert ids_of(predictor, 0, 8) == [7, 1]


def test_of_several_rows_the_last_one_counts() -> None:
    """The step after a prompt continues its last token."""
    predictor = LastSelection(1)
    predictor.observe(0, np.arange(12, dtype=np.int32).reshape(2, 3, 2))
    assert ids_of(predictor, 0, 8) == [10, 11]


@pytest.mark.parametrize("predictor", [LastSelection(2), LastSelection(2, history=2)])
def test_a_new_sequence_forgets_the_selections(predictor: LastSelection) -> None:
    """Of every layer."""
    for layer in (0, 1):
        predictor.observe(layer, [1, 2])
    predictor.begin_sequence()
    assert [ids_of(predictor, layer, 8) for layer in (0, 1)] == [[], []]
    predictor.observe(0, [3, 4])
    assert ids_of(predictor, 0, 8) == [3, 4]


@pytest.mark.parametrize(("most", "expected"), [(0, []), (2, [4, 3]), (9, [4, 3, 2])])
def test_it_names_no_more_than_max_active(most: int, expected: list[int]) -> None:
    """However many were chosen, and are asked for."""
    predictor = LastSelection(1, most)
    predictor.observe(0, [4, 3, 2])
    assert ids_of(predictor, 0, 8) == expected


@pytest.mark.parametrize("predictor", [LastSelection(2), Frequency(2, 8)])
@pytest.mark.parametrize("layer", [-1, 2, 1000])
def test_a_layer_out_of_range_is_ignored(predictor: LastSelection | Frequency, layer: int) -> None:
    """It teaches nothing, not even the last layer, and gives nothing."""
    predictor.observe(layer, [1, 2])
    assert [ids_of(predictor, other, 8) for other in (0, 1, layer)] == [[], [], []]


def test_ids_are_copied_on_their_way_in_and_out() -> None:
    """The caller's arrays may change."""
    predictor = LastSelection(1)
    chosen = np.array([1, 2, 3], np.int32)
    predictor.observe(0, chosen)
    chosen[:] = 7
    predictor.predict(0, 3)[0][:] = 8
    assert ids_of(predictor, 0, 8) == [1, 2, 3]


@pytest.mark.parametrize("ids", [np.empty(shape, np.int32) for shape in ((0, 2), (3, 0), 0)])
def test_a_step_of_nobody_changes_nothing(ids: np.ndarray) -> None:
    """Of no tokens, or of tokens without experts."""
    last, often = LastSelection(1), Frequency(1, 4)
    for predictor in (last, often):
        predictor.observe(0, [1, 2])
        predictor.observe(0, ids)
        assert ids_of(predictor, 0, 8) == [1, 2]


def test_padding_is_left_out() -> None:
    """Rows are filled up with -1."""
    predictor = LastSelection(1)
    predictor.observe(0, [3, -1, 5, -1])
    assert ids_of(predictor, 0, 8) == [3, 5]


def test_with_a_history_of_two_the_one_before_follows() -> None:
    """Experts of both come once; at most twice as many in all."""
    predictor = LastSelection(1, history=2)
    for ids, expected in (
        ([1, 2], [1, 2]),
        ([2, 3], [2, 3, 1]),
        ([4, 5], [4, 5, 2, 3]),
        ([4, 6], [4, 6, 5, 2]),
    ):
        predictor.observe(0, ids)
        assert ids_of(predictor, 0, 8) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"num_layers": 2, "history": 3}, "history 1 or 2, got 2 and 3"),
        ({"num_layers": 2, "max_active": -1}, "max_active must not be negative, got -1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(arguments: dict[str, int], words: str) -> None:
    """With what was given."""
    with pytest.raises(ConfigError, match=words):
        LastSelection(**arguments)


def test_frequency_names_the_most_used() -> None:
    """Ties by id; those never used are left out."""
    predictor = Frequency(2, 6)
    for ids in ([4, 1], [4, 3], [4, 5]):
        predictor.observe(1, ids)

    assert ids_of(predictor, 1, 6) == [4, 1, 3, 5]
    assert ids_of(predictor, 1, 2) == [4, 1]
    assert ids_of(predictor, 0, 6) == []


def test_frequencys_scores_are_shares_of_the_tokens() -> None:
    """A row is a token; an expert twice in it is no more than sure."""
    predictor = Frequency(1, 4)
    predictor.observe(0, np.array([[0, 1], [0, 2]]))
    predictor.observe(0, [0, 3])
    predictor.observe(0, [0, 3])
    _, scores = predictor.predict(0, 4)
    assert scores is not None
    assert scores.tolist() == [1, 0.5, 0.25, 0.25]

    twice = Frequency(1, 4)
    twice.observe(0, [2, 2])
    _, scores = twice.predict(0, 4)
    assert scores is not None
    assert scores.tolist() == [1]


def test_frequency_counts_over_all_sequences_and_drops_foreign_ids() -> None:
    """Ids of experts elsewhere are num_experts, padding is -1."""
    predictor = Frequency(1, 4)
    predictor.observe(0, [1, 4, -1])
    predictor.begin_sequence()
    predictor.observe(0, [1, 2])
    assert ids_of(predictor, 0, 8) == [1, 2]


def test_frequency_refuses_a_shape_that_cannot_be() -> None:
    """With both numbers."""
    with pytest.raises(ConfigError, match="at least 1, got 2 and 0"):
        Frequency(2, 0)


def test_what_the_cache_learned_is_what_an_echo_that_observed_the_same_says() -> None:
    """`SharedEcho` itself learns nothing: the cache's policy did."""
    cache = ExpertCache(2, 8, 6, policy="echo")
    assert cache.echo is not None
    shared, own = SharedEcho(cache.echo), Echo(2, 8)
    rng = np.random.default_rng(0)
    for step in range(200):
        if step % 50 == 49:
            cache.begin_sequence()
            own.begin_sequence()
            shared.begin_sequence()
        layer = step % 2
        ids = rng.choice(8, 2, replace=False).astype(np.int32)
        slots, misses = np.empty(2, np.int32), np.empty(2, np.int32)
        cache.acquire(layer, ids, slots, misses)
        for slot in slots[cache.slot_table[layer, ids] < 0].tolist():
            cache.publish(slot)
        cache.release(slots)
        shared.observe(layer, ids)
        own.observe(layer, ids)
        for other in (0, 1):
            for one, two in zip(shared.predict(other, 5), own.predict(other, 5), strict=True):
                assert np.array_equal(one, two)
