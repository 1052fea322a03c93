import numpy as np
import numpy.typing as npt

from moecache.study._accesses import Accesses

def stack_distances(trace: Accesses, scope: str) -> npt.NDArray[np.int64]: ...
