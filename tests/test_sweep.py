"""Sweeps: every cell once, the same wherever it runs, and nothing lost to a kill."""

import functools
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache._slru import SlruCache
from moecache.errors import ConfigError, FormatError, MissingDependencyError, StoreError, SweepError
from moecache.policies._lfu import LfruCache
from moecache.policies._policy import LruCache
from moecache.study import Table, Trace, replay, sweep
from moecache.study._journal import HEADER
from moecache.study._workers import can_be_sent
from tests.helpers.routing import ScriptedLru, random_trace

POLICIES = ("lru", "echo", "belady")


def traces() -> dict[str, Trace]:
    """Return two traces of different shapes."""
    return {"one": random_trace(1, (60, 3, 2), 16), "two": random_trace(2, (40, 2, 3), 24)}


def figures(table: Table) -> list[dict[str, Any]]:
    """Return the rows without the time they took."""
    return [{**row, "seconds": None} for row in table]


class Failing(ScriptedLru):
    """Fails with more than 20 slots."""

    def __init__(self, capacity: int, *, num_keys: int) -> None:
        super().__init__(capacity, num_keys=num_keys)
        if capacity > 20:
            raise RuntimeError(f"{capacity} slots are too many")


def test_a_sweep_is_its_replays() -> None:
    """A row per trace, scope, capacity and policy, in that order."""
    table = sweep(traces(), POLICIES, ("25%", 24), scopes=("global", "layer"))

    assert len(table) == 2 * 2 * 2 * 3
    where = [(row["trace"], row["scope"], row["capacity"], row["policy"]) for row in table]
    assert where[:4] == [
        ("one", "global", 12, "lru"),
        ("one", "global", 12, "echo"),
        ("one", "global", 12, "belady"),
        ("one", "global", 24, "lru"),
    ]
    assert len(set(where)) == len(where)
    for row in table:
        done = replay(traces()[row["trace"]], row["policy"], row["capacity"], scope=row["scope"])
        assert (row["num_hits"], row["num_accesses"]) == (done.num_hits, done.num_accesses)
        assert row["hit_rate"] == done.hit_rate == 1 - row["miss_ratio"]
        assert row["decode_hit_rate"] == done.per_phase["decode"]
        assert row["prefill_hit_rate"] is None
        assert row["fraction"] == row["capacity"] / 48
        assert row["model"].startswith("random")


def test_a_sweep_has_the_layers_rates() -> None:
    """Of each row, wherever it was replayed, and of parts of a table; they are no column."""
    table = sweep(traces(), POLICIES, ("25%", "50%"))

    for row, rates in zip(table, table.per_layer, strict=True):
        done = replay(traces()[row["trace"]], row["policy"], row["capacity"])
        assert rates == done.per_layer.tolist()
        assert "per_layer" not in row
    part = table.select(trace="two", policy="lru")
    assert part.per_layer == [table.per_layer[6], table.per_layer[9]]
    assert table[9:].per_layer == table.per_layer[9:]
    assert Table(table.rows).per_layer == [None] * 12


def test_gap_shares_are_between_lru_and_belady() -> None:
    """LRU closes nothing of the gap, Belady all; without both there is none."""
    table = sweep(traces()["one"], POLICIES, "25%")
    low, echo, high = table["hit_rate"]
    assert table["gap_share"] == [0, (echo - low) / (high - low), 1]
    assert sweep(traces()["one"], ("lru", "echo"), "25%")["gap_share"] == [None, None]
    # With everything in memory there is no gap.
    assert sweep(traces()["one"], POLICIES, 1.0)["gap_share"] == [None] * 3


def test_capacities_that_are_the_same_slots_are_one() -> None:
    """25% of 48 and 12 are one row, and so are two that exceed everything."""
    assert sweep(traces()["one"], "lru", ("25%", 12, 0.25, 99, 48))["capacity"] == [12, 48]


@pytest.mark.parametrize("number", [np.int64, np.uint8, np.int32])
def test_numbers_of_numpy_are_numbers(number: type) -> None:
    """Alone or in an array, as capacities and as processes."""
    expected = figures(sweep(traces()["one"], "lru", 12))

    assert figures(sweep(traces()["one"], "lru", number(12), processes=number(1))) == expected
    assert figures(sweep(traces()["one"], ScriptedLru, np.array([12], number)))
    assert sweep(traces()["one"], "lru", np.float32(0.25))["capacity"] == [12]
    assert len(sweep(traces()["one"], "lru", 12).select(capacity=number(12))) == 1


