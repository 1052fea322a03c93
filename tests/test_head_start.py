"""HeadStart: what is brought in before anybody asks for it, and given back."""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import moecache
from moecache.commands.opened import opened
from moecache.prefault import holding, warm
from moecache.runtime import head_start
from moecache.runtime.head_start import HeadStart
from moecache.stores import CheckpointStore, SafetensorsStore, open_store
from tests.helpers.checkpoints import FAMILIES, write_checkpoint
from tests.helpers.gguf_files import write_gguf
from tests.helpers.leaks import nothing_left
from tests.helpers.pages import evict, num_cached, wait_until

MIB = 2**20


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Check that no file and no thread is left."""
    with nothing_left():
        yield


@pytest.fixture(name="held")
def _held(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the sizes of each process that holds memory; this machine is a virtual one."""
    held: list[list[int]] = []

    class Held(head_start._Held):
        def __init__(self, sizes: list[int]) -> None:
            held.append(sizes)
            super().__init__(sizes)

    monkeypatch.setattr(head_start, "_Held", Held)
    monkeypatch.setattr(head_start, "_is_lent", lambda: True)
    return held


def started(store: CheckpointStore, prefault: str = "auto", slots_bytes: int = MIB) -> HeadStart:
    """Return a head start that has begun."""
    found = HeadStart()
    found.begin(store, prefault, slots_bytes)
    return found


@pytest.mark.parametrize("family", [*FAMILIES, "gguf"])
def test_a_trunk_is_all_that_is_no_experts(tmp_path: Path, family: str) -> None:
    """Each of its tensors once, at its bytes; none of an expert."""
    if family == "gguf":
        write_gguf(tmp_path / "model.gguf")
    else:
        write_checkpoint(tmp_path, family, num_shards=2)
    with open_store(tmp_path) as store:
        found = {ctypes.string_at(*region) for region in store.trunk_regions() if region[1]}
        trunk = [name for name in store.tensor_names if not store._is_expert(name)]
        assert found == {store._read_bytes(name).tobytes() for name in trunk} - {b""}
        assert trunk
        assert not {tuple(one) for one in store.regions()} & {*store.trunk_regions()}


def test_trunk_and_memory_are_brought_in_once(tmp_path: Path, held: list[list[int]]) -> None:
    """Pages of the trunk stay cached; memory is as much as trunk and slots take, and goes."""
    write_checkpoint(tmp_path)
    evict(tmp_path / "model.safetensors")
    with open_store(tmp_path) as store:
        for _ in range(2):
            head_start.begin(store, "auto", 64 * MIB)
        ((trunk, slots),) = held
        assert trunk >= store.trunk_bytes
        assert slots == 64 * MIB
        begun = head_start._begun[store]
        assert begun._read is not None
        wait_until(lambda: begun._read.done)
        assert num_cached(tmp_path / "model.safetensors") > 0
        process = begun._held._process
        head_start.give_trunk(store)
        head_start.end(store)
        head_start.end(store)
        assert process.returncode == -signal.SIGKILL
        head_start.give_trunk(store)


def test_memory_is_held_part_by_part() -> None:
    """Each byte gives the next part back; the end of the input gives all back."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            holding.__file__,
            str(os.getpid()),
            str(64 * MIB),
            str(32 * MIB),
        ],
        stdin=subprocess.PIPE,
    )

    def has(mebibytes: int) -> Callable[[], bool]:
        memory = psutil.Process(process.pid).memory_info
        return lambda: abs(memory().rss / MIB - mebibytes) < 24

    wait_until(has(96 + 10))
    assert process.stdin is not None
    process.stdin.write(b".")
    process.stdin.flush()
    wait_until(has(32 + 10))
    process.stdin.close()
    assert process.wait(60) == 0


@pytest.mark.parametrize("prefault", ["off", "0", "auto"])
def test_nothing_is_done_where_it_is_off(
    tmp_path: Path, held: list[list[int]], prefault: str
) -> None:
    """Without slots the trunk is read, and no memory taken."""
    write_checkpoint(tmp_path)
    with open_store(tmp_path) as store:
        begun = started(store, prefault, 0 if prefault == "auto" else MIB)
        assert (begun._read is None) == (prefault != "auto")
        assert not held
        begun.end()


@pytest.mark.parametrize("memory", ["1 nonsense", "1", None, "99999GiB"])
def test_a_command_takes_what_its_plan_says(
    tmp_path: Path, held: list[list[int]], memory: str | None
) -> None:
    """What cannot be planned is `load`'s to refuse."""
    write_checkpoint(tmp_path)
    arguments = argparse.Namespace(model=str(tmp_path), memory=memory, device="cpu", read=None)
    with opened(arguments) as store:
        assert isinstance(store, SafetensorsStore)
        assert len(held) == (memory in {None, "99999GiB"})
        plan = moecache.plan(store, memory if held else None)
        assert [sizes[1] for sizes in held] == [plan.slots_bytes][: len(held)]


def test_of_little_memory_none_is_taken(
    tmp_path: Path, held: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trunk is there twice for a while, and libraries take a part."""
    write_checkpoint(tmp_path)
    with open_store(tmp_path) as store:
        monkeypatch.setattr(head_start, "free_host_bytes", lambda: 2**30)
        begun = started(store)
        assert begun._read is None
        assert not held


def test_files_that_are_cut_fail_where_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the head start, and as it reads; it kills nothing, and is no error of its own."""
    write_checkpoint(tmp_path, num_experts=64)

    def cut(regions: object, **options: Any) -> object:
        os.truncate(tmp_path / "model.safetensors", 4096)
        return warm(regions, **options)

    monkeypatch.setattr(head_start, "warm", cut)
    with open_store(tmp_path) as store:
        begun = started(store)
        assert begun._read is not None
        wait_until(lambda: begun._read.done)
        assert "prefault.failed" in caplog.text
        begun.end()
        again = started(store)
        assert again._read is None
        again.end()


def test_a_process_that_was_forked_keeps_no_memory() -> None:
    """It has the pipe, too: memory goes with the process that it was held for."""
    command = f"[sys.executable, '-I', '-S', {holding.__file__!r}, str(os.getpid()), '{MIB}']"
    code = (
        "import os, signal, subprocess, sys, time\n"
        f"held = subprocess.Popen({command}, stdin=subprocess.PIPE)\n"
        "forked = os.fork()\n"
        "if forked:\n"
        "    print(held.pid, forked, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.close(1)\n"
        "time.sleep(120)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    held, forked = map(int, done.stdout.split())
    try:
        wait_until(lambda: not psutil.pid_exists(held) or _is_over(held))
    finally:
        os.kill(forked, signal.SIGKILL)


def _is_over(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_without_a_process_memory_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that starts no more of them is no reason to fail."""
    write_checkpoint(tmp_path)

    def refuse(*_: object, **__: object) -> object:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(head_start, "_is_lent", lambda: True)
    monkeypatch.setattr(head_start.subprocess, "Popen", refuse)
    with open_store(tmp_path) as store:
        begun = started(store)
        assert begun._held is None
        begun.end()
        # What it did is over; the thread itself goes a moment later.
        wait_until(
            lambda: all(one.name != "moecache-prefault" for one in threading.enumerate()),
        )
