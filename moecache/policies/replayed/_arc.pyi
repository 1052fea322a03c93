from typing import Self, final

from moecache.policies._policy import Policy

@final
class ArcCache(Policy):
    def __new__(cls, capacity: int, *, num_keys: int) -> Self: ...
    @property
    def recency_target(self) -> float: ...
