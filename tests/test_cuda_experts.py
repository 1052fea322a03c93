"""CudaExperts: what a GPU computes is what the host computes, and does not depend on the cache."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import moecache
from moecache import ExpertCache, ExpertRuntime
from moecache.compute import CudaExperts, on_device
from moecache.compute._residency import residency_of
from moecache.compute.experts import feed_forward, silu
from moecache.errors import ConfigError, MoeCacheError
from moecache.slots import CudaSlots, HostSlots
from moecache.stores.memory import MemoryStore
from tests.helpers.examples import num_examples
from tests.helpers.fake_device import FakeArray, FakeDevice
from tests.helpers.nightly import some
from tests.helpers.pairs import pairwise

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH = 2, 12, 3, 40, 24
FP32 = np.dtype(np.float32)
TYPES = {
    "float32": FP32,
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def make_store(dtype: np.dtype, seed: int = 0) -> MemoryStore:
    """Return experts of random weights, whose outputs are about one."""
    rng = np.random.default_rng(seed)
    gate_up = rng.normal(0, HIDDEN**-0.5, (LAYERS, EXPERTS, 2 * WIDTH, HIDDEN))
    down = rng.normal(0, WIDTH**-0.5, (LAYERS, EXPERTS, HIDDEN, WIDTH))
    return MemoryStore({"gate_up": gate_up.astype(dtype), "down": down.astype(dtype)}, top_k=TOP_K)


def make_runtime(
    device: Any, dtype: np.dtype, capacity: int = LAYERS * EXPERTS, **options: Any
) -> ExpertRuntime:
    """Return a runtime whose slots are on the device."""
    store = make_store(dtype)
    cache = ExpertCache(LAYERS, EXPERTS, capacity, policy=options.pop("policy", "lru"))
    staging = 0 if capacity == LAYERS * EXPERTS else 2
    pool = CudaSlots(store.layout, capacity, staging, device)
    return ExpertRuntime(store, pool, cache, **options)


def make_step(
    dtype: np.dtype, num_tokens: int, seed: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return hidden states, ids and weights of a step."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(num_tokens, HIDDEN)).astype(dtype)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(num_tokens)])
    weights = rng.random((num_tokens, TOP_K)).astype(np.float32)
    return hidden, ids.astype(np.int64), weights / weights.sum(1, keepdims=True)


def on(device: Any, *arrays: np.ndarray) -> list[Any]:
    """Return copies on the device; what it does not know comes as unsigned integers."""
    stream = device.current_stream()
    return [
        device.to_device(array.view(np.uint16) if array.dtype.kind == "V" else array, stream)
        for array in arrays
    ]


def bits(device: Any, array: Any) -> np.ndarray:
    """Return an array's bytes on the host."""
    return device.to_host(array).view(np.uint8)


