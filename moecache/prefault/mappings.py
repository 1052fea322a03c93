"""The mappings of this process, and the file behind an address."""

import bisect
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moecache._prefault import PAGE_SIZE

_PRESENT = 1 << 63
_PAGEMAP_ENTRIES = 8192
# Addresses, flags, offset, device, inode and path; a name may have a carriage return in it.
_LINE = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (.)(.).. ([0-9a-f]+) [^ ]+ ([0-9]+) *([^\n]*)\n")


class Mapping(NamedTuple):
    """A range of addresses with one thing behind it.

    Parameters
    ----------
    start, stop : int
        Addresses of the first byte and of the byte after the last.
    readable : bool
        Whether the process may read there.
    offset : int
        Byte of the file that is at `start`.
    inode : int
        0 for anonymous memory.
    path : str
        Empty for anonymous memory.
    writable : bool
        Whether the process may write there.
    """

    start: int
    stop: int
    readable: bool
    offset: int
    inode: int
    path: str
    writable: bool = False

    @property
    def anonymous(self) -> bool:
        """Whether the mapping has no file behind it that could be cut short."""
        # The kernel gives a path of its own to shared memory that has no name.
        return self.inode == 0 or self.path == "/dev/zero (deleted)" or self.path[:5] == "/SYSV"

    def open_file(self) -> int:
        """Return a descriptor of the file behind the mapping, or -1 if there is none.

        Opens only a regular file that is still found under its name: no device, no
        deleted file, and no other file that took its place.
        """
        if self.anonymous:
            return -1
        # The escape for a line feed may have been these four characters in the name itself.
        literal = self.path.replace("\n", "\\012")
        path = self.path if os.path.exists(self.path) else literal
        try:
            # Checked before opening: to open a device or a pipe can have an effect already.
            if not stat.S_ISREG(os.stat(path).st_mode):
                return -1
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            return -1
        # The inode alone: overlayfs and btrfs show two different device numbers.
        if os.fstat(descriptor).st_ino != self.inode:
            os.close(descriptor)
            return -1
        return descriptor


def read_mappings(proc: Path = Path("/proc")) -> list[Mapping] | None:
    """Return this process's mappings by address; None where the system has no such list."""
    try:
        text = (proc / "self/maps").read_bytes()
    except OSError:
        return None
    found = _LINE.findall(text)
    if len(found) != text.count(b"\n"):
        return None
    return [
        Mapping(
            int(start, 16),
            int(stop, 16),
            readable == b"r",
            int(offset, 16),
            int(inode),
            # A line feed is the only character of a name that the kernel writes as an escape.
            os.fsdecode(path.replace(b"\\012", b"\n")) if inode != b"0" else "",
            writable == b"w",
        )
        for start, stop, readable, writable, offset, inode, path in found
    ]


def split(
    mappings: list[Mapping], address: int, nbytes: int
) -> list[tuple[int, int, Mapping | None]]:
    """Return (address, nbytes, mapping) of the parts of a range, None where nothing is mapped."""
    parts: list[tuple[int, int, Mapping | None]] = []
    stop = address + nbytes
    index = bisect.bisect_right(mappings, address, key=lambda mapping: mapping.stop)
    while address < stop:
        mapping = mappings[index] if index < len(mappings) else None
        if mapping is None or mapping.start >= stop:
            parts.append((address, stop - address, None))
            break
        if mapping.start > address:
            parts.append((address, mapping.start - address, None))
            address = mapping.start
        end = min(stop, mapping.stop)
        parts.append((address, end - address, mapping))
        address = end
        index += 1
    return parts


def is_mapped_in(address: int, nbytes: int) -> bool:
    """Return whether every page of a range is in this process's page table already.

    False where the system does not tell. Costs next to nothing if the first page is missing.
    """
    first, stop = address // PAGE_SIZE, -(-(address + nbytes) // PAGE_SIZE)
    try:
        descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # The first, the middle and the last page tell most ranges apart.
        for page in (first, (first + stop) // 2, stop - 1):
            if not _all_present(descriptor, page, 1):
                return False
        return all(
            _all_present(descriptor, page, min(_PAGEMAP_ENTRIES, stop - page))
            for page in range(first, stop, _PAGEMAP_ENTRIES)
        )
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _all_present(descriptor: int, page: int, num_pages: int) -> bool:
    entries = np.frombuffer(os.pread(descriptor, 8 * num_pages, 8 * page), np.uint64)
    return entries.size == num_pages and bool((entries & np.uint64(_PRESENT)).all())
