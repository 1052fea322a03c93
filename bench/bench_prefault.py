"""How fast a file comes into memory, cold and warm, against other ways, in one run.

    pytest bench/bench_prefault.py --bench-dir=/on/the/disk

Contestants take turns, in another order each round. Before each the file is swept and dropped from
the page cache, which is verified: memory that went unused for some seconds may have to come from
a virtual machine's host again, which made some runs two to four times slower. After each,
every page is asked for: all must be in memory, or no figure is shown. Direct reads into a huge-page
buffer fill no page cache; they are the disk's limit. `vmtouch -t` if installed.
"""

import mmap
import os
import random
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moecache import prefault
from moecache._prefault import Sweep, address_of, advise_willneed, can_populate, touch_pages

Table = Callable[[str, list[str]], None]

MIB = 2**20
GIB = 2**30
TOUCH_THREADS = 2


@pytest.fixture
def file(disk: Path, small: bool) -> Path:
    """Return a file of 1 GiB (small: 64 MiB) that no process has mapped."""
    path = disk / "model"
    block = np.random.default_rng(0).bytes(16 * MIB)
    with path.open("wb") as handle:
        for _ in range(4 if small else 64):
            handle.write(block)
    return path


def test_cold(file: Path, small: bool, table: Table) -> None:
    """From the disk to memory: GiB/s, and the share of what direct reads reach."""
    contestants: dict[str, Callable[[Path], float]] = {
        "direct reads (limit)": read_directly,
        "moecache": warm,
        "moecache, 1 thread": lambda path: warm(path, threads=1),
        "moecache, no read-back": lambda path: warm(path, read_back=False),
        "moecache, page cache only": lambda path: warm(path, keep_mapped=False),
        "moecache, pread (old kernels)": lambda path: warm(path, method="read"),
        "touch, 1 thread": lambda path: touch(path, 1),
        f"touch, {TOUCH_THREADS} threads": lambda path: touch(path, TOUCH_THREADS),
        "WILLNEED alone": willneed,
        "cat > /dev/null": lambda path: command("cat", str(path)),
    }
    if shutil.which("vmtouch"):
        contestants["vmtouch -t"] = lambda path: command("vmtouch", "-tq", str(path))

    seconds = take_turns(file, contestants, rounds=1 if small else 7, cold=True)

    limit = seconds["direct reads (limit)"]
    size = file.stat().st_size
    lines = [f"{'':32} GiB/s  of the limit   (medians; read-ahead {read_ahead(file)})"]
    lines += [
        f"{name:32} {size / GIB / median:5.2f}  {limit / median:8.2f}"
        for name, median in seconds.items()
    ]
    table(f"{size / GIB:.2f} GiB, cold", lines)


