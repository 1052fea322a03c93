from typing import Self, final

from moecache.policies._policy import Policy

@final
class LrfuCache(Policy):
    def __new__(cls, capacity: int, *, num_keys: int, half_life: float = 128.0) -> Self: ...
    @property
    def half_life(self) -> float: ...
