from typing import Final, Self, final

INPUTS: Final[tuple[str, ...]]

@final
class Inputs:
    def __new__(cls) -> Self: ...

@final
class Rows:
    def __new__(cls, num: int) -> Self: ...
