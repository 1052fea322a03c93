"""The manifest of a packed directory: the place and checksum of everything in it."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from moecache.errors import FormatError, StoreError
from moecache.packing._copy import hash_range
from moecache.packing._plan import ALIGNMENT, FilePlan
from moecache.packing._source import MANIFEST_NAME

_FORMAT = "moecache-pack"
_VERSION = 1
# A unit of 256 MiB takes some 150 bytes.
_MAX_BYTES = 2**24

# Called with the bytes done and the bytes in all.
Progress = Callable[[int, int], object]
# A part to compare: file, name of the part, offset, nbytes and checksum.
_Part = tuple[str, str, int, int, str]


def describe(
    files: Sequence[FilePlan],
    checksums: Sequence[str],
    others: Mapping[str, tuple[int, str]],
) -> str:
    """Return the text of moecache-pack.json: equal for equal checkpoints, whenever packed.

    Parameters
    ----------
    files : sequence of FilePlan
    checksums : sequence of str
        One for each unit of the files, in their order.
    others : mapping of name to (nbytes, checksum)
        The files without units.
    """
    following = iter(checksums)
    document: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "alignment": ALIGNMENT}
    described: dict[str, Any] = {}
    for file in files:
        parts = [
            {
                "name": unit.name,
                "offset": unit.offset,
                "nbytes": unit.nbytes,
                "blake2b": next(following),
            }
            for unit in file.units
        ]
        described[file.name] = {"nbytes": file.nbytes, "parts": parts}
    for name, (nbytes, checksum) in sorted(others.items()):
        part = {"name": "whole", "offset": 0, "nbytes": nbytes, "blake2b": checksum}
        described[name] = {"nbytes": nbytes, "parts": [part]}
    return json.dumps(document | {"files": described}, indent=1) + "\n"


def verify(out: str | os.PathLike[str], *, progress: Progress | None = None) -> int:
    """Read a packed directory again and compare it with its checksums.

    Blocks until all of it was read from the disk: its pages in the page cache are
    dropped first, unless a process has them mapped.

    Parameters
    ----------
    out : str or Path
        A directory that `pack` made.
    progress : callable (done_bytes, total_bytes), optional
        Called after every few MiB.

    Returns
    -------
    int
        Bytes that were compared.

    Raises
    ------
    StoreError
        If something differs, is missing or cannot be read; the message names the
        layer and the file. FormatError if it is no packed directory.
    """
    directory = Path(out)
    parts = list(_check(directory, _read(directory)))
    done, total = 0, sum(nbytes for _, _, _, nbytes, _ in parts)

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    for name, what, offset, nbytes, checksum in parts:
        found = hash_range(directory / name, offset, nbytes, count)
        if found != checksum:
            raise StoreError(
                f"{directory / name}: {what} differs from what was packed: bytes {offset} to "
                f"{offset + nbytes} have the checksum {found}, not {checksum}; pack the model again"
            )
    return done


def _read(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST_NAME
    try:
        # Reading a pipe would wait for its writer.
        usable = path.is_file() and path.stat().st_size <= _MAX_BYTES
        text = path.read_bytes() if usable or not path.exists() else b""
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FormatError(
            f"{directory}: has no {MANIFEST_NAME}, so it was not made by moecache pack, or not "
            "finished"
        ) from error
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is not JSON; pack the model again") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise FormatError(f"{path}: does not say {_FORMAT!r}; pack the model again")
    if document.get("version") != _VERSION:
        raise FormatError(
            f"{path}: is of version {str(document.get('version'))[:20]}, this moecache reads "
            f"version {_VERSION}; use the moecache that packed it"
        )
    return document


def _check(directory: Path, document: dict[str, Any]) -> Iterator[_Part]:
    """Check the sizes, then yield the parts whose checksums are to be compared."""
    try:
        files = {
            name: (_size(file["nbytes"]), [_part(name, part) for part in file["parts"]])
            for name, file in document["files"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{directory / MANIFEST_NAME}: is damaged; pack the model again") from (
            error
        )
    for name, (nbytes, parts) in files.items():
        path = directory / name
        if _is_outside(name) or _gap(nbytes, parts):
            raise FormatError(
                f"{directory / MANIFEST_NAME}: what it says of {name[:200]!r} is damaged; "
                "pack the model again"
            )
        try:
            found = path.stat().st_size if path.is_file() else None
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: cannot be read: {error}") from error
        if found != nbytes:
            state = "is missing" if found is None else f"has {found} bytes, packed were {nbytes}"
            raise StoreError(f"{path}: {state}; pack the model again")
        yield from parts


def _part(file: str, part: dict[str, Any]) -> _Part:
    offset, nbytes = _size(part["offset"]), _size(part["nbytes"])
    return file, str(part["name"]), offset, nbytes, str(part["blake2b"])


def _size(value: object) -> int:
    """Return a number of bytes; JSON also has infinity, fractions and numbers of any length."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{str(value)[:40]} is no number of bytes")
    return value


def _is_outside(name: str) -> bool:
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts


def _gap(nbytes: int, parts: Iterable[_Part]) -> bool:
    """Return whether any byte is in no part, or in two."""
    end = 0
    for _, _, offset, size, _ in parts:
        if offset != end:
            return True
        end += size
    return end != nbytes
