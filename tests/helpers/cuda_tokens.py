"""A small model on a device, to be run token by token, in a graph or not."""

import functools
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
# Routers and sums on a GPU. One thread a token: it is the order of the sums that matters.
KERNELS = """
extern "C" __global__ void route(
    const float* hidden, const float* router, int size, int num_experts, int top_k, long long* ids,
    float* weights)
{
    const int token = threadIdx.x;
    unsigned chosen = 0;
    for (int k = 0; k < top_k; k++) {
        int best = -1;
        float highest = 0;
        for (int expert = 0; expert < num_experts; expert++) {
            if (chosen >> expert & 1) continue;
            float score = 0;
            for (int i = 0; i < size; i++) {
                const float x = hidden[token * size + i];
                score += (x == x ? fminf(fmaxf(x, -9), 9) : 0) * router[i * num_experts + expert];
            }
            if (best < 0 || score > highest) best = expert, highest = score;
        }
        chosen |= 1u << best;
        ids[token * top_k + k] = best;
        weights[token * top_k + k] = 1.0f / (1 + k);
    }
}

extern "C" __global__ void add(const float* hidden, const float* out, float* next, int count)
{
    for (int i = threadIdx.x; i < count; i += blockDim.x) next[i] = tanhf(hidden[i] + out[i]);
}
"""


def make_runtime(device: Any, capacity: int, **options: Any) -> ExpertRuntime:
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
        if not isinstance(self.device, FakeDevice):
            self._routers = [self.device.to_device(router, stream) for router in self.routers]
            for name in ("route", "add"):  # before a graph is captured
                _kernel(name)

    def begin(self, hidden: np.ndarray) -> None:
        """Give the device what a token begins with."""
        if isinstance(self.device, FakeDevice):
            given = hidden.copy()
            self.device.work(lambda: np.copyto(self.hidden[0], given))
        else:
            self.hidden[0].set(hidden)

    def layer(self, layer: int) -> None:
        """Issue a layer."""
        self.route(layer)
        self.compute(
            layer,
            self.hidden[layer],
            self.ids[layer],
            self.weights[layer],
            out=self.out[layer],
        )
        self.add(layer)

    def route(self, layer: int) -> None:
        """Issue a layer's router."""

        def work() -> None:
            # What stalled steps leave behind may be anything.
            x = np.nan_to_num(self.hidden[layer], nan=0, posinf=1, neginf=-1)
            scores = np.clip(x, -9, 9) @ self.routers[layer]
            top_k = self.ids[layer].shape[1]
            self.ids[layer][...] = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
            self.weights[layer][...] = 1 / (1 + np.arange(top_k))

        if isinstance(self.device, FakeDevice):
            self.device.work(work)
            return
        num_tokens, top_k = self.ids[layer].shape
        sizes = np.int32(HIDDEN), np.int32(EXPERTS), np.int32(top_k)
        arrays = self.ids[layer], self.weights[layer]
        _kernel("route")(
            (1,), (num_tokens,), (self.hidden[layer], self._routers[layer], *sizes, *arrays)
        )

    def add(self, layer: int) -> None:
        """Issue the sum behind a layer's experts."""

        def work() -> None:
            with np.errstate(all="ignore"):
                moved = np.tanh(self.hidden[layer] + self.out[layer])
            np.copyto(self.hidden[layer + 1], moved)

        if isinstance(self.device, FakeDevice):
            self.device.work(work)
            return
        arrays = self.hidden[layer], self.out[layer], self.hidden[layer + 1]
        _kernel("add")((1,), (128,), (*arrays, np.int32(self.hidden[layer].size)))

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


def expected(
    tokens: list[np.ndarray], top_k: int = TOP_K, seed: int = 0, device: Any = None
) -> list[np.ndarray]:
    """Return the results with every expert resident, and no token begun."""
    with make_runtime(device or FakeDevice(), LAYERS * EXPERTS) as runtime:
        model = Model(runtime, tokens[0].shape[0], top_k, seed)
        return [model.plain(hidden) for hidden in tokens]


@functools.cache
def _kernel(name: str) -> Any:
    import cupy

    return cupy.RawModule(code=KERNELS, options=("-fmad=false",)).get_function(name)
