"""A file that is read by position, from any thread."""

import contextlib
import errno
import logging
import mmap
import os
import stat
from pathlib import Path
from typing import NamedTuple, NoReturn

from moecache.errors import StoreError

logger = logging.getLogger(__name__)


class Version(NamedTuple):
    """The identity of a file: a later one at its path has another."""

    path: str
    device: int
    inode: int
    nbytes: int
    modified_ns: int


def version_of(path: str | Path, status: os.stat_result) -> Version:
    """Return the version of a file, given what the system says of it."""
    return Version(str(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class ReadOnlyFile:
    """A file descriptor that closes when its last user is done.

    A read in another thread keeps it open through the store's `close`: the
    number of a closed descriptor could by then be another file's.

    Attributes
    ----------
    version : Version
        Version of the file when it was opened.

    Raises
    ------
    StoreError
        If the path cannot be opened or is no regular file.
    """

    __slots__ = ("_modified_ns", "descriptor", "path", "version")

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.path = path
        self._modified_ns: int | None = None
        try:
            # O_NONBLOCK: opening a pipe would wait for a writer.
            self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            _raise_of_handler(error)
            raise StoreError(f"{path}: cannot be opened: {error.strerror}") from error
        status = self.status()
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"{path}: is not a regular file")
        self._modified_ns = status.st_mtime_ns
        self.version = version_of(path, status)

    @property
    def nbytes(self) -> int:
        """Size of the file as it is now."""
        return self.status().st_size

    def status(self) -> os.stat_result:
        """Return what the system says of the file as it is now.

        Raises
        ------
        StoreError
            If it says nothing.
        """
        try:
            return os.fstat(self.descriptor)
        except OSError as error:
            _raise_of_handler(error)
            raise StoreError(f"{self.path}: cannot be read: {error.strerror}") from error

    def read(self, offset: int, buffers: list[memoryview], what: str) -> None:
        """Fill `buffers`, one after the other, from `offset` on.

        Blocks without holding the GIL. `buffers` is consumed.

        Raises
        ------
        StoreError
            If the file ends too early or cannot be read; the message says `what`.
        """
        while buffers:
            try:
                count = os.preadv(self.descriptor, buffers, offset)
            except OSError as error:
                _raise_of_handler(error)
                raise self.failure(error.errno or errno.EIO, offset, what, 0) from error
            if count == 0:
                raise self.failure(errno.ENODATA, offset, what, sum(map(len, buffers)))
            offset += count
            while buffers and count >= len(buffers[0]):
                count -= len(buffers.pop(0))
            if count:
                buffers[0] = buffers[0][count:]
        self.check_unchanged()

    def will_need(self, offset: int, nbytes: int) -> None:
        """Ask the kernel to read a range ahead into the page cache; not where the file ends."""
        aligned = offset - offset % mmap.PAGESIZE
        try:
            if nbytes <= self.nbytes - offset:
                os.posix_fadvise(
                    self.descriptor, aligned, nbytes + offset - aligned, os.POSIX_FADV_WILLNEED
                )
        except OSError as error:
            logger.debug("store.prefetch_refused path=%s error=%s", self.path, error)

    def has_byte(self, offset: int) -> bool:
        """Return whether the file goes on at `offset`, even beyond its stated size.

        Raises
        ------
        StoreError
            If that cannot be read.
        """
        try:
            return bool(os.pread(self.descriptor, 1, offset))
        except OSError as error:
            _raise_of_handler(error)
            raise self.failure(error.errno or errno.EIO, offset, "it", 0) from error

    def check_current(self) -> None:
        """Raise a StoreError if the file at the path is not the one that was opened, as it was."""
        now = None
        try:
            now = version_of(self.path, os.stat(self.path))
        except OSError as error:  # a file that is not there is an error when it is opened
            _raise_of_handler(error)
        if now != self.version:
            raise StoreError(
                f"{self.path}: was {_difference(self.version, now)} while the model was loaded, "
                "which would be of two files; load it again"
            )

    def check_unchanged(self) -> None:
        """Warn, once, if the file was written to since it was opened."""
        if self._modified_ns is None:
            return
        try:
            modified_ns = os.fstat(self.descriptor).st_mtime_ns
        except OSError as error:  # a read will tell what is wrong, if anything
            _raise_of_handler(error)
            return
        if modified_ns != self._modified_ns:
            self._modified_ns = None
            logger.warning(
                "store.file_changed path=%s it was written to while in use: experts may be of two "
                "versions; open it again",
                self.path,
            )

    def failure(self, error: int, offset: int, what: str, wanted: int) -> StoreError:
        """Return what to raise for a read that failed with an errno; ENODATA: the end of file."""
        if error == errno.ENODATA:
            return StoreError(
                f"{self.path}: {what} needs {wanted} bytes at byte {offset}, but the file has "
                f"only {self.nbytes} now; it was changed while in use"
            )
        return StoreError(
            f"{self.path}: reading {what} at byte {offset} failed: {os.strerror(error)}"
        )

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: two would close the same descriptor."""
        raise TypeError(f"{self.path}: an open file cannot be copied or pickled; open it again")

    def __del__(self) -> None:
        """Close the descriptor."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):  # nothing was written
                os.close(self.descriptor)


def _raise_of_handler(error: OSError) -> None:
    """Raise an error again that no call of the system gave: a handler's, such as a TimeoutError."""
    if error.errno is None:
        raise error


def _difference(first: Version, now: Version | None) -> str:
    if now is None:
        return "removed"
    if (now.device, now.inode) != (first.device, first.inode):
        return "replaced by another file"
    if now.nbytes != first.nbytes:
        return f"changed from {first.nbytes} to {now.nbytes} bytes"
    return "written to"
