"""A pack that was interrupted goes on, and its files are those of one that was not."""

import errno
import io
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moecache import packing
from moecache.errors import StoreError
from tests.helpers.checkpoints import Checkpoint, write_checkpoint
from tests.helpers.packs import tree
from tests.helpers.quantized import SCHEMES, write_experts

JOURNAL = "moecache-pack.jsonl"

# The child is killed before its n-th call that changes the disk, of a write with half done.
KILL_BEFORE = """
import itertools, os, signal, sys
from pathlib import Path
from moecache import packing

model, out, nth = Path(sys.argv[1]), Path(sys.argv[2]), 0
calls = itertools.count()

def wrap(owner, name):
    original = getattr(owner, name)
    def wrapped(*arguments, **keywords):
        if next(calls) == nth:
            if name in ("pwrite", "write"):
                descriptor, data, *rest = arguments
                original(descriptor, bytes(data)[: len(data) // 2], *rest)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **keywords)
    setattr(owner, name, wrapped)

for name in ("mkdir", "touch", "rename", "replace", "unlink", "rmdir", "write_text"):
    wrap(Path, name)
for name in ("pwrite", "write", "fdatasync", "fsync", "truncate"):
    wrap(os, name)

for nth in itertools.count():
    target = out / str(nth)
    child = os.fork()
    if not child:
        calls = itertools.count()
        packing.pack(model, target)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
print(nth)
"""

PACK = """
import sys
from moecache import packing
from moecache.errors import StoreError
print("ready", flush=True)
try:
    packing.pack(sys.argv[1], sys.argv[2])
except StoreError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def small(tmp_path: Path) -> Checkpoint:
    """Return a checkpoint of two MoE layers, three experts each, and a file beside."""
    made = write_checkpoint(tmp_path / "model", num_layers=2, num_experts=3, num_shards=2)
    (made.path / "sub").mkdir()
    (made.path / "sub" / "notes.txt").write_text("text")
    return made


@pytest.fixture
def expected(small: Checkpoint, tmp_path: Path) -> dict[str, str]:
    """Return the files of a pack that nothing interrupted."""
    return tree(packing.pack(small.path, tmp_path / "expected").path)


class Stopped(Exception):  # noqa: N818 - no error
    """What a test's progress raises."""


def stop_after(num_calls: int) -> Callable[[int, int], None]:
    """Return a progress that raises at its n-th call."""
    calls = iter(range(num_calls))

    def stop(done: int, total: int) -> None:
        if next(calls, None) is None:
            raise Stopped

    return stop


def interrupt(model: Path, out: Path, num_calls: int = 4) -> Path:
    """Pack until progress was told some times; return the unfinished directory."""
    with pytest.raises(Stopped):
        packing.pack(model, out, progress=stop_after(num_calls))
    return out.with_name(f"{out.name}.partial")


