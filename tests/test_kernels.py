"""Products: exact weights, sums in float32, and a row's bits do not depend on other rows."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache import kernels
from moecache.errors import ConfigError
from moecache.formats import find_format, quantize
from tests.helpers.examples import num_examples
from tests.helpers.kernels import (
    BF16,
    BLOCKED,
    DTYPES,
    F32,
    LEVELS,
    NAMES,
    computing,
    draw_inputs,
    draw_matrix,
    fitting,
    has_integers,
    product_error,
    rounding,
)

# Every format with every dtype: within a test, as an item for each costs more than its products.
CASES = tuple(itertools.product(NAMES, DTYPES))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Around the ends of tiles, of registers and of chunks of inputs.
NUM_INPUTS = (1, 2, 3, 4, 5, 7, 9, 63, 64, 65, 200)


@pytest.fixture(name="level", params=LEVELS, scope="module")
def _level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute with each level that this processor has."""
    with computing(request.param):
        yield request.param


every_level = pytest.mark.usefixtures("level")


def raw_product(matrix: object, inputs: np.ndarray, out: np.dtype = F32) -> np.ndarray:
    """Return products in float32, or in another dtype than the inputs'."""
    types = {F32: "f32", BF16: "bf16"}
    result = np.full((len(inputs), matrix.rows), np.nan, out)  # type: ignore[attr-defined]
    matrix.multiply(  # type: ignore[attr-defined]
        inputs=inputs.ctypes.data,
        input_type=types[inputs.dtype],
        num=len(inputs),
        input_row_bytes=inputs.strides[0],
        out=result.ctypes.data,
        out_type=types[out],
        out_row_bytes=result.strides[0],
    )
    return result


def takes_denormals_as_zeros(level: str, name: str, dtype: np.dtype) -> bool:
    """Return whether vdpbf16ps or AMX multiplies, or integers, which cannot be that small."""
    if has_integers(name):
        return True
    return level in ("avx512", "amx") and dtype == BF16 and name not in ("f32", "f16")


@every_level
@pytest.mark.parametrize("name", NAMES)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 70),
    columns=st.integers(0, 200),
    num=st.integers(0, 20),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=num_examples(30))
def test_products_are_as_good_as_sums_in_float32(
    name: str, dtype: np.dtype, rows: int, columns: int, num: int, threads: int, seed: int
) -> None:
    """Over shapes that are multiples of nothing, as far as the format has such."""
    columns = fitting(name, columns)
    matrix, exact = draw_matrix(name, rows, columns, seed)
    inputs = draw_inputs(num, columns, dtype, seed + 1)
    with computing(threads=threads):
        found = kernels.products(inputs, matrix)

    assert found.dtype == dtype
    assert found.shape == (num, rows)
    expected = inputs.astype(np.float64) @ exact.T
    bound = product_error(inputs, exact, name)
    # What is rounded to bfloat16 is the sum with its error.
    bound = bound + rounding(np.abs(expected) + bound, dtype)
    assert (np.abs(found.astype(np.float64) - expected) <= bound).all()


@every_level
def test_an_output_in_bfloat16_is_that_in_float32_rounded_once() -> None:
    """To the nearest, ties to even."""
    for name, dtype in CASES:
        matrix, _ = draw_matrix(name, 70, 96, 1)
        inputs = draw_inputs(9, 96, dtype, 2)
        found, wide = raw_product(matrix, inputs, BF16), raw_product(matrix, inputs)
        assert found.tobytes() == wide.astype(BF16).tobytes(), (name, dtype)


@every_level
@every_dtype
def test_ties_between_two_numbers_of_bfloat16_go_to_the_even_one(dtype: np.dtype) -> None:
    """Upwards and downwards, of both signs; a NaN stays one, and what is too large is infinite."""
    ulp = 2.0**-7
    wide = [1 + ulp / 2, 1 + 3 * ulp / 2, -1 - ulp / 2, -1 - 3 * ulp / 2, 1 + ulp * 0.5001]
    near = [1, 1 + 2 * ulp, -1, -1 - 2 * ulp, 1 + ulp]
    weights = np.array([*wide, np.nan, 3.4e38], np.float32)[:, None]
    found = raw_product(kernels.matrix_of(weights), np.ones((1, 1), dtype), BF16)
    np.testing.assert_array_equal(found[0].astype(np.float32), [*near, np.nan, np.inf])


