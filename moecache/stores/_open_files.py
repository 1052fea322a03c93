"""The files of a checkpoint, opened once, and mapped when they are first asked for."""

import errno
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moecache.errors import StoreError
from moecache.stores._file import ReadOnlyFile
from moecache.stores.base import Parts, Run


class OpenFiles:
    """The files of a checkpoint by their numbers, until it is closed; any thread may ask.

    Parameters
    ----------
    path : Path
        The checkpoint, for errors.
    files : list of ReadOnlyFile
    ends : sequence of int
        Byte at which the last tensor of each file ends.
    """

    def __init__(self, path: Path, files: list[ReadOnlyFile], ends: Sequence[int]) -> None:
        self._path = path
        self._files = files
        self._ends = ends
        self._closed = False
        self._maps: dict[int, mmap.mmap] = {}
        self._lock = threading.Lock()

    @property
    def files(self) -> list[ReadOnlyFile]:
        """All of them, in order."""
        self.check_open()
        return self._files

    def check_open(self) -> None:
        """Raise StoreError if they were closed."""
        if self._closed:
            raise StoreError(f"{self._path}: the store is closed")

    def file(self, number: int) -> ReadOnlyFile:
        """Return a file."""
        files = self._files
        if not files:
            raise StoreError(f"{self._path}: the store is closed")
        return files[number]

    def mapping(self, number: int) -> mmap.mmap:
        """Return the one mapping of a file, for good: addresses in it are given away."""
        with self._lock:
            if number not in self._maps:
                self._maps[number] = self.map_anew(number)
            return self._maps[number]

    def map_anew(self, number: int) -> mmap.mmap:
        """Return another mapping of a file, which ends with its last reference.

        Raises
        ------
        StoreError
            If it cannot be mapped, or became too short for its tensors.
        """
        handle = self.file(number)
        if handle.nbytes < self._ends[number]:
            raise StoreError(
                f"{handle.path}: cannot be mapped: its tensors end at byte {self._ends[number]}, "
                f"but the file has only {handle.nbytes} now"
            )
        try:
            return mmap.mmap(handle.descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise StoreError(f"{handle.path}: cannot be mapped: {error}") from error

    def read(self, runs: Sequence[Run], target: Parts, what: str) -> None:
        """Read an expert from the files."""
        for file, offset, spans in runs:
            buffers = [target[role][start:stop].data for role, start, stop in spans]
            self.file(file).read(offset, buffers, what)

    def copy_mapped(self, runs: Sequence[Run], target: Parts, what: str) -> None:
        """Copy an expert from the mapped files."""
        for file, offset, spans in runs:
            mapped = np.frombuffer(self.mapping(file), np.uint8)
            handle = self.file(file)
            nbytes = sum(stop - start for _, start, stop in spans)
            # A page beyond the end of the file would kill the process.
            if offset + nbytes > handle.nbytes:
                raise handle.failure(errno.ENODATA, offset, what, nbytes)
            for role, start, stop in spans:
                # NumPy copies without the GIL.
                target[role][start:stop] = mapped[offset : offset + stop - start]
                offset += stop - start
            handle.check_unchanged()

    def close(self) -> None:
        """Close the files; a second call does nothing. Existing mappings stay valid."""
        with self._lock:
            self._closed = True
            # Not mmap.close(): it fails while views exist. The last view unmaps.
            self._maps = {}
            self._files = []
