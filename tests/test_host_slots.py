"""Slots in RAM."""

import sys
import threading
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from moecache.errors import ConfigError, MoeCacheError
from moecache.layout import ExpertLayout, Role
from moecache.slots import HostSlots, SlotPool
from tests.helpers.checkpoints import random_bits

BF16 = np.dtype(ml_dtypes.bfloat16)
NUM_SLOTS = 5


def _layout(*, width: int = 3, dtype: npt.DTypeLike = BF16) -> ExpertLayout:
    roles = [
        Role("gate_up", (2 * width, 7), np.dtype(dtype)),
        Role("down", (7, width), np.dtype(dtype)),
        Role("down_packed", (5,), np.dtype(np.uint8)),
    ]
    return ExpertLayout(4, 1, [roles] * 2)


def _uneven() -> ExpertLayout:
    wide, narrow = _layout(width=9).layers[0], _layout(width=2).layers[0]
    return ExpertLayout(4, 1, [narrow, wide, [*narrow, Role("down_bias", (7,), BF16)]])


def _finite(seed: int, role: Role) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(-99, 99, role.shape).astype(np.float32).astype(role.dtype)


def _parts(layout: ExpertLayout, layer: int, seed: int) -> dict[str, np.ndarray]:
    return {role.name: _finite(seed, role) for role in layout.layers[layer]}


def _turned(dtype: npt.DTypeLike, shape: tuple[int, int]) -> ExpertLayout:
    role = Role("down", shape, np.dtype(dtype), is_transposed=True)
    return ExpertLayout(4, 1, [[role, Role("down_bias", shape[:1], np.dtype(dtype))]])


def _fill(pool: HostSlots, slot: int, layer: int, parts: dict[str, np.ndarray]) -> None:
    buffers = pool.buffers(slot, layer)
    for name, array in parts.items():
        buffers[name][...] = array
    pool.upload(slot, layer, buffers)


def _holds(pool: HostSlots, slot: int, layer: int, parts: dict[str, np.ndarray]) -> bool:
    expert = pool.expert(slot, layer)
    return set(expert) == set(parts) and all(
        np.array_equal(expert[name], array.astype(expert[name].dtype))
        for name, array in parts.items()
    )


@pytest.mark.parametrize("layout", [_layout(), _uneven()], ids=["even", "uneven"])
@pytest.mark.parametrize("dtype", [None, np.float32])
def test_every_slot_of_every_role_is_aligned_to_64_bytes(
    layout: ExpertLayout, dtype: npt.DTypeLike | None
) -> None:
    """Whatever the size of an expert, a slot begins at a cache line."""
    pool = HostSlots(layout, NUM_SLOTS, dtype=dtype)

    for layer in range(layout.num_layers):
        for slot in range(NUM_SLOTS):
            addresses = [array.ctypes.data for array in pool.expert(slot, layer).values()]
            assert all(address % 64 == 0 for address in addresses)


def test_slots_begin_filled_with_zeros() -> None:
    """An unused slot must never bring a NaN into a product."""
    pool = HostSlots(_layout(), NUM_SLOTS)

    assert isinstance(pool, SlotPool)
    assert not any(pool.slab(name).astype(np.float32).any() for name in pool.layout.role_names)


def test_slab_and_expert_are_the_same_memory() -> None:
    """What is written to one is seen in the other, and slots do not overlap."""
    pool = HostSlots(_layout(), NUM_SLOTS)

    for role in pool.layout.layers[0]:
        slab = pool.slab(role.name)
        assert (slab.shape, slab.dtype) == ((NUM_SLOTS, *role.shape), role.dtype)
        for slot in range(NUM_SLOTS):
            pool.expert(slot, 0)[role.name][...] = slot + 1
        assert [set(row.ravel().tolist()) for row in slab] == [{n + 1} for n in range(NUM_SLOTS)]


