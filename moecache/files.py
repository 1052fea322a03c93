"""Files written whole or not at all, and never over something else.

The writer of a file says which `Kind` it is. An existing file is replaced if it is of the
same kind or empty; anything else is replaced only with `force`.
"""

import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from moecache.errors import ConfigError, StoreError

_END_BYTES = 4096


def find_examples() -> Path:
    """Return the directory of the host loop, tiny model and trace: a checkout's, or as installed.

    Raises
    ------
    ConfigError
        If they were not installed.
    """
    for root in (
        Path(__file__).parents[1] / "examples",
        Path(sys.prefix) / "share" / "moecache",
    ):
        if (root / "numpy_loop.py").is_file():
            return root
    raise ConfigError(
        "the example model and its files (examples, or share/moecache) were not installed; run "
        "this from a checkout"
    )


class Kind(NamedTuple):
    """The identity of a file.

    Parameters
    ----------
    name : str
        With its article: "a routing trace".
    matches : callable (bytes) -> bool
        Recognises it by the first and the last 4 KiB of a file.
    """

    name: str
    matches: Callable[[bytes], bool]


@contextmanager
def whole_file(
    path: str | os.PathLike[str], kind: Kind | None, *, force: bool = False, sync: bool = False
) -> Iterator[IO[bytes]]:
    """Yield a file to write to, and rename it to `path` if nothing was raised.

    The new file takes over the permissions of the one that it replaces.

    Parameters
    ----------
    path : str or Path
    kind : Kind or None
        The kind of content; None if the caller knows what it replaces.
    force : bool, default False
        Replace a file of any kind.
    sync : bool, default False
        Flush it to the disk before it is renamed: a power cut leaves the old file or the new one.

    Raises
    ------
    ConfigError
        If it would replace something else.
    StoreError
        If it cannot be written. The file that was there is kept.
    """
    if not force and kind is not None:
        check_replaced(path, kind)
    try:
        mode = _mode(path)
        if mode is not None and not stat.S_ISREG(mode):
            # A device or a pipe is written to; renaming would put a file in its place.
            with open(path, "wb") as file:
                yield file
            return
        # Links are followed: the file behind them is the one that is meant.
        target = Path(os.path.realpath(path))
        partial = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}")
        try:
            # Not even for a moment open to more users than the file that it replaces.
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


def check_replaced(path: str | os.PathLike[str], kind: Kind) -> None:
    """Refuse a path that holds something other than a file of this kind.

    A path may be written to if nothing is there, or if its file is empty or, like a device, not
    a regular one.

    Raises
    ------
    ConfigError
        If something else is there.
    StoreError
        If that cannot be told.
    """
    try:
        mode = _mode(path)
        if mode is None or not stat.S_ISREG(mode):
            return
        with open(path, "rb") as file:
            known = file.read(_END_BYTES)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(len(known), size - _END_BYTES))
            known += file.read(_END_BYTES)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror or error}") from error
    if known and not kind.matches(known):
        raise ConfigError(
            f"{path}: is not {kind.name}, and would be lost; name another file, remove this one, "
            "or force it (--force, force=True)"
        )


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


def write_whole(
    path: str | os.PathLike[str], data: bytes, kind: Kind, *, force: bool = False
) -> None:
    """Write a file as `whole_file` does.

    Raises
    ------
    ConfigError
        If it would replace something else.
    StoreError
        If it cannot be written. The file that was there is kept.
    """
    with whole_file(path, kind, force=force) as file:
        file.write(data)
