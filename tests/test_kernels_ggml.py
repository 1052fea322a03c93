"""ggml's blocks beyond a scale and codes: their forms, values, products, experts."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moecache import kernels
from moecache.errors import FormatError
from moecache.formats import find_format
from moecache.layout import Role
from tests.helpers.formats import CODE_BOOKS
from tests.helpers.kernels import (
    DTYPES,
    LEVELS,
    compute_pairs,
    computing,
    draw_inputs,
    product_error,
    rounding,
    wide_products,
)
from tests.helpers.kernels_forms import block_parts, form_of_blocks, terms_of

SMALL = ("q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4_gguf")
NAMES = (*SMALL, "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")
few = settings(max_examples=max(1, settings().max_examples // 2))
every_format = pytest.mark.parametrize("name", NAMES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(name="level", params=LEVELS, autouse=True, scope="module")
def _level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute with each level that this processor has."""
    with computing(request.param):
        yield request.param


def columns_in(name: str, blocks: int) -> int:
    """Return the columns of a few blocks; of 32 columns there are more."""
    return blocks * (96 if name in SMALL else 256)


def joined(parts: dict[str, np.ndarray]) -> np.ndarray:
    """Return the bytes of a matrix."""
    return np.concatenate([part.reshape(-1).view(np.uint8) for part in parts.values()])


def tiled(raw: np.ndarray, name: str, rows: int, columns: int) -> np.ndarray:
    """Return the compute form."""
    form = find_format(name).form
    assert form is not None
    out = np.full(form.nbytes(rows, columns), 7, np.uint8)
    kernels.tile(raw, name, rows, columns, out)
    return out


