from collections.abc import Sequence
from typing import Self, final

import numpy as np
import numpy.typing as npt

from moecache.policies._policy import Policy

def replay_policy(
    experts: npt.NDArray[np.int32],
    steps: npt.NDArray[np.int64],
    begins: npt.NDArray[np.uint8],
    bulk: npt.NDArray[np.uint8],
    num_experts: int,
    capacity: int,
    policy: str | Sequence[Policy],
    scope: str,
    hits_out: npt.NDArray[np.int32],
    misses_out: npt.NDArray[np.int32],
    sequences: npt.NDArray[np.int32] | None = None,
) -> None: ...

@final
class Visit:
    def __new__(
        cls,
        num_layers: int,
        num_experts: int,
        widest: int,
        partitions: list[Policy],
        counts: npt.NDArray[np.uint64],
    ) -> Self: ...
