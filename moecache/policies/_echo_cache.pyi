from typing import Self, final

from moecache.policies._echo import Echo
from moecache.policies._policy import Policy

@final
class EchoCache(Policy):
    def __new__(
        cls, capacity: int, *, num_keys: int, echo: Echo, layer: int | None = None
    ) -> Self: ...
    @property
    def echo(self) -> Echo: ...
