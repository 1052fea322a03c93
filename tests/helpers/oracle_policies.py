"""Plain-Python versions of the policies, written to be read, not to be fast."""

from collections import Counter
from collections.abc import Callable

import numpy.typing as npt

from moecache.errors import CapacityError


class OracleLru:
    """LRU as one list of keys, the most recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.recent: list[int] = []
        self.pinned: set[int] = set()
        self.held: set[int] = set()

    def __contains__(self, key: int) -> bool:
        """Return whether a key is in the cache."""
        return key in self.keys()

    def __len__(self) -> int:
        """Return the number of keys in the cache."""
        return len(self.keys())

    def keys(self) -> list[int]:
        """Return the keys in the cache, the most recently used first."""
        return list(self.recent)

    def touch(self, key: int) -> bool:
        """Record an access; return whether the key is there."""
        if key not in self:
            return False
        self.access(key)
        return True

    def admit(self, key: int) -> int:
        """Put the key in and return the key that left, or -1."""
        evicted = -1
        if key in self:
            self.access(key)
            return evicted
        if self.full():
            self.expect(key)
            evicted = self.victim()
            if evicted < 0:
                raise CapacityError("everything is pinned")
            self.evict(evicted)
        self.insert(key, accessed=True)
        return evicted

    def discard(self, key: int) -> None:
        """Take the key out, pinned or not."""
        if key in self:
            self.remove(key)

    def pin(self, key: int) -> bool:
        """Keep a key that is there."""
        if key not in self:
            return False
        self.pinned.add(key)
        return True

    def unpin(self, key: int) -> None:
        """Let the key be evicted again."""
        self.pinned.discard(key)

    def clear(self) -> None:
        """Forget everything."""
        self.recent.clear()
        self.pinned.clear()
        self.held.clear()

    def full(self) -> bool:
        """Return whether a key must leave before another is inserted."""
        return len(self) == self.capacity

    def evictable(self) -> list[int]:
        """Return the keys that are neither pinned nor held, the oldest first."""
        return self.unblocked(self.recent)

    def unblocked(self, newest_first: list[int]) -> list[int]:
        """Return the evictable keys of a list, the oldest first."""
        return [k for k in reversed(newest_first) if k not in self.pinned | self.held]

    def begin_step(self, layer: int, rows: npt.ArrayLike = ()) -> None:
        """Note that a layer is visited, and by which experts."""

    def begin_sequence(self) -> None:
        """Note that the next tokens do not continue the last ones."""

    def expect(self, key: int) -> None:
        """Note which key the next victim is to make room for."""

    def victim(self) -> int:
        """Return the key that leaves next, or -1."""
        return next(iter(self.evictable()), -1)

    def access(self, key: int) -> None:
        """Note the use of a key that is there."""
        self.recent.remove(key)
        self.recent.insert(0, key)

    def insert(self, key: int, *, accessed: bool) -> None:
        """Put in a key that is not there; a prefetched one is not accessed yet."""
        self.recent.insert(0, key)

    def remove(self, key: int) -> None:
        """Take out a key that is there."""
        self.recent.remove(key)
        self.pinned.discard(key)
        self.held.discard(key)

    def evict(self, key: int) -> None:
        """Take out the victim."""
        self.remove(key)

    def prefers(self, candidate: int, resident: int) -> bool:
        """Return whether a prefetch of the candidate may evict the resident."""
        return False

    def recount(self) -> None:
        """Read all counts again."""


class OracleLfu(OracleLru):
    """LFU whose counts survive eviction; ties go to the least recently used."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.counts: Counter[int] = Counter()

    def clear(self) -> None:
        """Forget everything, counts too."""
        super().clear()
        self.counts.clear()

    def victim(self) -> int:
        """Return the least often used key; `min` keeps the first, the oldest."""
        return min(self.evictable(), key=self.score, default=-1)

    def score(self, key: int) -> float:
        """Return what the policy values a key at."""
        return self.counts[key]

    def access(self, key: int) -> None:
        """Note the use of a key that is there."""
        super().access(key)
        self.counts[key] += 1

    def insert(self, key: int, *, accessed: bool) -> None:
        """Put in a key that is not there."""
        super().insert(key, accessed=accessed)
        self.counts[key] += accessed

    def prefers(self, candidate: int, resident: int) -> bool:
        """Return whether the candidate is worth more."""
        return self.score(candidate) > self.score(resident)


