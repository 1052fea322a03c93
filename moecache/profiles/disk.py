"""Disks in a profile: how fast each is, and how it is best read."""

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from moecache.errors import StoreError
from moecache.profiles.file import update_profile
from moecache.reader._reader import ENGINES
from moecache.reader.disk import CANDIDATES, DiskSpeed, disk_of
from moecache.stores.base import FileStore

logger = logging.getLogger(__name__)


def speed_of(disks: Mapping[str, Any], store: FileStore) -> DiskSpeed | None:
    """Return a profile's figures of this store's disk; impossible ones are a warning."""
    entry = disks.get(disk_of(store))
    if entry is None:
        return None
    try:
        speed = DiskSpeed(**{**entry, "bytes_per_s": float(entry["bytes_per_s"])})
        if (
            speed.engine not in ENGINES
            or (speed.depth, speed.piece_bytes) not in CANDIDATES
            or {type(speed.depth), type(speed.piece_bytes)} != {int}
            or not 0 < speed.bytes_per_s < math.inf
        ):
            raise ValueError(f"{str(entry)[:200]} is no calibration")
    except (TypeError, ValueError, OverflowError, KeyError) as error:
        logger.warning("reading.calibration_ignored of the profile: %s", error)
        return None
    return speed


def keep_speed(path: str | os.PathLike[str], store: FileStore, speed: DiskSpeed) -> None:
    """Note a calibration in a profile; a file that cannot be written is a warning."""
    try:
        update_profile(path, disks={disk_of(store): asdict(speed)})
    except StoreError as error:
        logger.warning("profile.not_written %s", error)
