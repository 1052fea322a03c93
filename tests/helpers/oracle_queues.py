"""Plain-Python FIFO, SIEVE, S3-FIFO and W-TinyLFU: lists whose first key leaves first."""

from collections import Counter

from tests.helpers.oracle_policies import OracleLru


class OracleFifo(OracleLru):
    """FIFO; `recent` only says in which order keys were used."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.queue: list[int] = []

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self.queue.clear()

    def victim(self) -> int:
        """Return the first that came."""
        return next(iter(self.free(self.queue)), -1)

    def insert(self, key: int, *, accessed: bool) -> None:
        """Put in a key that is not there."""
        super().insert(key, accessed=accessed)
        self.queue.append(key)

    def remove(self, key: int) -> None:
        """Take out a key that is there."""
        super().remove(key)
        self.queue.remove(key)

    def free(self, keys: list[int]) -> list[int]:
        """Return those that are neither pinned nor held."""
        return [key for key in keys if key not in self.pinned | self.held]


class OracleSieve(OracleFifo):
    """SIEVE: a hand moves along the queue; None is before its oldest key."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.visited: set[int] = set()
        self.hand: int | None = None

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self.visited.clear()
        self.hand = None

    def victim(self) -> int:
        """Return the first key without a mark, from the hand on."""
        if not self.free(self.queue):
            return -1
        while True:
            key = self.queue[0] if self.hand is None else self.hand
            if key not in self.pinned | self.held:
                if key not in self.visited:
                    self.hand = key
                    return key
                self.visited.remove(key)
            self.hand = self.newer(key)

    def access(self, key: int) -> None:
        """Mark a key."""
        super().access(key)
        self.visited.add(key)

    def remove(self, key: int) -> None:
        """Take out a key that is there."""
        if self.hand == key:
            self.hand = self.newer(key)
        super().remove(key)
        self.visited.discard(key)

    def newer(self, key: int) -> int | None:
        """Return the key that came after this one."""
        index = self.queue.index(key) + 1
        return self.queue[index] if index < len(self.queue) else None


class OracleS3Fifo(OracleLru):
    """S3-FIFO: a small queue, a main one, and ghosts of the small one."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.room_small = max(1, capacity // 10)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.uses: dict[int, int] = {}
        self.named = self.expected = self.returning = -1

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self.small.clear()
        self.main.clear()
        self.ghosts.clear()
        self.named = -1

    def expect(self, key: int) -> None:
        """Note the key that is missed."""
        self.expected = key

    def meet(self, key: int) -> None:
        """Take a key that comes back out of the ghosts."""
        if key in self.ghosts:
            self.ghosts.remove(key)
            self.returning = key

    def victim(self) -> int:
        """Return the key that leaves next; the same one as long as nothing changes."""
        if self.named < 0 or self.named in self.pinned | self.held:
            searches = [self.search_main, self.search_small, self.search_main]
            if len(self.small) >= self.room_small:
                searches.insert(0, self.search_small)
            self.named = next((key for key in (search() for search in searches) if key >= 0), -1)
        return self.named

    def search_small(self) -> int:
        """Return the oldest small key used less than twice; older ones move on."""
        for key in list(self.small):
            if key in self.pinned | self.held:
                continue
            if self.uses[key] < 2:
                return key
            self.small.remove(key)
            self.main.append(key)
            self.uses[key] = 0
        return -1

    def search_main(self) -> int:
        """Return the oldest main key without uses left; the others go round."""
        while True:
            free = [key for key in self.main if key not in self.pinned | self.held]
            if not free or self.uses[free[0]] == 0:
                return free[0] if free else -1
            self.uses[free[0]] -= 1
            self.main.remove(free[0])
            self.main.append(free[0])

    def access(self, key: int) -> None:
        """Count a use."""
        super().access(key)
        self.uses[key] = min(3, self.uses[key] + 1)
        self.named = -1

    def insert(self, key: int, *, accessed: bool) -> None:
        """Put in a key that is not there."""
        super().insert(key, accessed=accessed)
        self.uses[key] = 0
        self.named = -1
        self.meet(key)
        (self.main if self.returning == key else self.small).append(key)
        self.returning = -1

    def evict(self, key: int) -> None:
        """Take out the victim and remember it if it was small."""
        was_small = key in self.small
        self.remove(key)
        self.meet(self.expected)
        if was_small and self.capacity > self.room_small:
            self.ghosts.append(key)
            del self.ghosts[: -(self.capacity - self.room_small)]

    def remove(self, key: int) -> None:
        """Take out a key that is there."""
        super().remove(key)
        (self.small if key in self.small else self.main).remove(key)
        self.named = -1


class OracleWTinyLfu(OracleLru):
    """W-TinyLFU with exact counts: a window, probation and a protected segment."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.room_window = max(1, capacity // 100)
        self.room_main = capacity - self.room_window
        self.room_protected = int(self.room_main * 0.8)
        self.window: list[int] = []
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.counts: Counter[int] = Counter()
        self.num_counted = 0
        self.winner = -1
        self.evicted = False

    def clear(self) -> None:
        """Forget everything."""
        capacity = self.capacity
        super().clear()
        self.__init__(capacity)  # type: ignore[misc]

    def victim(self) -> int:
        """Return the key that loses between the window and the rest."""
        free = {
            name: [key for key in keys if key not in self.pinned | self.held]
            for name, keys in vars(self).items()
            if name in ("window", "probation", "protected")
        }
        residents = free["probation"] or free["protected"]
        self.winner = -1
        if not residents:
            return free["window"][0] if free["window"] else -1
        if not free["window"] or len(self.window) < self.room_window:
            return residents[0]
        candidate = free["window"][0]
        if self.counts[candidate] <= self.counts[residents[0]]:
            return candidate
        self.winner = candidate
        return residents[0]

    def access(self, key: int) -> None:
        """Count a use and move the key on, or to the end of its segment."""
        super().access(key)
        self.count(key)
        grown = len(self.window) > self.room_window
        short = len(self.probation) + len(self.protected) < self.room_main
        if key in self.window:
            self.window.remove(key)
            (self.probation if grown and short else self.window).append(key)
            return
        (self.protected if key in self.protected else self.probation).remove(key)
        self.protected.append(key)
        if len(self.protected) > self.room_protected:
            self.probation.append(self.protected.pop(0))

    def insert(self, key: int, *, accessed: bool) -> None:
        """Put a key into the window."""
        super().insert(key, accessed=accessed)
        if accessed:
            self.count(key)
        self.window.append(key)
        grown = len(self.window) > self.room_window
        short = len(self.probation) + len(self.protected) < self.room_main
        if grown and short and not self.evicted:
            self.probation.append(self.window.pop(0))
        self.evicted = False

    def evict(self, key: int) -> None:
        """Take out the victim; the key that won against it takes its place."""
        self.remove(key)
        self.evicted = True
        if self.winner >= 0:
            self.window.remove(self.winner)
            self.probation.append(self.winner)

    def remove(self, key: int) -> None:
        """Take out a key that is there."""
        super().remove(key)
        for segment in (self.window, self.probation, self.protected):
            if key in segment:
                segment.remove(key)

    def count(self, key: int) -> None:
        """Count a use; halve all counts now and then."""
        self.counts[key] = min(15, self.counts[key] + 1)
        self.num_counted += 1
        if self.num_counted == 10 * self.capacity:
            self.num_counted //= 2
            for other in self.counts:
                self.counts[other] //= 2

    def prefers(self, candidate: int, resident: int) -> bool:
        """Return whether the candidate was counted more often."""
        return self.counts[candidate] > self.counts[resident]
