"""CudaExperts over quantised experts, and experts with biases."""

from typing import Any

import numpy as np
import pytest

from moecache import ExpertCache, ExpertRuntime
from moecache.compute import on_device
from moecache.errors import ConfigError
from moecache.layout import ExpertLayout
from moecache.slots import CudaSlots
from moecache.stores.memory import MemoryStore
from tests.helpers.cuda_layers import ACTIVATIONS
from tests.helpers.device_formats import RandomStore
from tests.helpers.fake_device import FakeDevice
from tests.helpers.nightly import some
from tests.test_cuda_experts import bits, on

TOP_K, EXPERTS, LAYERS = 2, 8, 2
# Name: formats of gate_up (or up) and down, hidden size, width, matrices of gate_up, biases.
KINDS: dict[str, tuple[str, str, int, int, int, str]] = {
    "gpt-oss": ("mxfp4", "mxfp4", 64, 96, 1, "bfloat16"),
    "Q4_K_M": ("q4_k", "q6_k", 256, 256, 2, ""),
    "fp8": ("fp8[16x32,f32]", "fp8[16x32,f32]", 64, 48, 2, ""),
    "mixed": ("q8_0", "int4[1x32,bf16]", 64, 96, 1, "float32"),
    "Nemotron 3": ("nvfp4", "nvfp4", 64, 96, 0, ""),
    "no gate, biases": ("q8_0", "fp8[16x32,f32]", 64, 96, 0, "float32"),
}
# So low that gate and up, both ways, meet it.
ALPHA, LIMIT = 1.702, 0.5


def make_store(kind: str) -> RandomStore:
    """Return random experts of a kind."""
    gate_up, down, size, width, halves, bias = KINDS[kind]
    return RandomStore(gate_up, down, size, width, halves=halves, bias=bias or None)


def make_runtime(device: Any, store: MemoryStore, capacity: int) -> ExpertRuntime:
    """Return a runtime whose slots are on the device."""
    cache = ExpertCache(LAYERS, EXPERTS, capacity, policy="lru")
    pool = CudaSlots(store.layout, capacity, 0 if capacity == LAYERS * EXPERTS else 2, device)
    return ExpertRuntime(store, pool, cache)


def options_of(kind: str) -> dict[str, Any]:
    """Return what a kind's gate needs."""
    if KINDS[kind][4] == 0:
        return {"activation": "relu2"}
    if kind != "gpt-oss":
        return {}
    return {"activation": "swiglu", "is_interleaved": True, "alpha": ALPHA, "limit": LIMIT}


