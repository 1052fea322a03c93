"""Roles with a format: in a store, in slots, and computed there."""

import threading
import time
from typing import Any

import numpy as np
import pytest

import moecache
from moecache import experts, formats, kernels
from moecache.errors import ConfigError
from moecache.layout import ExpertLayout, Role
from moecache.slots import HostSlots
from moecache.stores import MemoryStore
from tests.helpers import formats as oracle

LAYERS, EXPERTS, HIDDEN, WIDTH = 2, 6, 64, 32
SHAPES = {"gate_up": (2 * WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}


def _blocks(name: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    return oracle.random_blocks(name, shape[0], shape[1] // 32, seed)


def _stacks(names: dict[str, str]) -> dict[str, np.ndarray]:
    """Return each role's bytes, as small numbers that a feed-forward can take."""
    rng = np.random.default_rng(3)
    stacks = {}
    for role, name in names.items():
        shape = SHAPES[role]
        values = rng.standard_normal((LAYERS * EXPERTS, *shape)) * shape[1] ** -0.5
        blocks = np.stack([formats.quantize(one, name)["blocks"] for one in values])
        stacks[role] = blocks.reshape(LAYERS, EXPERTS, *blocks.shape[1:])
    return stacks


def _runtime(names: dict[str, str], capacity: int) -> moecache.ExpertRuntime:
    store = MemoryStore(
        _stacks(names), top_k=2, formats={role: (names[role], SHAPES[role]) for role in names}
    )
    cache = moecache.ExpertCache(LAYERS, EXPERTS, capacity)
    return moecache.ExpertRuntime(store, HostSlots(store.layout, capacity + 2), cache)


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
@pytest.mark.parametrize("is_tiled", [False, True])
def test_a_slot_has_the_values_of_the_blocks(name: str, is_tiled: bool) -> None:
    """In another order; what the file has in that order is read into the slot itself."""
    shape = (24, 96)
    role = Role("down", shape, format=name, is_tiled=is_tiled)
    pool = HostSlots(ExpertLayout(4, 1, [[role]]), 3)
    blocks = _blocks(name, shape, 0)
    stored = blocks.reshape(-1)
    if is_tiled:
        stored = np.empty(role.nbytes, np.uint8)
        kernels.tile(blocks, name, *shape, stored)

    buffers = pool.buffers(2, 0)
    buffers["down"][...] = stored
    pool.upload(2, 0, buffers)

    found = pool.expert(2, 0)["down"]
    assert (buffers["down"].ctypes.data == found.ctypes.data) == is_tiled
    assert (pool.max_buffers is None) == is_tiled
    np.testing.assert_array_equal(kernels.values_in(found, role), oracle.values_of(name, blocks))
    assert not pool.expert(1, 0)["down"].any()


@pytest.mark.parametrize("name", ["mxfp4", "fp8[16x32,bf16]", "int4[1x16,f32]"])
def test_a_slot_has_the_forms_of_two_matrices(name: str) -> None:
    """One after the other, each of whole tiles; what the file has so is read into the slot."""
    known, role = formats.find_format(name), Role("gate_up", (42, 40), format=name, matrices=2)
    tiled = Role("gate_up", (42, 40), format=name, matrices=2, is_tiled=True)
    rng = np.random.default_rng(4)
    parts = [known.quantize(rng.standard_normal((21, 40))) for _ in range(2)]
    raw = np.concatenate([a.reshape(-1).view(np.uint8) for one in parts for a in one.values()])
    pool = HostSlots(ExpertLayout(2, 1, [[role], [tiled]]), 2)
    pool.upload(0, 0, {"gate_up": raw})
    form = pool.expert(0, 0)["gate_up"]
    pool.upload(1, 1, {"gate_up": form})

    assert form.nbytes == role.form_bytes == 2 * known.form.nbytes(21, 40)  # type: ignore[union-attr]
    assert pool.expert(1, 1)["gate_up"].tobytes() == form.tobytes()
    expected = np.concatenate([known.dequantize(one) for one in parts])
    for array, given in ((form, role), (form, tiled)):
        assert kernels.values_in(array, given).tobytes() == expected.tobytes()


def test_layers_may_have_formats_of_their_own() -> None:
    """A slot takes the widest; each layer finds its own values there."""
    roles = [Role("down", (16, 64), format="q4_0"), Role("down", (48, 32), format="q8_0")]
    plain = Role("down", (5, 3), np.dtype(np.float32))
    pool = HostSlots(ExpertLayout(2, 1, [[roles[0]], [roles[1]], [plain]]), 2)

    for layer, role in enumerate(roles):
        blocks = _blocks(role.format, role.shape, layer)  # type: ignore[arg-type]
        pool.upload(0, layer, {"down": blocks.reshape(-1)})
        values = kernels.values_in(pool.expert(0, layer)["down"], role)
        np.testing.assert_array_equal(values, oracle.values_of(role.format, blocks))

    pool.upload(0, 2, {"down": np.ones((5, 3), np.float32)})
    assert (kernels.values_in(pool.expert(0, 2)["down"], plain) == 1).all()


@pytest.mark.parametrize(
    "names",
    [
        {"gate_up": "q4_0", "down": "q8_0"},
        {"gate_up": "q8_0", "down": "q4_0"},
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_experts_in_a_format_are_computed_where_they_lie(
    names: dict[str, str], num_tokens: int
) -> None:
    """The same bits at every number of slots; NumPy's output but for activations of 15 bits."""
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal((num_tokens, HIDDEN)).astype(np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:2] for _ in range(num_tokens)])
    weights = rng.random((num_tokens, 2)).astype(np.float32)

    def output(runtime: moecache.ExpertRuntime, compute: str) -> np.ndarray:
        return experts.feed_forward(runtime, 1, hidden, ids, weights, compute=compute)

    with _runtime(names, LAYERS * EXPERTS) as whole, _runtime(names, 1) as tiny:
        fast = output(whole, "fast")
        np.testing.assert_array_equal(fast, output(tiny, "fast"))
        np.testing.assert_array_equal(fast, output(tiny, "fast"))
        bound = 3e-4 * np.abs(fast).max()
        np.testing.assert_allclose(fast, output(tiny, "numpy"), rtol=0, atol=bound)
        wanted = _expected(names, hidden, ids, weights)
        np.testing.assert_allclose(fast, wanted, rtol=0, atol=bound)


def _expected(names: dict[str, str], hidden: Any, ids: Any, weights: Any) -> np.ndarray:
    """Return layer 1's output in float64, by the oracle's values."""
    stacks, out = _stacks(names), np.zeros(hidden.shape)
    for token, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            up, down = (
                oracle.values_of(names[role], stacks[role][1, expert]).astype(np.float64)
                for role in ("gate_up", "down")
            )
            both = up @ hidden[token].astype(np.float64)
            gate, rest = both[:WIDTH], both[WIDTH:]
            out[token] += share * (down @ (gate / (1 + np.exp(-gate)) * rest))
    return out


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ({"shape": (4, 33), "format": "q4_0"}, "whole blocks of 32 columns; 33"),
        ({"shape": (4, 32), "format": "q9"}, "format 'q9' is not supported; supported are"),
        ({"shape": (4, 32), "format": "bf16"}, "give the dtype alone"),
        ({"shape": (-4, 32), "format": "q4_0"}, "cannot have the shape"),
        ({"shape": (2, 4, 32), "format": "q4_0"}, r"matrix is \[rows, columns\]"),
        ({"shape": (4, 32), "format": "q4_0", "dtype": np.dtype(np.int8)}, "bytes are uint8"),
    ],
)
def test_a_role_that_no_file_can_have_is_refused(role: dict[str, Any], message: str) -> None:
    """By what it is, before any slot is made."""
    with pytest.raises(ConfigError, match=message):
        Role("down", **role)


def test_a_stack_of_another_size_than_its_format_is_refused() -> None:
    """Both sizes are named."""
    with pytest.raises(ConfigError, match=r"'down' in q4_0 of shape \[64, 32\] takes 1152 bytes"):
        MemoryStore({"down": np.zeros((1, 2, 5), np.uint8)}, formats={"down": ("q4_0", (64, 32))})


def test_only_native_floats_are_multiplied() -> None:
    """Others would be read as what they are not."""
    inputs = np.ones((1, 32), ">f4")
    with pytest.raises(ConfigError, match="not >f4"):
        kernels.products(inputs, np.ones((4, 32), np.float32))


def test_no_tokens_have_no_output() -> None:
    """An empty batch is no error."""
    names = {"gate_up": "q4_0", "down": "q8_0"}
    hidden = np.zeros((0, HIDDEN), np.float32)
    ids, weights = np.zeros((0, 2), np.int64), np.zeros((0, 2), np.float32)
    with _runtime(names, 2) as runtime:
        for compute in ("numpy", "fast"):
            out = experts.feed_forward(runtime, 0, hidden, ids, weights, compute=compute)
            assert out.shape == (0, HIDDEN)


def test_slots_that_are_computed_are_filled_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what is read ahead, and nobody looks; the thread ends with the runtime."""
    monkeypatch.setattr("moecache.runtime._parts.usable_cores", lambda: 2)
    runtime = _runtime({"gate_up": "q4_0", "down": "q8_0"}, 4)
    names = {thread.name for thread in threading.enumerate()}
    assert "moecache-filler" in names
    # It sleeps while nothing is on its way.
    assert runtime._loader.prefetch(1, 3)
    deadline = time.monotonic() + 30
    while runtime.cache.slot_table[1, 3] < 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    slot = int(runtime.cache.slot_table[1, 3])
    expected = runtime.store.view(1, 3)["down"]
    role = next(one for one in runtime.layout.layers[1] if one.name == "down")
    found = experts.values_in(runtime.expert(slot, 1)["down"], role)
    np.testing.assert_array_equal(
        found, experts.values_in(np.asarray(expected).reshape(-1), role, stored=True)
    )
    runtime.close()
    assert "moecache-filler" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(("cores", "loader_threads"), [(1, 1), (2, 0)])
def test_callers_fill_slots_where_no_thread_may(
    monkeypatch: pytest.MonkeyPatch, cores: int, loader_threads: int
) -> None:
    """With one core, or where none was asked for."""
    monkeypatch.setattr("moecache.runtime._parts.usable_cores", lambda: cores)
    store = MemoryStore(
        _stacks({"gate_up": "q4_0", "down": "q8_0"}),
        top_k=2,
        formats={"gate_up": ("q4_0", SHAPES["gate_up"]), "down": ("q8_0", SHAPES["down"])},
    )
    cache = moecache.ExpertCache(LAYERS, EXPERTS, 4)
    with moecache.ExpertRuntime(
        store, HostSlots(store.layout, 6), cache, loader_threads=loader_threads
    ) as runtime:
        assert "moecache-filler" not in {thread.name for thread in threading.enumerate()}
        assert sum(map(len, runtime.waves(0, np.array([[1, 2]])))) == 2
