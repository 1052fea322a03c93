"""`moecache replay`: tables, files, advice, and what it says of wrong values."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moecache import cli
from moecache.commands.arguments import check_output
from moecache.study import Replay, Trace, _workers, load_any, plots, recommend, replay, sweep
from moecache.study._arguments import POLICIES
from tests.helpers.routing import random_trace

ROOT = Path(__file__).parents[1]
DRAW = plots.draw_curves
TINY = str(ROOT / "examples" / "traces" / "tiny_moe.npz")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Return the name of a file with a small trace that does not say what an expert takes."""
    random_trace(shape=(60, 4, 3)).save(tmp_path / "run.npz")
    return str(tmp_path / "run.npz")


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the cells of a table's rows by the first one."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells if row}


def test_the_table_has_policies_by_capacities(capsys: pytest.CaptureFixture[str]) -> None:
    """With the defaults: five policies at three shares, Belady last, bytes where known."""
    assert cli.main(["replay", TINY]) == 0
    shown = capsys.readouterr()

    rows = rows_of(shown.out)
    assert list(rows) == ["lru", "slru", "lfru", "echo", "belady (the optimum)"]
    expected = [replay(load_any(TINY), "echo", share).hit_rate for share in (0.125, 0.25, 0.5)]
    assert rows["echo"] == [f"{rate:.1%}" for rate in expected]
    assert "tiny_moe, scope global: hit rates (a token uses 32 of 256 experts, 12.5%)" in shown.out
    assert "64 slots" in shown.out
    assert "3.00 MiB" in shown.out
    assert shown.err == ""


def test_policies_capacities_and_scopes_are_lists(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON has a row for each, as `sweep` gives them; `all` is every policy."""
    options = ["--policy", "all", "--capacity", "16,25%", "--scope", "global,layer"]
    assert cli.main(["replay", trace, *options, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)

    expected = sweep(trace, (*POLICIES, "belady"), (16, "25%"), scopes=("global", "layer"))
    assert [{**row, "seconds": 0} for row in rows] == [{**row, "seconds": 0} for row in expected]


def test_memory_becomes_slots_of_each_trace(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the trace's own expert size, or the one that is given for all."""
    options = ["--policy", "lru", "--json"]
    assert cli.main(["replay", TINY, "--memory", "1MiB,50%", *options]) == 0
    assert [row["capacity"] for row in json.loads(capsys.readouterr().out)] == [21, 128]
    given = ["--memory", "64KiB", "--expert-bytes", "2KiB"]
    assert cli.main(["replay", trace, TINY, *given, *options]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["trace"], row["capacity"]) for row in rows] == [("run", 32), ("tiny_moe", 32)]