@given(
    name=st.sampled_from(NAMES),
    rows=st.integers(0, 40),
    blocks=st.integers(0, 2),
    is_sane=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example(name="q6_k", rows=17, blocks=2, is_sane=False, seed=0)
@example(name="mxfp4_gguf", rows=18, blocks=2, is_sane=False, seed=0)
@example(name="q5_1", rows=33, blocks=1, is_sane=False, seed=0)
def test_any_blocks_are_tiled_and_expanded_without_losing_a_bit(
    name: str, rows: int, blocks: int, is_sane: bool, seed: int
) -> None:
    """Numbers that are none, too, and denormal ones; rows that fill up tiles are of zero bytes."""
    known, columns = find_format(name), columns_in(name, blocks)
    parts = block_parts(name, rows, columns, seed)
    if not is_sane:
        rng = np.random.default_rng(seed)
        parts["blocks"][...] = rng.integers(0, 256, parts["blocks"].shape)
    if name == "mxfp4_gguf":  # A scale of 255 is more than bfloat16 has: no number, and refused.
        np.minimum(parts["blocks"][..., 0], 254, out=parts["blocks"][..., 0])
    form = tiled(joined(parts), name, rows, columns)

    assert form.tobytes() == form_of_blocks(parts, name).tobytes()
    for dtype in DTYPES:
        out = np.full((rows, columns + 1), 7, dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            kernels.expand(form, name, rows, columns, out[:, :columns])
            expected = known.dequantize(parts, dtype)
        numbers = ~np.isnan(expected)
        found = out[:, :columns]
        assert (np.isnan(found) == ~numbers).all()
        assert found[numbers].tobytes() == expected[numbers].tobytes()
        assert (out[:, columns:] == 7).all()


@every_format
def test_a_tiler_finds_every_number_that_is_none(name: str) -> None:
    """Infinite or NaN, of scales and of offsets; the format's own check does, too."""
    known, columns = find_format(name), columns_in(name, 2)
    parts = block_parts(name, 35, columns, 1)
    tiler, form = (
        kernels.tiler(name, 35, columns),
        np.zeros(find_format(name).form.nbytes(35, columns), np.uint8),
    )  # type: ignore[union-attr]
    assert not tiler.tile(joined(parts), form)
    known.check(parts)

    for seed, at in enumerate(known.numbers_at or (0,)):  # type: ignore[attr-defined]
        for row in (0, 20, 34):
            spoilt = {"blocks": parts["blocks"].copy()}
            block = spoilt["blocks"][row, (row + seed) % parts["blocks"].shape[1]]
            block[at : at + 2] = (0, 0x7C) if known.numbers_at else (255, block[1])  # type: ignore[attr-defined]
            assert tiler.tile(joined(spoilt), form)
            with pytest.raises(FormatError, match=f"1 of .* scales are infinite or NaN in {name}"):
                known.check(spoilt)


@every_format
@every_dtype
def test_products_with_an_identity_are_the_values(name: str, dtype: np.dtype) -> None:
    """To the bit: each column of each row has its code, its scale and its offset."""
    columns = columns_in(name, 2)
    parts = block_parts(name, 21, columns, 2)
    found = wide_products(np.eye(columns, dtype=dtype), kernels.matrix_of(parts, name))
    np.testing.assert_array_equal(found, find_format(name).dequantize(parts).T)


@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 50),
    blocks=st.integers(1, 3),
    num=st.integers(1, 10),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_are_as_good_as_sums_in_float32(
    name: str, dtype: np.dtype, rows: int, blocks: int, num: int, seed: int
) -> None:
    """Of codes, and of offsets, which are summed apart."""
    columns = columns_in(name, blocks)
    parts = block_parts(name, rows, columns, seed)
    inputs = draw_inputs(num, columns, dtype, seed)
    found = kernels.products(inputs, kernels.matrix_of(parts, name)).astype(np.float64)

    expected = inputs.astype(np.float64) @ find_format(name).dequantize(parts).astype(np.float64).T
    bound = product_error(inputs, terms_of(parts, name), name)
    bound = bound + rounding(np.abs(expected) + bound, dtype)
    assert (np.abs(found - expected) <= bound).all()


@every_format
@every_dtype
def test_a_row_has_the_same_bits_in_any_batch(name: str, dtype: np.dtype) -> None:
    """With any number of threads, alone and among others; and in any matrix."""
    parts = block_parts(name, 400, columns_in(name, 3), 3)
    matrix = kernels.matrix_of(parts, name)
    inputs = draw_inputs(11, matrix.columns, dtype, 4)
    whole = kernels.products(inputs, matrix)
    for first, last in ((0, 1), (3, 5), (2, 9), (1, 11)):
        with computing(threads=3):
            some = kernels.products(inputs[first:last], matrix)
        assert some.tobytes() == whole[first:last].tobytes()
    rows = kernels.matrix_of({"blocks": parts["blocks"][37:59]}, name)
    assert kernels.products(inputs, rows).tobytes() == whole[:, 37:59].tobytes()


@every_dtype
@pytest.mark.parametrize("name", ["q5_1", "q4_k"])
def test_inputs_that_are_no_numbers_count_in_their_rows_alone(name: str, dtype: np.dtype) -> None:
    """And an offset of NaN in its row of the matrix; of infinite inputs nothing is a number."""
    parts = block_parts(name, 24, columns_in(name, 2), 5)
    parts["blocks"][20, 1, 2:4] = (0, 0x7E)
    inputs = draw_inputs(4, parts["blocks"].shape[1] * find_format(name).block[1], dtype, 6)
    inputs[1, 40], inputs[3, 70] = np.nan, np.inf
    found = kernels.products(inputs, kernels.matrix_of(parts, name))
    assert np.isnan(found[1]).all()
    assert (np.isnan(found[[0, 2]]) == (np.arange(24) == 20)).all()
    assert np.isnan(found[3]).all()


@pytest.mark.parametrize(
    "names", [("q4_k", "q6_k"), ("q5_k", "q5_1"), ("iq4_xs", "q2_k"), ("mxfp4_gguf", "q4_1")]
)
@every_dtype
def test_experts_have_the_bits_of_their_products(names: tuple[str, str], dtype: np.dtype) -> None:
    """Gate and up, a matrix each, then down, in formats of their own."""
    hidden_size, width = columns_in(names[0], 1), columns_in(names[1], 2)
    shapes = {"gate_up": (2 * width, hidden_size), "down": (hidden_size, width)}
    layer, slots, matrices = [], {}, {}
    for name, (role, shape) in zip(names, shapes.items(), strict=True):
        several = 2 if role == "gate_up" else 1
        layer.append(Role(role, shape, format=name, matrices=several))
        slots[role] = np.zeros((1, layer[-1].form_bytes), np.uint8)
        height = shape[0] // several
        for i, form in enumerate(slots[role].reshape(several, -1)):
            parts = block_parts(name, height, shape[1], 7 + i)
            kernels.tile(joined(parts), name, height, shape[1], form)
            matrices[role, i] = kernels.matrix_of(parts, name)
    kernel = kernels.SlotKernel(
        lambda slot: {role: array[slot] for role, array in slots.items()},
        1,
        roles=layer,
        activation="relu",
    )
    inputs = draw_inputs(20, hidden_size, dtype, 8)
    gate, up = (wide_products(inputs, matrices["gate_up", i]) for i in range(2))
    hidden = np.maximum(gate, 0) * up
    expected = wide_products(hidden, matrices["down", 0])
    for threads in (1, 3):
        rows = np.zeros((20, hidden_size), np.float32)
        with computing(threads=threads):
            compute_pairs(kernel, inputs, rows, slots=np.zeros(20, np.int64))
        assert rows.tobytes() == expected.tobytes()


@given(name=st.sampled_from(CODE_BOOKS), rows=st.integers(0, 40), seed=st.integers(0, 2**32 - 1))
@few
def test_code_books_become_tables_without_losing_a_bit(name: str, rows: int, seed: int) -> None:
    """Values are gguf's; four bits a weight, and an integer for each 16 or 32."""
    parts = block_parts(name, rows, 512, seed)
    form = tiled(joined(parts), name, rows, 512)
    for dtype in DTYPES:
        out = np.full((rows, 512), 7, dtype)
        kernels.expand(form, name, rows, 512, out)
        np.testing.assert_array_equal(out, find_format(name).dequantize(parts, dtype))
    assert form.size <= -(-rows // 16) * 16 * 512 * 4.6 / 8


def test_forms_of_blocks_take_little_more_than_the_file() -> None:
    """Slots hold them: bytes decide how many there are. Two and three bits become four."""
    for name in NAMES:
        known = find_format(name)
        more = known.form.nbytes(768, 2048) / known.nbytes(768, 2048)  # type: ignore[union-attr]
        assert more < {"q2_k": 2, "q3_k": 1.34, "mxfp4_gguf": 1.06}.get(name, 1.03)
