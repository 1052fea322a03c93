"""Sweeps in the background: wait, cancel, progress, garbage, forks, interrupts, lifetimes."""

import contextlib
import gc
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moecache import StoreError
from moecache._prefault import address_of
from moecache.prefault import BackgroundSweep, PrefaultReport, Region, warm
from moecache.prefault.extents import Extent
from moecache.prefault.sweep import Sweeper
from tests.helpers.examples import num_examples
from tests.helpers.leaks import nothing_left
from tests.helpers.pages import (
    MIB,
    PAGE,
    anonymous,
    mapped,
    mapped_in,
    num_cached,
    run_child,
    skip_fork_under_sanitizer,
    wait_until,
    write_cold,
    write_file,
)

NUM_BYTES = 70 * MIB


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Check that every way to end gives back files and threads."""
    with nothing_left():
        yield


@pytest.fixture(name="memory")
def _memory() -> Iterator[mmap.mmap]:
    """Return memory to be swept."""
    with anonymous(NUM_BYTES) as memory:
        yield memory
        gc.collect()


@pytest.fixture(name="endless")
def _endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every sweep go on until it is cancelled: its threads read /dev/zero."""
    with contextlib.ExitStack() as stack:
        zero = stack.enter_context(open("/dev/zero", "rb")).fileno()

        def read_on(self: Sweeper, part: object) -> None:
            self.sweep.run([(0, 2**50, zero, 0)], "read")

        monkeypatch.setattr(Sweeper, "_sweep_part", read_on)
        yield
        gc.collect()
        wait_until(lambda: not sweeping())


