"""Residency: which experts of a runtime stay where they are, as far as a device relies on it."""

import threading
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

from moecache.errors import MoeCacheError
from moecache.runtime.runtime import ExpertRuntime


class Holder(Protocol):
    """What freezes a cache on behalf of a thread."""

    def give_up_left(self, runtime: ExpertRuntime) -> bool:
        """Thaw it if that thread has ended; return whether it had."""


class Residency:
    """Whether every expert is in its slot for good, and whether nothing is evicted for a while.

    One for each runtime, which every call is given: this does not keep it alive.
    """

    def __init__(self) -> None:
        self._holders: WeakSet[Holder] = WeakSet()
        self._all_resident = False
        self._freezing = threading.Lock()
        self._num_frozen = 0

    def begin_step(self, runtime: ExpertRuntime, *, look: bool = True) -> bool:
        """Return whether every expert of the model is in its slot for good, and count a step.

        Then a step needs neither a lease nor the ids on the host: `cache.slot_table` says where
        each expert is. Never waits; once it is so, this is a test of one bit.

        Parameters
        ----------
        runtime : ExpertRuntime
        look : bool, default True
            Find out whether it is so, if it was not before. A device may not be asked while a
            graph is captured.
        """
        if not self._all_resident:
            runtime.steps.check_usable()
            if not look:
                return False
            cache, share = runtime.cache, runtime.share
            total = runtime.layout.total_experts if share is None else share.num_experts
            if cache.capacity < total or cache.num_resident < total:
                return False
            if runtime.pool.uploads.in_flight_bytes:
                return False
            self._all_resident = True
        runtime.steps.count_resident()
        return True

    def freeze(self, runtime: ExpertRuntime) -> None:
        """Evict nothing until `thaw`: every expert in a slot stays there.

        Steps go on meanwhile. Their misses take free slots, and then those for staging; a lease
        that needs more is a `CapacityError`. Calls nest; each needs a `thaw`.
        """
        runtime.steps.check_usable()
        if runtime.steps.reclaim is None:
            known = ref(runtime)
            runtime.steps.reclaim = lambda: self.give_up_left(known())
        with self._freezing:
            self._num_frozen += 1
            runtime.cache.evicts = False

    @property
    def is_frozen(self) -> bool:
        """Whether nothing is evicted now."""
        return self._num_frozen > 0

    def add(self, holder: Holder) -> None:
        """Know of one that will freeze the cache."""
        with self._freezing:
            self._holders.add(holder)

    def give_up_left(self, runtime: ExpertRuntime | None) -> bool:
        """Thaw what threads froze that have ended since; return whether any had."""
        if runtime is None or not self.is_frozen:
            return False
        with self._freezing:
            holders = list(self._holders)
        return sum(holder.give_up_left(runtime) for holder in holders) > 0

    def thaw(self, runtime: ExpertRuntime) -> None:
        """Let experts be evicted again."""
        with self._freezing:
            if not self._num_frozen:
                raise MoeCacheError("the cache is not frozen; was it thawed twice?")
            self._num_frozen -= 1
            runtime.cache.evicts = not self._num_frozen


_residencies: WeakKeyDictionary[ExpertRuntime, Residency] = WeakKeyDictionary()


def residency_of(runtime: ExpertRuntime) -> Residency:
    """Return the one of a runtime."""
    return _residencies.setdefault(runtime, Residency())
