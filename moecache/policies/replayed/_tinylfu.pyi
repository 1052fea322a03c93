from typing import Self, final

from moecache.policies._policy import Policy

@final
class WTinyLfuCache(Policy):
    def __new__(
        cls,
        capacity: int,
        *,
        num_keys: int,
        window_ratio: float = 0.01,
        protected_ratio: float = 0.8,
    ) -> Self: ...
    @property
    def window(self) -> int: ...
    @property
    def protected(self) -> int: ...