def sweeping() -> list[str]:
    """Return the names of the threads that sweep."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("moecache-")]


def start(regions: object, **options: object) -> BackgroundSweep:
    """Start a sweep and wait until it is at work."""
    handle = warm(regions, mode="force", background=True, threads=2, **options)
    wait_until(lambda: handle.done or handle.progress.done_bytes)
    return handle


def test_waiting_gives_the_report(memory: mmap.mmap) -> None:
    """Again and again; all is done then."""
    handle = warm(memory, mode="force", background=True)
    report = handle.wait()

    assert handle.done
    assert report.done_bytes == NUM_BYTES
    assert handle.wait(0) is report
    assert handle.progress == (NUM_BYTES, NUM_BYTES)
    assert handle.progress.fraction == 1.0
    assert mapped_in(*address_of(memory)).all()
    handle.cancel()
    assert handle.wait().reason == "forced"


@pytest.mark.usefixtures("endless")
def test_waiting_has_an_end(memory: mmap.mmap) -> None:
    """The sweep goes on after a TimeoutError, and counts."""
    with start(memory) as handle:
        with pytest.raises(TimeoutError, match=r"has not ended after 0\.01 s"):
            handle.wait(0.01)
        assert not handle.done
        assert 0 < handle.progress.done_bytes <= handle.progress.total_bytes == NUM_BYTES
        assert 0 < handle.progress.fraction <= 1


@pytest.mark.usefixtures("endless")
def test_a_cancel_returns_when_the_sweep_has_stopped(memory: mmap.mmap) -> None:
    """The report says so; a second cancel does nothing."""
    handle = start(memory)
    wait_until(lambda: len(sweeping()) == 3)
    handle.cancel()
    handle.cancel()

    assert handle.done
    assert not sweeping()
    report = handle.wait()
    assert (report.ran, report.reason) == (True, "cancelled")
    assert "; cancelled, of 70.0 MiB" in report.describe()


@pytest.mark.usefixtures("endless")
def test_leaving_the_block_cancels(memory: mmap.mmap) -> None:
    """With an error too, which goes on."""
    with pytest.raises(KeyError), start(memory) as handle:
        raise KeyError

    assert handle.done
    assert handle.wait().reason == "cancelled"


def test_a_sweep_that_nobody_holds_goes_on(tmp_path: Path) -> None:
    """The caller need not wait for it, nor keep its handle."""
    path = write_cold(tmp_path / "file", 4 * PAGE)
    with mapped(path) as mapping:
        warm(mapping, background=True, mode="force")
        gc.collect()
        wait_until(lambda: num_cached(path) == 4)
        wait_until(lambda: not sweeping())


@pytest.mark.usefixtures("endless")
def test_a_mapping_cannot_be_closed_while_it_is_swept() -> None:
    """BufferError; after the end it can."""
    memory = mmap.mmap(-1, NUM_BYTES)
    handle = start([memory])
    with pytest.raises(BufferError):
        memory.close()
    handle.cancel()
    memory.close()

    assert memory.closed
    assert handle.wait().reason == "cancelled"


@pytest.mark.usefixtures("endless")
def test_the_sweep_holds_its_regions_owners_until_it_ends() -> None:
    """The caller need not hold them; when it has ended the handle does not either."""
    array = np.zeros(NUM_BYTES, np.uint8)
    alive = weakref.ref(array)
    handle = start([Region(*address_of(array), array)])
    del array
    gc.collect()

    assert alive() is not None
    handle.cancel()
    assert alive() is None
    assert handle.done


def test_an_error_is_raised_by_every_wait(tmp_path: Path) -> None:
    """And by nothing else: neither the thread nor leaving the block."""
    path = write_file(tmp_path / "file", 8 * PAGE)
    with mapped(path) as mapping:
        os.truncate(path, PAGE)
        with warm(mapping, mode="force", background=True) as handle:
            for _ in range(2):
                with pytest.raises(StoreError, match="cut short"):
                    handle.wait(30)
            assert handle.done
            assert handle.progress.total_bytes == 8 * PAGE


def test_progress_is_told_by_the_sweeps_thread(memory: mmap.mmap) -> None:
    """What it raises is an error of the sweep."""
    threads = set()

    def look(done: int, total: int) -> None:
        threads.add(threading.current_thread().name)
        raise ZeroDivisionError

    handle = warm(memory, mode="force", background=True, progress=look)

    with pytest.raises(ZeroDivisionError):
        handle.wait()
    assert threads == {"moecache-prefault"}
    assert not sweeping()


@pytest.mark.usefixtures("endless")
def test_what_progress_raises_stops_threads_at_work(memory: mmap.mmap) -> None:
    """Also if no thread would ever end by itself."""
    calls = []

    def stop(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        warm(memory, mode="force", threads=2, progress=stop)

    assert not sweeping()
    assert calls == sorted(calls)


def test_a_foreground_request_may_overlap_a_background_sweep(tmp_path: Path) -> None:
    """Both end, and both tell the truth."""
    with mapped(write_cold(tmp_path / "file", NUM_BYTES)) as mapping:
        with warm(mapping, mode="force", background=True) as handle:
            front = warm(memoryview(mapping)[: 40 * MIB], mode="force")
            back = handle.wait()
        assert mapped_in(*address_of(mapping)).all()

    assert back.done_bytes == NUM_BYTES
    assert front.done_bytes == 40 * MIB or front.reason == "resident"


def test_four_threads_may_sweep_one_file_at_once(tmp_path: Path) -> None:
    """Each gets a report of its own."""
    path = write_cold(tmp_path / "file", 40 * MIB)
    reports: list[PrefaultReport] = []
    with mapped(path) as mapping, contextlib.ExitStack() as stack:
        for number in range(4):
            options = {"keep_mapped": number % 2 == 0, "threads": 2, "mode": "force"}
            thread = threading.Thread(
                target=lambda options=options: reports.append(warm(mapping, **options))
            )
            stack.callback(thread.join)
            thread.start()
        stack.close()
        assert mapped_in(*address_of(mapping)).all()

    assert len(reports) == 4
    assert all(report.done_bytes == 40 * MIB for report in reports if report.ran)
    assert any(report.ran for report in reports)


def test_nothing_to_do_is_a_report_in_the_background_too() -> None:
    """The handle is the same, whatever the verdict."""
    with warm([], background=True) as handle:
        assert handle.wait().reason == "empty"
        assert handle.progress.fraction == 1.0
    with anonymous(PAGE) as memory, warm(memory, mode="off", background=True) as handle:
        assert handle.wait().reason == "off"


def test_twenty_sweeps_leave_no_file_and_no_thread(tmp_path: Path) -> None:
    """Some waited for, some cancelled, some forgotten."""
    path = write_file(tmp_path / "file", NUM_BYTES)
    for number in range(20):
        with mapped(path) as mapping:
            keep = number % 4 < 2
            handle = warm(mapping, mode="force", background=True, keep_mapped=keep)
            if number % 2:
                handle.wait()
            else:
                handle.cancel()


_ENDLESS = """
import gc, mmap, os, signal, threading, time, warnings
from moecache import MoeCacheError, StoreError
from moecache.prefault import warm
from moecache.prefault.sweep import Sweeper
warnings.simplefilter("ignore")
zero = os.open("/dev/zero", os.O_RDONLY)
def read_on(self, part):
    self.sweep.run([(0, 2**50, zero, 0)], "read")
