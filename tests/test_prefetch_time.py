"""The benchmark of prefetching shows every mode, and says where "auto" costs too much."""

import json
from pathlib import Path

import pytest

from bench import prefetch_time
from bench.hit_rates import NAMES
from moecache.study._machine import PREFETCH_MODES
from tests.helpers.routing import random_trace


def test_every_mode_is_shown_on_every_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At both bandwidths, and nothing is missed: neither in time waited nor in time taken."""
    for seed, name in enumerate(NAMES):
        random_trace(seed, shape=(100, 4, 3)).save(tmp_path / f"{name}.npz")

    code = prefetch_time.main(["--traces", str(tmp_path), "--json", str(tmp_path / "figures")])

    figures = json.loads((tmp_path / "figures").read_text())
    for rows in (figures["25 GB/s"], figures["2.5 GB/s"]):
        for modes in rows.values():
            assert list(modes) == list(PREFETCH_MODES)
            assert modes["auto"]["stall_ns"] <= 1.02 * modes["off"]["stall_ns"]
            assert modes["auto"]["total_ns"] <= 1.01 * modes["off"]["total_ns"]
            assert modes["off"]["bytes_prefetch"] == 0
    assert all(modes["echo"]["bytes_prefetch"] > 0 for modes in figures["25 GB/s"].values())
    shown = capsys.readouterr().out
    assert all(shown.count(name) == 2 for name in NAMES)
    assert "time waited at 25 GB/s" in shown
    assert "time waited at 2.5 GB/s" in shown
    assert "missed" not in shown
    assert code == 0


def test_a_slower_link_waits_longer() -> None:
    """Of all modes that there are."""
    traces = {"random": random_trace()}
    fast, slow = (prefetch_time.simulate(traces, rate)["random"] for rate in (25e9, 2.5e9))
    assert list(fast) == list(PREFETCH_MODES)
    assert all(slow[mode].stall_ns > fast[mode].stall_ns for mode in PREFETCH_MODES)


def test_a_mode_that_costs_too_much_is_named() -> None:
    """Only "auto" promises anything: two in a hundred of what is waited, one of all time."""
    times = {
        "a": {"off": 1000, "last": 5000, "auto": 1020},
        "b": {"off": 1000, "last": 900, "auto": 1021},
        "c": {"off": 1000, "last": 900},
    }
    assert prefetch_time.compare(times, "stall_ns", "2.5 GB/s") == [
        "auto at 2.5 GB/s on b: 1.021 of off's stall_ns"
    ]
    assert prefetch_time.compare(times, "total_ns", "2.5 GB/s") == [
        "auto at 2.5 GB/s on a: 1.020 of off's total_ns",
        "auto at 2.5 GB/s on b: 1.021 of off's total_ns",
    ]


def test_without_the_traces_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And succeeds: they are not the project's to ship."""
    assert prefetch_time.main(["--traces", str(tmp_path)]) == 0
    assert "skipped: the traces are not in" in capsys.readouterr().out
