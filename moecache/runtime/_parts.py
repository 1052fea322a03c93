"""A runtime's parts: whether they suit each other, and the loader that ties them together."""

from moecache.cache._cache import ExpertCache
from moecache.errors import ConfigError
from moecache.kernels.startup import usable_cores
from moecache.layout import ExpertLayout
from moecache.loading._loader import SlotLoader
from moecache.loading._reader_engine import ReaderEngine
from moecache.loading.engine import Engine
from moecache.loading.store_engine import StoreEngine
from moecache.ranks import Share
from moecache.reader._reader import Reader
from moecache.slots import HostSlots, SlotPool
from moecache.stores import ExpertStore

MAX_LOADER_THREADS = 999


def check_parts(
    layout: ExpertLayout,
    pool: SlotPool,
    cache: ExpertCache,
    share: Share | None,
    loader_threads: int,
) -> None:
    """Raise `ConfigError` if a runtime cannot be made of these."""
    if (cache.num_layers, cache.num_experts) != (layout.num_layers, layout.num_experts):
        raise ConfigError(
            f"the cache is for {cache.num_layers} x {cache.num_experts} experts, "
            f"the store has {layout.num_layers} x {layout.num_experts}"
        )
    if share is not None:
        share.check(layout)
    total = layout.total_experts if share is None else share.num_experts
    if pool.num_slots < cache.capacity:
        raise ConfigError(f"the pool has {pool.num_slots} slots, the cache needs {cache.capacity}")
    if pool.num_slots == cache.capacity < total:
        raise ConfigError(
            f"the pool needs at least {cache.capacity + 1} slots: one for staging, "
            "as not all experts fit"
        )
    if loader_threads < 0:
        raise ConfigError(f"loader_threads must not be negative, got {loader_threads}")
    if loader_threads > MAX_LOADER_THREADS:
        raise ConfigError(
            f"loader_threads must be at most {MAX_LOADER_THREADS}, got {loader_threads}"
        )


def make_loader(
    store: ExpertStore,
    pool: SlotPool,
    cache: ExpertCache,
    reader: Reader | None,
    loader_threads: int,
) -> SlotLoader:
    """Return what fills slots, by a reader of the store's files if there is one."""
    engine: Engine
    beside = pool.converts and loader_threads > 0 and usable_cores() > 1
    if reader is None:
        engine = StoreEngine(store, loader_threads)
    else:
        engine = ReaderEngine(reader, store, loader_threads, fills=beside)
    loader = SlotLoader(store, pool, cache, engine)
    # Compiled code fills slots as they are read, where it can; else a thread of Python's does.
    if beside and not (engine.fills and isinstance(pool, HostSlots) and pool.fills_all):
        loader.start_filler()
    return loader
