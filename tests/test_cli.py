"""The command line: what it prints, where, and its exit codes."""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moecache import cli, errors
from moecache.commands import demo
from moecache.settings import OPTIONS


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m moecache` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "moecache", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module", name="demonstrated")
def _demonstrated() -> subprocess.CompletedProcess[str]:
    """Return a demo of 60 tokens."""
    return run("demo", "--max-new-tokens", "60", "--verbose", "--report")


def test_demo_streams_text_and_proves_that_it_is_exact(
    demonstrated: subprocess.CompletedProcess[str],
) -> None:
    """Text on standard output, figures on standard error, exit code 0."""
    done = demonstrated
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(demo.DEFAULT_PROMPT)
    assert len(done.stdout) > len(demo.DEFAULT_PROMPT) + 40
    for text in (
        "text    60 tokens, with at most 60 of the model's 256 experts in memory",
        "tokens/s this way,",
        "memory  6.00 MiB for experts this way, 24.0 MiB for all of them",
        "output  equal, bit for bit",
        "hit rate",
        "read,",
        "60 of 256 in memory",
        "peak RSS",
        "layer 7: hit rate",
    ):
        assert text in done.stderr


def test_demo_is_exact_whatever_the_threads_of_the_blas(
    monkeypatch: pytest.MonkeyPatch, prompt: bytes
) -> None:
    """A prompt's products are large enough to be split among four of them."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")
    done = run("demo", "--prompt", prompt[:200].decode(), "--max-new-tokens", "1")
    assert done.returncode == 0, done.stderr
    assert "equal, bit for bit" in done.stderr


def test_demo_starts_warm_with_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second time; the text and its bits are the same."""
    options = ("demo", "--max-new-tokens", "40", "--profile", str(tmp_path / "demo.profile"))
    texts, rates = set(), []
    for start in ("cold", "warm"):
        assert cli.main([*options]) == 0
        shown = capsys.readouterr()
        texts.add(shown.out)
        found = re.search(rf"{start} start hit rate ([\d.]+)% of the prompt", shown.err)
        assert found is not None, shown.err
        rates.append(float(found[1]))
    assert len(texts) == 1
    assert rates[1] > rates[0]


def test_demo_takes_no_more_memory_than_it_says(
    demonstrated: subprocess.CompletedProcess[str],
) -> None:
    """Peak RSS at a quarter of the experts <= imports + trunk + slots + 30 MiB."""
    shown = demonstrated.stderr
    figures = re.search(r"imports ([\d.]+) MiB, .*the rest ([\d.]+) (MiB|KiB)", shown)
    assert figures is not None, shown
    # The process's own peak, not one inherited from its parent.
    assert float(figures[1]) < 100
    assert figures[3] == "KiB" or float(figures[2]) <= 30


def test_demo_is_the_same_text_at_any_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed does not depend on the budget, policy or scope."""
    texts = set()
    for options in (
        (),
        ("--memory", "500KiB"),
        ("--memory", "100%", "--policy", "lfu"),
        ("--policy", "lru", "--scope", "layer"),
    ):
        assert cli.main(["demo", "--max-new-tokens", "25", *options]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1
    assert len(texts.pop()) >= 25


def test_demo_by_kernels_is_exact_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Over weights as the file has them; the resident run is by kernels, too."""
    for memory in ("500KiB", "100%"):
        argv = ["demo", "--max-new-tokens", "25", "--compute", "fast", "--memory", memory]
        assert cli.main(argv) == 0
        assert "equal, bit for bit" in capsys.readouterr().err


def test_a_mismatch_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bit of difference in the resident run is found."""
    honest = demo.combine
    monkeypatch.setattr(demo, "combine", lambda rows, weights: honest(rows, weights) * 1.0000001)
    assert cli.main(["demo", "--max-new-tokens", "3"]) == 1
    shown = capsys.readouterr().err.splitlines()
    # Nothing but the four lines; counters are for those who ask.
    assert [line.split()[0] for line in shown] == ["text", "speed", "memory", "output"]
    assert "differs" in shown[-1]


def test_inspect_shows_layout_and_plan(
    tiny_moe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers, roles, shapes and what the budget buys."""
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["inspect", str(tiny_moe), "--memory", "3MiB"]) == 0
    text = capsys.readouterr().out
    for part in (
        "8 MoE layers x 32 experts, top-4",
        "12.0 MiB",
        "gate_up",
        "128 x 64",
        "bfloat16",
        "60 of 256 experts and 4 for staging",
        "64 (3.00 MiB) are recommended",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["demo", "--memory", "lots"], 2, "'lots' is not a size; write for example 4GiB"),
        (["demo", "--memory", "50KiB"], 1, "raise memory to at least"),
        (["demo", "--prompt", ""], 2, "--prompt is empty"),
        (["demo", "--max-new-tokens", "0"], 2, "at least 1, got 0"),
        (["demo", "--temperature", "-1"], 2, "must be 0 or between 0.01 and 100"),
        (["demo", "--prompt", "x" * 1024], 2, "leaves no room"),
        (["demo", "--prompt", "x" * 1500], 2, "leaves no room"),
        (["inspect", "/no/such/model"], 1, "/no/such/model: no such file or directory"),
        (["inspect", "README.md"], 1, "only .safetensors files"),
    ],
)
def test_errors_are_one_line_with_the_remedy(
    arguments: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2 for usage, 1 for failure; the last line says what to do."""
    monkeypatch.chdir(Path(__file__).parents[1])
    assert cli.main(arguments) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("moecache: ")
    assert message in last


@pytest.mark.parametrize(
    "arguments",
    [[], ["frobnicate"], ["demo", "--polcy", "lru"], ["demo", "--policy", "nonesuch"], ["inspect"]],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The parser names what is wrong."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage: moecache" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["inspect", "--help"]])
def test_help_teaches(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every help has a description, and the commands an example."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "moecache" in text
    assert len(arguments) == 1 or re.search(r"^examples?:\n  moecache ", text, re.MULTILINE)


def test_each_example_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """To be copied."""
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    text = capsys.readouterr().out.partition("examples:\n")[2]
    lines = text.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("  moecache bench ./") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "command", "hint"),
    [
        (["generate", "--max-tokans", "3", "m", "p"], "generate", "did you mean --max-tokens?"),
        (["trace", "info", "--jsn", "x"], "trace info", "did you mean --json?"),
        (["demo", "--nothing-like-it"], "demo", ""),
    ],
)
def test_a_wrong_flag_shows_the_usage_of_its_command(
    arguments: list[str], command: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the option that comes closest."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    text = capsys.readouterr().err
    assert f"usage: moecache {command} [-h]" in text
    assert f"moecache {command}: error: unrecognized arguments: " in text
    assert text.rstrip().endswith(hint or "--nothing-like-it")


@pytest.mark.parametrize("command", ["bench", "generate", "inspect", "pack", "warm"])
def test_help_says_that_a_model_may_be_a_gguf(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And that of a split one any part will do."""
    text = _help(capsys, command)
    assert ".gguf file (of a split one any part" in text


@pytest.mark.parametrize("command", [("simulate",), ("replay",), ("trace", "info")])
def test_help_says_that_a_trace_is_no_model(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands that take either look alike."""
    assert "a routing trace of a run, and no model" in _help(capsys, *command)


def _help(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    return " ".join(capsys.readouterr().out.split())


def test_an_interrupt_while_modules_are_imported_is_no_traceback(tmp_path: Path) -> None:
    """The command has not begun by then; the exit code is that of any interrupt."""
    (tmp_path / "rich.py").write_text("raise KeyboardInterrupt")
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "runpy.run_module('moecache', run_name='__main__')"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, "inspect", "x"], capture_output=True, text=True, check=False
    )
    assert (child.returncode, child.stderr) == (130, "moecache: interrupted\n")


def test_any_number_of_interrupts_is_one(tmp_path: Path) -> None:
    """Also while it is told, and as the interpreter ends: neither a traceback nor a signal."""
    (tmp_path / "rich.py").write_text("import time; print('begun', flush=True); time.sleep(60)")
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "runpy.run_module('moecache', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "serve", "x"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "begun\n"
        while child.poll() is None:
            child.send_signal(signal.SIGINT)
            time.sleep(0.0005)
        assert (child.returncode, child.stderr.read()) == (130, "moecache: interrupted\n")


ERRORS = [one for one in vars(errors).values() if isinstance(one, type)]


@pytest.mark.parametrize("kind", ERRORS)
def test_the_exit_code_of_each_error_is_that_of_the_documentation(
    kind: type[errors.MoeCacheError],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever the command."""

    def fail(_: argparse.Namespace) -> int:
        raise kind("it failed", *(([], []) if kind is errors.SweepError else ()))

    page = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| \d+ \|", line)]
    codes = [int(row.split("|")[1]) for row in rows if f"`{kind.__name__}`" in row]
    monkeypatch.setattr("moecache.commands.inspect.run", fail)
    assert [cli.main(["inspect", "x"])] == codes
    assert capsys.readouterr().err == "moecache: it failed\n"


def test_a_reader_that_closes_the_output_is_no_failure(tiny_moe: Path) -> None:
    """As `head` does; rich ends the program with 1 then, without a word."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as output:
        child = subprocess.run(
            [sys.executable, "-m", "moecache", "inspect", str(tiny_moe)],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (child.returncode, child.stderr) == (0, "")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of all its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action


def test_an_option_is_the_same_in_every_command_that_has_it() -> None:
    """Help and choices are the table's; other choices are explained one by one."""
    known = {name for name, option in OPTIONS.items() if option.is_argument}
    actions = [action for action in _actions(cli._parser()) if action.dest in known]
    assert {"memory", "policy", "prefetch", "record_trace"} < {action.dest for action in actions}
    for action in actions:
        option, text = OPTIONS[action.dest], (action.help or "").replace("%%", "%")
        assert text.startswith(option.help), action.option_strings
        if action.choices is None:
            assert all(choice in text for choice in option.choices), text
        elif tuple(action.choices) != option.choices:
            assert all(f" {choice} (" in text for choice in action.choices), text


def test_a_wrong_choice_is_named_with_its_option_and_the_right_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the last line; exit code 2."""
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", "--policy", "nonesuch"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert "argument --policy: invalid choice: 'nonesuch'" in last
    assert all(policy in last for policy in OPTIONS["policy"].choices)


def test_a_damaged_checkpoint_is_an_error_not_a_traceback(tiny_moe: Path, tmp_path: Path) -> None:
    """A truncated file names itself, the tensor and the figures."""
    shutil.copytree(tiny_moe, tmp_path / "model")
    with (tmp_path / "model" / "model.safetensors").open("rb+") as file:
        file.truncate(9_000_000)
    done = run("inspect", str(tmp_path / "model"))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "file has 9000000; download it again" in done.stderr
    assert cli.main(["demo", "--model", str(tmp_path / "model")]) == 1
