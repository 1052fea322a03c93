"""Codes with zero points, as GPTQ and AWQ publish them: their forms, values, products, experts."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moecache import kernels
from moecache.formats import find_format
from moecache.layout import Role
from tests.helpers.kernels import (
    DTYPES,
    LEVELS,
    U32,
    compute_pairs,
    computing,
    draw_inputs,
    product_error,
    rounding,
    wide_products,
)
from tests.helpers.kernels_forms import form_of, grouped_parts, integers_of

NAMES = (
    "gptq2[32,bf16]",
    "gptq4[*,f16]",
    "gptq4[96,f32]",
    "gptq_v24[128,bf16]",
    "gptq8[64,f16]",
    "gptq_v28[*,bf16]",
    "awq4[32,f16]",
    "awq4[128,bf16]",
    "awq4[*,f32]",
)
few = settings(max_examples=max(1, settings().max_examples // 2))
every_format = pytest.mark.parametrize("name", NAMES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(name="level", params=LEVELS, autouse=True, scope="module")
def _level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute with each level that this processor has."""
    with computing(request.param):
        yield request.param


def words(name: str, size: int) -> int:
    """Return a size of whole words."""
    each = 32 // find_format(name).bits  # type: ignore[attr-defined]
    return -(-size // each) * each


def error(inputs: np.ndarray, name: str, parts: dict[str, np.ndarray]) -> np.ndarray:
    """Return by how much products may be wrong: sums of codes and of zero points are apart."""
    known = find_format(name)
    codes = integers_of(parts["codes"].T, known, across=known.method == "awq")  # type: ignore
    zeros = known.zeros(integers_of(parts["zeros"].T, known, across=True).astype(np.int64))  # type: ignore
    group = known.groups(parts, codes.shape[1])  # type: ignore[attr-defined]
    half = 128 if known.bits == 8 else 8  # type: ignore[attr-defined]
    sizes = np.abs(codes.astype(np.int64) - half) + np.abs(half - zeros)[:, group]
    scales = np.abs(parts["scales"].T.astype(np.float64))[:, group]
    return product_error(inputs, sizes * scales, name) * 1.1 + 3 * U32


@given(
    name=st.sampled_from(NAMES),
    rows=st.integers(0, 50),
    columns=st.integers(0, 300),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@example(name="gptq4[96,f32]", rows=24, columns=200, threads=1, seed=0)
@example(name="awq4[32,f16]", rows=40, columns=72, threads=1, seed=0)
def test_any_words_are_tiled_and_expanded_without_losing_a_bit(
    name: str, rows: int, columns: int, threads: int, seed: int
) -> None:
    """Scales that are no number too; what fills up tiles and blocks is zero."""
    known, rows, columns = find_format(name), words(name, rows), words(name, columns)
    raw = np.random.default_rng(seed).integers(0, 256, known.nbytes(rows, columns), np.uint8)
    assert known.form is not None
    form = np.full(known.form.nbytes(rows, columns), 7, np.uint8)
    kernels.tile(raw, name, rows, columns, form)

    assert form.tobytes() == form_of(raw, known, rows, columns).tobytes()
    for dtype in DTYPES:
        out = np.full((rows, columns + 1), 7, dtype)
        with computing(threads=threads):
            kernels.expand(form, name, rows, columns, out[:, :columns])
        expected, found = known.dequantize(known.split(raw, rows, columns), dtype), out[:, :-1]
        is_number = ~np.isnan(expected)
        assert (np.isnan(found) == ~is_number).all()
        assert found[is_number].tobytes() == expected[is_number].tobytes()
        assert (out[:, columns:] == 7).all()


@every_format
def test_a_tiler_finds_scales_that_are_no_numbers(name: str) -> None:
    """The last one of the second matrix among them."""
    known = find_format(name)
    parts = grouped_parts(name, 32, 160, 0)
    raw = np.tile(np.concatenate([a.reshape(-1).view(np.uint8) for a in parts.values()]), 2)
    tiler = kernels.tiler(name, 32, 160)
    out = np.zeros((2, tiler.form_bytes), np.uint8)
    assert not tiler.tile(raw, out)
    assert (
        out[0].tobytes()
        == out[1].tobytes()
        == form_of(raw[: raw.size // 2], known, 32, 160).tobytes()
    )

    known.split(raw.reshape(2, -1)[1], 32, 160)["scales"][-1, -1] = np.nan
    assert tiler.tile(raw, out)


@given(
    name=st.sampled_from(NAMES),
    rows=st.integers(1, 70),
    columns=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    num=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_are_as_good_as_sums_in_float32(
    name: str, rows: int, columns: int, dtype: np.dtype, num: int, seed: int
) -> None:
    """Whatever the sizes, and however large the zero points."""
    parts = grouped_parts(name, words(name, rows), words(name, columns), seed)
    exact = find_format(name).dequantize(parts).astype(np.float64)
    inputs = draw_inputs(num, exact.shape[1], dtype, seed)
    found = kernels.products(inputs, kernels.matrix_of(parts, name)).astype(np.float64)
    expected = inputs.astype(np.float64) @ exact.T
    assert (
        np.abs(found - expected) <= error(inputs, name, parts) + rounding(expected, dtype)
    ).all()


@every_format
@every_dtype
def test_integers_are_multiplied_exactly(name: str, dtype: np.dtype) -> None:
    """By scales that are powers of two, at every column."""
    parts = grouped_parts(name, 32, 64, 1)
    parts["scales"][...] = 0.25
    exact = find_format(name).dequantize(parts)
    found = kernels.products(np.eye(64, dtype=dtype), kernels.matrix_of(parts, name))
    np.testing.assert_array_equal(found.astype(np.float32), exact.T)


@every_format
@every_dtype
def test_a_row_has_the_same_bits_in_any_batch(name: str, dtype: np.dtype) -> None:
    """With any number of threads, alone and among others."""
    matrix = kernels.matrix_of(grouped_parts(name, 800, 320, 2), name)
    inputs = draw_inputs(11, 320, dtype, 3)
    whole = kernels.products(inputs, matrix)
    for first, last in ((0, 1), (3, 5), (2, 9), (1, 11)):
        with computing(threads=3):
            some = kernels.products(inputs[first:last], matrix)
        assert some.tobytes() == whole[first:last].tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_that_are_no_numbers_count_in_their_rows_alone(dtype: np.dtype) -> None:
    """And a scale of NaN in its row of the matrix."""
    parts = grouped_parts("awq4[32,f16]", 24, 64, 4)
    parts["scales"][1, 20] = np.nan
    inputs = draw_inputs(3, 64, dtype, 5)
    inputs[1, 40] = np.nan
    found = np.isnan(kernels.products(inputs, kernels.matrix_of(parts, "awq4[32,f16]")))
    assert found[1].all()
    assert (found[[0, 2]] == (np.arange(24) == 20)).all()


@given(
    names=st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
@few
def test_experts_have_the_bits_of_their_products(
    names: tuple[str, str], sizes: tuple[int, int], dtype: np.dtype, seed: int
) -> None:
    """Gate and up, a matrix each, then down; rows that are not multiplied fill up tiles."""
    hidden_size, width = (words("gptq2[32,bf16]", size) for size in sizes)
    shapes = {"gate_up": (2 * width, hidden_size), "down": (hidden_size, width)}
    layer, slots, matrices = [], {}, {}
    for name, (role, shape) in zip(names, shapes.items(), strict=True):
        several = 2 if role == "gate_up" else 1
        layer.append(Role(role, shape, format=name, matrices=several))
        slots[role] = np.zeros((1, layer[-1].form_bytes), np.uint8)
        height = shape[0] // several
        for i, form in enumerate(slots[role].reshape(several, -1)):
            parts = grouped_parts(name, height, shape[1], seed + i)
            raw = np.concatenate([a.reshape(-1).view(np.uint8) for a in parts.values()])
            kernels.tile(raw, name, height, shape[1], form)
            matrices[role, i] = kernels.matrix_of(parts, name)
    kernel = kernels.SlotKernel(
        lambda slot: {role: array[slot] for role, array in slots.items()},
        1,
        roles=layer,
        activation="relu",
    )
    inputs = draw_inputs(3, hidden_size, dtype, seed)
    rows = np.zeros((3, hidden_size), np.float32)
    compute_pairs(kernel, inputs, rows, slots=np.zeros(3, np.int64))

    gate, up = (wide_products(inputs, matrices["gate_up", i]) for i in range(2))
    hidden = np.maximum(gate, 0) * up
    expected = wide_products(hidden, matrices["down", 0])
    assert rows.tobytes() == expected.tobytes()


def test_groups_that_are_no_whole_blocks_have_no_form() -> None:
    """Nor has a format that says the group of each column."""
    for name in ("awq4[16,f16]", "gptq4[48,f16]", "gptq4[128,f16,g_idx]"):
        assert not kernels.has_form(name)
