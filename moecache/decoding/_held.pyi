from typing import Self, final

@final
class KeyValues:
    @property
    def owner(self) -> object: ...
    def __new__(
        cls,
        keys: int,
        values: int,
        type: str,  # noqa: A002 - as the dtypes of kernels are named
        shape: tuple[int, ...],
        value_width: int,
        owner: object,
        dropped: int = 0,
    ) -> Self: ...
    def of_sequence(self, sequence: int) -> KeyValues: ...

@final
class States:
    num_saved: int
    @property
    def owner(self) -> object: ...
    def __new__(
        cls,
        seen: int,
        next_seen: int,
        saved_seen: int,
        type: str,  # noqa: A002 - as the dtypes of kernels are named
        shape: tuple[int, ...],
        steps: tuple[int, ...],
        states: int,
        next_states: int,
        saved_states: int,
        state_shape: tuple[int, ...],
        owner: object,
    ) -> Self: ...
    def of_sequence(self, sequence: int) -> States: ...
