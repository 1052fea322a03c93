from collections.abc import Callable

import numpy as np

from moecache.cache._cache import ExpertCache
from moecache.decoding.recipe import Recipe

MAX_ROWS: int

class KeyValues:
    owner: object
    def __init__(
        self,
        keys: int,
        values: int,
        type: str,  # noqa: A002 - as the dtypes of kernels are named
        shape: tuple[int, ...],
        value_width: int,
        owner: object,
    ) -> None: ...

class Program:
    hidden: np.ndarray
    normed: np.ndarray
    ids: np.ndarray
    rows: np.ndarray
    busy_ns: np.ndarray
    def __init__(self, recipe: Recipe, cache: ExpertCache) -> None: ...
    def begin(
        self,
        pages: list[KeyValues],
        length: int,
        each: int,
        begins: np.ndarray,
        cos: np.ndarray,
        sin: np.ndarray,
        observe: Callable[[int, np.ndarray, None], object] | None = None,
    ) -> None: ...
    def run(self) -> int: ...
    def resume(self) -> None: ...
    def logits_of(self, num: int) -> np.ndarray: ...
