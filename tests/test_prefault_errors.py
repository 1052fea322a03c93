"""The compiled sweep: what fails is told, with its number and place, and stops nothing else."""

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from moecache._prefault import CHUNK_BYTES, PAGE_SIZE, Sweep, address_of, can_populate
from tests.helpers.pages import (
    NOWHERE,
    PAGE,
    anonymous,
    mapped,
    mapped_in,
    num_cached,
    skip_under_sanitizer,
    undisturbed,
    wait_until,
    write_cold,
)

NO_FILE = -1

needs_populate = pytest.mark.skipif(not can_populate(), reason="needs Linux 5.14")


@pytest.fixture(name="pipe")
def _pipe() -> Iterator[int]:
    """Return the reading end of a pipe."""
    reader, writer = os.pipe()
    yield reader
    os.close(reader)
    os.close(writer)


@needs_populate
@pytest.mark.parametrize("keep_mapped", [True, False])
def test_an_address_that_is_not_mapped_is_an_entry(keep_mapped: bool) -> None:
    """The process lives; the pieces around it are swept."""
    with anonymous(4 * PAGE) as memory:
        address, _ = address_of(memory)
        pieces = [
            (address, PAGE, NO_FILE, 0),
            (NOWHERE, 3 * PAGE, NO_FILE, 0),
            (address + 3 * PAGE, PAGE, NO_FILE, 0),
        ]
        sweep = Sweep()

        failed = sweep.run(pieces, "populate", keep_mapped=keep_mapped)

        assert failed == [(1, 0, 3 * PAGE, errno.ENOMEM)]
        assert mapped_in(address, 4 * PAGE)[[0, 3]].all()
        assert sweep.done_bytes == 2 * PAGE


@needs_populate
def test_an_address_between_pages_is_an_entry() -> None:
    """The kernel takes page-aligned ones alone."""
    with anonymous(4 * PAGE) as memory:
        piece = (address_of(memory)[0] + 1, PAGE, NO_FILE, 0)

        assert Sweep().run([piece], "populate") == [(0, 0, PAGE, errno.EINVAL)]


@needs_populate
def test_memory_that_may_not_be_read_is_an_entry() -> None:
    """PROT_NONE is how whole address ranges are reserved."""
    with anonymous(4 * PAGE, protection=0) as memory:
        failed = Sweep().run([(*address_of(memory), NO_FILE, 0)], "populate")

    assert failed == [(0, 0, 4 * PAGE, errno.EINVAL)]


@pytest.mark.parametrize(
    ("method", "number"),
    [pytest.param("populate", errno.EFAULT, marks=needs_populate), ("read", errno.EFAULT)],
)
@undisturbed
def test_a_file_that_is_too_short_is_an_entry_and_what_it_has_comes_in(
    tmp_path: Path, method: str, number: int
) -> None:
    """No SIGBUS; cut between two pages or within one."""
    for size in (0, 1, 5 * PAGE, 5 * PAGE + 1):
        path = write_cold(tmp_path / "file", 16 * PAGE)
        with mapped(path) as mapping, path.open("rb") as file:
            os.truncate(path, size)
            piece = (*address_of(mapping), file.fileno(), 0)
            sweep = Sweep()

            assert sweep.run([piece], method) == [(0, 0, 16 * PAGE, number)]
            assert sweep.done_bytes == 0
        assert num_cached(path) * PAGE == -(-size // PAGE) * PAGE


@undisturbed
def test_a_read_of_the_last_page_of_a_file_is_no_failure(tmp_path: Path) -> None:
    """Ranges are whole pages, files need not be."""
    path = write_cold(tmp_path / "file", 3 * PAGE + 1)
    with mapped(path) as mapping, path.open("rb") as file:
        pieces = [(address_of(mapping)[0], 4 * PAGE, file.fileno(), 0)]

        assert Sweep().run(pieces, "read") == []
    assert num_cached(path) == 4


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("closed", errno.EBADF),
        ("write-only", errno.EBADF),
        ("directory", errno.EISDIR),
        ("pipe", errno.ESPIPE),
        ("unreadable", errno.EIO),
        ("beyond", errno.EINVAL),
    ],
)
@undisturbed
def test_a_failed_read_is_an_entry_with_its_number(
    tmp_path: Path, pipe: int, kind: str, number: int
) -> None:
    """And the piece after it is read."""
    path = write_cold(tmp_path / "file", 4 * PAGE)
    offset = 2**63 if kind == "beyond" else 0
    flags = {"write-only": os.O_WRONLY, "directory": os.O_DIRECTORY}.get(kind, os.O_RDONLY)
    # Reading one's own memory at address 0 is an EIO.
    name = {"directory": str(tmp_path), "unreadable": "/proc/self/mem"}.get(kind, str(path))
    bad = os.open(name, flags)
    good = os.open(path, os.O_RDONLY)
    descriptor = {"closed": 2**20, "pipe": pipe}.get(kind, bad)
    try:
        with mapped(path) as mapping:
            address, nbytes = address_of(mapping)
            pieces = [(address, nbytes, descriptor, offset), (address, nbytes, good, 0)]

            assert Sweep().run(pieces, "read") == [(0, 0, nbytes, number)]
            assert num_cached(path) == 4
    finally:
        os.close(bad)
        os.close(good)


