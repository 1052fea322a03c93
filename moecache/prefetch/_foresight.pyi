from typing import Self, final

import numpy as np
import numpy.typing as npt

from moecache.cache._cache import ExpertCache

@final
class Foresight:
    def __new__(cls, cache: ExpertCache) -> Self: ...
    @property
    def num_used(self) -> int: ...
    @property
    def num_predicted_k(self) -> int: ...
    @property
    def num_found_k(self) -> int: ...
    @property
    def num_predicted_2k(self) -> int: ...
    @property
    def num_found_2k(self) -> int: ...
    def expect(
        self,
        layer: int,
        ids: npt.ArrayLike,
        scores: npt.ArrayLike | None = None,
        *,
        min_likelihood: float = 0.0,
    ) -> tuple[npt.NDArray[np.int32], int] | None: ...
    def score(self, layer: int, ids: npt.ArrayLike) -> None: ...
    def drop(self, layer: int) -> None: ...