@every_level
@pytest.mark.parametrize("columns", [192, 95, 607])
def test_a_row_has_the_same_bits_alone_and_among_others(columns: int) -> None:
    """At the start, in the middle and at the end of any number."""
    for name, dtype in CASES:
        fitted = fitting(name, columns)
        matrix, _ = draw_matrix(name, 37, fitted, 3)
        inputs = draw_inputs(max(NUM_INPUTS), fitted, dtype, 4)
        alone = np.concatenate([raw_product(matrix, row[None]) for row in inputs])
        for num in NUM_INPUTS:
            case = name, dtype, num
            assert raw_product(matrix, inputs[:num]).tobytes() == alone[:num].tobytes(), case
            assert raw_product(matrix, inputs[-num:]).tobytes() == alone[-num:].tobytes(), case


@every_level
def test_the_number_of_threads_changes_no_bit() -> None:
    """With a matrix of many items, the last of which is not whole."""
    for name, dtype in CASES:
        matrix, _ = draw_matrix(name, 1000, 320, 5)
        inputs = draw_inputs(7, 320, dtype, 6)
        with computing(threads=1):
            alone = raw_product(matrix, inputs)
        for threads in (2, 3, 4):
            with computing(threads=threads):
                found = raw_product(matrix, inputs)
            assert found.tobytes() == alone.tobytes(), (name, dtype, threads)


@every_level
def test_a_row_of_weights_has_the_same_bits_in_any_matrix() -> None:
    """In whichever row of a tile, and beside any others."""
    weights = draw_inputs(40, 96, F32, 8)
    for name, dtype in CASES:
        if find_format(name).block[0] != 1:
            continue
        inputs = draw_inputs(5, 96, dtype, 7)
        parts = quantize(weights, name)
        whole = raw_product(kernels.matrix_of(parts, name), inputs)
        for first, last in ((1, 40), (5, 6), (13, 30), (39, 40)):
            # A number for the whole matrix stays.
            rows = {part: a[first:last] if len(a) == 40 else a for part, a in parts.items()}
            found = raw_product(kernels.matrix_of(rows, name), inputs)
            expected = np.ascontiguousarray(whole[:, first:last])
            assert found.tobytes() == expected.tobytes(), (name, dtype, first)


@every_level
@every_dtype
@pytest.mark.parametrize("name", BLOCKED)
def test_every_integer_of_a_block_is_multiplied_at_every_column(name: str, dtype: np.dtype) -> None:
    """Down to -128 and -8, which have no opposite; products with ones of an identity are exact."""
    integers = np.arange(256, dtype=np.uint8) if name == "q8_0" else np.arange(16, dtype=np.uint8)
    signed = integers.view(np.int8) if name == "q8_0" else integers.astype(np.int8) - 8
    blocks = np.zeros((len(integers), 1, 34 if name == "q8_0" else 18), np.uint8)
    blocks[:, 0, 1] = 0x38  # 0.5
    blocks[:, 0, 2:] = (integers if name == "q8_0" else integers * 17)[:, None]
    matrix = kernels.matrix_of({"blocks": blocks}, name)

    found = raw_product(matrix, np.eye(32, dtype=dtype))
    assert (found == 0.5 * signed).all()


@every_level
@every_dtype
@pytest.mark.parametrize("name", BLOCKED)
def test_columns_keep_their_places_in_the_compute_form(name: str, dtype: np.dtype) -> None:
    """Each column of each row has a value of its own, beyond one group of rows."""
    rng = np.random.default_rng(9)
    exact = rng.integers(-8 if name == "q4_0" else -127, 8, (35, 64))
    exact[:, ::32] = -8 if name == "q4_0" else -127
    matrix = kernels.matrix_of(quantize(exact.astype(np.float32), name), name)

    found = raw_product(matrix, np.eye(64, dtype=dtype))
    np.testing.assert_array_equal(found, exact.T)


