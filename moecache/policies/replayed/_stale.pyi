from typing import Self, final

from moecache.policies._policy import Policy

@final
class LeastStaleCache(Policy):
    def __new__(cls, capacity: int, *, num_keys: int, num_experts: int | None = None) -> Self: ...
    @property
    def num_experts(self) -> int: ...
