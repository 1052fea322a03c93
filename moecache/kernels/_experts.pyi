from collections.abc import Sequence
from typing import Final, Self, final

import numpy as np
import numpy.typing as npt

from moecache.kernels._inputs import Inputs
from moecache.kernels._matrix import Matrix

ACTIVATIONS: Final[tuple[str, ...]]

@final
class Experts:
    def __new__(
        cls,
        ups: Sequence[Matrix],
        up_slot_bytes: int,
        down: Matrix,
        down_slot_bytes: int,
        width: int,
        *,
        is_interleaved: bool = False,
        activation: str = "silu",
        alpha: float = 1.702,
        limit: float = 7.0,
        up_bias: tuple[int, int, str] | None = None,
        down_bias: tuple[int, int, str] | None = None,
        owner: object = None,
    ) -> Self: ...
    @property
    def owner(self) -> object: ...
    def inputs(
        self,
        inputs: int,
        input_type: str,
        num_tokens: int,
        input_row_bytes: int,
        product_type: str | None = None,
    ) -> Inputs: ...
    def compute(
        self,
        slots: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
        pairs: npt.NDArray[np.int64],
        top_k: int,
        inputs: Inputs,
        out: int,
        out_type: str,
        out_row_bytes: int,
    ) -> None: ...

def combine(
    rows: int,
    num_tokens: int,
    top_k: int,
    columns: int,
    weights: int,
    weight_type: str,
    weight_row_bytes: int,
    out: int,
    out_type: str,
    out_row_bytes: int,
) -> None: ...
