"""Files written whole or not at all."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from moecache.errors import StoreError


@contextmanager
def whole_file(path: str | os.PathLike[str], *, sync: bool = False) -> Iterator[IO[bytes]]:
    """Give a file to write to, which is renamed to `path` if nothing was raised.

    Parameters
    ----------
    path : str or Path
    sync : bool, default False
        Have it on the disk before it is renamed, so that a power cut leaves one or the other.

    Raises
    ------
    StoreError
        If it cannot be written. What was there before is still there.
    """
    try:
        if not stat.S_ISREG(_mode(path)):
            # A device or a pipe is written to; renaming would put a file in its place.
            with open(path, "wb") as file:
                yield file
            return
        # Through links: the file behind them is the one that is meant.
        target = Path(os.path.realpath(path))
        partial = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}")
        try:
            with partial.open("xb") as file:
                yield file
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            partial.replace(target)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror or error}") from error


def _mode(path: str | os.PathLike[str]) -> int:
    """Return what is at a path, a regular file if nothing is."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        if os.fspath(path) == "":
            raise
        return stat.S_IFREG
    except ValueError as error:  # a NUL in it
        raise OSError(errno.EINVAL, str(error)) from error


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file as `whole_file` does.

    Raises
    ------
    StoreError
        If it cannot be written. What was there before is still there.
    """
    with whole_file(path) as file:
        file.write(data)
