"""Formats of GGUF files: their values are those of the `gguf` package, to the bit."""

import importlib.util
import sys

import numpy as np
import pytest

from moecache.errors import ConfigError, FormatError
from moecache.formats import FORMATS, BlockFormat, find_format, quantize
from tests.helpers.formats import CODE_BOOKS, READ_ONLY

MADE = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4_gguf")
NAMES = (*MADE, *READ_ONLY)
needs_gguf = pytest.mark.skipif(not importlib.util.find_spec("gguf"), reason="gguf is not there")


def random_parts(name: str, rows: int, columns: int) -> dict[str, np.ndarray]:
    """Return blocks of any bytes."""
    known = find_format(name)
    raw = np.random.default_rng(1).integers(0, 256, known.nbytes(rows, columns)).astype(np.uint8)
    return known.split(raw, rows, columns)


@needs_gguf
@pytest.mark.parametrize("name", NAMES)
def test_values_of_blocks_are_those_of_gguf(name: str) -> None:
    """Of any bytes: infinite, NaN and denormal scales, and both signs of zero."""
    import gguf

    kind = gguf.GGMLQuantizationType[name.upper().removesuffix("_GGUF")]
    parts = random_parts(name, 24, 768)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(parts["blocks"].reshape(24, -1), kind)
    found = find_format(name).dequantize(parts)
    numbers = ~np.isnan(expected)
    assert found.dtype == np.float32
    assert (np.isnan(found) == ~numbers).all()
    assert found[numbers].tobytes() == expected[numbers].tobytes()


@needs_gguf
@pytest.mark.parametrize("name", MADE)
def test_quantize_gives_the_bits_of_gguf(name: str) -> None:
    """Of numbers of all sizes; of constants, zeros and powers of two."""
    import gguf

    rng = np.random.default_rng(2)
    values = rng.standard_normal((16, 256)) * np.exp2(rng.integers(-12, 9, (16, 1)))
    values[1, :64], values[2], values[3] = 0, 1.25, np.exp2(rng.integers(-9, 9, 256))
    values[4, ::2] = -8.5
    kind = gguf.GGMLQuantizationType[name.upper().removesuffix("_GGUF")]
    expected = gguf.quantize(values.astype(np.float32), kind)
    assert quantize(values, name)["blocks"].tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["q4_1", "q5_0", "q5_1", "mxfp4_gguf"])
def test_values_of_blocks_are_quantized_to_the_same_values(name: str) -> None:
    """The error of the first time is at most a step."""
    values = np.random.default_rng(3).standard_normal((8, 128)).astype(np.float32)
    known = find_format(name)
    once = known.dequantize(quantize(values, name))
    steps = np.abs(values).reshape(8, 4, 32).max(-1).repeat(32, 1) / {"4": 7, "5": 15}.get(
        name[1], 3
    )
    assert (np.abs(once - values) <= steps).all()
    again = known.dequantize(quantize(once, name))
    assert (np.abs(again - once) <= steps / 16).all()


@pytest.mark.parametrize("name", READ_ONLY)
def test_what_llama_cpp_alone_makes_is_not_made(name: str) -> None:
    """The message says what makes it."""
    with pytest.raises(ConfigError, match=f"{name} is read, not made: .*llama-quantize"):
        quantize(np.ones((2, 256), np.float32), name)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("q8_0", "q4_0")])
def test_columns_that_are_no_whole_blocks_are_refused(name: str) -> None:
    """The message names the block and what was asked for."""
    known = find_format(name)
    columns = known.block[1] * 3 // 2
    message = f"{name} stores whole blocks of {known.block[1]} columns; {columns} are not"
    with pytest.raises(ConfigError, match=message):
        known.nbytes(2, columns)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_none_are_found(name: str) -> None:
    """Every float16 of a block, and the 255 of e8m0, as damage of the file."""
    known = find_format(name)
    assert isinstance(known, BlockFormat)
    for at in known.numbers_at or (0,):
        parts = {"blocks": np.zeros((4, 2, known.block_bytes), np.uint8)}
        known.check(parts)
        parts["blocks"][3, 1, at : at + 2] = (255, 0x7F)
        if name == "iq1_m":  # in the highest bits of four numbers
            parts["blocks"][3, 1, 49::2] = (0xF0, 0xF0, 0xF0, 0x70)
        with pytest.raises(FormatError, match=f"1 of 8 scales are infinite or NaN in {name}"):
            known.check(parts)


@pytest.mark.parametrize("name", CODE_BOOKS)
def test_code_books_need_gguf_for_their_values_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the message says what to install; sizes are known all the same."""
    known = find_format(name)
    parts = random_parts(name, 2, 512)
    assert parts["blocks"].nbytes == known.nbytes(2, 512)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"need the gguf package.* 'moecache\[gguf\]'"):
        known.dequantize(parts)


def test_formats_take_as_many_bits_as_in_ggml() -> None:
    """Bits a weight, scales included."""
    found = {name: find_format(name).bits_per_weight for name in NAMES}
    assert found == {
        "q4_0": 4.5,
        "q4_1": 5,
        "q5_0": 5.5,
        "q5_1": 6,
        "q8_0": 8.5,
        "mxfp4_gguf": 4.25,
        "q2_k": 2.625,
        "q3_k": 3.4375,
        "q4_k": 4.5,
        "q5_k": 5.5,
        "q6_k": 6.5625,
        "iq4_nl": 4.5,
        "iq4_xs": 4.25,
        "iq1_s": 1.5625,
        "iq1_m": 1.75,
        "iq2_xxs": 2.0625,
        "iq2_xs": 2.3125,
        "iq2_s": 2.5625,
        "iq3_xxs": 3.0625,
        "iq3_s": 3.4375,
    }
    assert set(NAMES) <= FORMATS.keys()
