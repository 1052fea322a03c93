"""A small model on the fake device, to be run token by token, in a graph or not."""

from collections.abc import Callable
from typing import Any

import numpy as np

from moecache import ExpertCache, ExpertRuntime
from moecache.compute import on_device
from moecache.slots import CudaSlots
from moecache.stores.memory import MemoryStore
from tests.helpers.fake_device import FakeDevice

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH = 4, 6, 2, 16, 8
FP32 = np.dtype(np.float32)


def make_runtime(device: FakeDevice, capacity: int, **options: Any) -> ExpertRuntime:
    """Return a runtime of random experts."""
    rng = np.random.default_rng(0)
    store = MemoryStore(
        {
            "gate_up": rng.normal(0, 0.5, (LAYERS, EXPERTS, 2 * WIDTH, HIDDEN)).astype(FP32),
            "down": rng.normal(0, 0.5, (LAYERS, EXPERTS, HIDDEN, WIDTH)).astype(FP32),
        },
        top_k=TOP_K,
    )
    cache = ExpertCache(
        LAYERS,
        EXPERTS,
        capacity,
        policy=options.pop("policy", "lru"),
        scope=options.pop("scope", "global"),
    )
    pool = CudaSlots(store.layout, capacity, 0 if capacity == LAYERS * EXPERTS else 2, device)
    options.setdefault("loader_threads", 0)
    return ExpertRuntime(store, pool, cache, **options)


class Model:
    """Layers of a router, experts and a sum, on buffers that stay where they are.

    Parameters
    ----------
    runtime : ExpertRuntime
    num_tokens : int
    top_k : int, default 2
    seed : int, default 0
        Of the routers.
    """

    def __init__(
        self, runtime: ExpertRuntime, num_tokens: int = 1, top_k: int = TOP_K, seed: int = 0
    ) -> None:
        self.compute = on_device(runtime)
        self.device: Any = runtime.pool.device
        rng = np.random.default_rng(seed)
        self.routers = rng.normal(size=(LAYERS, HIDDEN, EXPERTS)).astype(FP32)
        stream = self.device.current_stream()
        shape = (num_tokens, HIDDEN)
        self.hidden = [self.device.empty(shape, FP32, stream) for _ in range(LAYERS + 1)]
        self.out = [self.device.empty(shape, FP32, stream) for _ in range(LAYERS)]
        pairs = (num_tokens, top_k)
        self.ids = [self.device.empty(pairs, np.dtype(np.int64), stream) for _ in range(LAYERS)]
        self.weights = [self.device.empty(pairs, FP32, stream) for _ in range(LAYERS)]

    def begin(self, hidden: np.ndarray) -> None:
        """Give the device what a token begins with."""
        given = hidden.copy()
        self.device.work(lambda: np.copyto(self.hidden[0], given))

    def layer(self, layer: int) -> None:
        """Issue a layer."""

        def route() -> None:
            # What stalled steps leave behind may be anything.
            x = np.nan_to_num(self.hidden[layer], nan=0, posinf=1, neginf=-1)
            scores = np.clip(x, -9, 9) @ self.routers[layer]
            top_k = self.ids[layer].shape[1]
            self.ids[layer][...] = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
            self.weights[layer][...] = 1 / (1 + np.arange(top_k))

        def add() -> None:
            with np.errstate(all="ignore"):
                moved = np.tanh(self.hidden[layer] + self.out[layer])
            np.copyto(self.hidden[layer + 1], moved)

        self.device.work(route)
        self.compute(
            layer,
            self.hidden[layer],
            self.ids[layer],
            self.weights[layer],
            out=self.out[layer],
        )
        self.device.work(add)

    def capture(self, first: int = 0, last: int = LAYERS) -> Callable[[], None]:
        """Return what issues a graph of some layers."""
        stream = self.device.current_stream()
        self.device.begin_capture(stream)
        try:
            for layer in range(first, last):
                self.layer(layer)
        finally:
            graph = self.device.end_capture(stream)
        return lambda: self.device.replay(graph, stream)

    def result(self) -> np.ndarray:
        """Return what a token ends with."""
        return np.array(self.device.to_host(self.hidden[LAYERS]))

    def plain(self, hidden: np.ndarray) -> np.ndarray:
        """Return the result of a token whose steps the host takes."""
        self.begin(hidden)
        for layer in range(LAYERS):
            self.layer(layer)
        return self.result()

    def token(self, hidden: np.ndarray) -> np.ndarray:
        """Return the result of a token whose steps the device takes."""
        self.run(hidden)
        return self.result()

    def run(self, hidden: np.ndarray) -> None:
        """Have the device take a token's steps."""
        self.begin(hidden)
        first: int | None = self.compute.begin_token()
        rounds = 0
        while first is not None:
            rounds += 1
            assert rounds <= LAYERS + 1, "a layer misses experts again and again"
            for layer in range(first, LAYERS):
                self.layer(layer)
            first = self.compute.end_token()

    def replayed(self, hidden: np.ndarray, replay: Callable[[], None]) -> np.ndarray:
        """Return the result of a token from one graph of all layers."""
        self.begin(hidden)
        first: int | None = self.compute.begin_token()
        rounds = 0
        while first is not None:
            rounds += 1
            assert rounds <= LAYERS + 1, "a layer misses experts again and again"
            replay()
            first = self.compute.end_token()
        return self.result()


def inputs(num: int, num_tokens: int = 1, seed: int = 5) -> list[np.ndarray]:
    """Return what some tokens begin with; of a few kinds, so that experts are used again."""
    rng = np.random.default_rng(seed)
    kinds = rng.normal(size=(4, num_tokens, HIDDEN)).astype(FP32)
    return [kinds[rng.integers(4)] for _ in range(num)]


def expected(tokens: list[np.ndarray], top_k: int = TOP_K, seed: int = 0) -> list[np.ndarray]:
    """Return the results with every expert resident, and no token begun."""
    with make_runtime(FakeDevice(), LAYERS * EXPERTS) as runtime:
        model = Model(runtime, tokens[0].shape[0], top_k, seed)
        return [model.plain(hidden) for hidden in tokens]