def test_without_conversion_bytes_arrive_bit_for_bit() -> None:
    """NaNs with every payload too."""
    layout, rng = _layout(), np.random.default_rng(0)
    pool = HostSlots(layout, NUM_SLOTS)
    parts = {role.name: random_bits(rng, role.shape, role.dtype) for role in layout.layers[0]}

    buffers = pool.buffers(2, 0)
    for name, array in parts.items():
        buffers[name].view(np.uint8)[...] = array.view(np.uint8)
    pool.upload(2, 0, buffers)

    assert all(pool.expert(2, 0)[name].tobytes() == a.tobytes() for name, a in parts.items())


def test_every_bfloat16_becomes_the_same_float32() -> None:
    """The conversion is exact: float32 has all its bits and more."""
    role = Role("down", (2**16,), BF16)
    pool = HostSlots(ExpertLayout(1, 1, [[role]]), 2, dtype=np.float32)
    patterns = np.arange(2**16, dtype=np.uint16)

    buffers = pool.buffers(1, 0)
    buffers["down"][...] = patterns.view(BF16)
    pool.upload(1, 0, buffers)

    result, numbers = pool.expert(1, 0)["down"], ~np.isnan(patterns.view(BF16).astype(np.float32))
    exact = patterns.astype(np.uint32) << 16
    assert result.dtype == np.float32
    assert np.array_equal(result.view(np.uint32)[numbers], exact[numbers])
    assert np.isnan(result[~numbers]).all()


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.float16])
def test_narrow_floats_are_converted_and_integers_are_not(dtype: npt.DTypeLike) -> None:
    """Packed weights are bytes, whatever the slots' dtype."""
    layout = _layout(dtype=dtype)
    pool = HostSlots(layout, NUM_SLOTS, dtype=np.float32)
    parts = {role.name: _finite(1, role).astype(role.dtype) for role in layout.layers[0]}

    _fill(pool, 3, 0, parts)

    assert _holds(pool, 3, 0, parts)
    assert pool.slab("gate_up").dtype == np.float32
    assert pool.slab("down_packed").dtype == np.uint8


@pytest.mark.parametrize("dtype", [None, np.float32])
def test_layers_of_different_widths_share_the_slots(dtype: npt.DTypeLike | None) -> None:
    """A slot takes an expert of any layer; a slab would have no one shape."""
    layout = _uneven()
    pool = HostSlots(layout, NUM_SLOTS, dtype=dtype)

    for slot, layer in enumerate([0, 1, 2, 1, 0]):
        _fill(pool, slot, layer, _parts(layout, layer, seed=slot))

    for slot, layer in enumerate([0, 1, 2, 1, 0]):
        assert _holds(pool, slot, layer, _parts(layout, layer, seed=slot))
    with pytest.raises(ConfigError, match="'gate_up': layers differ"):
        pool.slab("gate_up")
    assert pool.slab("down_packed").shape == (NUM_SLOTS, 5)


@pytest.mark.parametrize("shape", [(1, 1), (31, 33), (32, 32), (64, 160), (7, 96)], ids=str)
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(BF16, None), (np.float16, None), (np.float32, None), (np.float64, None), (BF16, np.float32)],
    ids=str,
)
def test_what_is_stored_transposed_is_not_in_slots(
    stored: npt.DTypeLike, dtype: npt.DTypeLike | None, shape: tuple[int, int]
) -> None:
    """Whole lines of a cache or not, and numbers of another type; a bias has no order."""
    layout = _turned(stored, shape)
    pool = HostSlots(layout, NUM_SLOTS, dtype=dtype)
    matrix = _finite(1, Role("", shape[::-1], np.dtype(stored)))
    bias = _finite(2, layout.layers[0][1])

    _fill(pool, 3, 0, {"down": matrix, "down_bias": bias})

    assert layout.layers[0][0].array_shape == matrix.shape
    assert _holds(pool, 3, 0, {"down": matrix.T, "down_bias": bias})
    assert not pool.expert(2, 0)["down"].any()
    assert not pool.expert(4, 0)["down"].any()
    assert HostSlots.bytes_per_slot(layout, dtype) * NUM_SLOTS == pool.nbytes


