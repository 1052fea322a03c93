"""The journal of a pack: which units are on disk, so that another run can go on."""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from moecache.errors import StoreError
from moecache.packing._plan import Unit
from moecache.packing._report import Deviation

logger = logging.getLogger(__name__)

_VERSION = 2


class Finished(NamedTuple):
    """The journal's note of a finished unit: its checksum, and its deviation from the original."""

    checksum: str
    deviation: Deviation | None = None


class Journal:
    """JSON lines, each flushed to disk: the source's identity, then the finished units.

    Units are written in the order of the plan, so that the lines are the plan's beginning.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        self._first = {"version": _VERSION, "source": identity}
        self._descriptor = -1

    def load(self, units: Sequence[Unit]) -> list[Finished] | None:
        """Return what is noted of the finished units, or None: start anew.

        None if there is no journal, or it is damaged, or of another source; all but
        the first is logged as a warning.

        Raises
        ------
        StoreError
            If it cannot be read.
        """
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror}") from error
        # Bytes after the last newline were being written when the power went.
        lines = text.split(b"\n")[:-1]
        try:
            documents = [json.loads(line) for line in lines]
            if documents[:1] != [self._first]:
                reason = "is of another source, or of this one before it was changed"
            else:
                finished = [_finished(document) for document in documents[1:]]
                if [*map(_describe, units, finished)] == documents[1:]:
                    return finished
                reason = "is damaged"
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            reason = "is damaged"
        logger.warning("pack.restarted journal=%s: it %s", self.path, reason)
        return None

    def begin(self, units: Sequence[Unit], finished: Sequence[Finished]) -> None:
        """Write the journal anew, with these units finished, and keep it open."""
        lines = [self._first, *map(_describe, units, finished)]
        draft = self.path.with_name(f"{self.path.name}.new")
        try:
            draft.write_text("".join(map(_line, lines)))
            self._descriptor = os.open(draft, os.O_WRONLY | os.O_APPEND)
            os.fsync(self._descriptor)
            draft.replace(self.path)
            sync_directory(self.path.parent)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be written: {error.strerror}") from error

    def add(self, unit: Unit, finished: Finished) -> None:
        """Note a unit whose bytes are on disk; return when the note is too."""
        line = _line(_describe(unit, finished)).encode()
        try:
            if os.write(self._descriptor, line) < len(line):
                raise StoreError(f"{self.path}: cannot be written: the disk is full")
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _describe(unit: Unit, finished: Finished) -> dict[str, object]:
    deviation = finished.deviation
    document = {
        "file": unit.file,
        "unit": unit.name,
        "offset": unit.offset,
        "nbytes": unit.nbytes,
        "blake2b": finished.checksum,
        **({} if deviation is None else {"deviation": asdict(deviation)}),
    }
    # Only the last unit is read again: the others' checksums must be those written here.
    check = hashlib.blake2b(json.dumps(document).encode(), digest_size=8)
    return {**document, "check": check.hexdigest()}


def _finished(document: dict[str, Any]) -> Finished:
    said = document.get("deviation")
    deviation = None if said is None else Deviation(**{key: float(said[key]) for key in said})
    return Finished(str(document["blake2b"]), deviation)


def _line(document: dict[str, object]) -> str:
    return json.dumps(document) + "\n"
