from collections.abc import Callable
from typing import Self, final

import numpy as np

from moecache.cache._cache import ExpertCache
from moecache.decoding._held import KeyValues, States
from moecache.decoding.recipe import Recipe

MAX_ROWS: int

@final
class Program:
    @property
    def hidden(self) -> np.ndarray: ...
    @property
    def normed(self) -> np.ndarray: ...
    @property
    def given(self) -> np.ndarray: ...
    @property
    def ids(self) -> np.ndarray: ...
    @property
    def rows(self) -> np.ndarray: ...
    @property
    def num_resident(self) -> int: ...
    @property
    def product_type(self) -> str: ...
    def __new__(cls, recipe: Recipe, cache: ExpertCache, max_rows: int = 16) -> Self: ...
    def begin(
        self,
        pages: list[KeyValues | States | None],
        length: int,
        each: int,
        begins: np.ndarray,
        cos: np.ndarray,
        sin: np.ndarray,
        observe: Callable[[int, np.ndarray, np.ndarray | None], object] | None = None,
        *,
        sequences: np.ndarray | None = None,
        is_spread: bool = False,
    ) -> None: ...
    def begin_together(
        self,
        caches: list[list[KeyValues | States | None]],
        lengths: np.ndarray,
        cos: np.ndarray,
        sin: np.ndarray,
        observe: Callable[[int, np.ndarray, np.ndarray | None], object] | None = None,
        *,
        counts: np.ndarray | None = None,
        begins: np.ndarray | None = None,
        sequences: np.ndarray | None = None,
        is_spread: bool = False,
    ) -> None: ...
    def run(self, on_layer: Callable[[int], object] | None = None) -> int: ...
    def take_counts(self) -> list[tuple[int, int, int, int]]: ...
    def foresee(self, number: int, n: int) -> np.ndarray | None: ...
    def compute(self, slots: np.ndarray, chosen: list[int]) -> int: ...
    def resume(self) -> None: ...
    def abandon(self) -> None: ...
    def logits_of(self, num: int) -> np.ndarray: ...
