"""The file that a sweep resumes from: a line of JSON per finished cell.

The first line says what the file is. Every line ends with a checksum of what
stands before it, so that a damaged one is never taken for a result. Only the last
line can be torn, by a kill in the middle of a write: it lacks its newline, and is cut off.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moecache.errors import FormatError, StoreError

logger = logging.getLogger(__name__)

HEADER = b'{"moecache_sweep": 2}\n'
_SYNC_SECONDS = 1.0
_FIGURES: dict[str, Any] = {
    "num_accesses": int,
    "num_hits": int,
    "prefill_hit_rate": (float, type(None)),
    "decode_hit_rate": (float, type(None)),
    "layer_hits": list,
    "layer_misses": list,
    "seconds": float,
}


class Journal:
    """Finished cells by key, in memory and in a file. A context manager.

    Once it is open, a file that cannot be written any more, because the disk is full, is no
    error: the log has a warning, the file keeps the cells that it has, and gets no others.

    Parameters
    ----------
    path : str or Path
        Made if it does not exist. One sweep at a time writes to it.

    Raises
    ------
    FormatError
        If the file is something else, or a line is damaged.
    StoreError
        If it cannot be read or written, or another sweep is at it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.found: dict[str, dict[str, Any]] = {}
        # A device or a pipe could be read for ever.
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            raise StoreError(f"{self.path}: is not a regular file; name another to resume")
        try:
            self._file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise self._refused(error) from error
        try:
            self._lock()
            self._read()
        except OSError as error:
            self._file.close()
            raise self._refused(error) from error
        except BaseException:
            self._file.close()
            raise
        self._end = os.fstat(self._file.fileno()).st_size
        self._is_full = False
        self._synced = time.monotonic()

    def add(self, key: str, figures: Mapping[str, Any]) -> None:
        """Append a finished cell, unless an earlier one could not be written.

        From then on it survives the death of this process, and soon a crash of the machine.
        """
        if self._is_full:
            return
        text = json.dumps({"cell": key, **figures}, allow_nan=False).encode()
        line = text + b" %08x\n" % zlib.crc32(text)
        try:
            self._write(line)
            self._end += len(line)
            if time.monotonic() - self._synced >= _SYNC_SECONDS:
                self._sync()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Bring everything to the disk and let go of the file."""
        if self._file.closed:
            return
        try:
            if not self._is_full:
                self._sync()
        except OSError as error:
            self._give_up(error)
        finally:
            # Some systems say again here what they said before.
            with contextlib.suppress(OSError):
                self._file.close()

    def __enter__(self) -> Self:
        """Return the journal."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def _refused(self, error: OSError) -> StoreError:
        return StoreError(f"{self.path}: cannot be resumed from: {error.strerror or error}")

    def _give_up(self, error: OSError) -> None:
        self._is_full = True
        # Half a line must not stand before what another sweep adds.
        with contextlib.suppress(OSError):
            self._file.truncate(self._end)
        logger.warning(
            "sweep.not_written %s: cannot be written: %s; the sweep goes on, and what it does from "
            "here on is replayed again next time",
            self.path,
            error.strerror or error,
        )

    def _write(self, data: bytes) -> None:
        while data:
            # The part that has room is written, and the next call says why the rest is not.
            written = self._file.write(data)
            if not written:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            data = data[written:]

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(f"{self.path}: another sweep is writing to it") from error

    def _read(self) -> None:
        self._file.seek(0)
        data = self._file.read(len(HEADER))
        if data == HEADER:
            data += self._file.readall()
        if not data.startswith(HEADER):
            if not HEADER.startswith(data):
                raise FormatError(
                    f"{self.path}: is no file of a sweep, or an older one's; name another to resume"
                )
            self._file.truncate(0)
            try:
                self._write(HEADER)
            except OSError as error:
                raise StoreError(
                    f"{self.path}: cannot be written: {error.strerror or error}"
                ) from error
            return
        whole = data.rfind(b"\n") + 1
        lines = data[len(HEADER) : whole].splitlines()
        for number, line in enumerate(lines, 2):
            key, figures = self._parse(line, number)
            self.found[key] = figures
        if whole < len(data):
            self._file.truncate(whole)

    def _parse(self, line: bytes, number: int) -> tuple[str, dict[str, Any]]:
        text, _, checksum = line.rpartition(b" ")
        damaged = f"{self.path}: line {number} is damaged; delete it, or the file, and start again"
        if checksum != b"%08x" % zlib.crc32(text):
            raise FormatError(damaged)
        try:
            figures = json.loads(text)
            key = figures.pop("cell")
        except (ValueError, KeyError, AttributeError) as error:
            raise FormatError(damaged) from error
        if figures.keys() != _FIGURES.keys() or not all(
            isinstance(figures[name], kind) for name, kind in _FIGURES.items()
        ):
            raise FormatError(damaged)
        return str(key), figures
