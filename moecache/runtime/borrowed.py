"""Borrowed: memory that slots have until the host needs it."""

import logging
import os
import threading

from moecache.cache._cache import ExpertCache
from moecache.interrupts import uninterrupted
from moecache.sizing.host_memory import free_host_bytes
from moecache.slots import HostSlots, SlotPool

logger = logging.getLogger(__name__)

# Slots get memory back when so much more than they take is free: not for a moment.
_SURPLUS_BYTES = 32 * 2**20


class Borrowed:
    """The memory of a KV cache that does not need it yet, in slots.

    The last slots of a cache are in it. They are given back as the host says what it needs, and
    used again once that is free. Any thread may call.

    Parameters
    ----------
    cache : ExpertCache
    pool : SlotPool
    num_slots : int, default 0
        Slots that may be given back; none unless the pool is one of `HostSlots` and the cache has
        scope "global".
    spare_bytes : int, default 0
        Memory that stays free beside what the host needs.
    """

    def __init__(
        self, cache: ExpertCache, pool: SlotPool, num_slots: int = 0, spare_bytes: int = 0
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._num_slots = num_slots
        self._spare_bytes = spare_bytes
        self._slot_bytes = pool.nbytes // pool.num_slots
        self._given: list[int] = []
        self._lock = threading.Lock()
        self._process = os.getpid()

    @property
    def nbytes(self) -> int:
        """Bytes that slots have and may give back."""
        return (self._num_slots - len(self._given)) * self._slot_bytes

    def free_bytes(self) -> int:
        """Return the memory that is free beside the slots.

        Those that were never filled are taken, though the system does not know it yet.
        """
        pool, cache = self._pool, self._cache
        if not isinstance(pool, HostSlots):
            return free_host_bytes()
        unfilled = pool.nbytes * max(0, cache.capacity - cache.num_resident) // pool.num_slots
        return max(0, free_host_bytes() - unfilled)

    def room_bytes(self) -> int:
        """Return the memory that is free, or that slots give back as `make_room` asks for it."""
        return self.free_bytes() + self.nbytes

    def make_room(self, nbytes: int) -> None:
        """Give slots back until `nbytes` are free, as far as they may; or use some again.

        For a host that says what its KV cache takes next, if it was opened with `makes_room`.
        """
        pool = self._pool
        if not self._num_slots or not isinstance(pool, HostSlots) or os.getpid() != self._process:
            return
        with self._lock:
            # Slots that were never filled take memory that still counts as free.
            empty = self._cache.free_slots_now()
            unfilled = len(empty) - pool.count_backed(empty)
            over = free_host_bytes() - unfilled * self._slot_bytes - self._spare_bytes - nbytes
            with uninterrupted():
                # An interrupt would lose slots that are withheld and not yet noted.
                if over < 0:
                    self._give_back(pool, -(over // self._slot_bytes))
                elif self._given and over > _SURPLUS_BYTES:
                    self._use_again((over - _SURPLUS_BYTES) // self._slot_bytes)

    def _give_back(self, pool: HostSlots, num: int) -> None:
        slots = self._cache.withhold(min(num, self._num_slots - len(self._given)))
        if slots:
            self._given += slots
            pool.discard(slots)
            logger.debug("slots.given_back slots=%d in_all=%d", len(slots), len(self._given))

    def _use_again(self, num: int) -> None:
        num = min(num, len(self._given))
        if num:
            self._cache.restore(self._given[-num:])
            del self._given[-num:]
            logger.debug("slots.used_again slots=%d given_back=%d", num, len(self._given))
