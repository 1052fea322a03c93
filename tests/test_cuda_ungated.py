"""Experts without a gate: up, an activation, and down."""

from typing import Any

import numpy as np
import pytest

from moecache import ExpertCache, ExpertRuntime
from moecache.compute import on_device
from moecache.cuda import check_experts
from moecache.errors import ConfigError
from moecache.layout import ExpertLayout, Role
from moecache.slots import CudaSlots
from moecache.stores.memory import MemoryStore
from tests.helpers.cuda_layers import ACTIVATIONS, DTYPES
from tests.helpers.device_formats import FORMATS, RandomStore
from tests.helpers.fake_device import FakeDevice
from tests.helpers.nightly import some
from tests.helpers.pairs import pairwise
from tests.test_cuda_bits import results_of
from tests.test_cuda_experts import bits, on

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH = 2, 6, 2, 40, 24
NAMES = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def make_arrays(dtype: np.dtype, *, bias: bool = False) -> dict[str, np.ndarray]:
    """Return experts of random weights."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    if bias:
        shapes |= {"up_bias": (WIDTH,), "down_bias": (HIDDEN,)}
    return {
        role: (rng.normal(size=(LAYERS, EXPERTS, *shape)) / 6).astype(dtype)
        for role, shape in shapes.items()
    }


def make_runtime(device: Any, store: MemoryStore, capacity: int) -> ExpertRuntime:
    """Return a runtime whose slots are on the device."""
    cache = ExpertCache(LAYERS, EXPERTS, capacity, policy="lru")
    pool = CudaSlots(store.layout, capacity, 0 if capacity == LAYERS * EXPERTS else 2, device)
    return ExpertRuntime(store, pool, cache)


def make_step(dtype: np.dtype, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return hidden states, ids and weights."""
    rng = np.random.default_rng(1)
    hidden = rng.normal(size=(num_tokens, HIDDEN)).astype(dtype)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(num_tokens)])
    return hidden, ids.astype(np.int64), rng.random((num_tokens, TOP_K)).astype(np.float32)


def computed(
    device: Any,
    arrays: dict[str, np.ndarray],
    step: tuple[np.ndarray, np.ndarray, np.ndarray],
    activation: str,
    capacity: int = LAYERS * EXPERTS,
) -> np.ndarray:
    """Return what a device computes of a step of the second layer."""
    hidden, ids, weights = step
    with make_runtime(device, MemoryStore(arrays, top_k=TOP_K), capacity) as runtime:
        runtime.usage.fill().wait()
        x, w = on(device, hidden, weights)
        found = bits(device, on_device(runtime, activation)(1, x, ids, w))
        return found.view(hidden.dtype).reshape(hidden.shape)


@pytest.mark.parametrize(
    ("num_tokens", "activation", "suffix", "bias"),
    pairwise([1, 4, 5, 70], list(NAMES), list(DTYPES), [False, True]),
)
def test_the_device_computes_what_float64_does(
    gpu: Any, num_tokens: int, activation: str, suffix: str, bias: bool
) -> None:
    """Of few tokens and of many, with few slots and with all; the bits do not depend on these."""
    dtype = DTYPES[suffix]
    arrays, step = make_arrays(dtype, bias=bias), make_step(dtype, num_tokens)
    hidden, ids, weights = step
    wide = {role: array[1].astype(np.float64) for role, array in arrays.items()}
    h = np.einsum("tkoi,ti->tko", wide["up"][ids], hidden.astype(np.float64))
    h = ACTIVATIONS[NAMES.index(activation)](h + (wide["up_bias"][ids] if bias else 0))
    rows = np.einsum("tkoi,tki->tko", wide["down"][ids], h)
    rows += wide["down_bias"][ids] if bias else 0
    wanted = (rows * weights[..., None]).sum(1)
    whole, few = (computed(gpu, arrays, step, activation, n) for n in (LAYERS * EXPERTS, 3))
    error = np.linalg.norm(whole.astype(np.float64) - wanted)
    assert error < (1e-5 if suffix == "f32" else 1e-2) * np.linalg.norm(wanted)
    if suffix != "f32" or num_tokens <= 4:
        assert whole.tobytes() == few.tobytes()


