from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any, final

import numpy as np
import numpy.typing as npt

from moecache.loading.load import Cause

@final
class Load:
    cause: Cause
    urgent: bool
    parts: Mapping[str, Any]
    fills: tuple[tuple[Any, str, int, Any], ...]
    is_wrong: bool
    error: Exception | None
    def __init__(
        self, layer: int, expert: int, slot: int, cause: Cause, *, staged: bool = False
    ) -> None: ...
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

@final
class Step:
    leased: npt.NDArray[np.int32] | set[int]
    def __init__(
        self,
        layer: int,
        ids: np.ndarray,
        num_experts: int,
        *,
        share: int = -1,
        ignore_out_of_range: bool = False,
        sequences: npt.ArrayLike | None = None,
    ) -> None: ...
    @property
    def layer(self) -> int: ...
    @property
    def ids(self) -> np.ndarray: ...
    @property
    def sequences(self) -> npt.ArrayLike | None: ...
    @property
    def share(self) -> int: ...
    @property
    def ignore_out_of_range(self) -> bool: ...
    @property
    def cause(self) -> Cause: ...
    @property
    def slots(self) -> npt.NDArray[np.int32]: ...
    @property
    def misses(self) -> npt.NDArray[np.int32]: ...
    @property
    def arrived(self) -> SimpleQueue[Load]: ...
    @property
    def loads(self) -> set[Load]: ...
    @property
    def bypassed(self) -> list[int]: ...
    @property
    def staged(self) -> set[int]: ...
