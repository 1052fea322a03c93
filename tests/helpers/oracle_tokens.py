"""Plain-Python LRFU and Least-Stale: policies that are told of layers and tokens."""

import math

import numpy.typing as npt

from tests.helpers.oracle_policies import OracleLru


class OracleLrfu(OracleLru):
    """LRFU: counts that halve every 128 tokens, as logarithms so that ties are the same."""

    half_life = 128.0

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.clear()

    def clear(self) -> None:
        """Forget everything, counts and time too."""
        super().clear()
        self.values: dict[int, float] = {}
        self.token = 0
        self.lowest: int | None = None

    def begin_step(self, layer: int, rows: npt.ArrayLike = ()) -> None:
        """Count tokens by their lowest layer."""
        if self.lowest is None or layer <= self.lowest:
            self.lowest = layer
            self.token += 1

    def victim(self) -> int:
        """Return the lowest count; `min` keeps the first, the oldest."""
        return min(self.evictable(), key=self.value, default=-1)

    def value(self, key: int) -> float:
        """Return the logarithm of a decayed count as of time 0."""
        return self.values.get(key, -1.0)

    def access(self, key: int) -> None:
        """Count a use."""
        super().access(key)
        self.count(key)

    def insert(self, key: int, *, accessed: bool) -> None:
        """Put in a key that is not there."""
        super().insert(key, accessed=accessed)
        if accessed:
            self.count(key)

    def count(self, key: int) -> None:
        """Add 1 to what is left of a count."""
        if self.lowest is None:
            self.token += 1
        age = self.token / self.half_life
        if key in self.values:
            age += math.log2(1.0 + math.exp2(self.values[key] - age))
        self.values[key] = age

    def prefers(self, candidate: int, resident: int) -> bool:
        """Return whether the candidate's count is higher."""
        return self.value(candidate) > self.value(resident)


class OracleLeastStale(OracleLru):
    """Least-Stale: three kinds of keys, the least recently used of the first kind leaves."""

    def __init__(self, capacity: int, num_experts: int | None = None) -> None:
        super().__init__(capacity)
        self.num_experts = num_experts
        self.clear()

    def clear(self) -> None:
        """Forget everything, the layers seen too."""
        super().clear()
        self.used_in: dict[int, int] = {}
        self.current = 0
        self.lowest: int | None = None
        self.layer: int | None = None

    def begin_step(self, layer: int, rows: npt.ArrayLike = ()) -> None:
        """Count passes by their lowest layer."""
        if self.lowest is None or layer <= self.lowest:
            self.lowest = layer
            self.current += 1
        self.layer = layer

    def done(self, key: int) -> bool:
        """Return whether this pass needs a key no more."""
        return self.layer is None or self.layer_of(key) <= self.layer

    def layer_of(self, key: int) -> int:
        """Return a key's layer; with a policy per layer they are all 0."""
        return 0 if self.num_experts is None else key // self.num_experts

    def kind(self, key: int) -> tuple[int, int]:
        """Return what decides before recency."""
        if not self.done(key):
            return 2, -self.layer_of(key)
        return int(self.used_in[key] == self.current), 0

    def victim(self) -> int:
        """Return the first of the lowest kind; `min` keeps the first, the oldest."""
        return min(self.evictable(), key=self.kind, default=-1)

    def access(self, key: int) -> None:
        """Make a key current."""
        super().access(key)
        self.used_in[key] = self.current

    def insert(self, key: int, *, accessed: bool) -> None:
        """Put in a key; one prefetched for a layer to come is stale."""
        super().insert(key, accessed=accessed)
        self.used_in[key] = self.current - (not accessed and not self.done(key))

    def prefers(self, candidate: int, resident: int) -> bool:
        """Return whether the resident is stale and its layer done."""
        return self.kind(resident) == (0, 0)
