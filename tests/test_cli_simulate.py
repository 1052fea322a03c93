"""`moecache simulate`: tables, files, and what it says of wrong values."""

import csv
import json
from pathlib import Path

import pytest

from moecache import cli
from moecache.study import load_any, simulate_time
from moecache.study._machine import PREFETCH_MODES
from tests.helpers.routing import random_trace

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "examples" / "traces" / "tiny_moe.npz")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Return the name of a file with a small trace that does not say what an expert takes."""
    random_trace(shape=(30, 4, 3)).save(tmp_path / "run.npz")
    return str(tmp_path / "run.npz")


def cells_of(text: str) -> list[list[str]]:
    """Return the cells of a table's rows."""
    return [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in text.splitlines()
        if line.startswith("│")
    ]


def test_the_table_has_the_speed_and_what_it_waited_for(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Policies by modes of prefetch, with the defaults of `simulate_time`."""
    options = ["--expert-bytes", "6MB", "--policy", "lru,echo", "--prefetch", "off"]
    assert cli.main(["simulate", trace, *options]) == 0
    shown = capsys.readouterr()

    rows = cells_of(shown.out)
    for policy, row in zip(("lru", "echo"), rows, strict=True):
        timing = simulate_time(load_any(trace), policy, expert_bytes="6MB")
        rate, waited = f"{timing.tokens_per_s:.0f}", f"{timing.stall_share:.1%}"
        demand = timing.bytes_read["demand"] / 2**20 / timing.num_tokens
        assert row[6:] == [f"{demand:.1f}"]
        assert row[:6] == [policy, "off", rate, waited, "100.0%", f"{timing.hit_rate:.1%}"]
    assert (
        "run, scope global: 24 slots (25.0%) of 5.72 MiB at 25 GB/s, latency 10 us, "
        "18 ms of computing for 30 tokens; bytes per token\n"
    ) in shown.out
    assert "demand" in shown.out
    assert "bulk" not in shown.out
    assert shown.err == ""


def test_every_mode_is_shown_by_default(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each beside what is waited without."""
    assert cli.main(["simulate", trace, "--expert-bytes", "6MB"]) == 0
    rows = cells_of(capsys.readouterr().out)
    assert [row[:2] for row in rows] == [["echo", mode] for mode in PREFETCH_MODES]


def test_json_has_all_figures_of_every_machine(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row for each trace, capacity, bandwidth, policy and mode."""
    other = tmp_path / "other.npz"
    random_trace(shape=(30, 8, 3)).save(other)
    options = ["--capacity", "20,25%", "--bandwidth", "25GB/s,2.5GB", "--latency", "80us"]
    options += ["--compute", "1ms", "--expert-share", "0.75", "--scope", "layer"]
    options += ["--prefetch", "off", "--expert-bytes", "48KiB", "--json"]
    assert cli.main(["simulate", trace, str(other), *options]) == 0
    rows = json.loads(capsys.readouterr().out)

    assert [(row["trace"], row["capacity"], row["bandwidth"]) for row in rows] == [
        ("run", 20, 25 * 10**9),
        ("run", 20, 2_500_000_000),
        ("run", 24, 25 * 10**9),
        ("run", 24, 2_500_000_000),
        ("other", 20, 25 * 10**9),
        ("other", 20, 2_500_000_000),
        ("other", 48, 25 * 10**9),
        ("other", 48, 2_500_000_000),
    ]
    timing = simulate_time(
        load_any(trace),
        capacity=24,
        bandwidth=2_500_000_000,
        latency_ns=80_000,
        compute_ns=10**6,
        expert_share=0.75,
        scope="layer",
        expert_bytes="48KiB",
    )
    assert rows[3] == {"trace": "run", **timing.figures()}
    assert rows[3]["bytes_demand"] == timing.bytes_read["demand"]


def test_a_file_takes_the_same_figures(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each, under their names."""
    path = tmp_path / "times.csv"
    assert cli.main(["simulate", trace, "--expert-bytes", "1MB", "--json", "--csv", str(path)]) == 0
    expected = json.loads(capsys.readouterr().out)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["total_ns"] for row in rows] == [str(row["total_ns"]) for row in expected]
    assert list(rows[0]) == list(expected[0])


def test_the_trace_may_say_how_large_an_expert_is(capsys: pytest.CaptureFixture[str]) -> None:
    """And a prompt's steps are a column of their own."""
    assert cli.main(["simulate", TINY, "--compute", "5us", "--prefetch", "off"]) == 0
    shown = capsys.readouterr().out
    assert "64 slots (25.0%) of 48.0 KiB" in shown
    assert "bulk" in shown


def test_the_widest_table_fits_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is cut off: the longest name of a policy, a prompt, experts read ahead."""
    options = ["--compute", "5us", "--policy", "least-stale", "--prefetch", "off,echo"]
    assert cli.main(["simulate", TINY, *options]) == 0
    shown = capsys.readouterr().out

    (header,) = (line for line in shown.splitlines() if "policy" in line)
    assert "…" not in shown
    assert header.replace("┃", " ").split() == (
        ["policy", "ahead", "per", "s", "waited", "of", "off", "hits", "MiB", "MiB", "MiB"]
    )
    assert max(map(len, shown.splitlines()[1:])) <= 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--expert-bytes: the trace does not say how large an expert is"),
        (["--bandwidth", "fast"], "--bandwidth: 'fast' is no rate"),
        (["--bandwidth", "1GB,"], "--bandwidth: '1GB,' has an empty entry"),
        (["--latency", "10"], "--latency: '10' is not a time; write for example 150us"),
        (["--compute", "-1us"], "--compute: '-1us' is not a time"),
        (["--expert-share", "2"], "--expert-share must be in [0, 1], got 2.0"),
        (["--prefetch", "psychic"], "--prefetch: 'psychic' is not one of all, off"),
        (["--policy", "belady"], "--policy: 'belady' is not one of all, arc"),
        (["--capacity", "1%"], "--capacity: capacity '1%' of 96 experts is 0 slots"),
        (["--csv", ""], "--csv is empty"),
        (["--csv", "nowhere/times.csv"], "--csv: there is no directory nowhere"),
    ],
)
def test_wrong_values_are_named_before_anything_is_simulated(
    trace: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the option that has them, in one line."""
    given = options and ["--expert-bytes", "1MB", *options]
    joined = [f"{given[i]}={given[i + 1]}" for i in range(0, len(given), 2)]
    assert cli.main(["simulate", trace, *joined]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"moecache: {message}")
    assert shown.err.count("\n") == 1


def test_a_trace_is_never_written_over(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Found before anything is simulated."""
    before = Path(trace).read_bytes()
    assert cli.main(["simulate", TINY, trace, "--expert-bytes", "1MB", "--csv", trace]) == 2
    assert f"--csv {trace} is the trace as well" in capsys.readouterr().err
    assert Path(trace).read_bytes() == before
