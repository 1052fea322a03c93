"""Files of a checkpoint: what the system says of them, and what a signal's handler says."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moecache.errors import StoreError
from moecache.stores._file import ReadOnlyFile

CALLS: dict[str, tuple[str, Callable[[ReadOnlyFile], object]]] = {
    "status": ("fstat", lambda file: file.status()),
    "read": ("preadv", lambda file: file.read(0, [memoryview(bytearray(2))], "it")),
    "has_byte": ("pread", lambda file: file.has_byte(0)),
    "check_current": ("stat", lambda file: file.check_current()),
    "check_unchanged": ("fstat", lambda file: file.check_unchanged()),
    "open": ("open", lambda file: ReadOnlyFile(file.path)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_timeout_is_no_error_of_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TimeoutError is an OSError; a handler's has no number of the system's."""
    (tmp_path / "file").write_bytes(b"some")
    file = ReadOnlyFile(tmp_path / "file")
    wrapped, call = CALLS[name]

    def raises(error: OSError) -> Any:
        def fail(*_: object, **__: object) -> None:
            raise error

        return fail

    with monkeypatch.context() as patched:
        patched.setattr(os, wrapped, raises(TimeoutError("too long")))
        with pytest.raises(TimeoutError, match="too long"):
            call(file)
    with monkeypatch.context() as patched:
        patched.setattr(os, wrapped, raises(OSError(errno.EIO, "failed")))
        if name == "check_unchanged":
            call(file)
        else:
            with pytest.raises(StoreError):
                call(file)
    call(file)
