"""How much of some mapped files is in memory, and how to get it out again."""

import os
import time
from typing import Any, NamedTuple

from moecache._prefault import PAGE_SIZE
from moecache.prefault.extents import ExtentFinder
from moecache.prefault.regions import listed, merge

_EVICT_TRIES = 4
_EVICT_PAUSE_S = 0.02


class Residency(NamedTuple):
    """How much of a region is in memory.

    Parameters
    ----------
    num_bytes : int
        Bytes of the region's pages.
    resident_bytes : int
        Those of them that are in memory.
    known : bool
        False if the kernel does not tell, as for files that this user neither owns
        nor may write.
    """

    num_bytes: int
    resident_bytes: int
    known: bool


def residency(regions: Any) -> list[Residency]:
    """Return how much of each region is in memory now, in the order given.

    Asks cachestat (Linux 6.5) or mincore; touches nothing.

    Parameters
    ----------
    regions : as for `warm`

    Raises
    ------
    ConfigError
        If a region is not one.
    """
    counts = []
    finder = ExtentFinder(own_mappings=False)
    try:
        for region in list(listed(regions)):
            ranges, _owners = merge([region])
            extents, _ = finder.find(ranges)
            pages = [extent.resident_pages() for extent in extents]
            counts.append(
                Residency(
                    sum(nbytes for _, nbytes in ranges),
                    sum(count or 0 for count in pages) * PAGE_SIZE,
                    None not in pages,
                )
            )
    finally:
        finder.close()
    return counts


def evict(regions: Any) -> int:
    """Drop the files behind regions from the page cache; return the bytes that stay.

    For benchmarks. Writes dirty pages out first. Pages stay that another process has
    mapped or locked, or that this process has touched in its mappings. Pages that the
    kernel tells nothing about count as staying.

    Parameters
    ----------
    regions : as for `warm`

    Raises
    ------
    ConfigError
        If a region is not one.
    OSError
        If the file cannot be written out.
    """
    ranges, _owners = merge(regions)
    finder = ExtentFinder(own_mappings=False)
    try:
        extents = [extent for extent in finder.find(ranges)[0] if extent.path]
        for descriptor in {extent.descriptor for extent in extents if extent.descriptor >= 0}:
            os.fsync(descriptor)
        left = 0
        # The kernel skips pages that it is just moving from one of its lists to another.
        for attempt in range(_EVICT_TRIES):
            time.sleep(attempt * _EVICT_PAUSE_S)
            for extent in extents:
                if extent.descriptor >= 0:
                    os.posix_fadvise(
                        extent.descriptor, extent.offset, extent.nbytes, os.POSIX_FADV_DONTNEED
                    )
            pages = [(extent.resident_pages(), extent.num_pages) for extent in extents]
            left = sum(num if count is None else count for count, num in pages) * PAGE_SIZE
            if left == 0:
                break
        return left
    finally:
        finder.close()
