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
