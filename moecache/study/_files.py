"""Results written to files: whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path

from moecache.errors import StoreError


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file by renaming a finished one over it.

    Raises
    ------
    StoreError
        If it cannot be written. What was there before is still there.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        partial.write_bytes(data)
        partial.replace(target)
    except OSError as error:
        raise StoreError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
