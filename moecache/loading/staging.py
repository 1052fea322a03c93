"""StagingSlots: slots beside the cache's, for experts that find no room in it."""

import threading
from collections.abc import Iterable

from moecache.errors import CapacityError


class StagingSlots:
    """Which staging slots are free, and which threads' steps use the others.

    Every method is called under the loader's lock.

    Parameters
    ----------
    slots : iterable of int
    """

    def __init__(self, slots: Iterable[int]) -> None:
        self._free = list(slots)
        self._users: dict[int, int] = {}  # slot -> thread, 0 for an orphan
        self.num_slots = len(self._free)

    @property
    def num_free(self) -> int:
        """Slots that are not in use."""
        return len(self._free)

    def take(self) -> int:
        """Give a free slot to the calling thread and return it."""
        slot = self._free.pop()
        self._users[slot] = threading.get_ident()
        return slot

    def give_back(self, slot: int) -> bool:
        """Make a slot free; return False if it is free already."""
        if self._users.pop(slot, None) is None:
            return False
        self._free.append(slot)
        return True

    def orphan(self, slot: int) -> None:
        """Say that no step waits for a slot any more, while it is still being filled."""
        self._users[slot] = 0

    def check_wait(self, layer: int) -> None:
        """Raise CapacityError if waiting for a slot could last for ever."""
        if self.num_slots == 0:
            raise CapacityError(
                f"layer {layer} finds every slot in use and there are no staging slots; "
                "try again, or open with more memory"
            )
        # A thread that holds some and waits for more could wait for another that does the same.
        mine = list(self._users.values()).count(threading.get_ident())
        if mine:
            raise CapacityError(
                f"layer {layer} needs a staging slot, but all {self.num_slots} are in "
                f"use, {mine} of them by an unfinished step of this thread; finish its "
                "waves first"
            )