def expected(
    dtype: np.dtype, layer: int, hidden: np.ndarray, ids: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Return what the host computes, in double precision."""
    store = make_store(dtype)
    out = np.zeros(hidden.shape)
    for token, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            parts = store.view(layer, int(expert))
            both = parts["gate_up"].astype(np.float64) @ hidden[token].astype(np.float64)
            h = silu(both[:WIDTH]) * both[WIDTH:]
            out[token] += share * (parts["down"].astype(np.float64) @ h)
    return out


@pytest.fixture(params=list(TYPES))
def dtype(request: pytest.FixtureRequest) -> np.dtype:
    """Return a type that there are kernels for."""
    return TYPES[request.param]


@pytest.mark.parametrize(
    ("num_tokens", "capacity", "dtype"),
    pairwise([1, 2, 4, 5, 33], [3, 8, LAYERS * EXPERTS], list(TYPES)),
    indirect=["dtype"],
)
def test_the_device_computes_what_the_host_does(
    gpu: Any, dtype: np.dtype, num_tokens: int, capacity: int
) -> None:
    """To the accuracy of the type, however many experts there is room for."""
    hidden, ids, weights = make_step(dtype, num_tokens)
    with make_runtime(gpu, dtype, capacity) as runtime:
        experts = on_device(runtime)
        x, w = on(gpu, hidden, weights)
        for layer in range(LAYERS):
            found = bits(gpu, experts(layer, x, ids, w)).view(dtype).astype(np.float64)
            wanted = expected(dtype, layer, hidden, ids, weights)
            error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
            assert error < (1e-5 if dtype == np.float32 else 1e-2)


@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_few_tokens_do_not_depend_on_what_is_resident(
    gpu: Any, dtype: np.dtype, num_tokens: int
) -> None:
    """One launch or a wave at a time, many slots or few, again and again: the same bits."""
    hidden, ids, weights = make_step(dtype, num_tokens)
    results = []
    for capacity in (3, 5, 11, LAYERS * EXPERTS):
        with make_runtime(gpu, dtype, capacity) as runtime:
            x, w = on(gpu, hidden, weights)
            runtime.usage.fill().wait()
            gpu.synchronize(gpu.current_stream())
            results += [bits(gpu, on_device(runtime)(1, x, ids, w)) for _ in range(3)]
            whole = runtime.stats().num_resident_steps
            assert whole == (3 if capacity == LAYERS * EXPERTS else whole)
    assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("num_tokens", "dtype"),
    some(itertools.product([5, 40], TYPES), lambda case: (case[0] == 5) == (case[1] != "bfloat16")),
    indirect=["dtype"],
)
def test_many_tokens_do_not_depend_on_what_is_resident(
    gpu: Any, dtype: np.dtype, num_tokens: int
) -> None:
    """Each expert's tokens are one product, whenever it arrives."""
    hidden, ids, weights = make_step(dtype, num_tokens)
    results = []
    for capacity in (2, 9, LAYERS * EXPERTS):
        for policy in ("lru", "echo"):
            with make_runtime(gpu, dtype, capacity, policy=policy) as runtime:
                x, w = on(gpu, hidden, weights)
                results += [bits(gpu, on_device(runtime)(0, x, ids, w)) for _ in range(2)]
    assert all(np.array_equal(result, results[0]) for result in results)


def test_everything_resident_is_one_launch_that_nobody_waits_for() -> None:
    """Ids are resolved on the device; the report counts the step."""
    device = FakeDevice(eager=False)
    hidden, ids, weights = make_step(TYPES["float32"], 1)
    with make_runtime(device, TYPES["float32"]) as runtime:
        runtime.usage.fill().wait()
        device.run()
        x, w, chosen = on(device, hidden, weights, ids)
        experts = on_device(runtime)
        experts(0, x, chosen, w)
        device.num_launches.clear()
        device.num_waits = 0
        for layer in (0, 1, 0):
            experts(layer, x, chosen, w)
        assert device.num_launches == {"decode_f32": 3}
        assert device.num_waits == 0
        stats = runtime.stats()
        assert (stats.num_steps, stats.num_resident_steps) == (4, 4)
        assert "4 of them all resident (100%)" in runtime.report()
        device.run()


def test_a_graph_of_a_resident_step_can_be_replayed() -> None:
    """With other hidden states, ids and weights in the same places."""
    device = FakeDevice()
    dtype = TYPES["bfloat16"]
    with make_runtime(device, dtype) as runtime:
        runtime.usage.fill().wait()
        experts = on_device(runtime)
        x, w, chosen = on(device, *(make_step(dtype, 1)[place] for place in (0, 2, 1)))
        out = device.empty(x.shape, np.dtype(np.uint16), device.current_stream())
        experts(1, x, chosen, w, out=out)
        with device.capturing() as graph:
            experts(1, x, chosen, w, out=out)
        for seed in range(5):
            hidden, ids, weights = make_step(dtype, 1, seed)
            x[...], w[...], chosen[...] = hidden.view(np.uint16), weights, ids
            for work in graph:
                work()
            wanted = expected(dtype, 1, hidden, ids, weights)
            error = np.linalg.norm(out.view(dtype).astype(np.float64) - wanted)
            assert error < 1e-2 * np.linalg.norm(wanted)


@pytest.mark.parametrize("eager", [True, False])
def test_a_graph_keeps_its_memory_when_later_steps_need_more(eager: bool) -> None:
    """What it writes intermediate results to is its own until `close`."""
    device, dtype = FakeDevice(eager=eager), TYPES["float32"]
    with make_runtime(device, dtype) as runtime:
        runtime.usage.fill().wait()
        device.run()
        experts = on_device(runtime)
        hidden, ids, weights = make_step(dtype, 1)
        x, w, chosen = on(device, hidden, weights, ids)
        out = device.empty(x.shape, dtype, device.current_stream())
        experts(0, x, chosen, w, out=out)
        with device.capturing() as graph:
            experts(0, x, chosen, w, out=out)
        used = device.used_bytes
        for turn in range(3):
            larger = on(device, *(make_step(dtype, 4, turn)[place] for place in (0, 1, 2)))
            experts(1, *larger)
            device.run()
            out[...] = 0
            for work in graph:
                work()
            assert np.allclose(out, expected(dtype, 0, hidden, ids, weights), atol=1e-4)
        assert device.used_bytes <= used + 2 * device.allocation_bytes
    assert device.used_bytes == 0


def test_a_graph_needs_everything_resident_and_a_step_before() -> None:
    """Each with what to do about it."""
    device = FakeDevice()
    dtype = TYPES["float32"]
    hidden, ids, weights = make_step(dtype, 1)
    x, w, chosen = on(device, hidden, weights, ids)
    out = np.empty_like(x)
    with (
        make_runtime(device, dtype, 8) as runtime,
        device.capturing(),
        pytest.raises(MoeCacheError, match="once every expert is in its slot"),
    ):
        on_device(runtime)(0, x, chosen, w, out=out)
    with make_runtime(device, dtype) as runtime:
        runtime.usage.fill().wait()
        assert residency_of(runtime).begin_step(runtime)
        with device.capturing():
            with pytest.raises(MoeCacheError, match="one step before capturing"):
                on_device(runtime)(0, x, chosen, w, out=out)
            with pytest.raises(ConfigError, match="out="):
                on_device(runtime)(0, x, chosen, w)
        on_device(runtime)(0, x, chosen, w)
        with device.capturing(), pytest.raises(ConfigError, match="ids must be on the device"):
            on_device(runtime)(0, x, ids, w, out=out)


def test_a_wrong_id_on_the_device_makes_its_row_nan(gpu: Any) -> None:
    """The host never saw the id; the other tokens are as they would be without it."""
    dtype = TYPES["float32"]
    hidden, ids, weights = make_step(dtype, 3)
    with make_runtime(gpu, dtype) as runtime:
        runtime.usage.fill().wait()
        x, w = on(gpu, hidden, weights)
        right = gpu.to_host(on_device(runtime)(0, x, on(gpu, ids)[0], w))
        for wrong in (-1, EXPERTS, 2**40):
            bad = ids.copy()
            bad[1, 2] = wrong
            found = gpu.to_host(on_device(runtime)(0, x, on(gpu, bad)[0], w))
            assert np.isnan(found[1]).all()
            assert np.array_equal(found[[0, 2]], right[[0, 2]])


@pytest.mark.parametrize("wrong", [-1, EXPERTS])
@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("capacity", [5, LAYERS * EXPERTS])
def test_a_wrong_id_on_the_host_is_an_error(
    gpu: Any, wrong: int, num_tokens: int, capacity: int
) -> None:
    """It names the id, and the next step is right."""
    dtype = TYPES["float32"]
    hidden, ids, weights = make_step(dtype, num_tokens)
    bad = ids.copy()
    bad[0, 0] = wrong
    with make_runtime(gpu, dtype, capacity) as runtime:
        runtime.usage.fill().wait()
        x, w = on(gpu, hidden, weights)
        with pytest.raises(ValueError, match=f"expert {wrong} is not in"):
            on_device(runtime)(0, x, bad, w)
        found = gpu.to_host(on_device(runtime)(0, x, ids, w))
        assert np.allclose(found, expected(dtype, 0, hidden, ids, weights), atol=1e-4)
        runtime.cache.check()


def test_ids_may_be_on_the_device_where_experts_are_missing(gpu: Any) -> None:
    """Then the ids, int32 or int64, are copied to the host."""
    dtype = TYPES["float32"]
    hidden, ids, weights = make_step(dtype, 2)
    with make_runtime(gpu, dtype, 5) as runtime:
        x, w = on(gpu, hidden, weights)
        for kind in (np.int32, np.int64):
            found = gpu.to_host(on_device(runtime)(0, x, on(gpu, ids.astype(kind))[0], w))
            assert np.allclose(found, expected(dtype, 0, hidden, ids, weights), atol=1e-4)


def test_weights_may_have_the_type_of_hidden(gpu: Any, dtype: np.dtype) -> None:
    """As the routers of some models give them."""
    hidden, ids, weights = make_step(dtype, 2)
    rounded = weights.astype(dtype)
    with make_runtime(gpu, dtype, 5) as runtime:
        x, w = on(gpu, hidden, rounded)
        found = bits(gpu, on_device(runtime)(0, x, ids, w)).view(dtype).astype(np.float64)
        wanted = expected(dtype, 0, hidden, ids, rounded.astype(np.float64))
        assert np.linalg.norm(found - wanted) < 1e-2 * np.linalg.norm(wanted)


def test_no_token_is_no_work(gpu: Any) -> None:
    """An empty batch has an empty result."""
    dtype = TYPES["float32"]
    with make_runtime(gpu, dtype, 5) as runtime:
        x, w = on(gpu, np.empty((0, HIDDEN), dtype), np.empty((0, TOP_K), dtype))
        assert on_device(runtime)(0, x, np.empty((0, TOP_K), np.int64), w).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden": np.zeros((1, HIDDEN + 1), np.float32)}, r"the experts take float32"),
        ({"hidden": np.zeros((1, HIDDEN), np.float64)}, r"hidden is float64"),
        ({"ids": np.zeros((2, TOP_K), np.int64)}, r"must both be"),
        ({"weights": np.zeros((1, TOP_K), np.float64)}, r"weights are float64"),
        ({"out": np.zeros((2, HIDDEN), np.float32)}, r"out is float32 \[2, 40\]"),
        ({"hidden": np.zeros((1, 2 * HIDDEN), np.float32)[:, ::2]}, "not contiguous"),
        ({"hidden": [1.0]}, "a list is in host memory, not on cuda:0"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], problem: str) -> None:
    """With both shapes, before anything is looked up."""
    device = FakeDevice()
    dtype = TYPES["float32"]
    hidden, ids, weights = make_step(dtype, 1)
    with make_runtime(device, dtype, 5) as runtime:
        arguments = {"hidden": hidden, "ids": ids, "weights": weights, **change}
        for name, array in arguments.items():
            if name != "ids" and isinstance(array, np.ndarray):
                arguments[name] = array.view(FakeArray)
        with pytest.raises(ConfigError, match=problem):
            on_device(runtime)(0, **arguments)
        assert runtime.stats().num_steps == 0