Sweeper._sweep_part = read_on
memory = mmap.mmap(-1, 70 * 2**20)
def sweeping():
    return [t for t in threading.enumerate() if t.name.startswith("moecache-")]
"""


def test_a_forked_child_is_told_that_the_sweep_is_the_parents() -> None:
    """It does not hang: wait raises, cancel returns, and the parent's sweep goes on."""
    skip_fork_under_sanitizer()
    done = run_child(
        _ENDLESS
        + """
handle = warm(memory, mode="force", background=True, threads=2)
while not handle.progress.done_bytes:
    time.sleep(0.001)
child = os.fork()
if child == 0:
    try:
        handle.wait(60)
    except MoeCacheError as error:
        handle.cancel()
        del handle
        gc.collect()
        print("child:", error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
before = handle._job.sweep.done_bytes
while handle._job.sweep.done_bytes == before:
    time.sleep(0.001)
handle.cancel()
print("parent:", handle.wait().reason)
"""
    )

    assert (done.returncode, done.stderr) == (0, "")
    child, parent = done.stdout.splitlines()
    assert child.startswith("child: the sweep was started by the parent process")
    assert parent == "parent: cancelled"


def test_ctrl_c_while_the_thread_starts(
    endless: None, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no handle yet, and the sweep stops all the same."""
    begin = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        begin(self)
        if self.name == "moecache-prefault":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        warm(memory, mode="force", threads=2)
    wait_until(lambda: not sweeping())


def test_ctrl_c_stops_a_sweep_in_the_foreground() -> None:
    """KeyboardInterrupt reaches the caller when the threads have stopped, whenever it comes."""
    done = run_child(
        _ENDLESS
        + """
def interrupt():
    started.wait()
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGINT)
for delay in (0, 0.001, 0.003, 0.01, 0.03, 0.3):
    started = threading.Event()
    threading.Thread(target=interrupt).start()
    try:
        started.set()
        warm(memory, mode="force", threads=2)
    except KeyboardInterrupt:
        until = time.monotonic() + 60
        while sweeping() and time.monotonic() < until:
            time.sleep(0.001)
        print("interrupted", sweeping())
"""
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, 6 * "interrupted []\n", "")


def test_a_process_may_end_while_a_sweep_runs() -> None:
    """No crash, no hang, no message, with the handle held or not."""
    done = run_child(
        _ENDLESS
        + """
handle = warm(memory, mode="force", background=True, threads=2)
while not handle.progress.done_bytes:
    time.sleep(0.001)