def test_a_role_that_is_not_there_is_a_config_error() -> None:
    """The message names it."""
    with pytest.raises(ConfigError, match="role 'up': there is no such role"):
        HostSlots(_layout(), 1).slab("up")


@pytest.mark.parametrize("layout", [_layout(), _uneven()], ids=["even", "uneven"])
@pytest.mark.parametrize("dtype", [None, np.float32, np.float16])
def test_the_bytes_of_a_slot_are_those_allocated(
    layout: ExpertLayout, dtype: npt.DTypeLike | None
) -> None:
    """Padding and conversion included, so that a budget is kept."""
    pool = HostSlots(layout, NUM_SLOTS, dtype=dtype)

    assert HostSlots.bytes_per_slot(layout, dtype) * NUM_SLOTS == pool.nbytes
    assert pool.nbytes >= layout.slot_bytes * NUM_SLOTS


@pytest.mark.parametrize("dtype", [None, np.float32])
def test_arrays_of_the_caller_can_be_uploaded(dtype: npt.DTypeLike | None) -> None:
    """They are copied, so they may change at once."""
    layout = _layout()
    pool = HostSlots(layout, NUM_SLOTS, dtype=dtype)
    parts = _parts(layout, 1, seed=4)

    pool.upload(4, 1, parts)
    expected = _parts(layout, 1, seed=4)
    for array in parts.values():
        array[...] = 0

    assert _holds(pool, 4, 1, expected)
    assert not pool.slab("gate_up")[:4].astype(np.float32).any()


def test_parts_of_another_shape_are_refused() -> None:
    """An array of one row is not spread over all of them."""
    layout = _layout()
    pool = HostSlots(layout, NUM_SLOTS)

    with pytest.raises(ValueError, match="gate_up"):
        pool.upload(0, 0, _parts(layout, 0, seed=1) | {"gate_up": np.ones((1, 7), BF16)})


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS])
def test_a_slot_that_is_not_there_is_a_value_error(slot: int) -> None:
    """A negative number does not count from the end."""
    pool = HostSlots(_layout(), NUM_SLOTS)
    calls: list[Callable[[], object]] = [
        lambda: pool.expert(slot, 0),
        lambda: pool.buffers(slot, 0),
        lambda: pool.upload(slot, 0, _parts(pool.layout, 0, 0)),
    ]

    for call in calls:
        with pytest.raises(ValueError, match=rf"slot {slot} is not in \[0, {NUM_SLOTS}\)"):
            call()
    with pytest.raises(ValueError, match="layer 2 is not in"):
        pool.expert(0, 2)


def test_closed_slots_refuse_everything() -> None:
    """Closing twice is no error, and arrays handed out stay valid."""
    layout = _layout()
    with HostSlots(layout, NUM_SLOTS) as pool:
        _fill(pool, 0, 0, _parts(layout, 0, seed=1))
        slab = pool.slab("down")
    pool.close()

    assert slab[0].astype(np.float32).any()
    assert pool.nbytes == 0
    calls: list[Callable[[], object]] = [
        lambda: pool.slab("down"),
        lambda: pool.expert(0, 0),
        lambda: pool.buffers(0, 0),
        lambda: pool.upload(0, 0, _parts(layout, 0, 0)),
    ]
    for call in calls:
        with pytest.raises(MoeCacheError, match="closed"):
            call()


@pytest.mark.parametrize("num_slots", [0, -1])
def test_a_pool_without_slots_is_a_config_error(num_slots: int) -> None:
    """The message has the number."""
    with pytest.raises(ConfigError, match=f"at least 1 slot, got {num_slots}"):
        HostSlots(_layout(), num_slots)


def test_a_model_without_experts_is_a_config_error() -> None:
    """There is nothing a slot could hold."""
    with pytest.raises(ConfigError, match="no experts"):
        HostSlots(ExpertLayout(0, 0, []), 1)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_, np.complex64])