def test_files_are_read_and_named_after_themselves(tmp_path: Path) -> None:
    """A path, several, and a mapping of names to paths."""
    for name, trace in traces().items():
        trace.save(tmp_path / f"{name}.npz")
    paths = [tmp_path / "one.npz", tmp_path / "two.npz"]
    expected = sweep(traces(), POLICIES, "25%")

    assert figures(sweep(paths, POLICIES, "25%")) == figures(expected)
    named = sweep({"x": paths[0]}, "lru", "25%")
    assert named["trace"] == ["x"]
    with pytest.raises(ConfigError, match="is there twice"):
        sweep([paths[0]] * 3, "lru", "25%")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policies": ("lru", "best")}, "policy 'best' is not one of"),
        ({"policies": ()}, "at least one policy"),
        ({"traces": {}}, "at least one trace"),
        ({"capacities": ("25%", "x")}, "capacity 'x' is neither"),
        ({"scopes": "expert"}, "scope 'expert' is not one of"),
        ({"processes": -1}, "processes must be 0 or more"),
        ({"processes": "2"}, "processes must be 0 or more, got '2'"),
        ({"processes": 1.5}, "processes must be 0 or more, got 1.5"),
        ({"processes": True}, "processes must be 0 or more, got True"),
        ({"capacities": None}, "capacities must be .*, got None"),
        ({"policies": 3}, "policies must be .*, got 3"),
        ({"scopes": 3}, "scopes must be .*, got 3"),
        ({"traces": 3}, "traces must be .*, got 3"),
        ({"processes": 2, "cluster": "tcp://127.0.0.1:1"}, "processes or a cluster, not both"),
        ({"policies": (ScriptedLru(3, num_keys=3),)}, "ScriptedLru is one object"),
        ({"policies": (lambda *_: 0, lambda *_: 1)}, "two policies are called '<lambda>'"),
        ({"policies": (lambda *_: 0,), "processes": 2}, "cannot be sent to other processes"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    """Before anything is replayed."""
    given = {"traces": traces(), "policies": POLICIES, "capacities": ("25%", "50%"), **arguments}
    with pytest.raises(ConfigError, match=message):
        sweep(given.pop("traces"), given.pop("policies"), given.pop("capacities"), **given)


def test_a_failing_cell_is_reported_after_the_others_are_done() -> None:
    """The error names the cell and has the table of what succeeded."""
    message = (
        "5 replays succeeded, 1 failed; the first with trace 'two', policy 'Failing', scope .*: "
        "24 slots are too many; error.table has the others; with resume= given from the start, "
        "the same call repeats only what failed$"
    )
    with pytest.raises(SweepError, match=message) as caught:
        sweep({"two": traces()["two"]}, ("lru", Failing, "belady"), (24, 12))
    assert len(caught.value.table) == 5
    where, error = caught.value.failures[0]
    assert where == {"trace": "two", "policy": "Failing", "scope": "global", "capacity": 24}
    assert isinstance(error, RuntimeError)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert pickle.loads(pickle.dumps(caught.value)).failures[0][0] == where


def test_what_failed_is_repeated_alone(tmp_path: Path) -> None:
    """With a file to resume from the error says so, and it is so."""
    told: list[int] = []
    for done in (5, 5):
        with pytest.raises(SweepError, match=r"; the same call repeats only what failed$"):
            sweep(
                {"two": traces()["two"]},
                ("lru", Failing, "belady"),
                (24, 12),
                resume=tmp_path / "sweep.jsonl",
                progress=lambda at, _: told.append(at),
            )
        assert told[-1] == done
    assert told == [0, 1, 1, 2, 3, 4, 5, 5, 5]


def test_a_capacity_that_one_trace_cannot_have_fails_alone() -> None:
    """Two slots cannot be split over three layers, but over two."""
    with pytest.raises(SweepError, match="3 replays succeeded, 1 failed") as caught:
        sweep(traces(), POLICIES, 2, scopes="layer")
    assert set(caught.value.table["trace"]) == {"two"}


def test_processes_give_the_same() -> None:
    """Two of them, with policies of this file and a failing one."""
    expected = sweep(traces(), (*POLICIES, ScriptedLru), ("25%", "50%"), processes=0)

    found = sweep(traces(), (*POLICIES, ScriptedLru), ("25%", "50%"), processes=2)

    assert figures(found) == figures(expected)


def test_a_program_from_a_pipe_starts_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would have to import it."""
    assert can_be_sent(["lru", ScriptedLru])
    assert not can_be_sent(["lru", lambda: 0])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    assert not can_be_sent(["lru"])


def test_progress_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A function hears of each cell; True draws on standard error only."""
    told: list[tuple[int, int]] = []
    sweep(traces()["one"], POLICIES, "25%", progress=lambda *at: told.append(at))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    sweep(traces()["one"], POLICIES, "25%", progress=True)
    assert capsys.readouterr().out == ""


def test_a_sweep_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run replays only what is missing, and the table is the same."""
    file = tmp_path / "sweep.jsonl"
    first = sweep(traces(), POLICIES, ("25%", "50%"), resume=file)
    told: list[tuple[int, int]] = []

    again = sweep(
        traces(), POLICIES, ("25%", "50%"), resume=file, progress=lambda *at: told.append(at)
    )
    more = sweep(
        traces(), (*POLICIES, "lfu"), "25%", resume=file, progress=lambda *at: told.append(at)
    )

    assert again.rows == first.rows  # the very seconds
    assert again.per_layer == first.per_layer
    assert told == [(12, 12), (6, 8), (7, 8), (8, 8)]
    assert len(more) == 8
    # Another trace, and another version, are other cells.
    told.clear()
    other = {"one": random_trace(3, (60, 3, 2), 16)}
    sweep(other, "lru", "25%", resume=file, progress=lambda *at: told.append(at))
    monkeypatch.setattr("moecache.__version__", "9")
    sweep(other, "lru", "25%", resume=file, progress=lambda *at: told.append(at))
    assert told == [(0, 1), (1, 1)] * 2


def titled(name: str, policy: Any) -> Any:
    """Give a policy's result another name."""
    policy.__name__ = name
    return policy


def slru(capacity: int, *, num_keys: int, share: float = 0.5) -> SlruCache:
    """Make a segmented LRU whose first segment has that share."""
    first = max(1, int(capacity * share))
    return SlruCache(first, max(1, capacity - first), num_keys=num_keys)


def test_policies_of_ones_own_are_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Classes and functions of modules, compiled or not, and partials of them are known again."""
    policies = (
        ScriptedLru,
        LruCache,
        slru,
        titled("wide", functools.partial(slru, share=0.75)),
        titled("narrow", functools.partial(slru, share=0.25)),
        functools.partial(functools.partial(LfruCache)),
    )
    told: list[int] = []
    for _ in range(2):
        told.clear()
        table = sweep(
            traces()["one"],
            policies,
            "25%",
            resume=tmp_path / "sweep.jsonl",
            progress=lambda done, _: told.append(done),
        )
    assert told == [6]
    assert not caplog.records
    assert table["num_hits"] == [
        replay(traces()["one"], policy, "25%").num_hits for policy in policies
    ]


def test_a_policy_that_was_changed_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the source of its class, also within a partial."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "own_policy.py"
    lines = "from tests.helpers.routing import ScriptedLru\n\nclass Own(ScriptedLru):\n    a = "
    for number in ("1", "22"):
        file.write_text(lines + number + "\n")
        monkeypatch.delitem(sys.modules, "own_policy", raising=False)
        importlib.invalidate_caches()
        own = importlib.import_module("own_policy").Own
        told: list[int] = []
        sweep(
            traces()["one"],
            (own, titled("part", functools.partial(own))),
            "25%",
            resume=tmp_path / "sweep.jsonl",
            progress=lambda done, _, told=told: told.append(done),
        )
        assert told == [0, 1, 2]
    monkeypatch.delitem(sys.modules, "own_policy")


def test_a_policy_whose_base_was_changed_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the source of every class above it, however far; one of the standard library may be C."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "own_bases.py"
    for number, replayed in (("1", 2), ("22", 2), ("22", 0)):
        file.write_text(
            "import collections\n"
            "from tests.helpers.routing import ScriptedLru\n\n"
            f"class Lowest:\n    a = {number}\n\n"
            "class Lower(Lowest, ScriptedLru):\n    pass\n\n"
            "class Own(Lower):\n    pass\n\n"
            "class Queue(Lower, collections.deque):\n    __hash__ = object.__hash__\n"
            "    def __init__(self, capacity, *, num_keys):\n"
            "        ScriptedLru.__init__(self, capacity, num_keys=num_keys)\n"
        )
        monkeypatch.delitem(sys.modules, "own_bases", raising=False)
        importlib.invalidate_caches()
        own = importlib.import_module("own_bases")
        told: list[int] = []
        sweep(
            traces()["one"],
            (own.Own, own.Queue),
            "25%",
            resume=tmp_path / "sweep.jsonl",
            progress=lambda done, _, told=told: told.append(done),
        )
        assert told == [0, 1, 2][2 - replayed :]
    monkeypatch.delitem(sys.modules, "own_bases")


class Maker:
    """Makes policies; what it does depends on what it has."""

    def make(self, capacity: int, *, num_keys: int) -> ScriptedLru:
        """Return one."""
        return ScriptedLru(capacity, num_keys=num_keys)

    __call__ = make


def made(factor: int) -> type[ScriptedLru]:
    """Return a class that has a number of its own."""

    class Made(ScriptedLru):
        share = factor

    return Made


class Derived(made(3)):  # type: ignore[misc]
    """Has a base whose source does not say everything."""


def test_what_cannot_be_known_again_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Local classes and functions, classes made of such, methods, objects, partials of them."""

    class Local(ScriptedLru):
        pass

    policies = (
        "lru",
        Local,
        lambda capacity, num_keys: ScriptedLru(capacity, num_keys=num_keys),
        Maker().make,
        Maker(),
        titled("part", functools.partial(slru, share=np.float64(0.5))),
        titled("other", functools.partial(Local)),
        Derived,
    )
    told: list[int] = []
    for first in (0, 2):
        caplog.clear()
        told.clear()
        sweep(
            traces()["one"],
            policies,
            ("25%", "50%"),
            resume=tmp_path / "sweep.jsonl",
            progress=lambda done, _: told.append(done),
        )
        assert told == list(range(first, 17))
        (record,) = caplog.records
        assert (record.levelname, record.name) == ("WARNING", "moecache.study.sweeps")
        assert record.getMessage() == (
            "sweep.not_kept policies=Local,<lambda>,make,Maker,part,other,Derived cells=14: they "
            "are replayed again next time; take classes and functions of a module"
        )
    caplog.clear()
    sweep(traces()["one"], policies, "25%")
    assert not caplog.records


def test_a_torn_last_line_is_replayed_again(tmp_path: Path) -> None:
    """Whatever a kill left of the last line; also of the first."""
    file = tmp_path / "sweep.jsonl"
    expected = figures(sweep(traces()["one"], POLICIES, "25%", resume=file))
    whole = file.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    for length in (0, 5, len(HEADER), last, last + 1, (last + len(whole)) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert figures(sweep(traces()["one"], POLICIES, "25%", resume=file)) == expected
        assert len(file.read_bytes().splitlines()) == 4


def test_a_damaged_file_is_an_error_and_stays_as_it_is(tmp_path: Path) -> None:
    """A bit that flipped, a line that is cut in the middle, or another program's file."""
    file = tmp_path / "sweep.jsonl"
    sweep(traces()["one"], POLICIES, "25%", resume=file)
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    damaged = [
        (whole.replace(b'"num_hits": ', b'"num_hits": 1', 1), "line 2 is damaged"),
        (b"".join([lines[0], lines[1][:20] + b"\n", *lines[2:]]), "line 2 is damaged"),
        (b"".join([lines[0], lines[1], b"\n", *lines[2:]]), "line 3 is damaged"),
        (b"trace,policy\n", "is no file of a sweep"),
        (json.dumps({"moecache_sweep": 1}).encode() + b"\n", "is no file of a sweep"),
        (b"\x00" * 100, "is no file of a sweep"),
    ]
    for data, message in damaged:
        file.write_bytes(data)
        with pytest.raises(FormatError, match=message):
            sweep(traces()["one"], POLICIES, "25%", resume=file)
        assert file.read_bytes() == data


def test_a_file_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    """A directory, and a file that another sweep writes to."""
    with pytest.raises(StoreError, match="cannot be resumed from: Is a directory"):
        sweep(traces()["one"], "lru", "25%", resume=tmp_path)
    file = tmp_path / "sweep.jsonl"

    def at_work(done: int, total: int) -> None:
        with pytest.raises(StoreError, match="another sweep is writing"):
            sweep(traces()["one"], "lru", "25%", resume=file)

    sweep(traces()["one"], "lru", "25%", resume=file, progress=at_work)


SWEEP = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from moecache.study import sweep
from tests.helpers.routing import random_trace

if __name__ == "__main__":
    sweep(
        {{"long": random_trace(5, (400, 6, 4), 32)}}, ("lecar", "echo"), range(8, 190),
        resume=sys.argv[1], processes=int(sys.argv[2]),
        progress=lambda done, total: print(done, total, flush=True),
    )
"""


def start(tmp_path: Path, processes: int) -> "subprocess.Popen[str]":
    """Start a sweep of some seconds, and wait for its first ten cells."""
    (tmp_path / "program.py").write_text(SWEEP)
    child = subprocess.Popen(
        [sys.executable, tmp_path / "program.py", tmp_path / "sweep.jsonl", str(processes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    for line in child.stdout:
        if int(line.split()[0]) >= 10:
            break
    return child


def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    """After kill -9 every cell that was told is there, and the rest is replayed."""
    child = start(tmp_path, 1)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate(timeout=60)
    told: list[int] = []

    trace = {"long": random_trace(5, (400, 6, 4), 32)}
    table = sweep(
        trace,
        ("lecar", "echo"),
        range(8, 190),
        resume=tmp_path / "sweep.jsonl",
        progress=lambda done, _: told.append(done),
    )

    assert 10 <= told[0] < 364
    assert len(table) == told[-1] == 364
    for row in table[:: 364 // 7]:
        done = replay(trace["long"], row["policy"], row["capacity"])
        assert row["num_hits"] == done.num_hits


@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupt_ends_a_sweep_and_its_processes(tmp_path: Path, processes: int) -> None:
    """Ctrl-C in a terminal reaches all of them; nothing of the group is left, the file is whole."""
    child = start(tmp_path, processes)
    os.killpg(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=60)

    assert child.returncode not in (0, None)
    assert errors.count("KeyboardInterrupt\n") == 1, errors
    assert is_gone(child.pid)
    assert (tmp_path / "sweep.jsonl").read_bytes().endswith(b"\n")


def test_a_killed_sweep_leaves_no_processes(tmp_path: Path) -> None:
    """Workers and the tracker of resources end with the process that was killed, and it alone."""
    child = start(tmp_path, 2)
    child.kill()

    assert child.wait() == -signal.SIGKILL
    assert is_gone(child.pid)
    child.communicate()


def is_gone(group: int) -> bool:
    """Wait until a group has no process; end those that stay."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    return False


def test_a_process_that_dies_is_an_error() -> None:
    """Not a hang, and not a table with holes."""
    with pytest.raises(Exception, match="a process of the sweep died"):
        sweep(traces(), ("lru", Dies), ("25%", "50%"), processes=2)


class Dies(ScriptedLru):
    """Takes its process with it."""

    def insert(self, key: int) -> None:
        """End."""
        os._exit(3)


def test_a_dask_cluster_gives_the_same(tmp_path: Path) -> None:
    """With a client, and with the scheduler's address; what fails is reported."""
    distributed = pytest.importorskip("dask.distributed")
    expected = figures(sweep(traces(), (*POLICIES, ScriptedLru), ("25%", "50%")))
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        found = sweep(
            traces(),
            (*POLICIES, ScriptedLru),
            ("25%", "50%"),
            cluster=client,
            resume=tmp_path / "sweep.jsonl",
        )
        assert figures(found) == expected
        assert figures(sweep(traces(), POLICIES, "25%", cluster=cluster.scheduler_address))
        with pytest.raises(SweepError, match="24 slots are too many"):
            sweep(traces(), ("lru", Failing), 24, cluster=client)
        again = sweep(
            traces(), (*POLICIES, ScriptedLru), ("25%", "50%"), resume=tmp_path / "sweep.jsonl"
        )
        assert again.rows == found.rows


def test_without_dask_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extra is named, not a stack trace."""
    monkeypatch.setitem(sys.modules, "dask", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'moecache\[study\]'"):
        sweep(traces(), "lru", "25%", cluster="tcp://127.0.0.1:1")
