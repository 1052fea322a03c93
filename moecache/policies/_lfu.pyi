from typing import Self, final

from typing_extensions import disjoint_base

from moecache.policies._policy import Policy

@disjoint_base
class LfuCache(Policy):
    def __new__(cls, capacity: int, *, num_keys: int) -> Self: ...

@final
class LfruCache(LfuCache):
    def __new__(cls, capacity: int, *, num_keys: int) -> Self: ...