def test_a_kill_at_any_point_loses_nothing(
    small: Checkpoint, tmp_path: Path, expected: dict[str, str]
) -> None:
    """Before every call that changes the disk, with half of a write done."""
    done = subprocess.run(
        [sys.executable, "-c", KILL_BEFORE, small.path, tmp_path / "killed"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_points = int(done.stdout)
    assert num_points > 40

    resumed = 0
    for nth in range(num_points):
        out = tmp_path / "killed" / str(nth)
        if not out.exists():
            resumed += packing.pack(small.path, out).resumed_bytes > 0
        assert tree(out) == expected, nth
    assert resumed > num_points // 2
    assert tree(tmp_path / "killed" / str(num_points)) == expected


def test_a_kill_at_any_time_loses_nothing(tiny_moe: Path, tmp_path: Path) -> None:
    """Killed again and again, at random times, until it is done."""
    chance = random.Random(20)
    expected = tree(packing.pack(tiny_moe, tmp_path / "expected").path)
    out = tmp_path / "out"
    num_kills = 0
    while not out.exists():
        with subprocess.Popen(
            [sys.executable, "-c", PACK, tiny_moe, out], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            # A little longer each time: one unit must be finished some day.
            time.sleep(chance.uniform(0, 0.03 * (num_kills + 2)))
            child.kill()
        assert child.returncode in (0, -signal.SIGKILL)
        num_kills += child.returncode != 0
        assert num_kills < 50
    assert tree(out) == expected


def test_what_was_finished_is_not_written_again(
    small: Checkpoint, tmp_path: Path, expected: dict[str, str]
) -> None:
    """Progress goes on where it was, and the report says so."""
    partial = interrupt(small.path, tmp_path / "out", 3)
    inode = (partial / "files" / "experts.safetensors").stat().st_ino
    calls: list[int] = []

    report = packing.pack(
        small.path, tmp_path / "out", progress=lambda done, total: calls.append(done)
    )

    assert calls[0] == report.resumed_bytes > 0
    assert (tmp_path / "out" / "experts.safetensors").stat().st_ino == inode
    assert "by an earlier run" in report.describe()
    assert tree(tmp_path / "out") == expected
    assert not partial.exists()


def test_ctrl_c_leaves_what_can_go_on(
    small: Checkpoint, tmp_path: Path, expected: dict[str, str]
) -> None:
    """As a kill does."""

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packing.pack(small.path, tmp_path / "out", progress=interrupt)
    assert packing.pack(small.path, tmp_path / "out").resumed_bytes > 0
    assert tree(tmp_path / "out") == expected


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_an_error_with_file_offset_and_remedy(
    small: Checkpoint,
    tmp_path: Path,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    """And what is finished stays."""
    write = os.pwrite
    writes = iter(range(2))

    def fail(descriptor: int, data: memoryview, offset: int) -> int:
        if next(writes, None) is None:
            raise OSError(number, os.strerror(number))
        return write(descriptor, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr("os.pwrite", fail)
        with pytest.raises(StoreError) as caught:
            packing.pack(small.path, tmp_path / "out")
    message = str(caught.value)
    assert "experts.safetensors: writing at byte" in message
    assert os.strerror(number) in message
    assert "pack again: what is finished stays" in message
    assert ("space" in message) == (number == errno.ENOSPC)

    assert packing.pack(small.path, tmp_path / "out").resumed_bytes > 0
    assert tree(tmp_path / "out") == expected


class OneFailure:
    """Has the system refuse one call that is about something in a directory.

    Parameters
    ----------
    root : Path
    """

    NAMES = (
        *("open", "pwrite", "write", "preadv", "pread", "fsync", "fdatasync", "truncate", "mkdir"),
        *("rename", "replace", "unlink", "rmdir", "stat", "lstat", "fstat", "scandir", "listdir"),
        *("statvfs", "close"),
    )

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root, self._failing, self._number = str(root), ("", ""), errno.EIO
        self.seen: dict[tuple[str, str], None] = {}
        self._readlink = os.readlink
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))
        opened = io.open
        monkeypatch.setattr(io, "open", self._wrapped("io.open", opened))

    def arm(self, call: tuple[str, str], number: int = errno.EIO) -> None:
        """Let the first such call fail."""
        self._failing, self._number = call, number

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            what = arguments[0] if arguments else "."
            if isinstance(what, int):
                try:
                    what = self._readlink(f"/proc/self/fd/{what}")
                except OSError:
                    what = ""
            path = os.fsdecode(what)
            if path.startswith(self._root):
                found = name, path.removeprefix(self._root)
                self.seen.setdefault(found)
                if found == self._failing:
                    self._failing = "", ""
                    if name == "close":  # the descriptor is gone all the same
                        original(*arguments, **keywords)
                    raise OSError(self._number, os.strerror(self._number), path)
            # Nobody cuts the power, so that nothing need wait for the disk.
            return None if "sync" in name else original(*arguments, **keywords)

        return call


@pytest.mark.parametrize(("format", "number"), [(None, errno.EIO), ("bf16", errno.ENOSPC)])
def test_a_call_that_the_system_refuses_is_an_error_that_can_be_gone_on_from(
    format: str | None,  # noqa: A002 - as `pack` calls it
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each call, on each file: a StoreError with path and reason, and nothing half done."""
    write_experts(SCHEMES["fp8"], tmp_path / "model", num_layers=1, num_experts=2)
    expected = tree(packing.pack(tmp_path / "model", tmp_path / "expected", format=format).path)
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    failure = OneFailure(tmp_path, monkeypatch)
    packing.pack(tmp_path / "model", out, format=format)
    calls, num_errors, num_resumed = list(failure.seen), 0, 0
    assert len(calls) > 60
    for call in calls:
        shutil.rmtree(out)
        caplog.clear()
        failure.arm(call, number)
        said = ""
        try:
            packing.pack(tmp_path / "model", out, format=format)
        except StoreError as error:
            said = str(error)
        failure.arm(("", ""))
        if said:
            num_errors += 1
            assert str(tmp_path) in said, call
            assert os.strerror(number) in said, call
            assert ("is complete" in said) == out.exists(), call
        if not out.exists():
            num_resumed += packing.pack(tmp_path / "model", out, format=format).resumed_bytes > 0
        assert tree(out) == expected, call
        # What could not be removed is said.
        assert partial.exists() == ("pack.left_behind" in caplog.text), call
        shutil.rmtree(partial, ignore_errors=True)
    assert num_errors > len(calls) // 2
    assert num_resumed > 5


def test_short_writes_are_gone_on_with(
    small: Checkpoint, tmp_path: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may write less than it was given."""
    write = os.pwrite
    monkeypatch.setattr(
        "os.pwrite",
        lambda descriptor, data, offset: write(
            descriptor, data[: max(1, len(data) // 3 * 2)], offset
        ),
    )
    packing.pack(small.path, tmp_path / "out")
    assert tree(tmp_path / "out") == expected


def test_a_limit_of_the_file_system_is_an_error(tiny_moe: Path, tmp_path: Path) -> None:
    """Of file sizes, here the process's own; with the limit lifted the work goes on."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5000000, -1))\n" + PACK
    done = subprocess.run(
        [sys.executable, "-c", limited, tiny_moe, tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "experts.safetensors: writing at byte 5000000 failed: File too large" in done.stderr
    assert "ulimit -f" in done.stderr

    report = packing.pack(tiny_moe, tmp_path / "out")
    assert report.resumed_bytes > 3_000_000
    packing.verify(tmp_path / "out")


def test_a_last_line_that_is_torn_is_left_out(
    small: Checkpoint,
    tmp_path: Path,
    expected: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As after a power cut: the unit before it is still finished, and there is no warning."""
    partial = interrupt(small.path, tmp_path / "out")
    os.truncate(partial / JOURNAL, (partial / JOURNAL).stat().st_size - 5)
    with caplog.at_level(logging.WARNING):
        assert packing.pack(small.path, tmp_path / "out").resumed_bytes > 0
    assert not caplog.text
    assert tree(tmp_path / "out") == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:10] + "\0" * 20 + text[30:],
        lambda text: text.replace('"unit": "header"', '"unit": "tail"'),
        lambda text: text.replace('"blake2b"', '"x"'),
        lambda text: text.replace('"nbytes"', '"x"'),
        # A checksum of a unit that is not looked at again, as it is not the last.
        lambda text: re.sub('(?<="blake2b": ").', lambda m: "01"[m[0] == "0"], text, count=1),
        lambda text: text + "[]\n",
        lambda text: text + "7\n",
        lambda text: text + text.splitlines()[-1] + "\n",
        lambda text: "[" * 100_000 + "\n",
        lambda text: "",
    ],
    ids=range(10),
)
def test_a_damaged_journal_is_not_believed(
    small: Checkpoint,
    tmp_path: Path,
    expected: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[str], str],
) -> None:
    """All is written anew, with a warning."""
    partial = interrupt(small.path, tmp_path / "out")
    (partial / JOURNAL).write_text(damage((partial / JOURNAL).read_text()))

    with caplog.at_level(logging.WARNING):
        report = packing.pack(small.path, tmp_path / "out")

    assert "pack.restarted" in caplog.text
    assert report.resumed_bytes == 0
    assert tree(tmp_path / "out") == expected


def test_another_model_is_not_mixed_with_what_is_there(
    small: Checkpoint, tmp_path: Path, expected: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Of the same shape and names, but with other weights."""
    other = write_checkpoint(
        tmp_path / "other", num_layers=2, num_experts=3, num_shards=2, seed=1
    ).path
    interrupt(other, tmp_path / "out")

    with caplog.at_level(logging.WARNING):
        report = packing.pack(small.path, tmp_path / "out")

    assert "is of another source" in caplog.text
    assert report.resumed_bytes == 0
    assert tree(tmp_path / "out") == expected


@pytest.mark.parametrize("nbytes", [0, 1, 5000])
def test_a_file_that_lost_its_end_is_written_from_there(
    small: Checkpoint,
    tmp_path: Path,
    expected: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    nbytes: int,
) -> None:
    """What the journal says of bytes that are not there is not believed."""
    partial = interrupt(small.path, tmp_path / "out")
    os.truncate(partial / "files" / "experts.safetensors", nbytes)

    with caplog.at_level(logging.WARNING):
        report = packing.pack(small.path, tmp_path / "out")

    assert "pack.damaged" in caplog.text
    assert report.resumed_bytes <= nbytes
    assert tree(tmp_path / "out") == expected


@pytest.mark.parametrize("unit", [1, 2])
def test_if_the_last_unit_differs_every_one_is_checked(
    small: Checkpoint,
    tmp_path: Path,
    expected: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    unit: int,
) -> None:
    """What was right before the first that differs is kept."""
    partial = interrupt(small.path, tmp_path / "out", 4)
    noted = [json.loads(line) for line in (partial / JOURNAL).read_text().splitlines()][1:]
    assert len(noted) == 3
    with (partial / "files" / "experts.safetensors").open("rb+") as file:
        for number in {unit, 2}:
            file.seek(noted[number]["offset"])
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))

    with caplog.at_level(logging.WARNING):
        report = packing.pack(small.path, tmp_path / "out")

    assert f"unit={noted[unit]['unit']}" in caplog.text
    assert report.resumed_bytes == noted[unit]["offset"]
    assert tree(tmp_path / "out") == expected


def test_room_that_an_unfinished_run_takes_counts_as_free(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It will not be needed a second time."""
    interrupt(small.path, tmp_path / "out", 3)
    usage = shutil.disk_usage(tmp_path)
    needed = packing.plan(small.path, tmp_path / "out").disk_bytes
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=needed - 8000))

    with pytest.raises(StoreError, match="are needed"):
        packing.pack(small.path, tmp_path / "elsewhere")
    packing.pack(small.path, tmp_path / "out")
    packing.verify(tmp_path / "out")


def test_files_that_the_model_no_longer_has_do_not_stay(small: Checkpoint, tmp_path: Path) -> None:
    """Those that go along are copied as they are at the end."""
    with pytest.raises(Stopped):
        packing.pack(small.path, tmp_path / "out", progress=stop_after(7))
    assert (tmp_path / "out.partial" / "files" / "config.json").exists()
    shutil.rmtree(small.path / "sub")
    (small.path / "new.txt").touch()

    packing.pack(small.path, tmp_path / "out")

    assert (tmp_path / "out" / "new.txt").exists()
    assert not (tmp_path / "out" / "sub").exists()
    packing.verify(tmp_path / "out")
