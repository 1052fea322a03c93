from collections.abc import Sequence
from typing import Any, Self, final

from moecache.policies._policy import Policy

@final
class PythonPolicy(Policy):
    def __new__(cls, capacity: int, *, num_keys: int, script: Any) -> Self: ...
    @property
    def error(self) -> BaseException | None: ...
    @staticmethod
    def reraise(policies: Sequence[PythonPolicy]) -> None: ...

@final
class Held:
    def __new__(cls, policy: Policy) -> Self: ...
    def __contains__(self, key: int, /) -> bool: ...