@every_level
@pytest.mark.parametrize("num", [1, 5])
def test_infinities_and_nan_go_where_ieee_says(num: int) -> None:
    """An infinite input times positive, negative and no weight; and an input that is none.

    Of integers such a row is no number at all.
    """
    weights = np.ones((3, 32), np.float32)
    weights[1], weights[2] = -1, 0
    for name, dtype in CASES:
        matrix = kernels.matrix_of(quantize(weights, name), name)
        inputs = np.ones((num, 32), dtype)
        inputs[:, 30] = np.inf
        expected = [[np.nan] * 3 if has_integers(name) else [np.inf, -np.inf, np.nan]] * num
        np.testing.assert_array_equal(raw_product(matrix, inputs), expected, name)
        inputs[:, 3] = -np.inf
        assert np.isnan(raw_product(matrix, inputs)).all(), (name, dtype)
        inputs[:, 3], inputs[:, 30] = 1, np.nan
        assert np.isnan(raw_product(matrix, inputs, BF16)).all(), (name, dtype)


@every_level
@pytest.mark.parametrize("columns", [1, 31, 33])
def test_infinite_and_nan_weights_count_in_their_rows_alone(columns: int) -> None:
    """In the last column too, which is a tail's."""
    weights = np.ones((18, columns), np.float32)
    weights[3, -1], weights[16, -1], weights[17, -1] = np.inf, -np.inf, np.nan
    expected = np.full((5, 18), float(columns))
    expected[:, 3], expected[:, 16], expected[:, 17] = np.inf, -np.inf, np.nan
    for name, dtype in itertools.product(("f32", "f16", "bf16"), DTYPES):
        matrix = kernels.matrix_of(quantize(weights, name), name)
        found = raw_product(matrix, np.ones((5, columns), dtype))
        np.testing.assert_array_equal(found, expected, name)


def test_denormal_inputs_count_but_where_vdpbf16ps_takes_them_as_zeros(level: str) -> None:
    """That instruction knows no denormals, in its operands as in its sums."""
    for name, dtype in itertools.product(NAMES[:6], DTYPES):
        weight = 127.0 if name == "q8_0" else -8.0
        weights = np.full((1, 32), weight, np.float32)
        matrix = kernels.matrix_of(quantize(weights, name), name)
        inputs = np.zeros((1, 32), dtype)
        inputs[0, 5] = 2.0**-132
        is_zero = takes_denormals_as_zeros(level, name, dtype)
        expected = 0.0 if is_zero else weight * 2.0**-132
        assert raw_product(matrix, inputs)[0, 0] == expected, (name, dtype)


def test_denormal_weights_count_but_where_vdpbf16ps_takes_them_as_zeros(level: str) -> None:
    """Those of float16 always do: they are no denormals of float32."""
    least_of = {"f16": 2.0**-24, "bf16": 2.0**-133}
    for (name, least), dtype in itertools.product(least_of.items(), DTYPES):
        matrix = kernels.matrix_of(quantize(np.array([[least, -3 * least]]), name), name)
        is_zero = takes_denormals_as_zeros(level, name, dtype)
        found = raw_product(matrix, np.full((1, 2), 4, dtype))
        assert found[0, 0] == (0.0 if is_zero else -8 * least), (name, dtype)


