"""Formats: their values are those of the bytes, to the bit; what they cannot store is refused."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecache.errors import ConfigError
from moecache.formats import FORMATS, find_format, format_of, quantize
from moecache.formats.base import EXAMPLES
from tests.helpers.formats import BLOCK_BYTES, READ_ONLY, blocks_of, random_blocks, values_of

BLOCKED = sorted(BLOCK_BYTES)
FLOATS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
blocked = pytest.mark.parametrize("name", BLOCKED)
seeds = st.integers(0, 2**32 - 1)


def draw(seed: int, rows: int, columns: int) -> np.ndarray:
    """Return numbers whose sizes differ from block to block."""
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.integers(-12, 12, (rows, max(1, columns // 32))))
    values = rng.standard_normal((rows, columns)) * np.repeat(sizes, 32, 1)[:, :columns]
    return values.astype(np.float32)


@blocked
@given(rows=st.integers(0, 3), num_blocks=st.integers(0, 3), seed=seeds)
def test_values_of_blocks_are_those_of_their_bytes(
    name: str, rows: int, num_blocks: int, seed: int
) -> None:
    """Whatever the bytes; the sign of zero included."""
    blocks = random_blocks(name, rows, num_blocks, seed)
    values = find_format(name).dequantize({"blocks": blocks})

    assert values.dtype == np.float32
    assert values.shape == (rows, num_blocks * 32)
    assert values.tobytes() == values_of(name, blocks).tobytes()


@blocked
def test_every_integer_has_its_value_at_every_column(name: str) -> None:
    """Down to -128 and -8, which have no opposite."""
    levels = range(-128, 128) if name == "q8_0" else range(-8, 8)
    for integer in levels:
        stored = [integer & 255] * 32 if name == "q8_0" else [(integer + 8) * 17] * 16
        blocks = np.array([[[0x00, 0x38, *stored]]], np.uint8)  # 0.5

        assert (find_format(name).dequantize({"blocks": blocks}) == 0.5 * integer).all()


@blocked
def test_values_in_another_dtype_are_rounded_once(name: str) -> None:
    """From float32, in which they are exact."""
    parts = {"blocks": random_blocks(name, 4, 3, 1)}
    for dtype in (np.float64, np.float16, ml_dtypes.bfloat16):
        values = find_format(name).dequantize(parts, dtype)
        assert values.tobytes() == values_of(name, parts["blocks"]).astype(dtype).tobytes()


@blocked
@given(rows=st.integers(0, 3), num_blocks=st.integers(0, 3), seed=seeds)
def test_quantize_gives_the_bits_of_the_reference_quantiser(
    name: str, rows: int, num_blocks: int, seed: int
) -> None:
    """One number at a time, in float32."""
    values = draw(seed, rows, num_blocks * 32)
    assert quantize(values, name)["blocks"].tobytes() == blocks_of(name, values).tobytes()


@blocked
def test_ties_are_rounded_as_c_rounds_them(name: str) -> None:
    """Halves away from zero in q8_0, upwards in q4_0; of two largest values the first counts."""
    values = np.arange(-16, 16, dtype=np.float32)[None] / 2
    values[0, :2] = (127, -127) if name == "q8_0" else (8, -8)
    assert quantize(values, name)["blocks"].tobytes() == blocks_of(name, values).tobytes()


@blocked
def test_quantize_gives_the_bits_of_gguf(name: str) -> None:
    """The package that llama.cpp's converter uses."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name.upper()]
    values = draw(3, 8, 256)
    blocks = quantize(values, name)["blocks"]

    assert blocks.tobytes() == gguf.quantize(values, kind).tobytes()
    expected = gguf.dequantize(blocks.reshape(8, -1), kind)
    assert find_format(name).dequantize({"blocks": blocks}).tobytes() == expected.tobytes()


