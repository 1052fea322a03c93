"""Lengths of stalls, from the counts that the profiler keeps."""

from collections.abc import Sequence
from itertools import accumulate

from moecache.cache._profiler import stall_bucket_ns

# Buckets of the exported histogram: doublings from a microsecond to 17 s.
DOUBLINGS = range(10, 35)


def stall_percentile_ns(histogram: Sequence[int], percent: float) -> int:
    """Return the length that `percent` of the stalls do not exceed.

    It is the longest one of the bucket in which that stall is counted: never too short, and
    less than 12.5 % too long.

    Parameters
    ----------
    histogram : sequence of int
        `AccessProfiler.stall_histogram`, or the difference of two.
    percent : float
        In [0, 100].

    Returns
    -------
    int
        Nanoseconds; 0 if there were no stalls.

    Raises
    ------
    ValueError
        If `percent` is out of range.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be in [0, 100], got {percent}")
    rank = sum(histogram) * percent / 100
    for bucket, counted in enumerate(accumulate(histogram)):
        if counted and counted >= rank:
            return stall_bucket_ns(bucket)
    return 0


def count_by_doublings(histogram: Sequence[int]) -> list[tuple[float, int]]:
    """Return (seconds, stalls of less than that) for doublings from a microsecond to 17 s."""
    counted = list(accumulate(histogram, initial=0))
    # Each doubling has eight buckets; the first starts at 8 ns.
    return [(2**power / 1e9, counted[8 * (power - 2)]) for power in DOUBLINGS]
