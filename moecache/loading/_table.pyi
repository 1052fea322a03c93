from typing import Any, Self, final

from moecache.cache._cache import ExpertCache
from moecache.loading._counts import LoadCounts
from moecache.loading._load import Load
from moecache.loading.engine import Engine
from moecache.slots import SlotPool
from moecache.stores.base import ExpertStore

@final
class LoadTable:
    pool: SlotPool
    cache: ExpertCache
    def __new__(
        cls,
        store: ExpertStore,
        pool: SlotPool,
        cache: ExpertCache,
        engine: Engine,
        counts: LoadCounts,
    ) -> Self: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def lock(self) -> Any: ...
    @property
    def by_slot(self) -> dict[int, Load]: ...
    @property
    def num_queued(self) -> int: ...
    @property
    def num_reading(self) -> int: ...
