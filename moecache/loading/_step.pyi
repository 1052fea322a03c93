from queue import SimpleQueue
from typing import Self, final

import numpy as np
import numpy.typing as npt

from moecache.loading._load import Load
from moecache.loading.load import Cause

@final
class Step:
    leased: npt.NDArray[np.int32] | set[int]
    def __new__(
        cls,
        layer: int,
        ids: np.ndarray,
        num_experts: int,
        *,
        share: int = -1,
        ignore_out_of_range: bool = False,
        sequences: npt.ArrayLike | None = None,
    ) -> Self: ...
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
