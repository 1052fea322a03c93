"""The output does not depend, in any bit, on what is in the cache."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import moecache
from moecache.policies.making import SCOPES
from moecache.settings import POLICIES
from moecache.slots import HostSlots
from moecache.stores import open_store
from tests.helpers.nightly import some
from tests.helpers.pairs import pairwise
from tests.helpers.stores import FailEachOnce, WrappedStore

NUM_LAYERS, TOP_K, ALL = 8, 4, 256
# Policies that are tried at every capacity; the others differ in nothing but the victim.
THOROUGHLY = ("echo", "lru", "slru-lfu")


def generate(
    numpy_loop: ModuleType, path: Path, runtime: moecache.ExpertRuntime, prompt: bytes
) -> list[np.ndarray]:
    """Return the logits of the prompt and of six sampled tokens."""
    with open_store(path) as store:
        model = numpy_loop.NumpyMoe(store, numpy_loop.through_moecache(runtime))
    steps = numpy_loop.generate(model, prompt, 6, temperature=0.7, seed=len(prompt))
    return [scores for _, scores in steps]


def assert_same(logits: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Compare bit by bit."""
    assert len(logits) == len(expected)
    for one, two in zip(logits, expected, strict=True):
        assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize(
    ("capacity", "length", "policy", "loader_threads", "scope"),
    pairwise((TOP_K, 30, 64, ALL), (1, 7, 64, 600), THOROUGHLY, (0, 1, 4), SCOPES),
)
def test_output_equals_resident_output(
    tiny_moe: Path,
    numpy_loop: ModuleType,
    prompt: bytes,
    resident_logits: dict[int, list[np.ndarray]],
    capacity: int,
    length: int,
    policy: str,
    loader_threads: int,
    scope: str,
) -> None:
    """Every capacity from one layer's top-k to everything gives the resident bits."""
    with moecache.open(
        tiny_moe,
        slots=capacity if scope == "global" else max(capacity, NUM_LAYERS),
        policy=policy,
        scope=scope,
        dtype=np.float32,
        loader_threads=loader_threads,
    ) as runtime:
        logits = generate(numpy_loop, tiny_moe, runtime, prompt[:length])
        runtime.cache.check()
    assert_same(logits, resident_logits[length])


@pytest.mark.parametrize(
    "policy", some(sorted(set(POLICIES) - set(THOROUGHLY)), lambda policy: policy == "slru")
)
def test_output_does_not_depend_on_the_policy(
    tiny_moe: Path,
    numpy_loop: ModuleType,
    prompt: bytes,
    resident_logits: dict[int, list[np.ndarray]],
    policy: str,
) -> None:
    """The choice of victims decides what is read, never what is computed."""
    with moecache.open(tiny_moe, slots=30, policy=policy, dtype=np.float32) as runtime:
        logits = generate(numpy_loop, tiny_moe, runtime, prompt[:64])
        runtime.cache.check()
    assert_same(logits, resident_logits[64])


@pytest.mark.parametrize("capacity", [1, 3])
def test_fewer_slots_than_one_token_needs_give_the_same_output(
    tiny_moe: Path,
    numpy_loop: ModuleType,
    prompt: bytes,
    resident_logits: dict[int, list[np.ndarray]],
    capacity: int,
) -> None:
    """A cache smaller than top-k works through staging slots."""
    with moecache.open(tiny_moe, slots=capacity, dtype=np.float32) as runtime:
        assert_same(generate(numpy_loop, tiny_moe, runtime, prompt[:7]), resident_logits[7])


def test_converting_at_every_use_gives_the_same_output(
    tiny_moe: Path,
    numpy_loop: ModuleType,
    prompt: bytes,
    resident_logits: dict[int, list[np.ndarray]],
) -> None:
    """bfloat16 slots, converted by the feed-forward, equal float32 slots."""
    with moecache.open(tiny_moe, slots=40) as runtime:
        assert runtime.slab("down").dtype == runtime.layout.layers[0][1].dtype
        assert_same(generate(numpy_loop, tiny_moe, runtime, prompt[:64]), resident_logits[64])


@pytest.mark.parametrize(
    ("capacity", "loader_threads"), [(TOP_K, 0), (TOP_K, 4), (64, 1), (64, 4), (ALL, 0), (ALL, 1)]
)
def test_reads_that_fail_once_change_nothing(
    tiny_moe: Path,
    numpy_loop: ModuleType,
    prompt: bytes,
    resident_logits: dict[int, list[np.ndarray]],
    capacity: int,
    loader_threads: int,
) -> None:
    """The caller sees each error, repeats the call, and gets the resident bits."""
    store = WrappedStore(open_store(tiny_moe), FailEachOnce())
    cache = moecache.ExpertCache(8, 32, capacity)
    pool = HostSlots(store.layout, capacity + (capacity < ALL) * 2, dtype=np.float32)
    errors = 0

    with moecache.ExpertRuntime(store, pool, cache, loader_threads=loader_threads) as runtime:

        def patient(
            layer: int, hidden: np.ndarray, ids: np.ndarray, weights: np.ndarray
        ) -> np.ndarray:
            nonlocal errors
            while True:
                try:
                    return moecache.experts.feed_forward(runtime, layer, hidden, ids, weights)
                except moecache.StoreError:
                    errors += 1

        with open_store(tiny_moe) as trunk:
            model = numpy_loop.NumpyMoe(trunk, patient)
        steps = numpy_loop.generate(model, prompt[:7], 6, temperature=0.7, seed=7)
        logits = [scores for _, scores in steps]
        cache.check()
        # Wait for loads that a failed step left under way, then nothing may be in use.
        runtime.close()
        cache.check()

    assert errors > 0
    assert_same(logits, resident_logits[7])
