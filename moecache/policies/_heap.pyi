from typing import Self, final

from typing_extensions import disjoint_base

from moecache.policies._policy import Policy

@disjoint_base
class RankedPolicy(Policy): ...

@final
class CountHeap:
    def __new__(cls, num_keys: int) -> Self: ...
