"""Whether files that are opened again are those that were opened first."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from moecache.errors import StoreError
from moecache.stores._file import Version, version_of
from moecache.stores._tensors import CheckpointStore
from moecache.stores.base import ExpertStore
from moecache.stores.gguf._parts import find_parts, is_gguf


def versions_of(store: ExpertStore) -> list[Version]:
    """Return which files a checkpoint's store has open, as they were when it opened them."""
    assert isinstance(store, CheckpointStore)
    return [file.version for file in store.files]


def versions_at(path: Path) -> list[Version]:
    """Return the versions of a GGUF model's files; none of another path."""
    return _now(map(str, find_parts(path))) if is_gguf(path) else []


@contextlib.contextmanager
def unchanged(first: Sequence[Version]) -> Iterator[Callable[[ExpertStore], None]]:
    """Compare files with what they were, to build no model of two of them.

    Parameters
    ----------
    first : sequence of Version
        With none, all files will do.

    Yields
    ------
    callable
        Takes a store that was opened meanwhile.

    Raises
    ------
    StoreError
        If one has changed: by the callable, or for any other StoreError meanwhile, which is then
        its consequence.
    """
    try:
        yield lambda store: _compare(first, versions_of(store))
    except StoreError as error:
        if not isinstance(error, _ChangedError):
            try:
                _compare(first, _now(version.path for version in first))
            except _ChangedError as changed:
                raise changed from error
        raise


class _ChangedError(StoreError):
    """A file is not the one it was."""


def _now(paths: Iterator[str]) -> list[Version]:
    found = []
    for path in paths:
        # What is not there is an error of those who open it.
        with contextlib.suppress(OSError):
            found.append(version_of(path, os.stat(path)))
    return found


def _compare(first: Sequence[Version], found: Sequence[Version]) -> None:
    now = {version.path: version for version in found}
    for version in first:
        if now.get(version.path) != version:
            raise _ChangedError(
                f"{version.path}: was {_difference(version, now.get(version.path))} while the "
                "model was loaded, which would be of two files; load it again"
            )


def _difference(first: Version, now: Version | None) -> str:
    if now is None:
        return "removed"
    if (now.device, now.inode) != (first.device, first.inode):
        return "replaced by another file"
    if now.nbytes != first.nbytes:
        return f"changed from {first.nbytes} to {now.nbytes} bytes"
    return "written to"
