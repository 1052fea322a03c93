"""`moecache trace`: what it shows, converts, records, and refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

from moecache import cli
from moecache.commands.trace_info import heat
from moecache.study import Trace, load_any, statistics
from tests.helpers.traces import random_trace

SHIPPED = Path(__file__).parents[1] / "examples" / "traces" / "tiny_moe.npz"


def test_info_shows_what_a_trace_is_and_how_it_behaves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts, figures, and a line per layer."""
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["trace", "info", str(SHIPPED)]) == 0
    text = capsys.readouterr().out
    figures = statistics(Trace.load(SHIPPED))

    for part in ("model        tiny_moe", "8 layers x 32, top-4", "568: 92 prefill, 476 decode"):
        assert part in text
    for line in figures.describe().splitlines():
        assert line in text
    for layer in range(8):
        assert heat(figures.counts[layer]) in text
    assert f"{figures.overlap[3]:.1%}" in text


def test_info_as_json_has_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An object per file, of any form, without NaN."""
    (tmp_path / "pairs.jsonl").write_text("[[0, 1], [2, 3]]\n")
    assert cli.main(["trace", "info", str(SHIPPED), str(tmp_path / "pairs.jsonl"), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)

    assert first["num_tokens"] == 568
    assert first["digest"] == Trace.load(SHIPPED).digest
    assert first["gini"] == statistics(Trace.load(SHIPPED)).gini.tolist()
    assert first["num_sequences"] == 4
    assert second["layers"] == [0, 2]
    assert second["overlap"] == [None, None]


def test_heat_is_a_column_per_expert_or_several() -> None:
    """The busiest is full, the unused empty, the hardly used still seen."""
    assert heat(np.array([0, 1, 800, 400])) == " ▁█▄"
    assert heat(np.zeros(3, int)) == "   "
    assert heat(np.repeat([1, 4], 64), 2) == "▂█"


def test_convert_writes_what_it_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the metadata that the options give."""
    (tmp_path / "in.jsonl").write_text('{"l": 0, "t": 1, "e": [[5, 2]]}\n')
    output = tmp_path / "out.npz"
    arguments = ["trace", "convert", str(tmp_path / "in.jsonl"), str(output)]
    assert cli.main([*arguments, "--model", "m", "--license", "MIT", "--source", "here"]) == 0
    assert "6 by the highest id; --num-experts says otherwise" in capsys.readouterr().err
    trace = Trace.load(output)
    assert trace.experts.tolist() == [[[5, 2]]]
    assert {"model": "m", "license": "MIT", "source": "here"}.items() <= trace.metadata.items()

    assert cli.main([*arguments, "--num-experts", "8", "--format", "llama-topk"]) == 0
    assert "--num-experts" not in capsys.readouterr().err
    assert Trace.load(output).num_experts == 8


