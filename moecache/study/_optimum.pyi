from typing import Self, final

import numpy as np
import numpy.typing as npt

from moecache.study._accesses import Accesses

def belady(
    trace: Accesses,
    capacity: int,
    scope: str,
    hits_out: npt.NDArray[np.int32],
    misses_out: npt.NDArray[np.int32],
) -> None: ...

@final
class Timeline:
    def __new__(cls, trace: Accesses) -> Self: ...
