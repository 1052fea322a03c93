from typing import Final, Self, final

NUMBERS: Final[tuple[str, ...]]
CODES: Final[tuple[str, ...]]
SCALES: Final[dict[str, int]]

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