def test_experts_without_kernels_are_refused() -> None:
    """Biases, other types and slots in RAM; each with what it is."""
    device = FakeDevice()
    roles: dict[str, np.ndarray] = {
        "gate_up": np.zeros((1, 2, 4, 3), np.float32),
        "down": np.zeros((1, 2, 3, 2), np.float32),
    }
    with (
        moecache.ExpertRuntime(
            store := MemoryStore(roles, top_k=1), HostSlots(store.layout, 2), ExpertCache(1, 2, 2)
        ) as runtime,
        pytest.raises(ConfigError, match="the slots are in RAM"),
    ):
        on_device(runtime)
    for name, array, problem in (
        ("down_bias", np.zeros((1, 2, 3), np.float32), "both biases or none"),
        ("down", np.zeros((1, 2, 3, 2), np.float64), "have no kernels"),
        ("down", np.zeros((1, 2, 3, 5), np.float32), "do not fit each other"),
    ):
        store = MemoryStore({**roles, name: array}, top_k=1)
        pool = CudaSlots(store.layout, 2, 0, device)
        with moecache.ExpertRuntime(store, pool, ExpertCache(1, 2, 2)) as runtime:
            with pytest.raises(ConfigError, match=problem):
                on_device(runtime)
            with pytest.raises(ConfigError, match="is not one of silu"):
                on_device(runtime, "swish")


