"""Loads for a Reader: where their bytes lie, where they go, and what must stand there then."""

import ctypes
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from moecache.reader._reader import Reader
from tests.helpers.pages import PAGE

CANARY = 0xA5
# errno, file number, offset
Failure = tuple[int, int, int]
Run = tuple[int, int, tuple[tuple[str, int, int], ...]]


class Order:
    """One load between canaries, with its bytes as plain Python finds them in the files.

    Parameters
    ----------
    contents : sequence of bytes
        The files, by number.
    runs : sequence of Run
    shift : int or None, default 0
        Address of each role's array, modulo a page. None: the first bytes of a role are
        at an address like their offset's, as direct reads want it.
    """

    def __init__(
        self, contents: Sequence[bytes], runs: Iterable[Run], *, shift: int | None = 0
    ) -> None:
        self.contents = contents
        self.runs = tuple(runs)
        self.parts: dict[str, np.ndarray] = {}
        self._memory: dict[str, np.ndarray] = {}
        self._expected: dict[str, np.ndarray] = {}
        first = {}
        sizes: dict[str, int] = {}
        for _, offset, spans in self.runs:
            for role, start, stop in spans:
                sizes[role] = max(sizes.get(role, 0), stop)
                first.setdefault(role, offset - start)
                offset += stop - start
        for role, nbytes in sizes.items():
            at = first[role] if shift is None else shift
            memory = np.full(nbytes + 3 * PAGE, CANARY, np.uint8)
            begin = PAGE + (at - memory.ctypes.data) % PAGE
            self._memory[role] = memory
            self.parts[role] = memory[begin : begin + nbytes]
            self._expected[role] = memory.copy()
            found = self._expected[role][begin : begin + nbytes]
            for file, offset, spans in self.runs:
                for name, start, stop in spans:
                    if name == role:
                        content = contents[file][offset : offset + stop - start]
                        found[start : start + len(content)] = np.frombuffer(content, np.uint8)
                    offset += stop - start

    @property
    def nbytes(self) -> int:
        """Bytes that are to be read."""
        return sum(stop - start for _, _, spans in self.runs for _, start, stop in spans)

    @property
    def entry(self) -> tuple["Order", tuple[Run, ...], dict[str, np.ndarray]]:
        """What `submit` takes."""
        return self, self.runs, self.parts

    def is_right(self) -> bool:
        """Return whether every byte is the file's, or a canary where none was wanted."""
        return all(
            np.array_equal(memory, self._expected[role]) for role, memory in self._memory.items()
        )

    def is_untouched(self) -> bool:
        """Return whether nothing was written at all."""
        return all((memory == CANARY).all() for memory in self._memory.values())

    def stays_inside(self) -> bool:
        """Return whether nothing was written but where something was wanted."""
        for role, memory in self._memory.items():
            inside = np.zeros(len(memory), bool)
            begin = self.parts[role].ctypes.data - memory.ctypes.data
            for _, _, spans in self.runs:
                for name, start, stop in spans:
                    if name == role:
                        inside[begin + start : begin + stop] = True
            if (memory[~inside] != CANARY).any():
                return False
        return True


def one_range(
    contents: Sequence[bytes], offset: int, nbytes: int, *, file: int = 0, shift: int | None = 0
) -> Order:
    """Return a load of one range of a file."""
    return Order(contents, [(file, offset, (("weights", 0, nbytes),))], shift=shift)


def read_all(reader: Reader, orders: Sequence[Order]) -> dict[Order, Failure | None]:
    """Read everything and return what became of each load."""
    reader.submit([order.entry for order in orders])
    return wait_for(reader, len(orders))


def wait_for(reader: Reader, count: int) -> dict[Order, Failure | None]:
    """Take in so many loads that were submitted before."""
    taken: list[tuple[Order, Failure | None]] = []
    while len(taken) < count:
        reader.wait(reader.epoch)
        before = -1
        while len(taken) > before:
            before = len(taken)
            reader.take(taken)
    assert reader.num_in_flight == 0
    return dict(taken)


def open_descriptor(path: Path) -> int:
    """Open a file to be read."""
    return os.open(path, os.O_RDONLY)


def num_mappings() -> int:
    """Return how many ranges of memory this process has mapped."""
    return len(Path("/proc/self/maps").read_bytes().splitlines())


def skip_without_direct(reader: Reader) -> Reader:
    """Skip where the tests' directory takes no direct reads."""
    if not reader.direct:
        reader.close()
        pytest.skip("this file system takes no direct reads")
    return reader


class Hole:
    """Memory whose first access hangs until it is filled: a read that never comes back.

    By userfaultfd. Skips where a process may not have the kernel's own accesses wait.
    """

    def __init__(self, nbytes: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self.descriptor = self._libc.syscall(323, os.O_CLOEXEC)
        if os.uname().machine != "x86_64" or self.descriptor < 0:
            pytest.skip("a test needs userfaultfd, which this system refuses")
        self._nbytes = nbytes
        self._address = self._libc.mmap(None, ctypes.c_size_t(nbytes), 3, 0x22, -1, 0)
        self._ioctl(0xC018AA3F, 0xAA, 0, 0)  # UFFDIO_API
        self._ioctl(0xC020AA00, self._address, nbytes, 1, 0)  # UFFDIO_REGISTER, missing pages
        self.array = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(self._address), np.uint8)

    def fill(self) -> None:
        """Let the accesses go on."""
        self._ioctl(0x8010AA01, self._address, self._nbytes)  # UFFDIO_UNREGISTER
        self._ioctl(0x8010AA02, self._address, self._nbytes)  # UFFDIO_WAKE

    def close(self) -> None:
        """Give back the descriptor. The memory stays: the kernel may still write to it."""
        os.close(self.descriptor)

    def _ioctl(self, request: int, *words: int) -> None:
        argument = (ctypes.c_uint64 * len(words))(*words)
        if self._libc.ioctl(self.descriptor, ctypes.c_ulong(request), argument) < 0:
            number = ctypes.get_errno()
            pytest.skip(f"a test needs userfaultfd: {os.strerror(number)}")
