from typing import Final

MOST_WIDTH: Final[int]

def attend(
    *,
    queries: tuple[int, int, int],
    keys: tuple[int, int, int],
    values: tuple[int, int, int],
    out: tuple[int, int],
    mask: tuple[int, int] | None,
    num_queries: int,
    num_keys: int,
    num_heads: int,
    num_kv_heads: int,
    width: int,
    value_width: int,
    kind: str,
    scale: float,
) -> None: ...
