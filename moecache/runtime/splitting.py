"""Which misses the CPU computes, and whether that pays."""

from moecache.cache._cache import ExpertCache
from moecache.loading.loader import SlotLoader
from moecache.loading.split import MissSplit
from moecache.prefetch.prefetcher import Prefetcher
from moecache.prefetch.switch import Switch


def make_split(
    loader: SlotLoader, cache: ExpertCache, prefetcher: Prefetcher | None = None
) -> MissSplit:
    """Return what divides misses between link and CPU, and stops where that does not pay.

    It is tried on and off in turns, as prefetching with "auto" is, and never while that is being
    tried: the two would be taken for each other.
    """
    switch = Switch(
        loader.clock,
        lambda: cache.profiler.num_misses + cache.num_foreseen_hits,
        lambda: cache.profiler.miss_stall_ns,
        lambda: sum(loader.counts.bytes_read.values()),
    )
    other = None if prefetcher is None else prefetcher.switch
    return MissSplit(loader, cache, switch, None if other is None else lambda: other.is_trying)
