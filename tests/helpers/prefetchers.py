"""Small runtimes that prefetch, and a predictor that a test tells what to say."""

import numpy as np

import moecache
from moecache.prefetch.prefetcher import Prefetcher
from tests.helpers.runtimes import drain, expected
from tests.helpers.stores import WrappedStore, nothing, numbered_store


class Oracle:
    """Predicts what it was told."""

    def __init__(self, guesses: dict[int, list[int]], scores: list[float] | None = None) -> None:
        self.guesses = guesses
        self.scores = scores
        self.observed: list[tuple[int, list[int]]] = []
        self.num_sequences = 0

    def observe(self, layer: int, ids: np.ndarray) -> None:
        """Note it."""
        self.observed.append((layer, ids.reshape(-1).tolist()))

    def predict(self, layer: int, n: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return what was told."""
        ids = np.array(self.guesses.get(layer, [])[:n], np.int32)
        return ids, None if self.scores is None else np.array(self.scores[: len(ids)], np.float32)

    def begin_sequence(self) -> None:
        """Count it."""
        self.num_sequences += 1


def make_runtime(
    prefetch: object,
    capacity: int = 6,
    *,
    store: WrappedStore | None = None,
    policy: str = "lru",
    loader_threads: int = 1,
) -> moecache.ExpertRuntime:
    """Return a runtime over 3 layers of 8 experts whose weights are their keys."""
    source = store or WrappedStore(numbered_store(), nothing)
    layout = source.layout
    cache = moecache.ExpertCache(layout.num_layers, layout.num_experts, capacity, policy=policy)
    return moecache.ExpertRuntime(
        source,
        moecache.slots.HostSlots(layout, capacity + 2),
        cache,
        loader_threads=loader_threads,
        prefetch=prefetch,  # type: ignore[arg-type]
    )


def prefetcher_of(runtime: moecache.ExpertRuntime) -> Prefetcher:
    """Return the runtime's prefetcher."""
    found = runtime._prefetcher
    assert found is not None
    return found


def is_resident(runtime: moecache.ExpertRuntime, layer: int, expert: int) -> bool:
    """Return whether an expert is in the cache."""
    return bool(runtime.cache.slot_table[layer, expert] >= 0)


def step(runtime: moecache.ExpertRuntime, layer: int, *experts: int) -> None:
    """Run one token through a layer, and check what its slots hold."""
    ids = np.array([experts])
    assert drain(runtime, layer, ids) == expected(layer, ids)