@blocked
def test_the_error_of_a_value_is_within_half_a_step(name: str) -> None:
    """A step is the scale; q4_0 has no +8, so that a whole step is lost there."""
    values = draw(4, 16, 320)
    parts = quantize(values, name)
    largest = np.abs(values).reshape(16, 10, 32).max(-1).repeat(32, 1)
    step = largest / 127 / 2 if name == "q8_0" else largest / 8
    # The scale is rounded to float16, of 11 bits, or less where it is denormal.
    bound = step * 1.0001 + largest * 2.0**-11 + 128 * 2.0**-25

    assert (np.abs(find_format(name).dequantize(parts) - values) <= bound).all()


@blocked
def test_values_of_blocks_are_quantized_to_the_same_blocks(name: str) -> None:
    """Nothing is lost a second time."""
    once = quantize(draw(5, 8, 128), name)
    again = quantize(find_format(name).dequantize(once), name)
    assert again["blocks"].tobytes() == once["blocks"].tobytes()


@blocked
def test_zeros_stay_zeros(name: str) -> None:
    """Beside blocks that are none."""
    values = draw(6, 2, 96)
    values[1, 32:64] = 0
    found = find_format(name).dequantize(quantize(values, name))

    assert (found[1, 32:64] == 0).all()
    assert (found[1, :32] != 0).any()


@blocked
@pytest.mark.parametrize("size", [1e-45, 3e-41, 1e-38, 1e-9])
def test_values_below_all_scales_become_zero(name: str, size: float) -> None:
    """Or what the least scales of float16 can tell, without a warning."""
    values = np.full((1, 32), size, np.float32)
    values[0, ::2] = 0
    found = find_format(name).dequantize(quantize(values, name))

    assert np.abs(found - values).max() <= size


@pytest.mark.parametrize(
    "name",
    [
        *BLOCKED,
        "q5_1",
        "q2_k",
        "q6_k",
        "iq4_xs",
        "mxfp4_gguf",
        "nvfp4",
        "nvfp4[modelopt]",
        "fp8[1x32,e8m0]",
        "fp8[1x32,f32]",
        "gptq4[32,f16]",
    ],
)
def test_scales_that_are_no_numbers_are_values_without_a_warning(name: str) -> None:
    """Any bytes have values, in any dtype: infinite ones and NaN too."""
    known = find_format(name)
    raw = np.random.default_rng(0).integers(0, 256, known.nbytes(64, 256)).astype(np.uint8)
    for bytes_ in (raw, np.full_like(raw, 255), np.full_like(raw, 0x7F)):
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            assert known.dequantize(known.split(bytes_, 64, 256), dtype).shape == (64, 256)


@pytest.mark.parametrize("name", sorted(FLOATS))
def test_floats_are_stored_as_they_are(name: str) -> None:
    """Infinities, NaN, denormals and the sign of zero too."""
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -2.5, 2.0**-130, 65504.0]
    if name == "f16":
        special[7] = 2.0**-24
    values = np.array([special], FLOATS[name])
    parts = quantize(values, name)

    assert parts["values"].dtype == FLOATS[name]
    assert parts["values"].tobytes() == values.tobytes()
    found = find_format(name).dequantize(parts, FLOATS[name])
    np.testing.assert_array_equal(found.astype(np.float64), values.astype(np.float64))
    assert (np.signbit(found) == np.signbit(values)).all()


@pytest.mark.parametrize("name", sorted(FLOATS))
def test_floats_are_rounded_to_the_nearest(name: str) -> None:
    """Ties to even."""
    values = np.array([[1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11]], np.float32)
    expected = {
        "f32": values,
        "f16": [[1 + 2.0**-8, 1 + 3 * 2.0**-8, 1, 1 + 2.0**-9]],
        "bf16": [[1, 1 + 2.0**-6, 1, 1]],
    }
    found = find_format(name).dequantize(quantize(values, name))
    np.testing.assert_array_equal(found, np.array(expected[name], np.float32))