class OracleLfru(OracleLfu):
    """LFRU: the lowest count / age leaves, ties to the least recently used."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.now = 0
        self.last: dict[int, int] = {}

    def clear(self) -> None:
        """Forget everything, ages too."""
        super().clear()
        self.now = 0
        self.last.clear()

    def score(self, key: int) -> float:
        """Return count / age as of the access that is under way."""
        return self.counts[key] / (self.now + 1 - self.last.get(key, 0) + 1)

    def access(self, key: int) -> None:
        """Note the use of a key that is there."""
        super().access(key)
        self._stamp(key)

    def insert(self, key: int, *, accessed: bool) -> None:
        """Put in a key that is not there."""
        super().insert(key, accessed=accessed)
        self._stamp(key)

    def _stamp(self, key: int) -> None:
        self.now += 1
        self.last[key] = self.now


class OracleSlru(OracleLru):
    """SLRU as two lists, the most recent first; pinned keys stay in the protected one."""

    def __init__(
        self,
        probationary: int,
        protected: int,
        *,
        count_of: Callable[[int], int] | None = None,
        strict: bool = False,
    ) -> None:
        super().__init__(probationary + protected)
        self.room_probationary = probationary
        self.room_protected = protected
        self.count_of = count_of
        self.strict = strict
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.read: dict[int, int] = {}

    def keys(self) -> list[int]:
        """Return the keys in the cache, in no promised order."""
        return self.probation + self.protected

    def pin(self, key: int) -> bool:
        """Keep a key in the protected segment, if it has room for it."""
        if key in self.probation and not self._make_protected_room():
            return False
        if key in self.probation:
            self.probation.remove(key)
            self.protected.insert(0, key)
        return super().pin(key)

    def clear(self) -> None:
        """Forget everything; the counts are the caller's."""
        super().clear()
        self.probation.clear()
        self.protected.clear()

    def full(self) -> bool:
        """Return whether probation overflows (strict) or everything does."""
        if self.strict and len(self.probation) == self.room_probationary:
            return True
        return super().full()

    def evictable(self) -> list[int]:
        """Return probation's candidates; those of the protected segment if there are none."""
        return self.unblocked(self.probation) or self.unblocked(self.protected)

    def victim(self) -> int:
        """Return the oldest, or with counts the least used, ties to the older."""
        candidates = self.evictable()
        if self.count_of is None or (candidates and candidates[0] in self.protected):
            return candidates[0] if candidates else -1
        return min(candidates, key=lambda key: self.read[key], default=-1)

    def access(self, key: int) -> None:
        """Refresh a protected key, promote a probationary one if there is room."""
        if key in self.protected:
            self.protected.remove(key)
            self.protected.insert(0, key)
            return
        self.probation.remove(key)
        if self._make_protected_room():
            self.protected.insert(0, key)
        else:
            self._enter_probation(key)

    def insert(self, key: int, *, accessed: bool) -> None:
        """Put a key on probation."""
        self._enter_probation(key)

    def remove(self, key: int) -> None:
        """Take out a key that is there."""
        (self.probation if key in self.probation else self.protected).remove(key)
        self.pinned.discard(key)
        self.held.discard(key)

    def prefers(self, candidate: int, resident: int) -> bool:
        """Return whether the candidate was used more often."""
        return self.count_of is not None and self.count_of(candidate) > self.count_of(resident)

    def recount(self) -> None:
        """Read all counts again."""
        if self.count_of is not None:
            self.read = {key: self.count_of(key) for key in self.probation}

    def _enter_probation(self, key: int) -> None:
        self.probation.insert(0, key)
        if self.count_of is not None:
            self.read[key] = self.count_of(key)

    def _make_protected_room(self) -> bool:
        if len(self.protected) < self.room_protected:
            return True
        unpinned = [key for key in self.protected if key not in self.pinned]
        if not unpinned:
            return False
        self.protected.remove(unpinned[-1])
        self._enter_probation(unpinned[-1])
        return True
