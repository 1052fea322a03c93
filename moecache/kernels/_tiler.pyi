from typing import Final, Self, final

import numpy as np

ORDERS: Final[tuple[str, ...]]
TILE: Final[int]

# Functions for other compiled code.
__pyx_capi__: dict[str, object]

@final
class Tiler:
    def __new__(
        cls,
        *,
        rows: int,
        columns: int,
        group: int,
        raw_bytes: int,
        form_bytes: int,
        order: str,
        row_bytes: int,
        scale: str,
        largest: int,
        scale_row_bytes: int,
        block_bytes: int = 0,
        zero: int = 0,
        scale_rows: int = 1,
        scale_step: int = 0,
        num_scales: int = 0,
        codes_at: int = 0,
        scales_at: int = 0,
        zeros_at: int = 0,
        factor_at: int = 0,
        zero_row_bytes: int = 0,
        zero_points: bytes = b"",
    ) -> Self: ...
    @property
    def raw_bytes(self) -> int: ...
    @property
    def form_bytes(self) -> int: ...
    def tile(self, raw: np.ndarray, out: np.ndarray) -> bool: ...
