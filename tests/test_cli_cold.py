"""`moecache generate` between header and first token: a file that changes, profiles, interrupts."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import moecache
from moecache import cli
from moecache.runtime import head_start
from moecache.stores import CheckpointStore
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.leaks import nothing_left

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Check that no file and no thread is left."""
    with nothing_left():
        yield


@pytest.fixture(name="model")
def _model(tiny_moe: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_moe, tmp_path / "model"))


def generate(model: Path, *options: str) -> int:
    """Run the command with a quarter of the experts in memory."""
    return cli.main(["generate", str(model), "def ", "--max-new-tokens", "4", *options])


def cut(file: Path) -> None:
    """Take a third of its end away."""
    os.truncate(file, file.stat().st_size * 2 // 3)


def replace(file: Path) -> None:
    """Put a copy in its place."""
    other = file.with_name("other")
    shutil.copy(file, other)
    other.replace(file)


def overwrite(file: Path) -> None:
    """Change its last byte."""
    with file.open("r+b") as out:
        out.seek(-1, os.SEEK_END)
        out.write(b"x")
    os.utime(file, (1, 1))


def delete(file: Path) -> None:
    """Remove it."""
    file.unlink(missing_ok=True)


def after_header(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Have something happen once the command has read the header, before it reads more."""
    begin = head_start.begin

    def begin_after(store: CheckpointStore, *rest: Any) -> None:
        do()
        begin(store, *rest)

    monkeypatch.setattr(head_start, "begin", begin_after)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (cut, "was changed from"),
        (replace, "was replaced by another file"),
        (overwrite, "was written to"),
        (delete, "was removed"),
    ],
)
def test_a_file_that_changes_behind_its_header_is_an_error(
    change: Callable[[Path], object],
    reason: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    """Exit code 1 and a line that names it; no text of two files."""
    after_header(monkeypatch, lambda: change(model / "model.safetensors"))
    assert generate(model) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert reason in shown.err.splitlines()[-1]
    assert "model.safetensors" in shown.err.splitlines()[-1]


def test_a_read_that_fails_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """A disk that fails from the header on."""

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    after_header(monkeypatch, lambda: monkeypatch.setattr(os, "preadv", fail))
    assert generate(model) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith(f"moecache: {model}/")
    assert "Input/output error" in shown.err.splitlines()[-1]


def test_a_profile_of_another_model_changes_no_text(
    model: Path, tmp_path: Path, capsys: Captured, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once; the file has both from then on."""
    other = write_checkpoint(tmp_path / "other", num_layers=2)
    profile = tmp_path / "usage.moecache"
    with moecache.open(other.path, slots=6, profile=profile) as runtime, runtime.lease(0, [[0, 1]]):
        pass

    texts = []
    for options in ((), ("--profile", str(profile)), ("--profile", str(profile))):
        assert generate(model, *options) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    with moecache.open(other.path, slots=6, profile=profile):
        pass
    assert caplog.text.count("profile.foreign") == 1


@pytest.mark.parametrize(
    "phase", ["begin", "load", "from_pretrained", "give_trunk", "end", "prompt"]
)
def test_an_interrupt_in_any_phase_ends_the_command(
    phase: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Exit code 130 and one line; no text, no traceback, no thread and no file."""
    from transformers import OlmoeForCausalLM

    from moecache.integrations import transformers
    from moecache.integrations.transformers import reading

    num_calls = 0

    def interrupt(*_: object, **__: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise KeyboardInterrupt

    place, name = {
        "load": (transformers, "load"),
        "from_pretrained": (OlmoeForCausalLM, "from_pretrained"),
        "prompt": (reading.PromptReader, "advance"),
    }.get(phase, (head_start, phase))
    do = getattr(place, name)

    def interrupted(*given: Any, **named: Any) -> Any:
        interrupt()
        return do(*given, **named)

    monkeypatch.setattr(place, name, interrupted)
    assert generate(model) == 130
    shown = capsys.readouterr()
    assert num_calls
    assert shown.err.splitlines()[-1] == "moecache: interrupted"
    assert "Traceback" not in shown.err