def make_twins(name: str) -> tuple[MemoryStore, MemoryStore]:
    """Return experts without a gate, and experts whose gate is their up."""
    size, width = (256, 96) if name.startswith("q") else (64, 96)
    if name in DTYPES:
        rng = np.random.default_rng(0)
        up = (rng.normal(size=(1, 4, width, size)) / 6).astype(DTYPES[name])
        down = (rng.normal(size=(1, 4, size, width)) / 6).astype(DTYPES[name])
        twin = {"gate_up": np.concatenate([up, up], 2), "down": down}
        return MemoryStore({"up": up, "down": down}, top_k=2), MemoryStore(twin, top_k=2)
    sizes = {"num_layers": 1, "num_experts": 4, "top_k": 2}
    store = RandomStore(name, "q8_0", size, width, halves=0, **sizes)
    parts = [store.view(0, expert) for expert in range(4)]
    arrays = {
        "gate_up": np.stack([np.concatenate([part["up"], part["up"]]) for part in parts])[None],
        "down": np.stack([part["down"] for part in parts])[None],
    }
    twin_store = MemoryStore(arrays, top_k=2)
    gate_up = Role("gate_up", (2 * width, size), format=name, matrices=2)
    twin_store._layout = ExpertLayout(4, 2, [[gate_up, store.layout.layers[0][1]]])
    return store, twin_store


@pytest.mark.parametrize(
    "name", some([*DTYPES, *FORMATS], lambda name: name in {"f32", "bf16", "nvfp4", "q4_k"})
)
def test_a_square_is_a_gate_that_is_up_itself(name: str) -> None:
    """Every kernel of every format: relu(up) * up has the bits of relu(up)**2, but for a zero's."""
    device = FakeDevice()
    device.num_multiprocessors = 2
    store, twin = make_twins(name)
    found, dense = results_of(device, store, "relu2")
    wanted, twins_dense = results_of(device, twin, "relu")
    assert found.keys() == wanted.keys()
    for kernel, array in wanted.items():
        given = DTYPES["bf16"] if array.dtype == np.uint16 else array.dtype
        one, other = (result.view(given).astype(np.float32) for result in (found[kernel], array))
        assert np.array_equal(one, other), kernel
        assert other.any(), kernel
    assert (dense is None) == (name == "f32")
    if dense is not None and twins_dense is not None:
        assert np.array_equal(dense, twins_dense)


@pytest.mark.parametrize("suffix", DTYPES)
@pytest.mark.parametrize("activation", NAMES[:4])
@pytest.mark.parametrize("num_tokens", [2, 9])
def test_no_gate_is_a_gate_whose_up_is_one(suffix: str, activation: str, num_tokens: int) -> None:
    """Bit for bit: zeros times anything, and a bias of one."""
    dtype, device = DTYPES[suffix], FakeDevice()
    arrays, step = make_arrays(dtype, bias=True), make_step(dtype, num_tokens)
    gated = {
        "gate_up": np.concatenate([arrays["up"], np.zeros_like(arrays["up"])], 2),
        "gate_up_bias": np.concatenate([arrays["up_bias"], np.ones_like(arrays["up_bias"])], 2),
        **{role: array for role, array in arrays.items() if role.startswith("down")},
    }
    found = computed(device, arrays, step, activation)
    assert found.tobytes() == computed(device, gated, step, activation).tobytes()
    assert found.astype(np.float32).all()


def test_a_token_takes_them_without_the_host(gpu: Any) -> None:
    """Its steps have the bits of others, and a miss is told."""
    dtype = DTYPES["bf16"]
    arrays, step = make_arrays(dtype), make_step(dtype, 1)
    hidden, ids, weights = step
    wanted = computed(gpu, arrays, step, "relu2")
    with make_runtime(gpu, MemoryStore(arrays, top_k=TOP_K), 4) as runtime:
        compute = on_device(runtime, "relu2")
        x, w, where = on(gpu, hidden, weights, ids)
        layers = []
        first: int | None = compute.begin_token()
        while first is not None:
            layers.append(first)
            for layer in range(first, LAYERS):
                out = compute(layer, x, where, w)
            first = compute.end_token()
        assert layers == [0, 0, 1]
        assert bits(gpu, out).tobytes() == wanted.tobytes()


def test_what_takes_a_gate_is_refused() -> None:
    """Limited activations, rows that alternate, both roles at once, one bias."""
    device = FakeDevice()
    arrays = make_arrays(DTYPES["f32"])

    def refused(given: dict[str, np.ndarray], problem: str, **options: Any) -> None:
        runtime = make_runtime(device, MemoryStore(given, top_k=TOP_K), 4)
        with runtime, pytest.raises(ConfigError, match=problem):
            on_device(runtime, **options)

    for name in ("swiglu", "clamped_silu"):
        refused(arrays, f"{name}.*have no gate", activation=name)
    refused(arrays, "alternate.*have no gate", is_interleaved=True)
    both = np.zeros((LAYERS, EXPERTS, 2 * WIDTH, HIDDEN), np.float32)
    refused({**arrays, "gate_up": both}, "down, gate_up, up is no feed-forward that has a kernel")
    refused({**arrays, "up": both}, r"up \[48, 40\] and down \[40, 24\] do not fit")
    one = np.zeros((LAYERS, EXPERTS, WIDTH), np.float32)
    refused({**arrays, "up_bias": one}, "with both biases or none")
    check_experts(MemoryStore(arrays, top_k=TOP_K).layout)
