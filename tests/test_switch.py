"""Switch: what it decides from the time of tokens, and what finding out costs. No real clock."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from moecache.prefetch.switch import PRESUMED, WARM_UP, WINDOW, Gain, Switch, gained

TRIAL = 8 * WINDOW  # tokens: four pairs of windows
SHORT = 4 * WINDOW  # what is clear then is decided
PAIR = 2 * WINDOW  # what is glaring
TOKEN_NS = 10_000_000
TimeOf = Callable[[bool], float]


class Counted(Switch):
    """A switch that says how often it was decided."""

    num_trials = 0

    def _decide(self, found: Gain) -> None:
        self.num_trials += 1
        super()._decide(found)


class Host:
    """Tokens on a virtual clock, whose times a test chooses."""

    def __init__(self, time_of: TimeOf) -> None:
        self.time_of = time_of
        self.now = self.misses = self.stall_ns = self.num_bytes = 0
        self.misses_of: Callable[[], int] = lambda: 10
        self.switch = Counted(
            lambda: self.now,
            lambda: self.misses,
            lambda: self.stall_ns,
            lambda: self.num_bytes,
        )
        self.states: list[bool] = []  # of each token, whether it was on

    def run(self, num_tokens: int) -> "Host":
        """Pass so many tokens."""
        if not self.states:
            self.switch.begin_token()
        for _ in range(num_tokens):
            on = self.switch.on
            self.states.append(on)
            self.misses += self.misses_of()
            taken = int(self.time_of(on))
            self.now += taken
            self.stall_ns += taken // 2
            self.num_bytes += 2**20 if on else 3 * 2**20
            self.switch.begin_token()
        return self

    def run_until(self, num_trials: int) -> int:
        """Pass tokens until so many trials are over; return how many tokens that took."""
        for count in range(100_000):
            if self.switch.num_trials == num_trials:
                return count
            self.run(1)
        raise AssertionError("the trial never ends")


def factor(on: float) -> TimeOf:
    """Return tokens that take so many times as long when it is on."""
    return lambda state: TOKEN_NS * (on if state else 1.0)


def test_it_is_off_and_untried_at_first() -> None:
    """Before the first token nothing was found out."""
    switch = Host(factor(1)).switch
    assert (switch.on, switch.reason, switch.num_trials) == (False, "not tried yet", 0)
    assert switch.settled_off


def test_what_is_presumed_to_pay_is_on_until_it_is_tried() -> None:
    """Four times as long as otherwise; then a trial decides, as ever."""
    host = Host(factor(1.05))
    host.switch.presume()
    assert (host.switch.on, host.switch.settled_off) == (True, False)
    assert "presumed" in host.switch.reason
    host.run(5)
    host.switch.presume()  # a second time, which is no reason to wait longer
    states = host.run(PRESUMED + SHORT - 5).states
    assert all(states[:PRESUMED])
    assert states[PRESUMED : PRESUMED + WINDOW] == [False] * WINDOW
    assert (host.switch.num_trials, host.switch.on) == (1, False)
    host.switch.presume()
    assert not host.switch.on


def test_windows_alternate_so_that_drift_counts_for_both() -> None:
    """Off, on, on, off, twice; each of 16 tokens, and nothing during the first 32."""
    states = Host(factor(0.98)).run(WARM_UP + TRIAL).states
    assert not any(states[:WARM_UP])
    states = states[WARM_UP:]
    windows = [states[start : start + WINDOW] for start in range(0, TRIAL, WINDOW)]

    assert all(len(set(window)) == 1 for window in windows)
    assert [window[0] for window in windows] == [False, True, True, False] * 2


@pytest.mark.parametrize(
    ("on", "expected"),
    [(0.5, True), (0.98, True), (0.995, False), (1.0, False), (1.02, False), (3.0, False)],
)
def test_it_stays_on_only_if_tokens_are_faster_by_more_than_a_hundredth(
    on: float, expected: bool
) -> None:
    """What is as fast either way stays off."""
    host = Host(factor(on))
    host.run_until(1)
    assert host.switch.on is expected
    assert host.switch.settled_off is not expected


@pytest.mark.parametrize(
    ("on", "tokens"),
    [(0.5, PAIR), (0.9, SHORT), (0.98, TRIAL), (1.02, TRIAL), (1.04, SHORT), (20.0, PAIR)],
)
def test_what_is_clear_is_decided_early(on: float, tokens: int) -> None:
    """After two pairs of windows, not four; what is glaring after one."""
    assert Host(factor(on)).run_until(1) == WARM_UP + tokens


def test_a_glaring_loss_is_not_tried_again_so_soon() -> None:
    """After 1,024 tokens, and twice as many each time."""
    host = Host(factor(1.6))
    trial = host.run_until(1) - WARM_UP
    holds = [host.run_until(number) - trial for number in range(2, 7)]
    assert holds == [1024, 2048, 4096, 8192, 8192]


@pytest.mark.parametrize("on", [0.5, 0.98, 1.0, 1.1])
def test_the_hold_doubles_while_the_answer_is_the_same(on: float) -> None:
    """From 256 tokens to 8,192, and no further."""
    host = Host(factor(on))
    trial = host.run_until(1) - WARM_UP

    holds = [host.run_until(number) - trial for number in range(2, 10)]
    assert holds == [256, 512, 1024, 2048, 4096, 8192, 8192, 8192]


def test_a_later_trial_begins_without_it_too() -> None:
    """Also where it was on meanwhile: both states are compared anew."""
    host = Host(factor(0.85))
    host.run_until(2)

    assert host.states[-SHORT - 1]
    assert host.states[-SHORT::WINDOW] == [False, True, True, False]


def test_another_answer_is_held_briefly_again() -> None:
    """What changed once may change back."""
    host = Host(factor(0.85))
    host.run_until(3)
    host.time_of = factor(1.1)
    host.run_until(4)

    assert not host.switch.on
    assert host.run_until(5) == 256 + SHORT


def test_about_to_be_tried_is_not_settled() -> None:
    """Predictions are made again a token before the trial, so that they are there for it."""
    host = Host(factor(1.1))
    host.run_until(1)
    host.run(254)
    assert host.switch.settled_off
    host.run(1)
    assert not host.switch.settled_off


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("on", "expected"), [(0.9, True), (1.02, False), (1.2, False)])
def test_noise_does_not_flip_it(on: float, expected: bool, seed: int) -> None:
    """Times that vary by 2 %, and one token of 29 that takes ten times as long."""
    rng = np.random.default_rng(seed)
    place = itertools.count(3 * seed)

    def noisy(state: bool) -> float:
        pause = 10 if next(place) % 29 == 0 else 1
        return TOKEN_NS * (on if state else 1) * rng.normal(1, 0.02) * pause

    host = Host(noisy)
    host.run_until(1)
    assert host.switch.on is expected


def test_skipped_tokens_do_not_count() -> None:
    """A pause of a second in one state only, before every other token."""
    host = Host(factor(0.9))
    while host.switch.num_trials == 0:
        host.run(1)
        if host.switch.on:
            host.switch.skip()
            host.now += 10**9
            host.switch.begin_token()
    assert host.switch.on
    assert "0.900 of the time" in host.switch.reason


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("on", "expected"), [(0.9, True), (1.0, False), (1.04, False)])
def test_tokens_are_compared_at_equal_misses(on: float, expected: bool, seed: int) -> None:
    """Times that vary by a third, as misses do: plain means would be off by 5 % and more."""
    rng = np.random.default_rng(seed)
    host = Host(factor(1))
    host.misses_of = lambda: int(rng.integers(0, 40))
    before = [0]

    def time_of(state: bool) -> float:
        missed, before[0] = host.misses - before[0], host.misses
        return (TOKEN_NS + missed * TOKEN_NS / 20) * (on if state else 1)

    host.time_of = time_of
    host.run_until(1)
    assert host.switch.on is expected


def test_the_gain_is_the_distance_of_parallel_lines() -> None:
    """One with a slope of 3 per miss through 100, one through 90; whatever was missed."""
    off = [(100 + 3 * missed, missed) for missed in (0, 1, 2, 3)]
    on = [(90 + 3 * missed, missed) for missed in (10, 12, 14, 18)]
    found = gained(off, on)
    assert found.share == pytest.approx(10 / 104.5)
    assert found.error == pytest.approx(0)
    # By the plain means it is slower: 130.5 instead of 104.5.
    assert found.is_slower
    assert gained(off, off).share == 0
    assert gained([(0, 0)], [(0, 0)]).share == 0


def test_what_slows_all_tokens_by_more_misses_is_off() -> None:
    """A state whose tokens are faster at equal misses, and miss four times as much."""
    host = Host(factor(1))
    host.misses_of = lambda: 40 if host.switch.on else 10
    host.time_of = lambda on: TOKEN_NS * (3.9 if on else 1.0)
    host.run_until(1)
    assert not host.switch.on


def test_noise_alone_is_no_reason() -> None:
    """Times that vary by 40 % for no reason, and 5 % that on costs: .3 % in the mean of 20 runs."""
    lost = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        host = Host(lambda on, rng=rng: TOKEN_NS * rng.normal(1.05 if on else 1.0, 0.4))  # type: ignore[misc]
        host.run(3000)
        lost.append(0.05 * sum(host.states) / 3000)
    assert np.mean(lost) < 0.005
    assert max(lost) < 0.02


@pytest.mark.parametrize(("on", "expected"), [(1.0, False), (0.85, True), (1.03, False)])
@pytest.mark.parametrize("per_token", [0.01, -0.01])
def test_drift_hits_both_alike(on: float, expected: bool, per_token: float) -> None:
    """Tokens that get slower, or faster, by a 400th of the first one's time each."""
    drift = iter(1 + per_token / 4 * np.arange(WARM_UP + TRIAL))
    host = Host(lambda state: TOKEN_NS * (on if state else 1) * next(drift))
    host.run_until(1)
    assert host.switch.num_trials == 1
    assert host.switch.on is expected


@pytest.mark.parametrize(
    ("on", "most"),
    [(1.02, 0.0008), (1.029, 0.0012), (1.04, 0.0008), (1.5, 0.01), (2.0, 0.02)],
)
def test_trying_what_does_not_pay_costs_little(on: float, most: float) -> None:
    """Of 10,000 tokens 384 are tried, 192 where the loss is clear, 64 where it is glaring."""
    host = Host(factor(on)).run(10_000)
    loss = host.now / (10_000 * TOKEN_NS) - 1

    tried = 384 if on <= 1.03 else 192 if on <= 1.2 else 64
    assert sum(host.states) == tried
    assert 0 < loss < most


def test_the_reason_has_the_figures() -> None:
    """Time, waiting and bytes, with it and without."""
    host = Host(factor(0.5))
    host.run_until(1)
    assert host.switch.reason == (
        "with it a token takes 0.500 of the time at equal misses; it waited 2.50 ms and read "
        "1.0 MiB, without 5.00 ms and 3.0 MiB"
    )
