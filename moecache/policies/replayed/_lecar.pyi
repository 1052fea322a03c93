from typing import Self, final

from moecache.policies._policy import Policy

@final
class LecarCache(Policy):
    def __new__(
        cls,
        capacity: int,
        *,
        num_keys: int,
        learning_rate: float = 0.45,
        discount_rate: float | None = None,
        seed: int = 0,
    ) -> Self: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def discount_rate(self) -> float: ...
    @property
    def weights(self) -> tuple[float, float]: ...
