"""Prefetching decides what is read when, never what is computed: chaos changes no bit."""

import itertools
import random
import threading
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moecache
from moecache.errors import StoreError
from moecache.prefetch.predict import LastSelection, Predictor
from moecache.settings import PREFETCH_MODES
from moecache.slots import HostSlots
from moecache.stores import open_store
from tests.helpers.examples import num_examples
from tests.helpers.nightly import some
from tests.helpers.runtimes import drain, expected
from tests.helpers.stores import WrappedStore, numbered_store

# Over all modes 2,000 steps of the demo's eight layers.
NUM_TOKENS = num_examples(50)
PROMPT = b"def "


class Chaos:
    """A `before_read` that fails now and then, and takes its time now and then."""

    def __init__(self, seed: int, *, failing: float = 0.03, slow: float = 0.1) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._failing = failing
        self._slow = slow

    def __call__(self, layer: int, expert: int) -> None:
        """Raise StoreError, sleep, or do nothing."""
        with self._lock:
            fate, delay = self._random.random(), self._random.random()
        if fate < self._failing:
            raise StoreError(f"expert {expert} of layer {layer} cannot be read now")
        if fate < self._failing + self._slow:
            time.sleep(delay * 0.001)


class Careless:
    """Predicts as another predictor does, or anything, or nothing, or fails."""

    def __init__(self, inner: Predictor, num_experts: int, seed: int) -> None:
        self._inner = inner
        self._num_experts = num_experts
        self._random = random.Random(seed)

    def observe(self, layer: int, ids: np.ndarray) -> None:
        """Pass it on."""
        self._inner.observe(layer, ids)

    def predict(self, layer: int, n: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return one thing or another."""
        fate = self._random.random()
        if fate < 0.1:
            raise RuntimeError("no idea")
        if fate < 0.2:
            return np.empty(0, np.int32), None
        if fate < 0.5:
            wild = [self._random.randrange(-1, self._num_experts + 2) for _ in range(2 * n)]
            return np.array(wild, np.int32), None
        return self._inner.predict(layer, n)

    def begin_sequence(self) -> None:
        """Pass it on."""
        self._inner.begin_sequence()


@pytest.fixture(scope="module", name="long_run")
def _long_run(numpy_loop: ModuleType, tiny_moe: Path) -> list[np.ndarray]:
    """Return the logits of a run that has every expert in a slot."""
    with moecache.open(tiny_moe, slots=256, dtype=np.float32, prefetch="off") as runtime:
        with open_store(tiny_moe) as store:
            model = numpy_loop.NumpyMoe(store, numpy_loop.through_moecache(runtime))
        steps = numpy_loop.generate(model, PROMPT, NUM_TOKENS, temperature=0.7, seed=1)
        return [scores for _, scores in steps]


@pytest.mark.parametrize("mode", PREFETCH_MODES)
def test_the_demos_output_is_the_same_to_the_last_bit(
    mode: str, numpy_loop: ModuleType, tiny_moe: Path, long_run: list[np.ndarray]
) -> None:
    """With delays, failures, hints of anything, and a quarter of the experts in slots."""
    store = WrappedStore(open_store(tiny_moe), Chaos(1))
    cache = moecache.ExpertCache(8, 32, 64)
    pool = HostSlots(store.layout, 66, dtype=np.float32)
    guess = random.Random(2)
    with moecache.ExpertRuntime(store, pool, cache, prefetch=mode) as runtime:

        def patient(
            layer: int, hidden: np.ndarray, ids: np.ndarray, weights: np.ndarray
        ) -> np.ndarray:
            if guess.random() < 0.5:
                runtime.hint((layer + 1) % 8, guess.sample(range(32), 6))
            while True:
                try:
                    return moecache.experts.feed_forward(runtime, layer, hidden, ids, weights)
                except StoreError:
                    pass

        with open_store(tiny_moe) as trunk:
            model = numpy_loop.NumpyMoe(trunk, patient)
        steps = numpy_loop.generate(model, PROMPT, NUM_TOKENS, temperature=0.7, seed=1)
        logits = [scores for _, scores in steps]
        runtime.cache.check()
    assert len(logits) == len(long_run)
    for one, two in zip(logits, long_run, strict=True):
        assert one.tobytes() == two.tobytes()


@settings(max_examples=num_examples(15))
@given(
    seed=st.integers(0, 2**32),
    capacity=st.integers(1, 9),
    loader_threads=st.integers(0, 2),
    num_callers=st.integers(1, 2),
    policy=st.sampled_from(["echo", "lru", "lfu", "sieve"]),
    scope=st.sampled_from(["global", "layer"]),
)
def test_every_slot_holds_what_was_asked_for(
    *, seed: int, capacity: int, loader_threads: int, num_callers: int, policy: str, scope: str
) -> None:
    """Two threads, steps of one token and of many, leases and pins, down to one slot."""
    layout_store = numbered_store(3, 8)
    if scope == "layer":
        capacity = max(3, capacity)
    cache = moecache.ExpertCache(3, 8, capacity, policy=policy, scope=scope)
    store = WrappedStore(layout_store, Chaos(seed, slow=0.02))
    predictor = Careless(LastSelection(3, history=2), 8, seed)
    pool = HostSlots(store.layout, capacity + 2)
    problems: list[BaseException] = []

    def call(number: int) -> None:
        dice = random.Random(seed + number)
        for _ in range(200):
            layer = dice.randrange(3)
            rows = dice.choice([1, 1, 1, 4])
            ids = np.array([dice.sample(range(8), 2) for _ in range(rows)])
            try:
                if dice.random() < 0.2:
                    with runtime.lease(layer, ids[:1, :1]) as lease:
                        slot = int(lease.slots[0, 0])
                        weights = runtime.expert(slot, layer)
                        assert int(weights["down"].flat[0]) == layer * 8 + ids[0, 0]
                else:
                    assert drain(runtime, layer, ids) == expected(layer, ids)
            except (StoreError, moecache.CapacityError):
                # Two steps at once may want more than there is; nothing is lost.
                pass
            except BaseException as error:
                problems.append(error)
                raise
            if dice.random() < 0.05:
                runtime.begin_sequence()

    with moecache.ExpertRuntime(
        store, pool, cache, loader_threads=loader_threads, prefetch=predictor
    ) as runtime:
        callers = [threading.Thread(target=call, args=(number,)) for number in range(num_callers)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
            assert not caller.is_alive(), "a step does not end"
        assert problems == []
        cache.check()


@pytest.mark.parametrize(
    ("mode", "read"),
    some(
        itertools.product(("echo", "last"), ("direct", "buffered", "mmap")),
        lambda case: (case[0] == "last") == (case[1] == "buffered"),
    ),
)
def test_every_way_to_read_gives_the_same_output(
    mode: str, read: str, numpy_loop: ModuleType, tiny_moe: Path, long_run: list[np.ndarray]
) -> None:
    """Prefetches go through the reader with everything else, or through the store."""
    with moecache.open(tiny_moe, slots=64, dtype=np.float32, prefetch=mode, read=read) as runtime:
        with open_store(tiny_moe) as store:
            model = numpy_loop.NumpyMoe(store, numpy_loop.through_moecache(runtime))
        steps = numpy_loop.generate(model, PROMPT, 40, temperature=0.7, seed=1)
        logits = [scores for _, scores in steps]
        assert runtime.cache.num_foreseen_hits > 0
        runtime.cache.check()
    for one, two in zip(logits, long_run, strict=False):
        assert one.tobytes() == two.tobytes()