print("bye")
"""
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "bye\n", "")


_UNMAPPING = """
import ctypes, mmap, os, random, threading
from moecache import StoreError
from moecache.prefault import warm
path, method, keep_mapped = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
rng, size = random.Random(7), os.path.getsize(path)
outcomes = set()
with open(path, "rb") as file:
    for step in range(int(sys.argv[4])):
        if step % 3 == 0:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        address = libc.mmap(None, ctypes.c_size_t(size), 1, mmap.MAP_SHARED, file.fileno(), 0)
        handle = warm(
            [(address, size)], mode="force", method=method, keep_mapped=keep_mapped,
            background=True, threads=2,
        )
        threading.Event().wait(rng.random() * 0.004)
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
        try:
            handle.wait(60)
            outcomes.add("swept")
        except StoreError:
            outcomes.add("failed")
print(*sorted(outcomes))
"""


@pytest.mark.parametrize("method", ["populate", "read"])
@pytest.mark.parametrize("keep_mapped", [True, False])
def test_bare_addresses_unmapped_under_a_sweep_never_kill(
    tmp_path: Path, method: str, keep_mapped: bool
) -> None:
    """The caller broke the contract: a StoreError or a report, and no crash."""
    path = write_file(tmp_path / "file", 40 * MIB)
    done = run_child(_UNMAPPING, path, method, keep_mapped, num_examples(30))

    assert done.returncode == 0, done.stderr
    assert done.stdout.split()
    assert set(done.stdout.split()) <= {"swept", "failed"}
    assert all(line.startswith("prefault.failed") for line in done.stderr.splitlines())


def test_a_yielding_sweep_begins_nothing_while_somebody_else_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on after their reads, in chunks of 2 MiB, and leaves out what they read meanwhile."""
    path = write_cold(tmp_path / "file", 6 * MIB)
    swept: list[tuple[int, int]] = []
    asked: list[bool] = []
    sweep_part = Sweeper._sweep_part

    def sweep_and_note(self: Sweeper, part: list[Extent]) -> None:
        swept.extend((extent.offset, extent.nbytes) for extent in part)
        sweep_part(self, part)

    def is_busy() -> bool:
        asked.append(0 < len(asked) < 4)
        return asked[-1]

    monkeypatch.setattr(Sweeper, "_sweep_part", sweep_and_note)
    # Not the kernel's answer: it reads ahead.
    monkeypatch.setattr(Extent, "resident_pages", lambda self: _seen(self, len(asked)))
    with mapped(path) as mapping:
        begin = threading.Event()
        run = Sweeper.run
        monkeypatch.setattr(
            Sweeper, "run", lambda self, *a, **k: begin.wait(30) and run(self, *a, **k)
        )
        handle = warm(mapping, mode="force", background=True, yielding=True, keep_mapped=False)
        handle.yield_to(is_busy)
        begin.set()
        report = handle.wait(30)

    assert asked == [False, True, True, True, False]
    assert swept == [(0, 2 * MIB), (4 * MIB, 2 * MIB)]
    assert report.done_bytes == report.num_bytes == 6 * MIB
    assert report.num_threads == 1


def _seen(extent: Extent, num_asked: int) -> int:
    """Answer as if others had read the second chunk while the sweep was asked to wait."""
    return extent.num_pages if extent.offset == 2 * MIB and num_asked >= 4 else 0


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="no idle class of threads")
def test_only_a_yielding_sweep_runs_when_nothing_else_does(
    memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the threads of others nor the caller's own are slowed."""
    classes: list[int] = []
    monkeypatch.setattr(Sweeper, "_sweep_part", lambda *_: classes.append(os.sched_getscheduler(0)))
    for yielding in (False, True):
        warm(memory, mode="force", background=True, yielding=yielding).wait(30)

    assert set(classes) == {os.SCHED_OTHER, os.SCHED_IDLE}
    assert classes[0] == os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_pause_ends_with_a_cancel(memory: mmap.mmap) -> None:
    """Even if other reads never end."""
    with warm(memory, mode="force", background=True, yielding=True) as handle:
        handle.yield_to(lambda: True)
        handle.cancel()

    assert handle.wait(0).reason == "cancelled"
