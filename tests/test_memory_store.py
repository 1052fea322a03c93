"""Experts served from arrays."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from moecache.errors import ConfigError, StoreError
from moecache.stores import ExpertStore, MemoryStore
from tests.helpers.checkpoints import empty_parts, random_bits, read_expert, same_bits, same_parts

NUM_LAYERS, NUM_EXPERTS = 3, 5


@pytest.fixture(name="arrays")
def _arrays() -> dict[str, np.ndarray]:
    rng, stack = np.random.default_rng(0), (NUM_LAYERS, NUM_EXPERTS)
    return {
        "gate_up": random_bits(rng, (*stack, 8, 4), ml_dtypes.bfloat16),
        "down": random_bits(rng, (*stack, 4, 4), np.float32),
    }


def _expert(arrays: dict[str, np.ndarray], layer: int, expert: int) -> dict[str, np.ndarray]:
    return {name: array[layer, expert] for name, array in arrays.items()}


def test_the_layout_follows_from_the_arrays(arrays: dict[str, np.ndarray]) -> None:
    """The first two axes are layers and experts, the others a role's shape."""
    store = MemoryStore(arrays, top_k=2)

    layout = store.layout
    assert isinstance(store, ExpertStore)
    assert (layout.num_layers, layout.num_experts, layout.top_k) == (NUM_LAYERS, NUM_EXPERTS, 2)
    assert [role.name for role in layout.layers[0]] == ["gate_up", "down"]
    assert layout.expert_bytes(0) == 8 * 4 * 2 + 4 * 4 * 4


def test_experts_are_read_and_viewed_bit_for_bit(arrays: dict[str, np.ndarray]) -> None:
    """By role, as one buffer, and without copying."""
    store = MemoryStore(arrays)

    for layer in range(NUM_LAYERS):
        for expert in range(NUM_EXPERTS):
            expected = _expert(arrays, layer, expert)
            buffer = np.empty(store.layout.expert_bytes(layer), np.uint8)
            store.read_into(layer, expert, buffer)
            assert same_parts(read_expert(store, layer, expert), expected)
            assert same_parts(store.view(layer, expert), expected)
            assert buffer.tobytes() == b"".join(array.tobytes() for array in expected.values())


def test_views_share_memory_and_are_read_only(arrays: dict[str, np.ndarray]) -> None:
    """The caller's arrays stay writable."""
    views = MemoryStore(arrays).view(1, 2)

    for name, view in views.items():
        assert np.shares_memory(view, arrays[name])
        assert not view.flags.writeable
        assert arrays[name].flags.writeable


def test_arrays_that_are_not_contiguous_are_accepted(arrays: dict[str, np.ndarray]) -> None:
    """A transposed stack is read as it looks, not as it lies."""
    turned = {name: array.swapaxes(2, 3) for name, array in arrays.items()}
    store = MemoryStore(turned)

    assert same_parts(read_expert(store, 2, 4), _expert(turned, 2, 4))


def test_a_scalar_per_expert_is_a_role(arrays: dict[str, np.ndarray]) -> None:
    """Such as the scale of a quantized matrix, in an array [num_layers, num_experts]."""
    scales = np.arange(NUM_LAYERS * NUM_EXPERTS, dtype=np.float32).reshape(NUM_LAYERS, -1)
    store = MemoryStore(arrays | {"down_scale": scales})

    assert store.view(1, 2)["down_scale"] == scales[1, 2]
    assert same_bits(read_expert(store, 1, 2)["down_scale"], np.array(scales[1, 2]))


def test_regions_are_the_stacks_of_each_layer(arrays: dict[str, np.ndarray]) -> None:
    """Their bytes are those of the layers' experts."""
    store = MemoryStore(arrays)

    assert len(store.regions()) == NUM_LAYERS * 2
    assert sum(nbytes for _, nbytes in store.regions()) == store.layout.total_bytes
    assert store.regions([1]) == [(a[1].ctypes.data, a[1].nbytes) for a in arrays.values()]
    held = np.zeros((NUM_LAYERS, store.layout.num_experts), bool)
    held[1, 2] = True
    assert store.regions(held=held) == [
        (a[1, 2].ctypes.data, a[1, 2].nbytes) for a in arrays.values()
    ]


@pytest.mark.parametrize("layer", [-1, NUM_LAYERS])
def test_regions_of_a_layer_that_is_not_there_are_a_value_error(
    arrays: dict[str, np.ndarray], layer: int
) -> None:
    """A negative number does not count from the end."""
    with pytest.raises(ValueError, match=f"layer {layer} is not in"):
        MemoryStore(arrays).regions([layer])


@pytest.mark.parametrize(("layer", "expert"), [(-1, 0), (NUM_LAYERS, 0), (0, -1), (0, NUM_EXPERTS)])
def test_an_expert_that_is_not_there_is_a_value_error(
    arrays: dict[str, np.ndarray], layer: int, expert: int
) -> None:
    """From every method that takes one."""
    store = MemoryStore(arrays)
    calls: list[Callable[[], object]] = [
        lambda: store.view(layer, expert),
        lambda: store.prefetch(layer, [expert]),
        lambda: store.read_into(layer, expert, empty_parts(store, 0)),
    ]

    for call in calls:
        with pytest.raises(ValueError, match="is not in"):
            call()


def test_a_destination_that_does_not_fit_is_a_value_error(arrays: dict[str, np.ndarray]) -> None:
    """As for any store."""
    store = MemoryStore(arrays)
    nbytes = store.layout.expert_bytes(0)

    with pytest.raises(ValueError, match="lacks role 'down'"):
        store.read_into(0, 0, {"gate_up": empty_parts(store, 0)["gate_up"]})
    with pytest.raises(ValueError, match=f"buffer of {nbytes} bytes"):
        store.read_into(0, 0, np.empty(nbytes + 1, np.uint8))


def test_prefetch_has_nothing_to_do(arrays: dict[str, np.ndarray]) -> None:
    """Everything is in memory."""
    MemoryStore(arrays).prefetch(0, range(NUM_EXPERTS))


def test_a_closed_store_refuses_reads(arrays: dict[str, np.ndarray]) -> None:
    """Closing twice is no error; views stay valid."""
    with MemoryStore(arrays) as store:
        view = store.view(0, 0)
    store.close()

    assert same_parts(view, _expert(arrays, 0, 0))
    with pytest.raises(StoreError, match="closed"):
        store.view(0, 0)
    with pytest.raises(StoreError, match="closed"):
        store.read_into(0, 0, empty_parts(store, 0))


@pytest.mark.parametrize(
    "shapes", [[], [(3,)], [(3, 5, 2), (3, 4, 2)], [(3, 5, 2), (2, 5, 2)], [()]], ids=range(5)
)
def test_arrays_that_do_not_agree_are_config_errors(shapes: list[tuple[int, ...]]) -> None:
    """All have the same layers and experts."""
    with pytest.raises(ConfigError, match="must start with the same"):
        MemoryStore({str(number): np.zeros(shape) for number, shape in enumerate(shapes)})


def test_a_format_of_no_role_is_a_config_error() -> None:
    """Else the bytes of a misspelt role would be numbers."""
    with pytest.raises(ConfigError, match="formats has 'dwon', the roles are down"):
        MemoryStore({"down": np.zeros((1, 2, 5), np.uint8)}, formats={"dwon": ("q8_0", (32, 64))})


def test_more_experts_per_token_than_there_are_is_a_config_error(
    arrays: dict[str, np.ndarray],
) -> None:
    """The layout refuses the figure."""
    with pytest.raises(ConfigError, match="top-6 of 5"):
        MemoryStore(arrays, top_k=6)
