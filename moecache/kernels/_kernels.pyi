from collections.abc import Sequence
from typing import Final, Self, final

import numpy as np
import numpy.typing as npt

NUMBERS: Final[tuple[str, ...]]
CODES: Final[tuple[str, ...]]
ORDERS: Final[tuple[str, ...]]
INPUTS: Final[tuple[str, ...]]
ACTIVATIONS: Final[tuple[str, ...]]
TILE: Final[int]

def levels() -> tuple[str, ...]: ...
def level() -> str: ...
def amx_is_refused() -> bool: ...
def use_level(name: str) -> None: ...
def num_threads() -> int: ...
def share_from(shared_bytes: int, waking_bytes: int) -> tuple[int, int]: ...
def use_threads(number: int) -> None: ...

# Functions for other compiled code.
__pyx_capi__: dict[str, object]

@final
class Matrix:
    def __new__(
        cls,
        address: int,
        name: str,
        rows: int,
        columns: int,
        row_bytes: int | None = None,
        owner: object = None,
    ) -> Self: ...
    @property
    def owner(self) -> object: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    def expand(self, out: int, out_type: str, out_row_bytes: int) -> None: ...
    def multiply(
        self,
        inputs: int,
        input_type: str,
        num: int,
        input_row_bytes: int,
        out: int,
        out_type: str,
        out_row_bytes: int,
        bias: int = 0,
        bias_type: str = "f32",
    ) -> None: ...

@final
class Inputs:
    def __new__(cls) -> Self: ...

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
        self, inputs: int, input_type: str, num_tokens: int, input_row_bytes: int
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
def is_late(waited_ns: int, own_ns: int, own_items: int) -> bool: ...
def read_all(address: int, nbytes: int) -> int: ...

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
