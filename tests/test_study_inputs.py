"""What a study is given from outside: pipes, devices, marks of other systems, other servers."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moecache import ConfigError, StoreError
from moecache.study import load_any, sweep
from tests.helpers.traces import random_trace


@pytest.fixture(name="pipe")
def _pipe(tmp_path: Path) -> Path:
    """Return a named pipe that no process writes to."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_a_trace_from_a_pipe_is_refused_at_once(pipe: Path) -> None:
    """It is looked at twice; nothing waits for a writer."""
    with pytest.raises(StoreError, match="is not a regular file"):
        load_any(pipe)


@pytest.mark.parametrize("path", ["pipe", "/dev/zero"])
def test_a_sweep_does_not_resume_from_what_never_ends(pipe: Path, path: str) -> None:
    """A device is not read until memory is full."""
    where = pipe if path == "pipe" else Path(path)
    with pytest.raises(StoreError, match="is not a regular file"):
        sweep({"one": random_trace(1)}, "lru", 2, resume=where)


def test_a_large_file_of_something_else_is_not_read(tmp_path: Path) -> None:
    """The first line is enough to refuse it, and it stays as it was."""
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(StoreError, match="is no file of a sweep"):
        sweep({"one": random_trace(1)}, "lru", 2, resume=path)
    assert path.stat().st_size == 2**40


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("route.csv", "turn,phase,step,layer,slot,expert\n0,1,0,0,0,1\n0,1,0,0,1,2\n"),
        ("tokens.jsonl", "[[0, 1], [0, 2]]\n[[0, 2], [0, 3]]\n"),
    ],
)
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, name: str, text: str) -> None:
    """As spreadsheets and other systems' editors write it."""
    plain, marked = tmp_path / name, tmp_path / f"marked-{name}"
    plain.write_text(text)
    marked.write_text(text, encoding="utf-8-sig")
    try:
        expected = load_any(plain, num_experts=8)
    except StoreError as error:
        pytest.fail(str(error))
    assert load_any(marked, num_experts=8) == expected


@pytest.fixture(name="silent")
def _silent() -> Iterator[str]:
    """Return the address of a server that says what a web server says."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_another_server_is_no_cluster(silent: str) -> None:
    """The dashboard's port is told from the scheduler's."""
    pytest.importorskip("distributed")
    with pytest.raises(ConfigError, match="no Dask scheduler"):
        sweep({"one": random_trace(1)}, "lru", 2, cluster=silent)


def test_an_address_that_is_none_ends_the_command(tiny_moe: Path) -> None:
    """With exit code 2, and the process does end."""
    pytest.importorskip("distributed")
    trace = str(tiny_moe.parent / "traces" / "tiny_moe.npz")
    addresses = ["nonsense", "", "tcp://127.0.0.1:x", "tcp://127.0.0.1:1"]
    program = (
        "import sys; from moecache import cli\n"
        "for address in sys.argv[2:]:\n"
        "    print(cli.main(['replay', sys.argv[1], '--cluster', address]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, trace, *addresses],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["2"] * len(addresses))
    assert done.stderr.count("cluster") >= len(addresses)


def test_a_device_is_written_to_and_stays_one(tmp_path: Path) -> None:
    """As /dev/stdout is asked for: what comes out of the pipe is the whole table."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    table = sweep({"one": random_trace(1)}, "lru", 2)
    table.to_csv(pipe)
    reader.join()
    assert pipe.is_fifo()
    assert read[0].startswith("trace,")
    with pytest.raises(StoreError, match="No space left"):
        table.to_csv("/dev/full")
    assert Path("/dev/full").is_char_device()


def test_a_link_stays_one_and_its_file_is_written(tmp_path: Path) -> None:
    """Also one whose file is not there yet."""
    real, link = tmp_path / "real.npz", tmp_path / "link.npz"
    link.symlink_to(real)
    for seed in (1, 2):
        random_trace(seed).save(link)
        assert link.is_symlink()
        assert load_any(real) == random_trace(seed)


@pytest.mark.parametrize("path", ["", "a\0b", "missing/trace.npz", "."])
def test_a_path_that_cannot_be_written_is_an_error(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of ours, with the path in it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="cannot be written"):
        random_trace(1).save(path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_no_text_does_not_lose_a_table(tmp_path: Path) -> None:
    """A lone surrogate, as file names of other encodings become, is written escaped."""
    table = sweep({"a\udcff": random_trace(1)}, "lru", 2)
    table.to_csv(tmp_path / "table.csv")
    assert "a\\udcff" in (tmp_path / "table.csv").read_text()
