from typing import Self, final

import numpy as np
import numpy.typing as npt

@final
class Accesses:
    def __new__(
        cls,
        experts: npt.NDArray[np.int32],
        steps: npt.NDArray[np.int64],
        num_experts: int,
        bulk: npt.NDArray[np.uint8] | None = None,
    ) -> Self: ...
    def __len__(self) -> int: ...
    def belady(
        self,
        capacity: int,
        scope: str,
        hits_out: npt.NDArray[np.int32],
        misses_out: npt.NDArray[np.int32],
    ) -> None: ...
    def stack_distances(self, scope: str) -> npt.NDArray[np.int64]: ...

@final
class Timeline:
    def __new__(cls, trace: Accesses) -> Self: ...