@pytest.mark.parametrize("stored", [BF16, np.dtype(np.uint8)], ids=str)
def test_a_dtype_that_is_no_float_is_a_config_error(
    dtype: npt.DTypeLike, stored: npt.DTypeLike
) -> None:
    """Whatever the roles are: the argument itself cannot be meant."""
    with pytest.raises(ConfigError, match="floating-point"):
        HostSlots(_layout(dtype=stored), 1, dtype=dtype)


def test_slots_beyond_memory_are_a_memory_error_with_figures() -> None:
    """The message has role, size and remedy."""
    layout = ExpertLayout.uniform(num_layers=1, num_experts=1, top_k=1, expert_bytes=2**40)

    with pytest.raises(MemoryError, match=r"65536 slots of role 'expert' \(64\.0 PiB\); lower"):
        HostSlots(layout, 2**16)


@pytest.fixture(name="fast_switches")
def _fast_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("fast_switches")
@pytest.mark.parametrize("dtype", [None, np.float32])
def test_threads_that_fill_different_slots_do_not_mix(dtype: npt.DTypeLike | None) -> None:
    """Every thread has a buffer of its own to convert from."""
    layout = _layout()
    pool = HostSlots(layout, NUM_SLOTS, dtype=dtype)
    wrong: list[object] = []

    def use(slot: int) -> None:
        try:
            for seed in range(200):
                parts = _parts(layout, 0, 1000 * slot + seed)
                _fill(pool, slot, 0, parts)
                if not _holds(pool, slot, 0, parts):
                    wrong.append((slot, seed))
        except BaseException as error:  # noqa: BLE001 - the main thread reports it
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(slot,)) for slot in range(NUM_SLOTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_a_pool_closed_by_another_thread_meanwhile_says_so() -> None:
    """Between the look whether it is open and the use of what was there."""
    even, uneven = HostSlots(_layout(), NUM_SLOTS), HostSlots(_uneven(), NUM_SLOTS)
    with_slab = HostSlots(_layout(), NUM_SLOTS)

    class ClosesWhenHashed(str):
        __slots__ = ()

        def __hash__(self) -> int:
            with_slab.close()
            return super().__hash__()

    class ClosesWhenCompared(int):
        def __ge__(self, other: int) -> bool:
            for pool in (even, uneven):
                if int(self) == pool.num_slots - 1 - (pool is uneven):
                    pool.close()
            return super().__ge__(other)

    roles = {"gate_up", "down", "down_packed"}
    assert with_slab.slab(ClosesWhenHashed("down")).shape == (NUM_SLOTS, 7, 3)
    assert set(even.expert(ClosesWhenCompared(NUM_SLOTS - 1), 0)) == roles
    assert set(uneven.expert(ClosesWhenCompared(NUM_SLOTS - 2), 1)) == roles
    for pool in (even, uneven, with_slab):
        with pytest.raises(MoeCacheError, match="slots are closed"):
            pool.expert(0, 0)
        with pytest.raises(MoeCacheError, match="slots are closed"):
            pool.slab("down")


def test_a_layer_that_is_none_is_refused() -> None:
    """Also where a slot's arrays are known from an earlier read."""
    layout = _layout()
    pool = HostSlots(layout, NUM_SLOTS)
    buffers = pool.buffers(0, layout.num_layers - 1)
    for layer in (-1, layout.num_layers):
        with pytest.raises(ValueError, match="layer"):
            pool.buffers(0, layer)
        with pytest.raises(ValueError, match="layer"):
            pool.upload(0, layer, buffers)


def test_an_array_that_was_put_into_a_slots_buffers_is_copied() -> None:
    """Only what `buffers` returned is in its place already; and a closed pool takes nothing."""
    layout = _layout()
    pool = HostSlots(layout, NUM_SLOTS)
    wanted = _parts(layout, 0, 5)

    pool.upload(2, 0, {**pool.buffers(2, 0), **wanted})

    assert _holds(pool, 2, 0, wanted)
    buffers = pool.buffers(1, 0)
    pool.close()
    with pytest.raises(MoeCacheError, match="slots are closed"):
        pool.upload(1, 0, buffers)
