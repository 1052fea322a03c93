from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any, Self, final

from moecache.loading.load import Cause

@final
class Load:
    cause: Cause
    urgent: bool
    parts: Mapping[str, Any]
    fills: tuple[tuple[Any, str, int, Any], ...]
    is_wrong: bool
    error: Exception | None
    def __new__(
        cls, layer: int, expert: int, slot: int, cause: Cause, *, staged: bool = False
    ) -> Self: ...
    @property
    def layer(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def staged(self) -> bool: ...
    @property
    def waiting(self) -> list[SimpleQueue[Load]]: ...
    @property
    def is_unwanted(self) -> bool: ...
    @property
    def is_cancelled(self) -> bool: ...
