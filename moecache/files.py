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

    A file that is replaced hands down its permissions.

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
        mode = _mode(path)
        if mode is not None and not stat.S_ISREG(mode):
            # A device or a pipe is written to; renaming would put a file in its place.
            with open(path, "wb") as file:
                yield file
            return
        # Through links: the file behind them is the one that is meant.
        target = Path(os.path.realpath(path))
        partial = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}")
        try:
            # Never open to more than may read the file it replaces, not for a moment.
            kept = 0o666 if mode is None else mode & 0o777
            partial.touch(mode=kept | stat.S_IWUSR, exist_ok=False)
            with partial.open("wb") as file:
                if mode is not None and os.fstat(file.fileno()).st_mode & 0o777 != kept:
                    os.fchmod(file.fileno(), kept)
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


def _mode(path: str | os.PathLike[str]) -> int | None:
    """Return the kind and the permissions of what is at a path, None if nothing is."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        if os.fspath(path) == "":
            raise
        return None
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
