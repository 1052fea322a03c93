"""The parts of each mode of prefetching."""

import numpy as np

from moecache.cache._cache import ExpertCache
from moecache.errors import ConfigError
from moecache.loading._loader import SlotLoader
from moecache.policies._echo import Echo
from moecache.prefetch.predict import LastSelection, Predictor, SharedEcho
from moecache.prefetch.prefetcher import Prefetcher
from moecache.prefetch.switch import Switch
from moecache.settings import PREFETCH_MODES
from moecache.stores.base import ExpertStore


def check_prefetch(prefetch: object) -> None:
    """Raise ConfigError if it is neither one of the modes nor a predictor."""
    if isinstance(prefetch, str):
        if prefetch not in PREFETCH_MODES:
            raise ConfigError(f"prefetch {prefetch!r} is not one of {', '.join(PREFETCH_MODES)}")
    else:
        check_predictor(prefetch)


def check_predictor(predictor: object) -> None:
    """Raise ConfigError if it is no predictor."""
    if not isinstance(predictor, Predictor) or isinstance(predictor, type):
        raise ConfigError(
            f"prefetch is {predictor!r}: neither one of {', '.join(PREFETCH_MODES)} nor an object "
            "with observe, predict and begin_sequence"
        )


def make_prefetcher(
    loader: SlotLoader,
    store: ExpertStore,
    cache: ExpertCache,
    prefetch: str | Predictor,
    *,
    threaded: bool = True,
    reads_ahead: bool = False,
    held: np.ndarray | None = None,
) -> Prefetcher | None:
    """Return a prefetcher for what `prefetch` says, or `None` for "off".

    Raises
    ------
    ConfigError
        If that is neither one of the modes nor a predictor.
    """
    check_prefetch(prefetch)
    predictor: Predictor | None = None
    switch = None
    if prefetch == "off":
        return None
    if not isinstance(prefetch, str):
        predictor, prefetch = prefetch, type(prefetch).__name__
    elif prefetch == "last":
        predictor = LastSelection(cache.num_layers)
    elif prefetch in {"auto", "echo"}:
        own = cache.echo
        predictor = (
            SharedEcho(own)
            if own is not None and own.ring
            else Echo(cache.num_layers, cache.num_experts)
        )
    if prefetch == "auto":
        switch = Switch(
            loader.clock,
            lambda: cache.profiler.num_misses + cache.num_foreseen_hits,
            lambda: cache.profiler.miss_stall_ns,
            lambda: sum(loader.counts.bytes_read.values()),
        )
    return Prefetcher(
        loader,
        store,
        cache,
        predictor,
        mode=prefetch,
        switch=switch,
        threaded=threaded,
        reads_ahead=reads_ahead,
        held=held,
    )
