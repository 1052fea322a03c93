from typing import Self, final

import numpy as np
import numpy.typing as npt

from moecache.policies._policy import Policy

@final
class SlruCache(Policy):
    def __new__(
        cls,
        probationary: int,
        protected: int,
        *,
        num_keys: int,
        counts: npt.NDArray[np.uint64] | None = None,
        strict: bool = False,
    ) -> Self: ...
    @property
    def probationary(self) -> int: ...
    @property
    def protected(self) -> int: ...
    @property
    def strict(self) -> bool: ...
    def probationary_keys(self) -> list[int]: ...
    def protected_keys(self) -> list[int]: ...
