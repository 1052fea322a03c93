from typing import Self, final

from moecache.cache._cache import ExpertCache
from moecache.decoding.recipe import Recipe

MOST_RANK: int
MOST_HEAD: int
MOST_KERNEL: int

@final
class Bound:
    def __new__(cls, recipe: Recipe, cache: ExpertCache) -> Self: ...
