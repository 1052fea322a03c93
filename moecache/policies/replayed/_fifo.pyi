from typing import Self, final

from moecache.policies._policy import Policy

@final
class FifoCache(Policy):
    def __new__(cls, capacity: int, *, num_keys: int) -> Self: ...

@final
class SieveCache(Policy):
    def __new__(cls, capacity: int, *, num_keys: int) -> Self: ...

@final
class S3FifoCache(Policy):
    def __new__(cls, capacity: int, *, num_keys: int, small_ratio: float = 0.1) -> Self: ...
    @property
    def small(self) -> int: ...
    @property
    def main(self) -> int: ...
