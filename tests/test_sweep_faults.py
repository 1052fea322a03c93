"""What goes wrong in a sweep costs one replay, or what a file would have kept, and no more."""

import contextlib
import errno
import pickle
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moecache.errors import StoreError, SweepError
from moecache.study import sweep
from moecache.study._journal import HEADER, Journal
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


@contextlib.contextmanager
def files_of(num_bytes: int) -> Iterator[None]:
    """Let no file of this process become longer, as if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("room", [0, 50])
def test_a_sweep_goes_on_without_space_for_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    """One warning, the whole table; the file has the cells before, and takes others again."""
    file = tmp_path / "sweep.jsonl"
    sweep(TRACE, "lru", (8, 9), resume=file)
    kept = file.read_bytes()

    with files_of(len(kept) + room):
        table = sweep(TRACE, "lru", range(8, 14), resume=file)

    assert table["capacity"] == [8, 9, 10, 11, 12, 13]
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "moecache.study._journal")
    assert f"{file}: cannot be written: File too large; the sweep goes on" in record.getMessage()
    assert file.read_bytes() == kept
    told: list[int] = []
    sweep(TRACE, "lru", range(8, 14), resume=file, progress=lambda done, _: told.append(done))
    assert told == [2, 3, 4, 5, 6]
    assert len(file.read_bytes().splitlines()) == 7


def test_a_file_that_cannot_be_brought_to_the_disk_costs_no_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems say only then that there is no space."""

    def fail(self: Journal) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "_sync", fail)
    assert sweep(TRACE, "lru", (8, 9), resume=tmp_path / "sweep.jsonl")["capacity"] == [8, 9]
    (record,) = caplog.records
    assert "cannot be written: No space left on device" in record.getMessage()


def test_a_file_that_has_no_space_for_its_first_line_is_an_error(tmp_path: Path) -> None:
    """Before anything is replayed; the file can be named again."""
    file = tmp_path / "sweep.jsonl"
    with files_of(5), pytest.raises(StoreError, match="cannot be written: File too large"):
        sweep(TRACE, "lru", 8, resume=file)
    sweep(TRACE, "lru", 8, resume=file)
    assert file.read_bytes().startswith(HEADER)