@needs_populate
@pytest.mark.parametrize("keep_mapped", [True, False])
def test_the_first_chunk_that_failed_is_told_and_the_next_ones_are_swept(keep_mapped: bool) -> None:
    """A hole in the middle of a piece: its place is counted from the piece's start."""
    nbytes = 3 * CHUNK_BYTES
    with anonymous(nbytes) as memory:
        address, _ = address_of(memory)
        protect(address + CHUNK_BYTES, CHUNK_BYTES, 0)
        sweep = Sweep()

        ((index, start, length, number),) = sweep.run(
            [(address, nbytes, NO_FILE, 0)], "populate", keep_mapped=keep_mapped
        )

        assert (index, start, number) == (0, CHUNK_BYTES, errno.EINVAL)
        assert 0 < length <= CHUNK_BYTES
        assert sweep.done_bytes == 2 * CHUNK_BYTES
        table = mapped_in(address, nbytes)
        assert table[: CHUNK_BYTES // PAGE].all()
        assert table[-CHUNK_BYTES // PAGE :].all()


@needs_populate
def test_a_range_that_gives_nothing_but_errors_is_left_soon() -> None:
    """A petabyte of nothing does not take minutes."""
    failed = Sweep().run([(NOWHERE, 2**50, NO_FILE, 0)], "populate")

    assert failed == [(0, 0, CHUNK_BYTES, errno.ENOMEM)]


def test_without_memory_for_the_table_nothing_is_done() -> None:
    """A MemoryError, and the sweep can be used again."""

    class Long(list[tuple[int, int, int, int]]):
        def __len__(self) -> int:
            return 2**55

    skip_under_sanitizer("ends the process instead")
    sweep = Sweep()
    with pytest.raises(MemoryError):
        sweep.run(Long(), "populate")
    with pytest.raises(MemoryError):
        sweep.run(Long(), "read")
    with anonymous(PAGE) as memory:
        assert sweep.run([(*address_of(memory), NO_FILE, 0)], "touch") == []

    assert sweep.done_bytes == PAGE_SIZE


@undisturbed
def test_pieces_are_read_ahead_of_the_sweep_up_to_the_last(tmp_path: Path) -> None:
    """Also behind a piece so large that nothing else is hinted beside it."""
    # None of them is read by the sweep itself: what is in memory was hinted.
    paths = [write_cold(tmp_path / str(number), PAGE) for number in range(4)]
    for path in paths:
        os.truncate(path, CHUNK_BYTES)
    with contextlib.ExitStack() as stack:
        maps = [stack.enter_context(mapped(path)) for path in paths]
        unreadable = stack.enter_context(paths[0].open("ab")).fileno()
        pieces = [(*address_of(mapping), unreadable, 0) for mapping in maps]
        failed = Sweep().run(pieces, "read")

    assert [number for _, _, _, number in failed] == [errno.EBADF] * 4
    wait_until(lambda: all(num_cached(path) for path in paths[1:]), timeout=60)


def protect(address: int, nbytes: int, protection: int) -> None:
    """Change what may be done with a range of memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), protection)
    assert result == 0, os.strerror(ctypes.get_errno())
