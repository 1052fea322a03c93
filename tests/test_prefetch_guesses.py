"""Predictors and hints: whatever names experts can do no harm."""

import os
import signal
from typing import Any

import numpy as np
import pytest

from moecache.errors import ConfigError
from tests.helpers.pages import wait_until
from tests.helpers.prefetchers import Oracle, is_resident, make_runtime, prefetcher_of, step
from tests.helpers.stores import Gate, WrappedStore, numbered_store


def test_a_predictor_that_fails_is_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    """One warning; steps go on."""

    class Broken(Oracle):
        def predict(self, layer: int, n: int) -> tuple[np.ndarray, np.ndarray | None]:
            raise ZeroDivisionError

    with make_runtime(Broken({})) as runtime:
        for _ in range(3):
            step(runtime, 0, 0, 1)
    assert len([text for text in caplog.messages if "predictor_failed" in text]) == 1


def test_a_timeout_in_a_predictor_is_no_failure_of_it() -> None:
    """What a signal's handler raises while it guesses ends the step, which has lost nothing."""

    class Interrupted(Oracle):
        def predict(self, layer: int, n: int) -> tuple[np.ndarray, np.ndarray | None]:
            if armed:
                os.kill(os.getpid(), signal.SIGALRM)
            return super().predict(layer, n)

    def raise_timeout(number: int, frame: object) -> None:
        raise TimeoutError

    armed = False
    before = signal.signal(signal.SIGALRM, raise_timeout)
    try:
        with make_runtime(Interrupted({0: [1]})) as runtime:
            step(runtime, 0, 0, 1)
            armed = True
            with pytest.raises(TimeoutError):
                step(runtime, 0, 0, 1)
            armed = False
            step(runtime, 0, 0, 1)
            assert prefetcher_of(runtime).num_predictor_errors == 0
            runtime.cache.check()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "scores", [[float("nan")], [-1.0], [0.5, 0.5]], ids=["nan", "negative", "too many"]
)
def test_a_predictor_that_returns_nonsense_is_no_harm(scores: list[float]) -> None:
    """As one that fails."""

    class Nonsense(Oracle):
        def predict(self, layer: int, n: int) -> tuple[np.ndarray, np.ndarray | None]:
            return np.array([1], np.int32), np.array(scores, np.float32)

    with make_runtime(Nonsense({})) as runtime:
        step(runtime, 0, 0, 1)
        assert prefetcher_of(runtime).num_predictor_errors == 1


@pytest.mark.parametrize(
    ("sequences", "guesses", "scored"),
    [(list(range(4)), 2 * 2 * 4, True), (None, 2 * 2, False), ([0, 0, 1, 1], 2 * 2, False)],
    ids=["a token of each", "of one", "two of each"],
)
def test_a_token_of_each_sequence_is_foreseen(
    sequences: list[int] | None, guesses: int, *, scored: bool
) -> None:
    """As many guesses as for so many tokens, and what comes is compared with them."""

    class Counting(Oracle):
        def predict(self, layer: int, n: int) -> tuple[np.ndarray, np.ndarray | None]:
            asked.append(n)
            return super().predict(layer, n)

    asked: list[int] = []
    with make_runtime(Counting({0: [1], 1: [4], 2: [5]})) as runtime:
        for layer in range(2):
            for _wave in runtime.waves(layer, np.array([[0, 4]] * 4), sequences=sequences):
                pass
        assert asked == [guesses] * 2
        assert (prefetcher_of(runtime).foresight.num_found_k == 1) == scored


def test_more_sequences_than_16_are_not_foreseen() -> None:
    """They use most experts."""
    asked: list[int] = []

    class Counting(Oracle):
        def predict(self, layer: int, n: int) -> tuple[np.ndarray, np.ndarray | None]:
            asked.append(n)
            return super().predict(layer, n)

    with make_runtime(Counting({})) as runtime:
        for rows in (16, 17):
            ids = np.array([[0, 4]] * rows)
            for _wave in runtime.waves(0, ids, sequences=np.arange(rows)):
                pass
    assert asked == [2 * 2 * 16]