@pytest.mark.parametrize(
    ("name", "bits", "nbytes"),
    [("f32", 32, 768), ("f16", 16, 384), ("bf16", 16, 384), ("q8_0", 8.5, 204), ("q4_0", 4.5, 108)],
)
def test_a_format_tells_its_size(name: str, bits: float, nbytes: int) -> None:
    """Of three rows of 64 columns; scales included."""
    known = find_format(name)
    parts = quantize(np.ones((3, 64), np.float32), name)

    assert known.bits_per_weight == bits
    assert known.nbytes(3, 64) == nbytes == sum(part.nbytes for part in parts.values())
    assert known.nbytes(0, 64) == known.nbytes(3, 0) == 0
    assert {part: (a.dtype, a.shape) for part, a in parts.items()} == known.parts(3, 64)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(0, 512), (3, 0), (0, 0)])
def test_matrices_without_elements_are_stored(name: str, shape: tuple[int, int]) -> None:
    """They have no bytes but a number for the whole matrix, and keep their shape."""
    known = find_format(name)
    parts = known.split(np.zeros(known.nbytes(*shape), np.uint8), *shape)
    if name not in READ_ONLY:
        parts = quantize(np.zeros(shape, np.float32), name)
    assert sum(part.nbytes for part in parts.values()) == 4 * ("global_scale" in parts)
    assert find_format(name).dequantize(parts).shape == shape


@pytest.mark.parametrize("name", FLOATS)
def test_the_format_of_a_dtype_is_found(name: str) -> None:
    """Whose elements these are."""
    assert format_of(FLOATS[name]) is find_format(name) is FORMATS[name]


def test_a_dtype_without_a_format_is_refused() -> None:
    """The message names those there are."""
    with pytest.raises(ConfigError, match=r"elements of float64; supported are .*bf16"):
        format_of(np.float64)


def test_the_examples_of_names_are_formats() -> None:
    """A message shows them."""
    assert [find_format(name).name for name in EXAMPLES] == list(EXAMPLES)


@pytest.mark.parametrize("name", ["q9", "", None, ["f32"]])
def test_an_unknown_format_is_refused(name: object) -> None:
    """The message names it and those there are."""
    with pytest.raises(
        ConfigError, match=r"format .* is not supported; supported are .*q4_0.* fp8\[128x128,f32\]"
    ):
        quantize(np.zeros((1, 32), np.float32), name)  # type: ignore[arg-type]


@blocked
@pytest.mark.parametrize("columns", [1, 31, 33, 48])
def test_columns_that_are_no_whole_blocks_are_refused(name: str, columns: int) -> None:
    """The message names the block and what was asked for."""
    message = f"{name} stores whole blocks of 32 columns; {columns} are not"
    with pytest.raises(ConfigError, match=message):
        quantize(np.zeros((2, columns), np.float32), name)
    with pytest.raises(ConfigError, match=message):
        find_format(name).nbytes(2, columns)


@blocked
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_blocks_have_no_infinity_and_no_nan(name: str, value: float) -> None:
    """One among many is found."""
    values = draw(7, 3, 64)
    values[2, 40] = value
    with pytest.raises(ConfigError, match=f"{name} has no infinity and no NaN"):
        quantize(values, name)


@blocked
def test_values_whose_scale_is_no_float16_are_refused(name: str) -> None:
    """The largest that fit are stored."""
    largest = 65504 * (127 if name == "q8_0" else 8)
    values = np.full((1, 32), largest, np.float32)

    found = find_format(name).dequantize(quantize(values, name))
    assert (np.abs(found) >= largest * 7 / 8).all()
    with pytest.raises(ConfigError, match="scales of float16: the values are too large"):
        quantize(values * np.float32(1.01), name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "values",
    [np.zeros(32, np.float32), np.zeros((2, 2, 32), np.float32), np.zeros((2, 32), np.int32)],
    ids=["vector", "stack", "integers"],
)
def test_what_is_no_matrix_of_floats_is_refused(name: str, values: np.ndarray) -> None:
    """The message has dtype and shape."""
    with pytest.raises(ConfigError, match=rf"matrix \[rows, columns\].* got {values.dtype}"):
        quantize(values, name)
