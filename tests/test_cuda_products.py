"""The products of many tokens, all experts of a wave in one launch."""

import numpy as np
import pytest

from moecache import ExpertCache, ExpertRuntime
from moecache.compute import _waves, on_device
from moecache.cuda import Memory
from moecache.cuda._launches import tiles_of
from moecache.slots import CudaSlots
from tests.helpers.cuda_layers import ACTIVATIONS
from tests.helpers.device_formats import RandomStore
from tests.helpers.fake_device import FakeDevice
from tests.test_cuda_experts import bits, on

LAYERS, EXPERTS, TOP_K, SIZE, WIDTH = 1, 5, 2, 40, 72
BF16 = np.dtype("bfloat16")


class Wave:
    """Slots of experts, and their pairs one behind the other."""

    def __init__(self, slots: list[int], counts: list[int]) -> None:
        self.slots = np.array(slots)
        self.offsets = np.cumsum([0, *counts])


def make_step(num_tokens: int, num_used: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return hidden states, ids of the first experts, and weights."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(num_tokens, SIZE)).astype(BF16)
    ids = np.stack([rng.permutation(num_used)[:TOP_K] for _ in range(num_tokens)])
    return hidden, ids.astype(np.int64), rng.random((num_tokens, TOP_K)).astype(np.float32)


def make_store() -> RandomStore:
    """Return experts in two formats."""
    return RandomStore(
        "fp8[16x32,f32]",
        "int8[1x*,f32]",
        SIZE,
        WIDTH,
        num_layers=LAYERS,
        num_experts=EXPERTS,
        top_k=TOP_K,
    )


def make_runtime(device: FakeDevice, store: RandomStore, capacity: int) -> ExpertRuntime:
    """Return a runtime whose slots are on the device."""
    cache = ExpertCache(LAYERS, EXPERTS, capacity, policy="lru")
    return ExpertRuntime(store, CudaSlots(store.layout, capacity, 2, device), cache)


def computed(
    step: tuple[np.ndarray, np.ndarray, np.ndarray], capacity: int, *, eager: bool = True
) -> tuple[np.ndarray, FakeDevice, RandomStore]:
    """Return what a device with some slots computes of a step, the device, and the experts."""
    device, store = FakeDevice(eager=eager), make_store()
    hidden, ids, weights = step
    with make_runtime(device, store, capacity) as runtime:
        if capacity == EXPERTS:
            runtime.usage.fill().wait()
        x, w = on(device, hidden, weights)
        found = on_device(runtime)(0, x, ids, w)
        device.run()
        return bits(device, found).view(BF16).reshape(hidden.shape), device, store


def test_a_wave_is_tiles_of_64_pairs_of_one_expert() -> None:
    """Slot, first pair, number of pairs; the last tile of an expert is short."""
    wave = Wave([7, 2, 9], [64, 1, 130])
    expected = [[7, 0, 64], [2, 64, 1], [9, 65, 64], [9, 129, 64], [9, 193, 2]]
    assert tiles_of(wave).tolist() == expected


def test_experts_of_several_tiles_are_what_float64_gives() -> None:
    """Two experts have 140 rows; hidden size and width end within a unit and within a tile."""
    step = make_step(70, 2)
    found, device, store = computed(step, EXPERTS)
    hidden, ids, weights = step
    expected = np.zeros(hidden.shape)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights, strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            gate_up = store.values["gate_up", 0, expert].astype(np.float64)
            gate, up = np.split(gate_up @ hidden[token].astype(np.float64), 2)
            down = store.values["down", 0, expert].astype(np.float64)
            expected[token] += share * (down @ (ACTIVATIONS[0](gate) * up))
    error = np.linalg.norm(found.astype(np.float64) - expected)
    assert error < 1e-2 * np.linalg.norm(expected)
    launched = {name.split("_bf16")[0]: num for name, num in device.num_launches.items()}
    assert launched == {"multiply_gate_up": 1, "multiply_down": 1, "combine": 1}


@pytest.mark.parametrize("capacity", [1, 3])
def test_a_tokens_bits_depend_neither_on_waves_nor_on_other_tokens(capacity: int) -> None:
    """Sums are taken in the order of the columns, wherever a row is in its tile."""
    hidden, ids, weights = make_step(24, EXPERTS)
    whole, _, _ = computed((hidden, ids, weights), EXPERTS)
    few, _, _ = computed((hidden, ids, weights), capacity, eager=False)
    assert np.array_equal(few.view(np.uint16), whole.view(np.uint16))
    some = slice(3, 24, 3)
    alone, _, _ = computed((hidden[some], ids[some], weights[some]), EXPERTS)
    assert np.array_equal(alone.view(np.uint16), whole[some].view(np.uint16))


class NotingDevice(FakeDevice):
    """A device that notes what is asked for."""

    def __init__(self, *, eager: bool) -> None:
        super().__init__(eager=eager)
        self.sizes: list[int] = []

    def allocate(self, num_bytes: int) -> Memory:
        """Return memory."""
        self.sizes.append(num_bytes)
        return super().allocate(num_bytes)


@pytest.mark.parametrize("capacity", [1, 2, EXPERTS])  # with two for staging
@pytest.mark.parametrize("eager", [True, False])
def test_the_scratch_of_a_prompt_is_bounded(
    monkeypatch: pytest.MonkeyPatch, capacity: int, eager: bool
) -> None:
    """Many parts, the same bits; rows of all tokens are there only where experts come in turns."""
    limit = 4096  # 25 tokens' rows, and h of 28 pairs
    steps = [make_step(num_tokens, EXPERTS) for num_tokens in (20, 70)]
    wanted = [computed(step, EXPERTS)[0] for step in steps]
    monkeypatch.setattr(_waves, "MAX_SCRATCH_BYTES", limit)
    device = NotingDevice(eager=eager)
    with make_runtime(device, make_store(), capacity) as runtime:
        if capacity == EXPERTS:
            runtime.usage.fill().wait()
        device.run()
        device.sizes.clear()
        for (hidden, ids, weights), one in zip(steps, wanted, strict=True):
            x, w = on(device, hidden, weights)
            # Its own result: a part must not overwrite what a later one begins with.
            on_device(runtime)(0, x, ids, w, out=x)
            device.run()
            assert np.array_equal(bits(device, x).view(np.uint16), one.view(np.uint16))
        num_steps = runtime.stats().num_steps
    assert num_steps == len(steps)
    beyond = [size for size in device.sizes if size > limit]
    assert len(beyond) == (capacity < EXPERTS)
    if capacity == EXPERTS:
        assert device.num_launches["combine_bf16"] == 1 + 3
