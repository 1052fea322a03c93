from typing import Self, final

import numpy as np
import numpy.typing as npt

@final
class RouteLog:
    def __new__(
        cls,
        num_layers: int,
        num_experts: int,
        *,
        top_k: int | None = None,
        max_bytes: int = 268435456,
    ) -> Self: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def max_bytes(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def num_dropped(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def full(self) -> bool: ...
    def record(
        self,
        layer: int,
        ids: npt.ArrayLike,
        *,
        bulk: bool | None = None,
        sequences: npt.ArrayLike | None = None,
    ) -> None: ...
    def begin_sequence(self) -> None: ...
    def clear(self) -> None: ...
    def trace_parts(
        self,
    ) -> tuple[
        npt.NDArray[np.int16 | np.int32],
        npt.NDArray[np.uint8],
        npt.NDArray[np.int32],
        npt.NDArray[np.int32],
        npt.NDArray[np.uint8],
        int,
    ]: ...
