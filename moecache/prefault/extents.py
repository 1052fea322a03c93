"""The files behind address ranges, and how much of them is in memory."""

import contextlib
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from moecache._prefault import (
    NO_FILE,
    OWN_MEMORY,
    PAGE_SIZE,
    address_of,
    cached_pages,
    resident_pages,
)
from moecache.prefault.mappings import Mapping, read_mappings, split


@dataclass(frozen=True, slots=True)
class Extent:
    """A mapped range with one thing behind it.

    Parameters
    ----------
    address, nbytes : int
        Beginning and length of the range.
    descriptor : int
        The open file behind the range; NO_FILE; or OWN_MEMORY, private memory that may be
        written.
    offset : int
        Byte of the file at which the range begins.
    path : str
        The file's name; empty for anonymous memory.
    mapping : (int, int)
        Address and length of the whole mapping.
    """

    address: int
    nbytes: int
    descriptor: int = NO_FILE
    offset: int = 0
    path: str = ""
    mapping: tuple[int, int] = (0, 0)

    @property
    def num_pages(self) -> int:
        """Pages of the extent."""
        return -(-self.nbytes // PAGE_SIZE)

    def part(self, start: int, nbytes: int) -> "Extent":
        """Return the part of `nbytes` bytes that begins at byte `start` of the extent."""
        return replace(
            self, address=self.address + start, nbytes=nbytes, offset=self.offset + start
        )

    def resident_pages(self) -> int | None:
        """Return how many pages are in memory now, or None if the kernel does not tell.

        The kernel does not tell for a file that this user neither owns nor may write:
        mincore then claims every page, and cachestat refuses.
        """
        try:
            if self.descriptor >= 0:
                # cachestat refuses files of other users. Linux before 6.5, some file systems and
                # older filters of system calls do not know it.
                with contextlib.suppress(OSError):
                    return int(cached_pages(self.descriptor, self.offset, self.nbytes))
                owner = os.fstat(self.descriptor).st_uid == os.geteuid()
                if not owner and not os.access(self.path, os.W_OK):
                    return None
            elif self.path and not self.path.startswith("/memfd:"):
                return None
            return int(resident_pages(self.address, self.nbytes))
        except OSError:
            return None

    def missing_bytes(self) -> int:
        """Return how many of its bytes lie past the present end of its file."""
        if self.descriptor < 0:
            return 0
        size = os.fstat(self.descriptor).st_size
        stop = -(-size // PAGE_SIZE) * PAGE_SIZE
        return min(self.nbytes, max(0, self.offset + self.nbytes - stop))

    def describe_failure(self, reason: str) -> str:
        """Return a sentence that names the file, the place in it, and its size now."""
        if not self.path:
            return f"{self.nbytes} bytes at address {self.address:#x}: {reason}"
        where = f"{self.path}: {self.nbytes} bytes at byte {self.offset}"
        if self.missing_bytes():
            size = os.fstat(self.descriptor).st_size
            return f"{where} are mapped, but the file has only {size} now; it was cut short"
        return f"{where}: {reason}"


class ExtentFinder:
    """Finds extents, and keeps their files open until it is closed.

    Parameters
    ----------
    own_mappings : bool
        Map each file that can be opened once more, and give extents of that mapping, so
        that a sweep does not touch the caller's mappings.
    """

    def __init__(self, *, own_mappings: bool) -> None:
        self._own_mappings = own_mappings
        self._descriptors: dict[tuple[int, str], int] = {}
        self._mapped: dict[int, mmap.mmap] = {}
        self._mappings: list[Mapping] | None = None

    def find(self, ranges: Iterable[tuple[int, int]]) -> tuple[list[Extent], list[str]]:
        """Return the extents of address ranges, and what is wrong with the others."""
        if self._mappings is None:
            self._mappings = read_mappings()
        mappings = self._mappings
        if mappings is None:
            # A file could be behind them, and a touch past its end would kill the process.
            return [Extent(*span, path="(no /proc: unknown)") for span in ranges], []
        extents: list[Extent] = []
        failures: list[str] = []
        for address, nbytes in ranges:
            for start, length, mapping in split(mappings, address, nbytes):
                if mapping is None or not mapping.readable:
                    reason = "nothing is mapped there" if mapping is None else "it is not readable"
                    failures.append(Extent(start, length).describe_failure(reason))
                    continue
                extent = Extent(
                    start,
                    length,
                    self._open(mapping),
                    mapping.offset + start - mapping.start,
                    "" if mapping.anonymous else mapping.path,
                    (mapping.start, mapping.stop - mapping.start),
                )
                missing = extent.missing_bytes()
                if missing:
                    there = extent.nbytes - missing
                    failures.append(extent.part(there, missing).describe_failure(""))
                    extent = extent.part(0, there)
                if extent.nbytes:
                    extents.append(self._remap(extent))
        return extents, failures

    def close(self) -> None:
        """Close the files and own mappings; extents found here cannot be used any more."""
        for mapping in self._mapped.values():
            mapping.close()
        self._mapped = {}
        for descriptor in self._descriptors.values():
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptors = {}

    def _open(self, mapping: Mapping) -> int:
        if mapping.anonymous:
            return OWN_MEMORY if mapping.writable and not mapping.inode else NO_FILE
        key = (mapping.inode, mapping.path)
        if key not in self._descriptors:
            self._descriptors[key] = mapping.open_file()
        return self._descriptors[key]

    def _remap(self, extent: Extent) -> Extent:
        if not self._own_mappings or extent.descriptor < 0:
            return extent
        mapped = self._mapped.get(extent.descriptor)
        if mapped is None:
            try:
                mapped = mmap.mmap(extent.descriptor, 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError):
                return replace(extent, descriptor=NO_FILE)
            self._mapped[extent.descriptor] = mapped
        address, nbytes = address_of(mapped)
        # The file grew or shrank since it was mapped: pages that are not covered stay as they are.
        if extent.offset + extent.nbytes > -(-nbytes // PAGE_SIZE) * PAGE_SIZE:
            return replace(extent, descriptor=NO_FILE)
        whole = (address, -(-nbytes // PAGE_SIZE) * PAGE_SIZE)
        return replace(extent, address=address + extent.offset, mapping=whole)