def test_a_capacity_may_be_a_decimal(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As the message about a wrong one says."""
    options = ["--policy", "lru", "--capacity", "0.25,25,25%", "--json"]
    assert cli.main(["replay", trace, *options]) == 0
    assert [row["capacity"] for row in json.loads(capsys.readouterr().out)] == [24, 25]


def test_layers_are_shown_on_request(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A row per layer in a table of its own, or a list in JSON."""
    options = ["--policy", "lru,echo", "--capacity", "24", "--per-layer"]
    assert cli.main(["replay", trace, *options]) == 0
    text = capsys.readouterr().out
    rates = replay(load_any(trace), "echo", 24).per_layer
    assert [rows_of(text)[str(layer)][1] for layer in range(4)] == [f"{r:.1%}" for r in rates]
    assert cli.main(["replay", trace, *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1]["layer_hit_rates"] == rates.tolist()


def test_figures_are_written_to_files(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CSV beside the table; a second run resumes."""
    kept = tmp_path / "kept.jsonl"
    options = ["--policy", "lru,lfu", "--resume", str(kept), "--csv", str(tmp_path / "t.csv")]
    assert cli.main(["replay", trace, *options]) == 0
    first = (tmp_path / "t.csv").read_text()
    assert cli.main(["replay", trace, *options]) == 0

    assert (tmp_path / "t.csv").read_text() == first
    assert len(list(csv.DictReader(first.splitlines()))) == 6
    assert len(kept.read_text().splitlines()) == 7


def test_figures_are_written_as_parquet(trace: str, tmp_path: Path) -> None:
    """With pandas and pyarrow."""
    pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    assert cli.main(["replay", trace, "--parquet", str(tmp_path / "t.parquet")]) == 0
    assert len(pandas.read_parquet(tmp_path / "t.parquet")) == 15


def test_curves_are_drawn(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An Axes per trace and scope, with points at the sizes asked for, too."""
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(
        plots,
        "draw_curves",
        lambda *given, **named: drawn.append((given[1], named)) or DRAW(*given, **named),
    )
    name = tmp_path / "curves.png"
    options = ["--scope", "global,layer", "--plot", str(name), "--capacity", "40"]
    assert cli.main(["replay", trace, TINY, *options]) == 0

    assert name.read_bytes().startswith(b"\x89PNG")
    assert "40 slots" in capsys.readouterr().out
    assert [named["scope"] for _, named in drawn] == ["global", "layer"] * 2
    points, _ = drawn[1]
    assert list(points) == ["lru", "slru", "lfru", "echo", "belady"]
    slots = [6, 9, 12, 18, 24, 36, 40, 48, 60, 72, 96]
    assert sorted(points["echo"]) == [
        (at, 1 - replay(load_any(trace), "echo", at, scope="layer").hit_rate) for at in slots
    ]


def test_curves_and_layers_are_of_the_same_sweep(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cell is replayed once, and all of them are kept to resume from."""
    pytest.importorskip("matplotlib")
    kept = tmp_path / "kept.jsonl"
    made = []
    monkeypatch.setattr(
        _workers, "replay", lambda *given, **named: made.append(given) or replay(*given, **named)
    )
    options = ["--policy", "lru,echo", "--per-layer", "--plot", str(tmp_path / "t.svg")]
    options += ["--resume", str(kept)]

    assert cli.main(["replay", trace, *options]) == 0
    # 12.5, 25 and 50 % are among the 11 sizes that are drawn.
    assert len(made) == 2 * 11
    assert len(kept.read_text().splitlines()) == 1 + len(made)
    monkeypatch.setattr(_workers, "replay", None)
    assert cli.main(["replay", trace, *options]) == 0


def test_curves_need_no_display(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever backend the environment asks for: pyplot is not even imported."""
    pytest.importorskip("matplotlib")
    program = (
        "import sys; from moecache import cli\n"
        "for name in sys.argv[2:]:\n"
        "    assert cli.main(['replay', sys.argv[1], '--policy', 'lru', '--plot', name]) == 0\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    monkeypatch.setenv("MPLBACKEND", "TkAgg")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    pictures = [tmp_path / "t.png", tmp_path / "t.pdf"]
    done = subprocess.run(
        [sys.executable, "-c", program, trace, *pictures],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all(picture.stat().st_size for picture in pictures)


def test_what_failed_can_be_repeated_alone(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are shown, and the message has the option."""

    def fails(trace: Trace, policy: str, slots: int, *, scope: str) -> Replay:
        if (policy, slots) == ("echo", 24):
            raise MemoryError("no room")
        return replay(trace, policy, slots, scope=scope)

    monkeypatch.setattr(_workers, "replay", fails)
    options = ["--policy", "lru,echo"]
    remedy = "the same command repeats only what failed"
    assert cli.main(["replay", trace, *options]) == 1
    shown = capsys.readouterr()
    assert "5 replays succeeded, 1 failed; the first with trace 'run', policy 'echo'" in shown.err
    assert f"no room; with --resume from the start, {remedy}\n" in shown.err
    assert rows_of(shown.out)["echo"][1] == "-"
    assert cli.main(["replay", trace, *options, "--resume", str(tmp_path / "kept")]) == 1
    assert f"no room; {remedy}\n" in capsys.readouterr().err


def test_advice_is_recommends(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As text and as JSON; policies and scopes are those to choose from."""
    assert cli.main(["replay", TINY, "--recommend", "3MiB"]) == 0
    advice = recommend(load_any(TINY), "3MiB")
    assert advice.describe() in capsys.readouterr().out
    options = ["--expert-bytes", "1KiB", "--policy", "lru,lfu", "--scope", "layer", "--json"]
    assert cli.main(["replay", trace, "--recommend", "24KiB", *options]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["trace"] == "run"
    assert found["scope"] == "layer"
    assert {name for name, _, _ in found["candidates"]} == {"lru", "lfu"}


def test_processes_work_side_by_side(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the same table."""
    assert cli.main(["replay", trace]) == 0
    alone = capsys.readouterr().out
    assert cli.main(["replay", trace, "--processes", "2"]) == 0
    assert capsys.readouterr().out == alone


def test_a_cluster_works_for_it(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the scheduler's address."""
    distributed = pytest.importorskip("dask.distributed")
    assert cli.main(["replay", trace]) == 0
    alone = capsys.readouterr().out
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
    ) as cluster:
        assert cli.main(["replay", trace, "--cluster", cluster.scheduler_address]) == 0
    assert capsys.readouterr().out == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--policy best", "--policy: 'best' is not one of all, arc"),
        ("--policy lru,,lfu", "--policy: 'lru,,lfu' has an empty entry"),
        ("--scope expert", "--scope: 'expert' is not one of all, global, layer"),
        ("--capacity x", "--capacity: capacity 'x' is neither"),
        ("--capacity 0", "--capacity: capacity '0' of 96 experts is 0 slots"),
        ("--capacity 2 --scope layer", "--capacity: capacity '2' is 2 slots, but scope 'layer'"),
        ("--memory 1MiB", "--expert-bytes: the trace does not say how large an expert is"),
        ("--memory x --expert-bytes 1KiB", "--memory: 'x' is not a size"),
        ("--memory 1KiB --expert-bytes 1MiB", "--memory: 1.00 KiB holds no expert of 1.00 MiB"),
        ("--expert-bytes x", "--expert-bytes: 'x' is not a size"),
        ("--processes -2", "--processes must be 0 or more, got -2"),
        ("--processes 2 --cluster a:1", "--processes and --cluster exclude each other"),
        ("--recommend x --expert-bytes 1KiB", "--recommend: 'x' is not a size"),
        ("--recommend 1MiB", "--expert-bytes: the trace does not say"),
        ("--recommend 1MiB --plot x.png", "--plot has no meaning with --recommend"),
        ("--recommend 1MiB --policy belady", "--policy: 'belady' is not one of all"),
    ],
)
def test_wrong_values_name_the_option(
    trace: str, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    """One line on standard error, nothing on standard output, exit code 2."""
    assert cli.main(["replay", trace, *options.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"moecache: {message}")
    assert shown.err.count("\n") == 1


def test_wrong_pictures_name_the_option(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is replayed."""
    pytest.importorskip("matplotlib")
    assert cli.main(["replay", trace, "--plot", "x.doc"]) == 2
    assert "--plot: 'x.doc' does not end in one of" in capsys.readouterr().err


def test_what_fails_is_a_line(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that are not there, are no trace, or cannot be written: exit code 1."""
    other = tmp_path / "other.jsonl"
    other.write_text("something else\n")
    for arguments in (
        [str(tmp_path / "none.npz")],
        [str(other)],
        [trace, "--resume", str(other)],
        [trace, "--csv", str(tmp_path)],
    ):
        assert cli.main(["replay", *arguments]) == 1
        assert capsys.readouterr().err.count("\n") == 1
    assert cli.main(["replay", trace, trace, trace]) == 2
    assert "is there twice" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--csv", "--parquet", "--plot", "--resume", "--capacity"])
def test_an_empty_value_is_not_taken_for_none(
    trace: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell variable that is not set must not lose the output."""
    assert cli.main(["replay", trace, option, ""]) == 2
    shown = capsys.readouterr()
    assert (shown.out, f"moecache: {option} is empty" in shown.err) == ("", True)


@pytest.mark.parametrize("option", ["--csv", "--parquet", "--plot", "--resume"])
def test_a_missing_directory_is_found_before_anything_is_replayed(
    trace: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after minutes of it."""
    assert cli.main(["replay", trace, option, str(tmp_path / "nowhere" / "out.png")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{option}: there is no directory {tmp_path / 'nowhere'}" in shown.err


@pytest.mark.parametrize("way", ["itself", "symlink", "hard link", "other spelling"])
@pytest.mark.parametrize("option", ["--csv", "--parquet", "--resume"])
def test_a_trace_is_never_written_over(
    trace: str, option: str, way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By whatever name the output is given."""
    before, out = Path(trace).read_bytes(), str(tmp_path / "link")
    if way == "symlink":
        Path(out).symlink_to(trace)
    elif way == "hard link":
        Path(out).hardlink_to(trace)
    else:
        out = trace if way == "itself" else f"{tmp_path}/../{tmp_path.name}/{Path(trace).name}"
    assert cli.main(["replay", trace, option, out]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{option} {out} is the trace as well; name another file" in shown.err
    assert Path(trace).read_bytes() == before


def test_two_outputs_are_two_files(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither of them there yet; a device may be both."""
    out = str(tmp_path / "out")
    assert cli.main(["replay", trace, "--csv", out, "--resume", out]) == 2
    assert f"--resume {out} is --csv as well" in capsys.readouterr().err
    assert not Path(out).exists()
    check_output("--csv", os.devnull, {os.devnull: "the trace"})
