"""Gated experts in slots: against float64, and the same bits in whatever waves they come."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache import kernels
from moecache.errors import ConfigError
from moecache.layout import Role
from tests.helpers.kernels import (
    ACTIVATIONS,
    BF16,
    DTYPES,
    F32,
    LEVELS,
    U32,
    Experts,
    compute_pairs,
    computing,
    draw_inputs,
)

F16 = np.dtype(np.float16)
# Activations that limit gate and up, and need both.
LIMITED = ("swiglu", "clamped_silu")
# Of each level, format and dtype; all of them together are many.
few = settings(max_examples=max(1, settings().max_examples // 4))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
GRID = np.concatenate([np.linspace(-100, 100, 801), np.linspace(-4, 4, 257)]).astype(np.float32)


@pytest.fixture(name="level", params=LEVELS, autouse=True, scope="module")
def _level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute with each level that this processor has."""
    with computing(request.param):
        yield request.param


def in_one_wave(
    experts: Experts, inputs: np.ndarray, slots: np.ndarray, dtype: np.dtype = F32
) -> np.ndarray:
    """Return the row of each (token, choice) pair, `slots` [num_tokens, top_k]."""
    rows = np.full((slots.size, inputs.shape[1]), np.nan, dtype)
    compute_pairs(experts.kernel, inputs, rows, slots=slots.reshape(-1), top_k=slots.shape[1])
    return rows