@pytest.mark.skipif(not can_populate(), reason="needs MADV_POPULATE_READ, Linux 5.14")
@pytest.mark.parametrize("folios", ["small", "large"])
def test_warm(file: Path, small: bool, table: Table, folios: str) -> None:
    """From the page cache into a page table, against the bare system call."""
    prefault.evict(mapped(file))
    if folios == "large":
        warm(file)
    else:
        # What a hint reads ahead comes in pages of the smallest size.
        view = mapped(file)
        address, nbytes = address_of(view)
        for start in range(0, nbytes, MIB // 8):
            advise_willneed(address + start, min(MIB // 8, nbytes - start))
        touch_pages(view)
        del view
    contestants: dict[str, Callable[[Path], float]] = {
        "MADV_POPULATE_READ alone": populate,
        "moecache": warm,
        "moecache, mapped already": warm_twice,
        "touch, 1 thread": lambda path: touch(path, 1),
    }

    seconds = take_turns(file, contestants, rounds=3 if small else 15, cold=False)

    size = file.stat().st_size
    limit = seconds["MADV_POPULATE_READ alone"]
    lines = [f"{'':32}  GiB/s       ms   of the bare call"]
    lines += [
        f"{name:32} {size / GIB / median:6.0f} {1000 * median:8.2f}  {limit / median:8.2f}"
        for name, median in seconds.items()
    ]
    table(f"{size / GIB:.2f} GiB, in the page cache in {folios} folios", lines)


def take_turns(
    file: Path, contestants: dict[str, Callable[[Path], float]], *, rounds: int, cold: bool
) -> dict[str, float]:
    """Return the median seconds of each; all but direct reads have brought the file into memory."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    size = file.stat().st_size
    shuffled = list(contestants.items())
    for number in range(rounds):
        random.Random(number).shuffle(shuffled)
        for name, contestant in shuffled:
            if cold:
                # One page in a thousand may be held by another process for a moment.
                warm(file)
                assert prefault.evict(mapped(file)) < size / 1000
            # The kernel may already have reclaimed a few of the pages that no process maps.
            least = 0.99 if name.startswith("moecache") else 0.95
            if name.startswith(("WILLNEED", "direct")):
                least = 0.0
            seconds[name].append(undisturbed(file, contestant, least))
    return {name: statistics.median(times) for name, times in seconds.items()}


def undisturbed(file: Path, contestant: Callable[[Path], float], least: float) -> float:
    """Return what a contestant took; once more if the system took pages back meanwhile."""
    for _ in range(10):
        seconds = contestant(file)
        share = resident_share(file)
        if share >= least:
            return seconds
    pytest.fail(f"{contestant}: {share:.4f} of the file is resident")


def mapped(path: Path) -> mmap.mmap:
    """Return a fresh mapping of the file, with nothing in the page table."""
    with path.open("rb") as handle:
        return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)


def resident_share(path: Path) -> float:
    """Return the share of the file that is in the page cache."""
    (found,) = prefault.residency([mapped(path)])
    assert found.known
    return found.resident_bytes / found.num_bytes


def warm(path: Path, **options: object) -> float:
    """Sweep a fresh mapping with the library."""
    view = mapped(path)
    start = time.perf_counter()
    report = prefault.warm(view, gate="always", **options)
    seconds = time.perf_counter() - start
    assert report.ran or report.reason == "resident"
    return seconds


def warm_twice(path: Path) -> float:
    """Sweep what is in the page table already."""
    view = mapped(path)
    for _ in range(10):
        prefault.warm(view, gate="always")
        start = time.perf_counter()
        report = prefault.warm(view, gate="always")
        seconds = time.perf_counter() - start
        if report.reason == "resident":
            return seconds
    pytest.fail("a sweep of what was swept found pages that were not resident, ten times")


def populate(path: Path) -> float:
    """Populate a fresh mapping, without asking or deciding anything."""
    view = mapped(path)
    address, nbytes = address_of(view)
    sweep = Sweep()
    start = time.perf_counter()
    assert sweep.run([(address, nbytes, -1, 0)], "populate") == []
    return time.perf_counter() - start


def touch(path: Path, threads: int) -> float:
    """Read a byte of every page, each thread a contiguous part."""
    view = memoryview(mapped(path))
    part = -(-len(view) // threads)
    start = time.perf_counter()
    workers = [
        threading.Thread(target=touch_pages, args=(view[first : first + part],))
        for first in range(0, len(view), part)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def willneed(path: Path) -> float:
    """Hint once for the whole file; the kernel reads as much as its read-ahead allows."""
    view = mapped(path)
    start = time.perf_counter()
    advise_willneed(*address_of(view))
    return time.perf_counter() - start


def command(*arguments: str) -> float:
    """Run a command whose output is of no interest."""
    start = time.perf_counter()
    subprocess.run(arguments, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def read_directly(path: Path) -> float:
    """Read the file around the page cache, 2 MiB at a time, into one huge page."""
    area = mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    first = -address_of(area)[0] % (2 * MIB)
    buffer = memoryview(area)[first : first + 2 * MIB]
    buffer[:] = bytes(2 * MIB)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        offset = 0
        start = time.perf_counter()
        while count := os.preadv(descriptor, [buffer], offset):
            offset += count
        seconds = time.perf_counter() - start
    finally:
        os.close(descriptor)
    assert offset == path.stat().st_size
    return seconds


def read_ahead(path: Path) -> str:
    """Return the disk's read-ahead setting, on which the others depend."""
    device = os.stat(path).st_dev
    name = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for candidate in (f"{name}/queue", f"{name}/../queue"):
        try:
            return f"{Path(candidate, 'read_ahead_kb').read_text().strip()} KiB"
        except OSError:
            continue
    return "unknown"