@every_level
def test_every_number_of_float16_is_multiplied_exactly() -> None:
    """Denormals, infinities and both zeros, in vectors and in tails."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    for columns in (1, 16):
        weights = np.zeros((2**16, columns), np.float16)
        weights[:, 0] = every
        found = raw_product(kernels.matrix_of(weights), np.ones((1, columns), F32))
        np.testing.assert_array_equal(found[0], every.astype(np.float32))


@every_level
def test_a_bias_is_added_in_float32() -> None:
    """To the sum, before that is rounded."""
    for (name, dtype), bias_dtype in itertools.product(CASES, DTYPES):
        matrix, _ = draw_matrix(name, 37, 64, 10)
        inputs = draw_inputs(5, 64, dtype, 11)
        bias = draw_inputs(1, 37, bias_dtype, 12)[0]
        expected = (raw_product(matrix, inputs) + bias.astype(np.float32)).astype(dtype)
        found = kernels.products(inputs, matrix, bias=bias)
        assert found.tobytes() == expected.tobytes(), (name, dtype, bias_dtype)


@every_level
@every_dtype
def test_arrays_are_multiplied_where_they_are(dtype: np.dtype) -> None:
    """An array of weights needs no matrix; rows of inputs may lie apart."""
    weights = draw_inputs(20, 33, dtype, 13)
    inputs = draw_inputs(6, 66, dtype, 14)
    expected = kernels.products(np.ascontiguousarray(inputs[::2, :33]), weights)

    assert kernels.products(inputs[::2, :33], weights).tobytes() == expected.tobytes()
    wide = np.concatenate([weights, weights], 1)
    assert kernels.products(inputs[::2, :33], wide[:, :33]).tobytes() == expected.tobytes()


def test_a_matrix_keeps_its_array_alive() -> None:
    """The array's last name may go."""
    weights = draw_inputs(300, 300, F32, 15)
    inputs = draw_inputs(2, 300, F32, 16)
    expected = kernels.products(inputs, weights)
    matrix = kernels.matrix_of(weights.copy())
    filler = [np.full((300, 300), np.nan, np.float32) for _ in range(4)]

    assert kernels.products(inputs, matrix).tobytes() == expected.tobytes()
    del filler


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (np.ones((2, 33), np.float32), r"\[2, 33\] are not \[num, 32\], the columns"),
        (np.ones(32, np.float32), r"\[32\] are not \[num, 32\]"),
        (np.ones((1, 2, 32), np.float32), r"\[1, 2, 32\] are not"),
        (np.ones((2, 32)), "float32 and bfloat16, not float64"),
        (np.ones((2, 32), np.float16), "float32 and bfloat16, not float16"),
    ],
    ids=["columns", "vector", "stack", "float64", "float16"],
)
def test_inputs_that_do_not_fit_are_refused(inputs: np.ndarray, message: str) -> None:
    """The message has what was given and what is taken."""
    with pytest.raises(ConfigError, match=message):
        kernels.products(inputs, np.ones((3, 32), np.float32))


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (np.ones(4, np.float32), r"bias of shape \[4\] is not \[3\], the rows"),
        (np.ones((1, 3), np.float32), r"bias of shape \[1, 3\] is not \[3\]"),
        (np.ones(3), "not float64"),
    ],
    ids=["rows", "rank", "float64"],
)
def test_a_bias_that_does_not_fit_is_refused(bias: np.ndarray, message: str) -> None:
    """The message has what was given and what is taken."""
    with pytest.raises(ConfigError, match=message):
        kernels.products(np.ones((2, 32), np.float32), np.ones((3, 32), np.float32), bias=bias)


@pytest.mark.parametrize(
    ("weights", "name", "message"),
    [
        (np.ones((3, 32)), None, "no format has elements of float64"),
        (np.ones(32, np.float32), None, "C-contiguous array of rows"),
        (np.ones((3, 64), np.float32)[:, ::2], None, "C-contiguous"),
        (np.ones((3, 32), np.float32), "bf16", "matrix in bf16 is .*got .*float32"),
        ({"blocks": np.zeros((3, 1, 34), np.uint8)}, None, "need the name of their format"),
        ({"blocks": np.zeros((3, 1, 34), np.uint8)}, "q4_0", "3 x 32 matrix in q4_0 is"),
        ({"blocks": np.zeros((3, 1, 34), np.int8)}, "q8_0", "got .*int8"),
        ({"blocks": np.zeros((3, 1, 34), np.uint8)}, "q9", "format 'q9' is not supported"),
        ({"codes": np.zeros((3, 8), np.uint8)}, "fp8[1x8,f32]", "no compute form, which kernels"),
        ({"scales": np.zeros((3, 1), np.uint8)}, "q8_0", "array of rows for each part"),
    ],
    ids=[
        "float64",
        "vector",
        "strides",
        "dtype",
        "no name",
        "q4_0",
        "int8",
        "q9",
        "no form",
        "parts",
    ],
)
def test_what_is_no_matrix_is_refused(weights: object, name: str | None, message: str) -> None:
    """The message says what a matrix in the format is."""
    with pytest.raises(ConfigError, match=message):
        kernels.matrix_of(weights, name)  # type: ignore[arg-type]
