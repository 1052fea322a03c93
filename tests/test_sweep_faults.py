"""What goes wrong in a sweep costs one replay, or what a file would have kept, and no more."""

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from moecache.errors import SweepError
from moecache.study import sweep
from moecache.study._workers import said
from tests.helpers.routing import ScriptedLru, random_trace

TRACE = random_trace(1, (60, 3, 2), 16)


class TwoPartsError(Exception):
    """Can be pickled, but not be made again."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


class FunctionError(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.function = lambda: 0


class OtherError(Exception):
    """Comes back as something else."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Become a number."""
        return int, ()


class MuteError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        """Fail."""
        raise RuntimeError("no text")


class TwoParts(ScriptedLru):
    """Raises what cannot be read."""

    def access(self, key: int) -> None:
        """Fail."""
        raise TwoPartsError("one", "two")


class Function(ScriptedLru):
    """Raises what cannot be written."""

    def access(self, key: int) -> None:
        """Fail."""
        raise FunctionError("a function")


class Other(ScriptedLru):
    """Raises what turns into a number."""

    def access(self, key: int) -> None:
        """Fail."""
        raise OtherError("another")


class Mute(ScriptedLru):
    """Raises what says nothing."""

    def access(self, key: int) -> None:
        """Fail."""
        raise MuteError


class Exits(ScriptedLru):
    """Would end the program."""

    def access(self, key: int) -> None:
        """End."""
        raise SystemExit(3)


class Interrupts(ScriptedLru):
    """Does what Ctrl-C does."""

    def access(self, key: int) -> None:
        """Interrupt."""
        raise KeyboardInterrupt


FAILING = {
    TwoParts: "TwoPartsError: onetwo",
    Function: "FunctionError: a function",
    Other: "OtherError: another",
    Mute: "MuteError (its text cannot be had)",
    Exits: "SystemExit: 3",
}


@contextlib.contextmanager
def way(name: str) -> Iterator[dict[str, Any]]:
    """Have the options of a sweep's way to replay."""
    if name != "cluster":
        yield {"processes": int(name)}
        return
    distributed = pytest.importorskip("dask.distributed")
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield {"cluster": client}


@pytest.mark.parametrize("name", ["1", "2", "cluster"])
def test_whatever_a_policy_raises_fails_its_own_replay(name: str) -> None:
    """What no other process can read comes as its text; the others' results are there."""
    with way(name) as options, pytest.raises(SweepError) as caught:
        sweep(TRACE, (*FAILING, "lru", ScriptedLru), 12, **options)

    assert sorted(caught.value.table["policy"]) == ["ScriptedLru", "lru"]
    failures = {where["policy"]: said(error) for where, error in caught.value.failures}
    assert failures.keys() == {policy.__name__ for policy in FAILING}
    for policy, text in FAILING.items():
        assert failures[policy.__name__].endswith(text)
    assert "2 replays succeeded, 5 failed; the first with trace 'random" in str(caught.value)
    if name != "1":
        assert len(pickle.loads(pickle.dumps(caught.value)).failures) == 5


@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupt_of_a_policy_is_none_of_its_failures(processes: int) -> None:
    """It ends the sweep."""
    with pytest.raises(KeyboardInterrupt):
        sweep(TRACE, (Interrupts, "lru"), 12, processes=processes)
