"""Plain-Python ARC and LeCaR: policies that learn from keys that they evicted too early."""

import math
from collections import Counter

from tests.helpers.oracle_policies import OracleLru


class OracleArc(OracleLru):
    """ARC as in figure 4 of its paper; lists have the most recent key first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0
        self.expected = self.returning = -1

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        for keys in (self.t1, self.t2, self.b1, self.b2):
            keys.clear()
        self.p = 0.0
        self.expected = self.returning = -1

    def expect(self, key: int) -> None:
        """Note the key that is missed."""
        self.expected = key

    def step(self, mine: list[int], other: list[int]) -> float:
        """Return how far a ghost of one's own moves p."""
        return max(1.0, len(other) / len(mine))

    def adapted(self, key: int) -> float:
        """Return p after a miss on a key."""
        if key in self.b1:
            return min(self.capacity, self.p + self.step(self.b1, self.b2))
        if key in self.b2:
            return max(0.0, self.p - self.step(self.b2, self.b1))
        return self.p

    def victim(self) -> int:
        """Return the key that REPLACE chooses; from the other list if that one is all blocked."""
        p = self.adapted(self.expected)
        t1, t2 = self.unblocked(self.t1), self.unblocked(self.t2)
        from_t1 = len(self.t1) > p or (len(self.t1) == p and self.expected in self.b2)
        candidates = (t1 or t2) if from_t1 else (t2 or t1)
        return candidates[0] if candidates else -1

    def access(self, key: int) -> None:
        """Case I: the key was used twice."""
        super().access(key)
        (self.t1 if key in self.t1 else self.t2).remove(key)
        self.t2.insert(0, key)

    def meet(self, key: int) -> None:
        """Cases II and III: adapt p and take the key out of the ghosts."""
        self.p = self.adapted(key)
        self.returning = key
        (self.b1 if key in self.b1 else self.b2).remove(key)

    def evict(self, key: int) -> None:
        """Make room among the ghosts (case IV) and move the victim there."""
        remembered = True
        if self.expected in self.b1 + self.b2:
            self.meet(self.expected)
        else:
            remembered = self.trim()
        ghosts = self.b1 if key in self.t1 else self.b2
        self.remove(key)
        if remembered:
            ghosts.insert(0, key)

    def trim(self) -> bool:
        """Forget a ghost before a new key comes; return whether the victim becomes one."""
        if len(self.t1) + len(self.b1) >= self.capacity:
            if not self.b1:
                return False
            self.b1.pop()
        elif len(self.t1 + self.t2 + self.b1 + self.b2) >= 2 * self.capacity:
            self.b2.pop()
        return True

    def insert(self, key: int, *, accessed: bool) -> None:
        """Put in a key that is not there."""
        super().insert(key, accessed=accessed)
        if key in self.b1 + self.b2 and accessed:
            self.meet(key)
        elif key in self.b1 + self.b2:
            (self.b1 if key in self.b1 else self.b2).remove(key)
        returning, self.returning = self.returning, -1
        if key == returning:
            self.t2.insert(0, key)
            return
        # Room may be left after a key was discarded.
        if len(self.t1) + len(self.b1) >= self.capacity and self.b1:
            self.b1.pop()
        if len(self.t1 + self.t2 + self.b1 + self.b2) >= 2 * self.capacity:
            (self.b2 or self.b1).pop()
        self.t1.insert(0, key)

    def remove(self, key: int) -> None:
        """Take out a key that is there."""
        super().remove(key)
        (self.t1 if key in self.t1 else self.t2).remove(key)


class OracleLecar(OracleLru):
    """LeCaR; histories are lists of (key, time of eviction), the earliest first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.clear()

    def clear(self) -> None:
        """Forget everything, what was learnt too."""
        super().clear()
        self.counts: Counter[int] = Counter()
        self.history: dict[str, list[tuple[int, int]]] = {"lru": [], "lfu": []}
        self.weight = 0.5
        self.now = 0
        self.state = 0
        self.expected = -1
        self.expert: str | None = None
        self.draw = self.next_draw()

    def next_draw(self) -> float:
        """Return what splitmix64 gives next."""
        wide = 2**64 - 1
        self.state = (self.state + 0x9E3779B97F4A7C15) & wide
        bits = self.state
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & wide
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & wide
        return float((bits ^ (bits >> 31)) >> 11) / 2**53

    def expect(self, key: int) -> None:
        """Note the key that is missed."""
        self.expected = key

    def weight_after(self, key: int) -> float:
        """Return LRU's weight after a miss on a key."""
        lru, lfu = self.weight, 1.0 - self.weight
        for expert, entries in self.history.items():
            for ghost, time in entries:
                if ghost == key:
                    regret = math.pow(
                        math.pow(0.005, 1.0 / self.capacity), float(self.now + 1 - time)
                    )
                    gain = math.exp(0.45 * regret)
                    lru, lfu = (lru, lfu * gain) if expert == "lru" else (lru * gain, lfu)
                    return min(0.99, max(0.01, lru / (lru + lfu)))
        return lru

    def victim(self) -> int:
        """Return the key that the drawn expert names."""
        free = self.evictable()
        if not free:
            return -1
        rarest = min(free, key=lambda key: self.counts[key])
        self.expert = "lru" if self.draw < self.weight_after(self.expected) else "lfu"
        if rarest == free[0]:
            self.expert = None
            return rarest
        return free[0] if self.expert == "lru" else rarest

    def access(self, key: int) -> None:
        """Count a use."""
        super().access(key)
        self.now += 1
        self.counts[key] += 1

    def insert(self, key: int, *, accessed: bool) -> None:
        """Put in a key that is not there."""
        super().insert(key, accessed=accessed)
        weight = self.weight
        self.meet(key)
        if not accessed:
            self.weight = weight
        self.now += 1
        self.counts[key] += accessed

    def meet(self, key: int) -> None:
        """Learn from a miss, and take the key out of its history."""
        self.weight = self.weight_after(key)
        for entries in self.history.values():
            entries[:] = [entry for entry in entries if entry[0] != key]

    def evict(self, key: int) -> None:
        """Take out the victim and remember whose it was."""
        count = self.counts[key]
        self.remove(key)
        self.meet(self.expected)
        self.draw = self.next_draw()
        if self.expert is None:
            return
        self.counts[key] = count
        entries = self.history[self.expert]
        entries.append((key, self.now + 1))
        if len(entries) > max(1, self.capacity // 2):
            del self.counts[entries.pop(0)[0]]

    def remove(self, key: int) -> None:
        """Take out a key that is there, and forget its count."""
        super().remove(key)
        del self.counts[key]
