"""Sampler: what is drawn of logits, and that it is the same for a seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecache.decoding.sampler import Sampler, Sampling
from moecache.errors import ConfigError

VOCABULARY = 50


def logits(seed: int = 0) -> np.ndarray:
    """Return random logits."""
    return np.random.default_rng(seed).normal(0, 3, VOCABULARY).astype(np.float32)


def drawn(num: int = 4000, given: np.ndarray | None = None, **sampling: float) -> np.ndarray:
    """Return how often each token is drawn."""
    given = logits() if given is None else given
    sampler = Sampler(Sampling(**sampling))  # type: ignore[arg-type]
    return np.bincount([sampler.draw(given) for _ in range(num)], minlength=VOCABULARY) / num


def test_a_temperature_of_0_takes_the_likeliest() -> None:
    """Of equal ones the one with the smallest id."""
    given = logits()
    assert Sampler(Sampling(temperature=0)).draw(given) == given.argmax()
    given[:] = 1.0
    assert Sampler(Sampling(temperature=0)).draw(given) == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_their_probability_says(temperature: float) -> None:
    """Each within four standard deviations."""
    wanted = np.exp(logits().astype(np.float64) / temperature)
    wanted /= wanted.sum()
    error = np.abs(drawn(temperature=temperature) - wanted)
    assert (error <= 4 * np.sqrt(wanted * (1 - wanted) / 4000) + 1e-3).all()


def test_limits_leave_the_tokens_that_they_say() -> None:
    """`top_k`, `top_p` and `min_p`, each beside its definition."""
    given = logits().astype(np.float64)
    weights = np.exp(given - given.max())
    order = np.argsort(-weights)
    sums = np.cumsum(weights[order]) / weights.sum()
    for sampling, kept in (
        ({"top_k": 3}, order[:3]),
        ({"top_p": 0.8}, order[: int(np.searchsorted(sums, 0.8)) + 1]),
        ({"min_p": 0.2}, np.flatnonzero(weights >= 0.2)),
    ):
        assert set(np.flatnonzero(drawn(**sampling))) == set(kept), sampling


@given(
    st.integers(0, 2**32),
    st.sampled_from([0.1, 1.0, 5.0]),
    st.sampled_from([{}, {"top_p": 0.5}, {"top_p": 0.999}, {"top_k": 40}, {"min_p": 0.01}]),
)
def test_a_draw_is_that_of_all_tokens_in_order(
    seed: int, temperature: float, limits: dict[str, float]
) -> None:
    """The likeliest first: only those that matter are sorted, and no draw is another one."""
    given = np.random.default_rng(seed).normal(0, 3, 2000).astype(np.float32).round(1)
    sampler = Sampler(Sampling(temperature=temperature, seed=seed, **limits))  # type: ignore[arg-type]
    points = np.random.Generator(np.random.Philox(key=seed))
    order = np.lexsort((np.arange(2000), -given))
    weights = np.exp((given[order].astype(np.float64) - given.max()) / temperature)
    if "top_k" in limits:
        weights[40:] = 0
    weights[weights < limits.get("min_p", 0)] = 0
    sums = np.cumsum(weights)
    last = int(np.searchsorted(sums, limits.get("top_p", 1) * sums[-1]))
    sums = sums[: last + 1]
    for _ in range(20):
        place = int(np.searchsorted(sums, points.random() * sums[-1], side="right"))
        assert sampler.draw(given) == order[place]


def test_top_k_among_equal_logits_keeps_the_smallest_ids() -> None:
    """So that a draw depends on logits alone, not on how they are sorted."""
    assert set(np.flatnonzero(drawn(1000, np.zeros(VOCABULARY, np.float32), top_k=3))) == {0, 1, 2}


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 20))
def test_a_seed_draws_the_same_whatever_else_is_drawn(seed: int, others: int) -> None:
    """Two samplers of a seed agree, though others draw in between."""
    one, other = Sampler(Sampling(seed=seed)), Sampler(Sampling(seed=seed))
    stranger = Sampler(Sampling(seed=seed ^ 1))
    found = [one.draw(logits(i)) for i in range(5)]
    again = []
    for i in range(5):
        for _ in range(others):
            stranger.draw(logits(i))
        again.append(other.draw(logits(i)))
    assert found == again


def test_penalties_and_biases_change_logits_as_their_protocols_say() -> None:
    """A repeated token's logit is divided or multiplied; others lose a constant, and per use."""
    given = logits()
    repeated = Sampler(Sampling(repetition_penalty=2.0), prompt=[3, 4])
    expected = given.copy()
    for token in (3, 4):
        expected[token] *= 0.5 if expected[token] > 0 else 2.0
    assert (repeated.adjusted(given) == expected).all()
    used = Sampler(Sampling(presence_penalty=0.5, frequency_penalty=0.25), prompt=[9])
    for token in (3, 3, 5):
        used.take(token)
    expected = given.copy()
    expected[3] -= np.float32(1.0)
    expected[5] -= np.float32(0.75)
    assert (used.adjusted(given) == expected).all()
    biased = Sampler(Sampling(temperature=0, logit_bias={7: 100.0, VOCABULARY: 1.0}))
    assert biased.draw(given) == 7


def test_a_mask_decides_and_logits_are_left_alone() -> None:
    """A mask that is shorter than the logits forbids the rest; one that allows nothing is said."""
    given = logits()
    before = given.copy()
    mask = np.zeros(VOCABULARY - 10, bool)
    mask[12] = True
    assert Sampler(Sampling()).draw(given, mask) == 12
    with pytest.raises(ConfigError, match="no token can be drawn"):
        Sampler(Sampling()).draw(given, np.zeros(VOCABULARY, bool))
    assert (given == before).all()


def test_logits_that_are_no_numbers_are_not_drawn() -> None:
    """One of them hides no other; all of them are an error."""
    given = logits()
    given[given.argmax()] = np.nan
    assert Sampler(Sampling(temperature=0)).draw(given) == np.nanargmax(given)
    with pytest.raises(ConfigError, match="no numbers"):
        Sampler(Sampling()).draw(np.full(VOCABULARY, np.nan, np.float32))


@pytest.mark.parametrize("limits", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_infinite_logits_are_drawn_alike(limits: dict[str, float]) -> None:
    """The limit of large ones: numbers of 16 bits overflow."""
    logits = np.array([0, np.inf, 3, np.inf], np.float32)
    for temperature in (0.0, 0.5):
        drawn = Sampler(Sampling(temperature=temperature, seed=1, **limits))
        tokens = {drawn.draw(logits) for _ in range(40)}
        assert tokens <= {1, 3}
        assert temperature == 0 or limits or len(tokens) == 2


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": np.nan}, {"top_k": -1}, {"top_p": 2}, {"min_p": -0.1}],
)
def test_numbers_out_of_their_range_are_refused(wrong: dict[str, float]) -> None:
    """With the name and the range."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]
