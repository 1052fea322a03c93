"""Small runtimes whose experts hold nothing but their own key."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import moecache
from moecache.errors import MoeCacheError
from moecache.slots import HostSlots
from tests.helpers.stores import WrappedStore, nothing, numbered_store


def make_runtime(
    capacity: int,
    *,
    store: WrappedStore | None = None,
    staging: int = 2,
    loader_threads: int = 1,
    policy: str = "lru",
    prefetch: str = "off",
    expert_stats: Path | None = None,
) -> moecache.ExpertRuntime:
    """Return a runtime over 3 layers of 8 experts whose weights are their keys."""
    source = store or WrappedStore(numbered_store(), nothing)
    layout = source.layout
    cache = moecache.ExpertCache(layout.num_layers, layout.num_experts, capacity, policy=policy)
    return moecache.ExpertRuntime(
        source,
        HostSlots(layout, cache.capacity + staging),
        cache,
        loader_threads=loader_threads,
        expert_stats=expert_stats,
        prefetch=prefetch,
    )


def drain(runtime: moecache.ExpertRuntime, layer: int, ids: np.ndarray) -> dict[int, int]:
    """Run a step and return pair -> the key found in its slot."""
    found = {}
    for wave in runtime.waves(layer, ids):
        for slot, pairs in wave:
            weights = runtime.expert(slot, layer)
            assert len({float(value) for part in weights.values() for value in part.flat}) == 1
            for pair in pairs.tolist():
                assert pair not in found
                found[pair] = int(weights["down"].flat[0])
    return found


def expected(layer: int, ids: np.ndarray) -> dict[int, int]:
    """Return pair -> key."""
    return {pair: layer * 8 + expert for pair, expert in enumerate(ids.reshape(-1).tolist())}


def close_beside(runtime: Any, call: Callable[[int], object], after_s: float) -> None:
    """Close a runtime beside a thread that calls with 0, 1, ..., which is told and ends."""
    begun = threading.Event()
    others: list[BaseException] = []

    def work() -> None:
        try:
            for turn in range(10_000):
                call(turn)
                begun.set()
        except MoeCacheError:
            pass
        except BaseException as error:  # noqa: BLE001 - the test shows it
            others.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(30)
    time.sleep(after_s)
    runtime.close()
    thread.join(30)
    assert not thread.is_alive()
    if others:
        raise others[0]
