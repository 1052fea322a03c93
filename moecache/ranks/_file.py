"""Files of placements: JSON that people can read."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from moecache.errors import FormatError, StoreError
from moecache.files import Kind, write_whole

VERSION = 1
MAX_FILE_BYTES = 2**28
PLACEMENT_FILE = Kind(
    "a placement of experts on ranks",
    lambda data: data.lstrip().startswith(b"{") and b'"moecache placement"' in data,
)
_FIELDS = ("num_ranks", "shares", "owners", "digest")


def write_fields(
    path: str | os.PathLike[str],
    num_ranks: int,
    shares: np.ndarray,
    owners: np.ndarray,
    digest: str,
    *,
    force: bool,
) -> None:
    """Write a placement, a line for each layer."""
    rows = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in owners.tolist())
    text = (
        f'{{"kind": "moecache placement", "version": {VERSION},\n'
        f' "num_ranks": {num_ranks}, "shares": {json.dumps(shares.tolist())},\n'
        f' "owners": [\n  {rows}],\n "digest": "{digest}"}}\n'
    )
    write_whole(path, text.encode(), PLACEMENT_FILE, force=force)


def read_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of a placement's file; only their names are checked.

    Raises
    ------
    FormatError
        If it is no placement.
    StoreError
        If it cannot be read.
    """
    try:
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            raise FormatError(f"{path}: is larger than any placement")
        found = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is no placement: {error!s:.200}") from error
    if not isinstance(found, dict) or found.get("kind") != "moecache placement":
        raise FormatError(f"{path}: is no placement; make one with moecache plan-ranks")
    if found.get("version") != VERSION:
        raise FormatError(
            f"{path}: is a placement of version {found.get('version')!r:.20}, this moecache reads "
            f"{VERSION}; make it anew by plan-ranks"
        )
    missing = [name for name in _FIELDS if name not in found]
    if missing:
        raise FormatError(f"{path}: has no {missing[0]!r}; make it anew by plan-ranks")
    return found