def test_the_feed_forward_of_the_host_goes_to_the_device(gpu: Any) -> None:
    """`feed_forward` is the same call for arrays of either."""
    dtype = TYPES["float32"]
    hidden, ids, weights = make_step(dtype, 2)
    with make_runtime(gpu, dtype, 5) as runtime:
        place = gpu.locate(on(gpu, hidden)[0])
        (w,) = on(gpu, weights)
        found = gpu.to_host(feed_forward(runtime, 0, place, ids, w))
        assert np.allclose(found, expected(dtype, 0, hidden, ids, weights), atol=1e-4)
        with pytest.raises(ConfigError, match="on_device"):
            feed_forward(runtime, 0, place, ids, w, activation=np.tanh)


def test_a_runtime_that_is_gone_is_an_error() -> None:
    """`CudaExperts` does not keep it alive."""
    device = FakeDevice()
    runtime = make_runtime(device, TYPES["float32"], 5)
    experts = CudaExperts(runtime)
    runtime.close()
    del runtime
    hidden, ids, weights = make_step(TYPES["float32"], 1)
    with pytest.raises(MoeCacheError, match=r"gone|closed"):
        experts(0, hidden, ids, weights)


def results_on(device: FakeDevice, prefetch: str) -> list[np.ndarray]:
    """Return what steps of one token and of many put out, in every layer."""
    dtype, outs = TYPES["float32"], []
    with make_runtime(device, dtype, 4, prefetch=prefetch, loader_threads=1) as runtime:
        for number, size in enumerate([1, 1, 3, 1, 20, 1, 1, 2]):
            hidden, ids, weights = make_step(dtype, size, number)
            x, w = on(device, hidden, weights)
            outs += [on_device(runtime)(layer, x, ids, w) for layer in range(LAYERS)]
        device.run()
        return [out.copy() for out in outs]


@pytest.fixture(scope="module", name="in_order")
def _in_order() -> list[np.ndarray]:
    return results_on(FakeDevice(), "off")


@pytest.mark.parametrize("seed", some(range(num_examples(8)), lambda seed: seed < 3))
@pytest.mark.parametrize("prefetch", ["off", "echo"])
def test_results_do_not_depend_on_when_the_device_comes_to_it(
    in_order: list[np.ndarray], seed: int, prefetch: str
) -> None:
    """Copies, products and refills in any order that events allow: the same bits."""
    late = results_on(FakeDevice(eager=False, seed=seed), prefetch)
    for one, other in zip(in_order, late, strict=True):
        assert np.array_equal(one, other)