def test_a_predictor_that_fails_at_a_sequence_is_no_harm() -> None:
    """It is counted, and what was foreseen is forgotten all the same."""

    class Broken(Oracle):
        def begin_sequence(self) -> None:
            raise ZeroDivisionError

    with make_runtime(Broken({1: [4]})) as runtime:
        runtime.begin_sequence()
        assert prefetcher_of(runtime).num_predictor_errors == 1


def test_a_predictor_cannot_change_the_ids() -> None:
    """They are the step's own."""

    class Scribbler(Oracle):
        def observe(self, layer: int, ids: np.ndarray) -> None:
            ids[...] = 0

    with make_runtime(Scribbler({})) as runtime:
        step(runtime, 0, 3, 5)
        assert prefetcher_of(runtime).num_predictor_errors == 1


def test_ids_are_copied() -> None:
    """A host may reuse its arrays at once."""
    gate = Gate()
    store = WrappedStore(numbered_store(), gate)
    with make_runtime("hints", store=store) as runtime:
        ids = np.array([3, 4])
        runtime.hint(0, ids)
        ids[:] = 7
        gate.opened.set()
        wait_until(lambda: is_resident(runtime, 0, 3) and is_resident(runtime, 0, 4))
        assert not is_resident(runtime, 0, 7)


def test_hints_are_checked() -> None:
    """Bad ones raise, and nothing is asked for."""
    with make_runtime("hints") as runtime:
        for layer, ids, scores in (
            (3, [0], None),
            (-1, [0], None),
            (0, [8], None),
            (0, [-1], None),
            (0, [0], [float("inf")]),
            (0, [0, 1], [1.0]),
        ):
            with pytest.raises(ValueError, match=r"layer|expert|score"):
                runtime.hint(layer, ids, scores)
        assert prefetcher_of(runtime).queue.num_requests == 0


@pytest.mark.parametrize(
    ("ids", "scores", "message"),
    [
        ([0.5], None, "ids must be whole numbers, got an array of float64"),
        (["1"], None, "ids must be whole numbers, got an array of <U1"),
        ([True], None, "ids must be whole numbers, got an array of bool"),
        ([2**70], None, "ids must be whole numbers, got an array of object"),
        (np.array([4, 5], object), None, "ids must be whole numbers, got an array of object"),
        (np.array([4, None, "x"], object), None, "whole numbers, got an array of object"),
        ([4], ["high"], "scores must be numbers: could not convert"),
        ([4], [object()], "scores must be numbers: float"),
        ([4], [1e300], "score inf is no probability"),
    ],
)
def test_hints_of_other_types_change_nothing(ids: Any, scores: Any, message: str) -> None:
    """The error names the dtype; the runtime's own prediction is still asked for."""
    with make_runtime(Oracle({1: [4, 5]})) as runtime:
        with pytest.raises(ValueError if scores else TypeError, match=message):
            runtime.hint(1, ids, scores)
        assert prefetcher_of(runtime).queue.num_requests == 0
        step(runtime, 0, 0, 1)
        wait_until(lambda: is_resident(runtime, 1, 4) and is_resident(runtime, 1, 5))


def test_a_hint_takes_the_place_of_the_prediction() -> None:
    """For the layer's next step, and no longer."""
    with make_runtime(Oracle({1: [2]})) as runtime:
        runtime.hint(1, [5])
        step(runtime, 0, 0, 1)
        wait_until(lambda: is_resident(runtime, 1, 5))
        assert not is_resident(runtime, 1, 2)
        step(runtime, 1, 6, 7)
        step(runtime, 0, 0, 1)
        wait_until(lambda: is_resident(runtime, 1, 2))


def test_off_takes_hints_and_ignores_them() -> None:
    """A host need not ask which mode it is."""
    with make_runtime("off") as runtime:
        runtime.hint(0, [0])
        assert runtime.cache.num_resident == 0


@pytest.mark.parametrize("prefetch", ["fast", 3, None, object()])
def test_an_unknown_mode_is_an_error(prefetch: object) -> None:
    """It names what there is."""
    with pytest.raises(ConfigError, match=r"auto, echo, hints, last, off|observe, predict"):
        make_runtime(prefetch)
