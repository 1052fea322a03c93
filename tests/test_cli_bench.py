"""`moecache bench`: every contestant does the same work, in a process of its own."""

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moecache import cli
from moecache.commands import bench, contestants
from moecache.commands.bench_table import print_bench
from moecache.commands.contestants import Contestant, differing, run_process
from moecache.errors import ConfigError, MoeCacheError
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.more_families import MORE_FAMILIES

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
# transformers' own
pytestmark = pytest.mark.filterwarnings("ignore")

Captured = pytest.CaptureFixture[str]
SHORT = ("--prompt-tokens", "12", "--new-tokens", "6", "--warm-up", "2", "--threads", "1")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> list[dict[str, Any]]:
    """Run contestants here, which imports nothing anew; return the tasks they were given."""
    from moecache.integrations.transformers import _contestant

    tasks: list[dict[str, Any]] = []

    def run(task: dict[str, Any]) -> dict[str, Any]:
        assert task.get("group") is None
        tasks.append(json.loads(json.dumps(task)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO(json.dumps(task)))
            patch.setattr(sys, "stdout", output := io.StringIO())
            _contestant.main()
        found = json.loads(output.getvalue().splitlines()[-1])
        if "error" in found:
            raise (ConfigError if found["usage"] else MoeCacheError)(found["error"])
        return dict(found)

    monkeypatch.setattr(bench, "run_process", run)
    monkeypatch.setattr(contestants, "run_process", run)
    return tasks


def test_a_run_is_measured_in_a_process_of_its_own(
    tiny_moe: Path,
    tmp_path: Path,
    in_process: list[dict[str, Any]],
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Machine first; a row per memory and policy; every figure in the JSON."""
    monkeypatch.setattr(contestants, "run_process", run_process)
    figures = tmp_path / "figures.json"
    options = ("--memories", "25%", "--repeats", "1", "--cold", "--json", str(figures))
    assert cli.main(["bench", str(tiny_moe), *SHORT, *options]) == 0
    assert [task["kind"] for task in in_process] == ["prepare"]
    shown = capsys.readouterr()
    for part in ("cores", "torch", "transformers", "1 threads, page cache cold", "prose"):
        assert part in shown.err
    assert "moecache 25% echo" in shown.out
    found = json.loads(figures.read_text())
    assert found["version"] == 1
    assert found["same_tokens"]
    [contestant] = found["contestants"]
    [run] = contestant["runs"]
    assert len(run["tokens"]) == 6
    assert run["peak_rss_bytes"] > run["imports_rss_bytes"] > 0
    assert 0 < run["hit_rate"] < 1
    # Five tokens through eight layers of four experts, after the first token.
    assert run["stats"]["num_hits"] + run["stats"]["num_misses"] == 5 * 8 * 4
    assert run["bytes_per_token"] == pytest.approx(run["stats"]["bytes_read"] / 5)
    assert run["slots"] == 60
    for name in ("load_s", "prefill_tokens_per_s", "decode_tokens_per_s", "stall_ms_per_token"):
        assert contestant["median"][name] == run[name] > 0


def test_comparison_is_with_what_one_would_do_otherwise(
    tiny_moe: Path, in_process: list[dict[str, Any]], capsys: Captured
) -> None:
    """On the same checkpoint and prompt, in turns; shares are of the resident model."""
    pytest.importorskip("accelerate")
    options = ("--memories", "25%,100%", "--policies", "lru", "--repeats", "2", "--sample")
    assert cli.main(["bench", str(tiny_moe), *SHORT, *options, "--compare"]) == 0
    kinds = [task["kind"] for task in in_process]
    once = ["resident", "disk_offload", "experts_on_disk", "moecache", "moecache"]
    assert kinds == ["prepare", *once, *once]
    assert len({tuple(task["prompt"]) for task in in_process[1:]}) == 1
    rows = {
        line.split("│")[1].strip(): line
        for line in capsys.readouterr().out.splitlines()
        if "│" in line
    }
    # Memory may be "1.00 GiB", and seconds 1.00.
    cells = [cell.strip() for cell in rows["all resident"].split("│")]
    assert (cells[4], cells[6]) == ("1.00", "1.00")
    for name in ("accelerate disk_offload", "device_map, experts on disk", "moecache 25% lru"):
        assert name in rows
    assert " 12.0 MiB " in rows["moecache 100% lru"]


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5_moe_vl"])
def test_a_model_without_tokenizer_gets_random_tokens(
    name: str, tmp_path: Path, in_process: list[dict[str, Any]], capsys: Captured
) -> None:
    """Other families, all ways to run them: the same tokens."""
    pytest.importorskip("accelerate")
    write_checkpoint(FAMILIES[name], tmp_path, "bfloat16")
    options = ("--memories", "50%", "--repeats", "1", "--sample", "--compare")
    code = cli.main(["bench", str(tmp_path), *SHORT, *options])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "random tokens, as there is no tokenizer" in shown.err
    assert len(in_process) == 5


def test_other_tokens_fail_and_are_named(
    tiny_moe: Path,
    in_process: list[dict[str, Any]],
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 1: figures of other work are no comparison."""
    honest = contestants.run_process

    def cheat(task: dict[str, Any]) -> dict[str, Any]:
        found = honest(task)
        if task["policy"] == "lfu":
            found["tokens"][3] += 1
        return found

    monkeypatch.setattr(contestants, "run_process", cheat)
    options = ("--memories", "50%", "--policies", "lru,lfu,slru", "--repeats", "1")
    assert cli.main(["bench", str(tiny_moe), *SHORT, *options]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "other tokens than moecache 50% lru were generated by: moecache 50% lfu:" in last


def test_what_cannot_run_is_a_row_that_says_why(
    tiny_moe: Path, in_process: list[dict[str, Any]], capsys: Captured
) -> None:
    """The others are run; exit code 1."""
    options = ("--memories", "50KiB,25%", "--repeats", "2")
    assert cli.main(["bench", str(tiny_moe), *SHORT, *options]) == 1
    shown = capsys.readouterr()
    assert "moecache 50KiB echo: " in shown.err
    assert "raise memory to at least" in shown.err
    assert [task.get("memory") for task in in_process] == [None, "50KiB", "25%", "25%"]


def test_what_does_not_fit_is_left_out(
    tiny_moe: Path,
    in_process: list[dict[str, Any]],
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model larger than memory is what moecache is for: no failure."""
    pytest.importorskip("accelerate")
    from moecache.integrations.transformers import _baselines

    monkeypatch.setattr(_baselines, "free_host_bytes", lambda: 2**20)
    options = ("--memories", "25%", "--repeats", "1", "--compare")
    assert cli.main(["bench", str(tiny_moe), *SHORT, *options]) == 0
    shown = capsys.readouterr()
    assert "all resident: takes 13.3 MiB, but 1.00 MiB are free" in shown.err
    assert "accelerate disk_offload: takes 13.3 MiB" in shown.err


def test_a_way_to_compute_that_has_no_kernel_is_left_out(
    tmp_path: Path, in_process: list[dict[str, Any]], capsys: Captured
) -> None:
    """So that all ways can be asked for, whatever the model; alone it is a failure."""
    write_checkpoint(MORE_FAMILIES["longcat_flash"], tmp_path, "bfloat16")
    options = ("--memories", "50%", "--repeats", "2", "--sample", "--compute")
    assert cli.main(["bench", str(tmp_path), *SHORT, *options, "fast,torch"]) == 0
    shown = capsys.readouterr()
    assert "moecache 50% echo fast: " in shown.err
    assert 'use "torch"' in shown.err
    ways = [task.get("compute") for task in in_process]
    assert ways == [None, "fast", "torch", "torch"]
    assert cli.main(["bench", str(tmp_path), *SHORT, *options, "fast"]) == 1


def test_compare_without_accelerate_runs_nothing(
    tiny_moe: Path,
    in_process: list[dict[str, Any]],
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 1 at once, and what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", str(tiny_moe), "--compare"]) == 1
    assert "pip install 'moecache[transformers]'" in capsys.readouterr().err
    assert not in_process


def test_a_process_that_dies_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A signal by its name; else the last line it wrote."""
    python = sys.executable
    for code, message in (
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "out of memory"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", "died of SIGABRT"),
        ("raise SystemExit('no torch here')", "no torch here"),
        ("", "ended with exit code 0 and said nothing"),
    ):
        script = tmp_path / "script"
        script.write_text(f'#!/bin/sh\nexec {python} -c "{code}"\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        with pytest.raises(MoeCacheError, match=message):
            run_process({"verbose": False})
        monkeypatch.undo()


def test_a_process_ends_with_the_one_that_started_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is told which that is, and is interrupted once that is gone, whatever it waits for."""
    script = tmp_path / "script"
    script.write_text('#!/bin/sh\necho \'{"error": "\'$*\'", "usage": 0}\'\n')
    script.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(script))
        with pytest.raises(MoeCacheError) as caught:
            run_process({"verbose": False})
    assert str(caught.value) == f"-m {contestants._MODULE} {os.getpid()}"

    # As if another process had started it, and its input had no end.
    left = subprocess.Popen(
        [sys.executable, "-m", contestants._MODULE, str(os.getppid())],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert left.wait(120) == -signal.SIGINT
    finally:
        left.kill()
        left.communicate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memories", "25%,,50%"), "has an empty entry"),
        (("--memories", "lots"), "--memories: 'lots' is not a size"),
        (("--policies", "best"), "'best' is not one of all"),
        (("--repeats", "0"), "--repeats must be from 1 to 16777216, got 0"),
        (("--new-tokens", "1"), "--new-tokens must be from 2 to 16777216, got 1"),
        (("--warm-up", "9" * 30), f"--warm-up must be from 0 to 16777216, got {'9' * 30}"),
        (("--threads", "0"), "--threads must be from 1 to 256, got 0"),
        (("--threads", "9" * 30), "--threads must be from 1 to 256, got 9"),
        (("--seed", str(2**63)), f"--seed must be from -2**63 to 2**63 - 1, got {2**63}"),
        (("--json", "/no/such/file.json"), "there is no directory /no/such"),
        (("--json", ""), "--json is empty"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    options: tuple[str, ...],
    message: str,
    tiny_moe: Path,
    in_process: list[dict[str, Any]],
    capsys: Captured,
) -> None:
    """Exit code 2, one line."""
    assert cli.main(["bench", str(tiny_moe), *options]) == 2
    assert message in capsys.readouterr().err
    assert not in_process


def test_medians_are_over_all_runs(capsys: Captured) -> None:
    """Each figure has its own median; runs that agree do not differ."""
    from rich.console import Console

    runs = [{"load_s": seconds, "hit_rate": 0.5, "tokens": [1]} for seconds in (3.0, 1.0, 2.0)]
    one, two = (Contestant(name, {"kind": "moecache"}, runs) for name in "ab")
    assert one.median() == {"load_s": 2.0, "hit_rate": 0.5}
    assert differing([one, two]) == []
    print_bench(Console(width=20), [one, two], compare=True)
    assert capsys.readouterr().out.count("2.00") == 2


@pytest.mark.parametrize("name", ["qwen3_5_moe_vl", "gemma4_text", "nemotron_h", "minimax_m2"])
def test_device_map_places_every_parameter_once(name: str) -> None:
    """Those of experts on disk, the others in memory."""
    from moecache.integrations.transformers._baselines import device_map
    from moecache.integrations.transformers._experts import find_experts

    family = FAMILIES[name]
    with torch.device("meta"):
        model = family.model_class(family.config())
    places, experts = device_map(model), find_experts(model)
    assert {path for path, place in places.items() if place == "disk"} == set(experts)
    assert "" not in places
    for parameter, _ in [*model.named_parameters(), *model.named_buffers()]:
        covering = [path for path in places if f"{parameter}.".startswith(f"{path}.")]
        assert len(covering) == 1, parameter
