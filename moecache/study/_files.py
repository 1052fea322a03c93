"""Files written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from moecache.errors import StoreError


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Give a file to write to, which is renamed to `path` if nothing was raised.

    Raises
    ------
    StoreError
        If it cannot be written. What was there before is still there.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        with partial.open("xb") as file:
            yield file
        partial.replace(target)
    except OSError as error:
        raise StoreError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file as `whole_file` does.

    Raises
    ------
    StoreError
        If it cannot be written. What was there before is still there.
    """
    with whole_file(path) as file:
        file.write(data)
