"""Files whose pages a test controls, and what the kernel says of them."""

import contextlib
import functools
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec

import numpy as np
import pytest

import moecache
from moecache._prefault import address_of, resident_pages

P = ParamSpec("P")

PAGE = mmap.PAGESIZE
MIB = 2**20
GIB = 2**30
# Beyond what a process can map.
NOWHERE = 2**56
_MAP_NORESERVE = 0x4000  # in mmap from Python 3.12 on
# A child imports what is tested here, which need not be what is installed.
_PACKAGE_ROOT = str(Path(moecache.__file__).parents[1])


def write_file(path: Path, nbytes: int, seed: int = 0) -> Path:
    """Write random bytes; the file is clean and in the page cache afterwards."""
    # The same 64 pages and a byte again and again, so that no page is like one near it.
    block = np.random.default_rng(seed).bytes(64 * PAGE + 1)
    with path.open("wb") as file:
        file.write((block * (nbytes // len(block) + 1))[:nbytes])
        file.flush()
        os.fsync(file.fileno())
    return path


def write_cold(path: Path, nbytes: int, seed: int = 0) -> Path:
    """Write random bytes and drop them from the page cache."""
    evict(write_file(path, nbytes, seed))
    return path


def evict(path: Path) -> None:
    """Drop a file that no process maps from the page cache; skip where that does not work."""
    with path.open("rb") as file:
        for _ in range(20):
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if num_cached(path) == 0:
                return
            time.sleep(0.05)
    pytest.skip("this file system keeps its files in memory")


def num_cached(path: Path) -> int:
    """Return how many pages of a file mincore finds in the page cache."""
    with path.open("rb") as file, contextlib.ExitStack() as stack:
        if os.fstat(file.fileno()).st_size == 0:
            return 0
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        stack.callback(mapping.close)
        return resident_pages(*address_of(mapping))


def came_in(path: Path, nbytes: int) -> bool:
    """Return whether a file is in the page cache, but for the little that a busy kernel dropped."""
    pages = -(-nbytes // PAGE)
    return 0.9 * pages <= num_cached(path) <= pages


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map a file to be read."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        yield mapping
    finally:
        mapping.close()


@contextlib.contextmanager
def anonymous(nbytes: int, *, protection: int = mmap.PROT_READ) -> Iterator[mmap.mmap]:
    """Map private memory that no page stands behind yet, and no huge page ever."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    mapping = mmap.mmap(-1, nbytes, flags, protection)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    try:
        yield mapping
    finally:
        mapping.close()


def mapped_in(address: int, nbytes: int) -> np.ndarray:
    """Return of each page whether it is in this process's page table.

    A page that the kernel is just moving counts: its entry is of the kind of swapped ones (bit 62)
    then. Compaction for huge pages moves many.
    """
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(address // PAGE * 8)
        entries = np.frombuffer(pagemap.read(-(-nbytes // PAGE) * 8), np.uint64)
    return (entries >> np.uint64(62)).astype(bool)


def pages_of(address: int, nbytes: int) -> set[int]:
    """Return the numbers of the pages that a range has a byte in, one by one."""
    return set(range(address // PAGE, -(-(address + nbytes) // PAGE))) if nbytes else set()


def num_descriptors() -> int:
    """Return how many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def undisturbed(test: Callable[P, None]) -> Callable[P, None]:
    """Run a test up to five times until it finds the pages where a sweep has brought them.

    Nothing promises that pages stay in memory, and no counter tells that they went: DAMON pages
    out what seems cold and drop_caches drops what no process maps, although memory is free, and
    neither counts as reclaim. Pages that a sweep leaves out are left out each time.
    """

    @functools.wraps(test)
    def run(*arguments: P.args, **options: P.kwargs) -> None:
        for _ in range(4):
            with contextlib.suppress(AssertionError):
                return test(*arguments, **options)
        return test(*arguments, **options)

    return run


def wait_until(condition: Callable[[], object], timeout: float = 30.0) -> None:
    """Wait for something another thread does."""
    pause = threading.Event()
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        pause.wait(0.002)


def skip_under_sanitizer(why: str) -> None:
    """Skip a test that the sanitizer's own ways would fail; the release build runs it."""
    if "libasan" in Path("/proc/self/maps").read_text():
        pytest.skip(f"the sanitizer {why}")


def skip_fork_under_sanitizer() -> None:
    """Skip a test that forks beside threads.

    GCC 12's does not hold its allocator's locks over a fork: one that another thread has is
    never free in the child.
    """
    skip_under_sanitizer("has locks that are lost in a fork beside threads")


def run_child(code: str, *arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program that must not take this process with it; it sees `sys.argv[1:]`."""
    code = f"import sys\nsys.path.insert(0, {_PACKAGE_ROOT!r})\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