def acted(values: np.ndarray, activation: str, ups: float = 1.0, **options: Any) -> np.ndarray:
    """Return act(value) * up of each, by experts of width 1 whose gates are their biases."""
    num = len(values)
    roles = {
        "gate_up": np.zeros((num, 2, 1), np.float32),
        "gate_up_bias": np.stack([values, np.full(num, ups, np.float32)], 1),
        "down": np.ones((num, 1, 1), np.float32),
    }
    kernel = kernels.SlotKernel(
        lambda slot: {name: array[slot] for name, array in roles.items()},
        num,
        activation=activation,
        **options,
    )
    rows = np.full((num, 1), np.nan, np.float32)
    compute_pairs(kernel, np.zeros((num, 1), np.float32), rows, slots=np.arange(num))
    return rows[:, 0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_those_of_their_formulas(activation: str) -> None:
    """Within some units of the last place; where they vanish, of that of the argument."""
    expected = np.array([ACTIVATIONS[activation](float(value)) for value in GRID])
    found = acted(GRID, activation).astype(np.float64)

    # The exponent of e is rounded, as is 1 + erf(x) near -1.
    exponent = GRID if activation != "gelu_tanh" else 1.6 * GRID + 0.072 * GRID**3
    bound = U32 * np.abs(expected) * (16 + 4 * np.minimum(np.abs(exponent), 100))
    bound += 4 * U32 * np.abs(GRID) if activation == "gelu" else 1e-36
    assert (np.abs(found - expected) <= bound).all()


def test_swiglu_limits_gate_and_up() -> None:
    """gpt-oss's: min(gate, 7) * sigmoid(1.702 gate) * (clip(up, -7, 7) + 1)."""
    for ups in (-20.0, -7.0, 0.5, 6.5, 30.0):
        gate = np.minimum(GRID.astype(np.float64), 7)
        expected = gate / (1 + np.exp(-1.702 * gate)) * (np.clip(ups, -7, 7) + 1)
        found = acted(GRID, "swiglu", ups)
        np.testing.assert_allclose(found, expected, rtol=1e-4 / 4, atol=1e-35)
    gate = np.minimum(GRID.astype(np.float64), 2)
    expected = gate / (1 + np.exp(-gate)) * 3
    found = acted(GRID, "swiglu", 5.0, alpha=1.0, limit=2.0)
    np.testing.assert_allclose(found, expected, rtol=1e-4 / 4, atol=1e-35)


def test_clamped_silu_limits_gate_and_up() -> None:
    """DeepSeek-V4's: silu(min(gate, limit)) * clip(up, -limit, limit)."""
    for ups in (-20.0, -3.0, 0.5, 2.5, 30.0):
        gate = np.minimum(GRID.astype(np.float64), 3)
        expected = gate / (1 + np.exp(-gate)) * np.clip(ups, -3, 3)
        found = acted(GRID, "clamped_silu", ups, limit=3.0)
        np.testing.assert_allclose(found, expected, rtol=1e-4 / 4, atol=1e-35)


@pytest.mark.parametrize("activation", kernels.ACTIVATIONS)
def test_activations_of_infinities_and_nan_are_those_of_their_formulas(activation: str) -> None:
    """-inf * 0 is no number, as in torch; a NaN passes every one; a limit has no infinity."""
    found = acted(np.array([np.inf, -np.inf, np.nan], np.float32), activation, 1.0)
    above = acted(np.array([7.0], np.float32), activation)[0] if activation in LIMITED else np.inf
    below = 0.0 if activation in ("relu", "relu2") else np.nan
    np.testing.assert_array_equal(found, [above, below, np.nan])


@pytest.mark.parametrize("dtype", [*DTYPES, F16], ids=str)
@given(
    input_dtype=st.sampled_from(DTYPES),
    hidden_size=st.integers(1, 70),
    width=st.integers(1, 70),
    activation=st.sampled_from(kernels.ACTIVATIONS),
    form=st.sampled_from(["stacked", "interleaved", "no gate"]),
    bias_dtype=st.sampled_from([None, *DTYPES]),
    num_tokens=st.integers(1, 9),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
@few
def test_experts_are_as_good_as_sums_in_float32(
    dtype: np.dtype,
    input_dtype: np.dtype,
    hidden_size: int,
    width: int,
    activation: str,
    form: str,
    bias_dtype: np.dtype | None,
    num_tokens: int,
    threads: int,
    seed: int,
) -> None:
    """Gate and up of every form, with biases and without, over any shapes."""
    form = "stacked" if activation in LIMITED and form == "no gate" else form
    experts = Experts(
        dtype,
        hidden_size,
        width,
        3,
        activation=activation,
        is_gated=form != "no gate",
        is_interleaved=form == "interleaved",
        bias_dtype=bias_dtype,
        limit=0.5,
        seed=seed,
    )
    inputs = draw_inputs(num_tokens, hidden_size, input_dtype, seed)
    slots = np.random.default_rng(seed).integers(0, 3, (num_tokens, 2))
    with computing(threads=threads):
        rows = in_one_wave(experts, inputs, slots)

    for pair, slot in enumerate(slots.reshape(-1)):
        expected, bound = experts.expected(slot, inputs[pair // 2][None])
        assert (np.abs(rows[pair] - expected[0]) <= bound[0]).all()


@every_dtype
@pytest.mark.parametrize("input_dtype", DTYPES, ids=str)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@few
def test_waves_give_the_bits_of_the_resident_order(
    dtype: np.dtype, input_dtype: np.dtype, data: st.DataObject, seed: int
) -> None:
    """Pairs split over waves in any order, experts in any slots, any number of threads."""
    rng = np.random.default_rng(seed)
    num_tokens, top_k = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    experts = EXPERTS[dtype]
    inputs = draw_inputs(num_tokens, 37, input_dtype, seed)
    ids = rng.integers(0, 4, (num_tokens, top_k))
    with computing(threads=1):
        resident = in_one_wave(experts, inputs, ids)

    # Elsewhere: expert e in slot places[e] of a larger pool.
    places = rng.permutation(7)[:4]
    moved = Experts(dtype, 37, 21, 7, bias_dtype=F32)
    for name, array in moved.roles.items():
        array[:] = np.nan
        array[places] = experts.roles[name]
    rows = np.full((ids.size, 37), np.nan, np.float32)
    pairs = rng.permutation(ids.size)
    cuts = np.sort(rng.integers(0, ids.size + 1, data.draw(st.integers(0, 4))))
    with computing(threads=data.draw(st.integers(1, 4))):
        for part in np.split(pairs, cuts):
            slots = places[ids.reshape(-1)[part]]
            compute_pairs(moved.kernel, inputs, rows, slots=slots, pairs=part, top_k=top_k)

    assert rows.tobytes() == resident.tobytes()


EXPERTS = {dtype: Experts(dtype, 37, 21, 4, bias_dtype=F32) for dtype in DTYPES}


@every_dtype
@pytest.mark.parametrize("input_dtype", DTYPES, ids=str)
def test_a_token_has_the_same_bits_alone_and_among_others(
    dtype: np.dtype, input_dtype: np.dtype
) -> None:
    """More tokens than a chunk of inputs has, all for one expert."""
    inputs = draw_inputs(200, 37, input_dtype, 1)
    experts = EXPERTS[dtype]
    alone = [in_one_wave(experts, row[None], np.array([[1]])) for row in inputs]
    for num in (2, 3, 4, 5, 7, 64, 65, 200):
        found = in_one_wave(experts, inputs[:num], np.ones((num, 1), int))
        assert found.tobytes() == np.concatenate(alone[:num]).tobytes()


@every_dtype
def test_threads_change_no_bit_where_experts_are_many_items(dtype: np.dtype) -> None:
    """The last item of an expert is not whole."""
    experts = Experts(dtype, 333, 301, 3)
    inputs = draw_inputs(5, 333, dtype, 2)
    slots = np.arange(10).reshape(5, 2) % 3
    with computing(threads=1):
        alone = in_one_wave(experts, inputs, slots)
    for threads in (2, 3, 4):
        with computing(threads=threads):
            assert in_one_wave(experts, inputs, slots).tobytes() == alone.tobytes()


@every_dtype
def test_rows_in_bfloat16_are_those_in_float32_rounded_once(dtype: np.dtype) -> None:
    """To the nearest, ties to even."""
    inputs, slots = draw_inputs(6, 37, dtype, 3), np.arange(12).reshape(6, 2) % 4
    wide = in_one_wave(EXPERTS[dtype], inputs, slots)
    found = in_one_wave(EXPERTS[dtype], inputs, slots, BF16)
    assert found.tobytes() == wide.astype(BF16).tobytes()


def test_experts_without_pairs_are_no_work() -> None:
    """First, last and in between; and a wave of none."""
    inputs, experts = draw_inputs(2, 37, F32, 4), EXPERTS[F32]
    expected = in_one_wave(experts, inputs, np.array([[1], [3]]))
    rows = np.full((2, 37), np.nan, np.float32)
    experts.kernel.compute(
        inputs,
        np.array([0, 1, 2, 3, 2], np.int32),
        np.array([0, 0, 1, 1, 2, 2], np.int64),
        np.array([0, 1], np.int64),
        1,
        rows,
    )
    assert rows.tobytes() == expected.tobytes()
    rows[:] = np.nan
    compute_pairs(experts.kernel, inputs, rows, slots=np.zeros(0, int))
    assert np.isnan(rows).all()


def test_only_the_rows_of_a_waves_pairs_are_written() -> None:
    """The others are another wave's."""
    inputs = draw_inputs(3, 37, F32, 5)
    rows = np.full((6, 37), np.nan, np.float32)
    slots, pairs = np.array([2, 0]), np.array([4, 1])
    compute_pairs(EXPERTS[F32].kernel, inputs, rows, slots=slots, pairs=pairs, top_k=2)
    assert np.isnan(rows).all(1).tolist() == [True, False, True, True, False, True]


def wrong(**changes: Any) -> dict[str, Any]:
    """Return arguments of `compute` of which some are others."""
    arguments = {
        "hidden": np.ones((2, 37), np.float32),
        "slots": np.array([0, 1], np.int32),
        "offsets": np.array([0, 1, 2], np.int64),
        "pairs": np.array([0, 1], np.int64),
        "top_k": 1,
    }
    return {**arguments, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": np.ones((2, 36), np.float32)}, r"hidden \[2, 36\] is no .*\[2, 37\]"),
        ({"hidden": np.ones((2, 74), np.float32)[:, ::2]}, "hidden .* is no contiguous"),
        ({"hidden": np.ones((2, 37))}, "not float64"),
        ({"top_k": 2}, r"rows \[2, 37\] is no contiguous \[4, 37\]"),
        ({"slots": np.array([0, 4], np.int32)}, r"are not in \[0, 4\)"),
        ({"slots": np.array([-1, 1], np.int32)}, r"are not in \[0, 4\)"),
        ({"slots": np.array([0, 1], np.int64)}, "mismatch"),
        ({"slots": np.array([0], np.int32)}, "one offset more"),
        (
            {"slots": np.zeros(0, np.int32), "offsets": np.array([0], np.int64)},
            "from 0 to 0, but there are 2",
        ),
        ({"pairs": np.zeros(0, np.int64)}, "from 0 to 2, but there are 0 pairs"),
        ({"offsets": np.array([0, 1, 1], np.int64)}, "from 0 to 1, but there are 2 pairs"),
        ({"offsets": np.array([0, 3, 2], np.int64)}, "offsets fall from 3 to 2"),
        ({"offsets": np.array([1, 1, 2], np.int64)}, "from 1 to 2, but there are 2"),
        ({"pairs": np.array([0, 2], np.int64)}, r"pair 2 is not in \[0, 2\)"),
        ({"pairs": np.array([-1, 0], np.int64)}, r"pair -1 is not in \[0, 2\)"),
    ],
)
def test_a_wave_that_does_not_fit_is_refused_before_anything_is_written(
    changes: dict[str, Any], message: str
) -> None:
    """The message has what was given and what fits."""
    rows = np.full((2, 37), np.nan, np.float32)
    with pytest.raises(ValueError, match=message):
        EXPERTS[F32].kernel.compute(**wrong(**changes), rows=rows)
    assert np.isnan(rows).all()


def test_rows_that_do_not_fit_are_refused() -> None:
    """Those of another dtype, that lie apart, or that nobody may write."""
    compute = EXPERTS[F32].kernel.compute
    with pytest.raises(ConfigError, match="not float16"):
        compute(**wrong(), rows=np.zeros((2, 37), np.float16))
    with pytest.raises(ConfigError, match=r"rows .* is no contiguous"):
        compute(**wrong(), rows=np.zeros((2, 74), np.float32)[:, ::2])
    rows = np.zeros((2, 37), np.float32)
    rows.flags.writeable = False
    with pytest.raises(ConfigError, match="rows are read-only"):
        compute(**wrong(), rows=rows)
    assert (rows == 0).all()


def _expert(**roles: Any) -> Callable[[int], dict[str, np.ndarray]]:
    arrays = {"gate_up": np.ones((6, 4), np.float32), "down": np.ones((4, 3), np.float32)}
    arrays |= roles
    return lambda slot: {name: array for name, array in arrays.items() if array is not None}


@pytest.mark.parametrize(
    ("roles", "options", "message"),
    [
        ({"gate_up": np.ones((4, 6), np.float32)}, {}, "stored transposed have no kernel"),
        ({"gate_up": np.ones((3, 4), np.float32)}, {}, r"gate_up \[3, 4\] and down \[4, 3\]"),
        ({"gate_up": np.ones((6, 4))}, {}, "elements of float64"),
        ({"gate_up": np.ones((4, 6), np.float32).T}, {}, "no contiguous matrix"),
        ({"gate_up_bias": np.ones(3, np.float32)}, {}, r"gate_up_bias \[3\] is not \[6\]"),
        ({"down_bias": np.ones(4)}, {}, "not float64"),
        ({"gate_up": None}, {}, "expert of down is no feed-forward"),
        ({"down": None}, {}, "expert of gate_up"),
        ({"up": np.ones((3, 4), np.float32)}, {}, "expert of down, gate_up, up is no"),
        ({"router": np.ones((3, 4), np.float32)}, {}, "expert of down, gate_up, router"),
        ({}, {"activation": "mish"}, "'mish' has no kernel; silu, "),
        ({"gate_up": None, "up": np.ones((3, 4), np.float32)}, {"activation": "swiglu"}, "gate"),
        ({"gate_up": None, "up": np.ones((3, 4), np.float32)}, {"is_interleaved": True}, "gate"),
        ({}, {"activation": "swiglu", "limit": float("nan")}, "cannot be limited to nan"),
        ({"down": np.ones(8, np.uint8)}, {"roles": [Role("down", (4, 32), format="q8_0")]}, "8 by"),
    ],
)
def test_what_is_no_feed_forward_is_refused(
    roles: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    """The message has roles and shapes."""
    with pytest.raises(ConfigError, match=message):
        kernels.SlotKernel(_expert(**roles), 2, **options)


@pytest.mark.parametrize(
    "other",
    [
        {"down": np.ones((4, 3), np.float16)},
        {"gate_up": np.ones((8, 4), np.float32)},
        {"down_bias": np.ones(4, np.float32)},
    ],
)
def test_slots_that_hold_something_else_are_refused(other: dict[str, np.ndarray]) -> None:
    """All are read by the addresses of one."""
    first, second = _expert(), _expert(**other)
    with pytest.raises(ConfigError, match=r"not every slot has|in one slot and"):
        kernels.SlotKernel(lambda slot: second(slot) if slot else first(slot), 2)
