"""`moecache warm`: what it brings into memory, drops, shows and refuses."""

import mmap
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moecache import cli, prefault
from moecache.commands.warm import parse_layers
from moecache.stores import open_store
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.gguf_files import write_gguf
from tests.helpers.pages import undisturbed

MIB = 2**20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of 3 MiB and a bit that is not in memory."""
    path = tmp_path / "model.bin"
    path.write_bytes(bytes(3 * MIB + 5))
    if prefault.evict(np.memmap(path, mode="r")):
        pytest.skip("this file system keeps its files in memory")
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a checkpoint directory whose files are not in memory."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    write_checkpoint(path)
    for file in path.iterdir():
        if prefault.evict(np.memmap(file, mode="r")):
            pytest.skip("this file system keeps its files in memory")
    return path


def resident_bytes(path: Path) -> int:
    """Return how much of a file is in memory."""
    return prefault.residency(np.memmap(path, mode="r"))[0].resident_bytes


@undisturbed
def test_warm_brings_a_file_into_memory(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every page, the last and partial one too; the second time there is nothing to do."""
    assert cli.main(["warm", str(file)]) == 0
    assert resident_bytes(file) == 3 * MIB + mmap.PAGESIZE
    assert "GiB/s" in capsys.readouterr().out

    assert cli.main(["warm", str(file)]) == 0
    assert "in memory already" in capsys.readouterr().out


def test_warm_takes_directories_and_counts_no_file_twice(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Links to one file are one file; hidden ones are left out; empty ones do no harm."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "again.gguf").symlink_to(file)
    (tmp_path / "hard.gguf").hardlink_to(file)
    (tmp_path / "empty").touch()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "blob").write_bytes(bytes(MIB))

    assert cli.main(["warm", str(tmp_path), str(file)]) == 0
    assert "3.00 MiB" in capsys.readouterr().out


@undisturbed
def test_warm_takes_all_parts_of_a_gguf_that_one_is_given_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `load` does; a part counts once, however many of them are given."""
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "m.gguf", [("Q8_0",) * 3] * 3, num_parts=3)
    parts = sorted(tmp_path.iterdir())
    for part in parts:
        if prefault.evict(np.memmap(part, mode="r")):
            pytest.skip("this file system keeps its files in memory")
    assert cli.main(["warm", str(parts[1])]) == 0
    assert all(resident_bytes(part) >= part.stat().st_size for part in parts)

    reports = []
    warm = prefault.warm
    monkeypatch.setattr(
        prefault, "warm", lambda *args, **kw: reports.append(warm(*args, **kw)) or reports[-1]
    )
    for given in (parts[:1], parts):
        assert cli.main(["warm", "--experts-only", *map(str, given)]) == 0
    assert reports[0].num_bytes == reports[1].num_bytes


@undisturbed
def test_warm_takes_the_experts_of_some_layers_alone(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly the pages of those layers' experts are asked for."""
    reports = []
    warm = prefault.warm
    monkeypatch.setattr(
        prefault, "warm", lambda *args, **kw: reports.append(warm(*args, **kw)) or reports[-1]
    )
    with open_store(checkpoint) as store:
        wanted = sum(nbytes for _, nbytes in prefault.merge(store.regions([0, 2, 3]))[0])

    assert cli.main(["warm", str(checkpoint), "--layers", "0,2-3", "--threads", "1"]) == 0

    assert [report.num_bytes for report in reports] == [wanted]
    with open_store(checkpoint) as store:
        found = prefault.residency(store.regions([0, 2, 3]))
    assert all(one.resident_bytes == one.num_bytes for one in found)