def test_record_makes_a_sequence_per_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace is the same whatever the memory and policy; the text is shown."""
    (tmp_path / "prompt.txt").write_text("import os")
    output = tmp_path / "out.npz"
    command = ["trace", "record", str(output), "--prompt", "def f", "--max-new-tokens", "4"]
    command += ["--prompt-file", str(tmp_path / "prompt.txt")]
    assert cli.main(command) == 0
    shown = capsys.readouterr()
    first = load_any(output)
    assert cli.main([*command, "--memory", "1MiB", "--policy", "lfu", "--quiet"]) == 0
    second = load_any(output)

    assert shown.out.startswith("def f")
    assert "import os" in shown.out
    assert f"{output}: <Trace of tiny_moe: 20 tokens" in shown.err
    assert capsys.readouterr().out == ""
    assert first.phase.tolist() == [0] * 5 + [1] * 3 + [0] * 9 + [1] * 3
    assert first.sequence.tolist() == [0] * 8 + [1] * 12
    assert second.digest == first.digest
    assert (first.metadata["policy"], second.metadata["policy"]) == ("echo", "lfu")


@pytest.mark.nightly
def test_the_shipped_trace_is_that_of_its_command(tmp_path: Path) -> None:
    """docs/traces.md has the command; prompts do not depend on how fast sums are rounded."""
    output = tmp_path / "again.npz"
    assert (
        "record examples/traces/tiny_moe.npz --seed 1\n"
        in (SHIPPED.parents[2] / "docs" / "traces.md").read_text()
    )
    assert cli.main(["trace", "record", str(output), "--seed", "1", "--quiet"]) == 0
    again, shipped = Trace.load(output), Trace.load(SHIPPED)

    assert again.metadata == shipped.metadata
    assert len(again.prefill()) == len(shipped.prefill()) == 92
    assert (again.prefill().experts == shipped.prefill().experts).mean() > 0.98


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["info", "/no/such/file"], 1, "/no/such/file: cannot be read: No such file"),
        (["info", "README.md"], 1, "README.md: is no trace of a known form"),
        (["convert", "README.md", "x.npz"], 1, "is no trace of a known form"),
        (["convert", "{pairs}", "/no/such/dir/x.npz"], 1, "/no/such/dir/x.npz: cannot be written"),
        (["convert", "{pairs}", "x.npz", "--num-experts", "0"], 2, "--num-experts must be at"),
        (["convert", "{pairs}", "x.npz", "--num-experts", "3"], 1, "expert 3 is not in [0, 3)"),
        (["convert", "{pairs}", "x.npz", "--top-k", "-1"], 2, "--top-k must be at least 1"),
        (["convert", "{bare}", "x.npz"], 1, "say --num-layers and --top-k"),
        (["record", "/no/such/dir/x.npz"], 2, "there is no directory /no/such/dir"),
        (["record", "{dir}"], 2, "is a directory"),
        (["record", "{out}", "--prompt", ""], 2, "--prompt is empty"),
        (["record", "{out}", "--prompt-file", "/no/such"], 2, "--prompt-file /no/such: No such"),
        (["record", "{out}", "--prompt", "x" * 1024], 2, "shorten --prompt"),
        (["record", "{out}", "--max-new-tokens", "0"], 2, "--max-new-tokens must be at least 1"),
        (["record", "{out}", "--seed", "-1"], 2, "--seed must not be negative"),
        (["record", "{out}", "--memory", "lots"], 2, "'lots' is not a size"),
    ],
)
def test_errors_are_one_line_and_leave_no_file(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They name the option or the file."""
    monkeypatch.chdir(Path(__file__).parents[1])
    (tmp_path / "pairs").write_text("[[0, 3]]\n")
    (tmp_path / "bare").write_text('{"meta_info": {"routed_experts": "AAAA"}}\n')
    places = {name: str(tmp_path / name) for name in ("pairs", "bare", "out")}
    arguments = [text.format(**places, dir=tmp_path) for text in arguments]
    assert cli.main(["trace", *arguments]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("moecache: ")
    assert message in last
    assert not (tmp_path / "out").exists()
    assert not Path("x.npz").exists()


def test_metadata_of_a_hostile_file_is_not_obeyed_by_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Escape sequences, markup and emoji codes are shown as they are."""
    trace = random_trace(0)
    hostile = Trace(trace.experts, num_experts=8, model="\x1b[2J[red]:warning:")
    hostile.save(tmp_path / "a.npz")
    assert cli.main(["trace", "info", str(tmp_path / "a.npz")]) == 0
    text = capsys.readouterr().out

    assert "\x1b" not in text
    assert "\\x1b[2J[red]:warning:" in text


@pytest.mark.parametrize("action", [[], ["info"], ["convert"], ["record"]])
def test_help_teaches(action: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every help has an example."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["trace", *action, "--help"])
    assert exit_.value.code == 0
    assert "example:\n  moecache trace " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["convert", "{file}", "{file}"], "the file to read"),
        (["convert", "{file}", "{link}"], "the file to read"),
        (["record", "{link}", "--prompt-file", "{file}"], "--prompt-file"),
    ],
)
def test_what_is_read_is_never_written_over(
    arguments: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through links, too."""
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("[[0, 3]]\n")
    link.symlink_to(file)
    assert cli.main(["trace", *(text.format(file=file, link=link) for text in arguments)]) == 2
    assert f" is {what} as well; name another file" in capsys.readouterr().err
    assert file.read_text() == "[[0, 3]]\n"