def make_step(store: RandomStore, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return hidden states in bfloat16, ids and weights."""
    rng = np.random.default_rng(num_tokens)
    size = store.layout.layers[0][0].shape[1]
    hidden = rng.normal(size=(num_tokens, size)).astype(np.dtype("bfloat16"))
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(num_tokens)])
    return hidden, ids.astype(np.int64), rng.random((num_tokens, TOP_K)).astype(np.float32)


def expected(
    store: RandomStore, kind: str, layer: int, step: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> np.ndarray:
    """Return what float64 gives of the values that the formats say."""
    hidden, ids, weights = step
    out = np.zeros(hidden.shape)
    wide = "gate_up" if KINDS[kind][4] else "up"
    biases = {name: array.astype(np.float64) for name, array in store.biases.items()}
    for token, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
        x = hidden[token].astype(np.float64)
        for expert, share in zip(chosen.tolist(), shares, strict=True):
            both = store.values[wide, layer, expert].astype(np.float64) @ x
            if biases:
                both += biases[f"{wide}_bias"][layer, expert]
            if kind == "gpt-oss":
                gate, up = np.minimum(both[::2], LIMIT), np.clip(both[1::2], -LIMIT, LIMIT)
                h = gate / (1 + np.exp(-ALPHA * gate)) * (up + 1)
            elif wide == "up":
                h = np.maximum(both, 0) ** 2
            else:
                gate, up = np.split(both, 2)
                h = ACTIVATIONS[0](gate) * up
            row = store.values["down", layer, expert].astype(np.float64) @ h
            out[token] += share * (row + (biases["down_bias"][layer, expert] if biases else 0))
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", some([1, 3, 7], lambda num_tokens: num_tokens != 3))
def test_the_device_computes_what_the_format_says(gpu: Any, kind: str, num_tokens: int) -> None:
    """With few slots and with all, of few tokens and of more; all with the same bits."""
    store, results = make_store(kind), []
    step = make_step(store, num_tokens)
    wanted = expected(store, kind, 1, step)
    for capacity in (2, LAYERS * EXPERTS):
        hidden, ids, weights = step
        with make_runtime(gpu, make_store(kind), capacity) as runtime:
            runtime.usage.fill().wait()
            x, w = on(gpu, hidden, weights)
            experts = on_device(runtime, **options_of(kind))
            assert experts is on_device(runtime, **options_of(kind))
            results.append(bits(gpu, experts(1, x, ids, w)))
    found = results[0].view(np.dtype("bfloat16")).reshape(wanted.shape).astype(np.float64)
    assert np.linalg.norm(found - wanted) < 1e-2 * np.linalg.norm(wanted)
    assert np.array_equal(results[0], results[1])


def test_hidden_states_are_of_the_type_that_was_asked_for(gpu: Any) -> None:
    """Quantised experts take any, and no other than that."""
    store = make_store("fp8")
    hidden, ids, weights = make_step(store, 1)
    wanted = expected(store, "fp8", 0, (hidden, ids, weights))
    with make_runtime(gpu, store, LAYERS * EXPERTS) as runtime:
        experts = on_device(runtime, dtype="float32")
        x, w, narrow = on(gpu, hidden.astype(np.float32), weights, hidden)
        found = gpu.to_host(experts(0, x, ids, w))
        assert np.linalg.norm(found - wanted) < 1e-5 * np.linalg.norm(wanted)
        with pytest.raises(ConfigError, match="the experts take float32"):
            experts(0, narrow, ids, w)
        with pytest.raises(ConfigError, match=r"hidden states of float64.*float32, float16"):
            on_device(runtime, dtype="float64")


def test_what_no_kernel_computes_is_refused_by_name() -> None:
    """Formats, one bias alone, rows that alternate in two matrices, a type that is not the own."""
    device = FakeDevice()

    def refused(store: MemoryStore, problem: str, **options: Any) -> None:
        runtime = make_runtime(device, store, 4)
        with runtime, pytest.raises(ConfigError, match=problem):
            on_device(runtime, **options)

    unread = RandomStore("q2_k", "q8_0", 256, 256)
    refused(unread, "experts in q2_k have no kernel on a GPU")
    problem = "alternate in one matrix, and these are two"
    refused(make_store("fp8"), problem, is_interleaved=True)
    arrays = {
        "gate_up": np.zeros((LAYERS, EXPERTS, 8, 4), np.float32),
        "down": np.zeros((LAYERS, EXPERTS, 4, 4), np.float32),
        "gate_up_bias": np.zeros((LAYERS, EXPERTS, 8), np.float32),
    }
    for name, array, problem in (
        ("down_bias", None, "with both biases or none"),
        ("down_bias", np.zeros((LAYERS, EXPERTS, 4), np.float64), "float64"),
        ("down_bias", np.zeros((LAYERS, EXPERTS, 5), np.float32), r"is not \[4\]"),
    ):
        made = arrays if array is None else {**arrays, name: array}
        refused(MemoryStore(made, top_k=TOP_K), problem)
    del arrays["gate_up_bias"]
    problem = r"hidden states of bfloat16.*they take float32"
    refused(MemoryStore(arrays, top_k=TOP_K), problem, dtype="bfloat16")


def test_a_compute_form_is_for_processors() -> None:
    """Slots on a GPU take the file's own bytes; the error says which file to open."""
    store = make_store("mixed")
    roles = [
        type(role)(role.name, (64, 64), format="q8_0", is_tiled=True)
        for role in store.layout.layers[0][:1]
    ]
    layout = ExpertLayout(EXPERTS, TOP_K, [roles] * LAYERS)
    with pytest.raises(ConfigError, match="the checkpoint that it was packed from"):
        CudaSlots(layout, 2, 0, FakeDevice())


@pytest.mark.parametrize("activation", ["silu", "swiglu", "clamped_silu"])
def test_plain_experts_may_have_biases(gpu: Any, activation: str) -> None:
    """In float32, with both kinds of gates, of one token and of nine."""
    rng = np.random.default_rng(0)
    shapes = {"gate_up": (48, 40), "down": (40, 24), "gate_up_bias": (48,), "down_bias": (40,)}
    arrays = {
        role: (rng.normal(size=(LAYERS, EXPERTS, *shape)) / 6).astype(np.float32)
        for role, shape in shapes.items()
    }
    for num_tokens in (1, 9):
        hidden = rng.normal(size=(num_tokens, 40)).astype(np.float32)
        ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(num_tokens)])
        weights = rng.random(ids.shape).astype(np.float32)
        both = np.einsum("tkoi,ti->tko", arrays["gate_up"][0, ids], hidden.astype(np.float64))
        both += arrays["gate_up_bias"][0, ids]
        gate, up = both[..., :24], both[..., 24:]
        if activation == "swiglu":
            gate, up = np.minimum(gate, 1), np.clip(up, -1, 1)
            h = gate / (1 + np.exp(-2 * gate)) * (up + 1)
        elif activation == "clamped_silu":
            h = ACTIVATIONS[0](np.minimum(gate, 1)) * np.clip(up, -1, 1)
        else:
            h = ACTIVATIONS[0](gate) * up
        rows = np.einsum("tkoi,tki->tko", arrays["down"][0, ids], h) + arrays["down_bias"][0, ids]
        wanted = (rows * weights[..., None]).sum(1)
        for capacity in (3, LAYERS * EXPERTS):
            store = MemoryStore(arrays, top_k=TOP_K)
            with make_runtime(gpu, store, capacity) as runtime:
                runtime.usage.fill().wait()
                x, w = on(gpu, hidden, weights)
                found = gpu.to_host(on_device(runtime, activation, alpha=2, limit=1)(0, x, ids, w))
                assert np.linalg.norm(found - wanted) < 1e-5 * np.linalg.norm(wanted)