@undisturbed
def test_evict_drops_what_status_then_shows_as_gone(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The map is all dots after an eviction and all blocks after a warm-up."""
    cli.main(["warm", str(file)])
    cli.main(["warm", str(file), "--status"])
    shown = capsys.readouterr().out
    assert "100.0%" in shown
    assert "█" * 20 in shown

    assert cli.main(["warm", str(file), "--evict"]) == 0
    assert resident_bytes(file) == 0
    cli.main(["warm", str(file), "--status"])
    shown = capsys.readouterr().out
    assert "dropped 3.00 MiB" in shown
    assert " 0.0%" in shown
    assert "·" * 20 in shown


def test_status_reads_nothing(file: Path) -> None:
    """Looking does not warm."""
    cli.main(["warm", str(file), "--status"])
    assert resident_bytes(file) == 0


@undisturbed
def test_status_has_a_line_for_each_layer(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the layer that is in memory as a row of blocks; the sum comes last."""
    with open_store(checkpoint) as store:
        num_layers = store.layout.num_layers
        prefault.warm(store.regions([1]), threads=1)
    assert cli.main(["warm", str(checkpoint), "--status", "--experts-only"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith(("layer ", "all "))}
    assert sum(line.startswith("layer ") for line in lines) == num_layers + 1  # and the heading
    assert "100.0%" in next(line for line in lines if line.startswith("layer 1 "))
    assert "all" in rows


def test_status_says_so_where_the_kernel_does_not_tell(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a file of another user it shows neither."""

    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr("moecache.prefault.extents.cached_pages", refuse)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert cli.main(["warm", str(file), "--status"]) == 0
    shown = capsys.readouterr().out
    assert "not told" in shown
    assert "?" * 20 in shown


def test_background_hint_does_not_fail(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It asks for the whole file, and comes back."""
    assert cli.main(["warm", str(file), "--background-hint"]) == 0
    assert "3.00 MiB ahead" in capsys.readouterr().out


def test_lock_holds_until_it_is_interrupted(file: Path) -> None:
    """The locked pages are counted as such by the kernel; Ctrl-C ends it well."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moecache", "warm", str(file), "--lock"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any("locked in memory" in line for line in lines), process.communicate()
        status = Path(f"/proc/{process.pid}/status").read_text()
        locked = next(line for line in status.splitlines() if line.startswith("VmLck"))
        assert int(locked.split()[1]) >= 3 * 1024
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "released" in out
    finally:
        process.kill()


def test_lock_that_is_refused_is_a_clear_error(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the size and the reason."""

    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("moecache.commands.warm.lock_pages", refuse)
    assert cli.main(["warm", str(file), "--lock"]) == 1
    error = capsys.readouterr().err
    assert "3.00 MiB cannot be locked" in error


def test_a_lock_beyond_the_limit_is_refused_before_anything_is_read(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has both limits, and the command that raises the lower one."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (65536, 2**20))
    monkeypatch.setattr("moecache.commands.warm._has_capability", lambda _: False)
    assert cli.main(["warm", str(file), "--lock"]) == 1
    error = capsys.readouterr().err
    assert "the limit is 64.0 KiB, at most 1.00 MiB" in error
    assert f"ulimit -l {3 * 1024 + mmap.PAGESIZE // 1024}" in error
    assert resident_bytes(file) == 0


def test_status_is_shown_in_any_encoding(file: Path) -> None:
    """Where there are no blocks, letters that every terminal has."""
    done = subprocess.run(
        [sys.executable, "-m", "moecache", "warm", str(file), "--status"],
        capture_output=True,
        env={"PYTHONIOENCODING": "latin-1"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b". nothing" in done.stdout


def test_no_path_is_not_the_current_directory(capsys: pytest.CaptureFixture[str]) -> None:
    """An unset variable in a script must not warm, or drop, whatever is there."""
    assert cli.main(["warm", "", "--evict"]) == 2
    assert "the path is empty" in capsys.readouterr().err


def test_looking_at_a_checkpoint_does_not_read_it_in(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for the headers."""
    big = checkpoint / "model.safetensors"
    header = 8 + int.from_bytes(big.read_bytes()[:8], "little")
    prefault.evict(np.memmap(big, mode="r"))
    cli.main(["warm", str(checkpoint), "--status"])
    capsys.readouterr()
    assert resident_bytes(big) <= header + 2 * mmap.PAGESIZE


@pytest.mark.parametrize("what", ["--status", "--evict", "--background-hint"])
def test_options_of_a_sweep_mean_nothing_without_one(
    file: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """They are refused, not ignored."""
    assert cli.main(["warm", str(file), what, "--threads", "2"]) == 2
    assert "--threads" in capsys.readouterr().err


def test_too_much_for_the_memory_is_refused_unless_forced(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both figures and the remedy are in the message; nothing is read."""
    monkeypatch.setattr("moecache.prefault.warming.total_host_bytes", lambda: 3 * MIB)
    assert cli.main(["warm", str(file)]) == 2
    error = capsys.readouterr().err
    assert "3.00 MiB" in error
    assert "--force" in error
    assert resident_bytes(file) == 0

    assert cli.main(["warm", str(file), "--force"]) == 0
    assert resident_bytes(file) > 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nowhere"], 1, "no such file"),
        (["{file}", "--experts-only"], 1, ".safetensors"),
        (["{checkpoint}", "--layers", "400"], 2, "there is no MoE layer 400"),
        (["{file}", "--threads", "0"], 2, "threads"),
        (["/dev/null"], 1, "not a regular file"),
    ],
)
def test_bad_input_is_one_line(
    file: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    text: str,
) -> None:
    """The exit code says whether usage or the file is wrong."""
    filled = [word.format(file=file, checkpoint=checkpoint) for word in arguments]
    assert cli.main(["warm", *filled]) == code
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_layers_are_read_as_people_write_them() -> None:
    """Single numbers, spans, both; each once."""
    assert parse_layers("0-3") == [0, 1, 2, 3]
    assert parse_layers("5, 1-2,2") == [5, 1, 2]


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "1,,2", "99999999999"])
def test_a_bad_list_of_layers_is_wrong_usage(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With an example of a good one."""
    with pytest.raises(SystemExit) as raised:
        cli.main(["warm", "x", f"--layers={text}"])
    assert raised.value.code == 2
    assert "0-11" in capsys.readouterr().err
