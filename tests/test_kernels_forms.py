"""Compute forms: made of any bytes, and expanded to the values that the format says."""

from collections.abc import Iterator
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moecache import kernels
from moecache.errors import ConfigError, FormatError
from moecache.formats import FORMATS, Format, GroupedFormat, ScaledFormat, find_format
from moecache.layout import Role
from tests.helpers.kernels import (
    BF16,
    BLOCKED,
    DTYPES,
    LEVELS,
    SCALED,
    computing,
    fitting,
    product_error,
    rounding,
)
from tests.helpers.kernels_forms import form_of

# Integers of every width that has a form, straddling words or not.
NAMES = (*BLOCKED, *SCALED, "int2[1x32,f16]", "int3[1x64,bf16]", "int5[4x32,f32]", "int7[1x*,bf16]")


@pytest.fixture(name="level", params=LEVELS, autouse=True, scope="module")
def _level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute with each level that this processor has."""
    with computing(request.param):
        yield request.param


def tiled(raw: np.ndarray, name: str, rows: int, columns: int) -> np.ndarray:
    """Return the compute form."""
    form = find_format(name).form
    assert form is not None
    out = np.full(form.nbytes(rows, columns), 7, np.uint8)
    kernels.tile(raw, name, rows, columns, out)
    return out


def equal(found: np.ndarray, expected: np.ndarray) -> None:
    """Compare bits, but for which NaN one is."""
    assert found.dtype == expected.dtype
    numbers = ~np.isnan(expected)
    assert (np.isnan(found) == ~numbers).all()
    assert found[numbers].tobytes() == expected[numbers].tobytes()


@given(
    name=st.sampled_from(NAMES),
    rows=st.integers(0, 50),
    columns=st.integers(0, 300),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@example(name="nvfp4", rows=17, columns=0, threads=1, seed=0)
def test_any_bytes_are_tiled_and_expanded_without_losing_a_bit(
    name: str, rows: int, columns: int, threads: int, seed: int
) -> None:
    """Codes and scales that are no number too; what fills up tiles and blocks is zero."""
    known, columns = find_format(name), fitting(name, columns)
    size = known.nbytes(rows, columns)
    raw = np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)
    form = tiled(raw, name, rows, columns)

    with np.errstate(over="ignore"):
        assert form.tobytes() == form_of(raw, known, rows, columns).tobytes()
    parts = known.split(raw, rows, columns)
    for dtype in DTYPES:
        out = np.full((rows, columns + 1), 7, dtype)
        with computing(threads=threads), np.errstate(over="ignore", invalid="ignore"):
            kernels.expand(form, name, rows, columns, out[:, :columns])
            equal(out[:, :columns], known.dequantize(parts, dtype))
        assert (out[:, columns:] == 7).all()


@pytest.mark.parametrize("name", [name for name in NAMES if "int" not in name or "[1x" in name])
def test_a_tiler_finds_every_scale_that_is_no_number(name: str) -> None:
    """Of two matrices one after the other, at any place."""
    known, shape = find_format(name), (35, fitting(name, 160))
    values = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    parts = known.quantize(values)
    raw = np.tile(np.concatenate([a.reshape(-1).view(np.uint8) for a in parts.values()]), 2)
    tiler = kernels.tiler(name, *shape)
    out = np.zeros((2, tiler.form_bytes), np.uint8)
    maybe = isinstance(tiler, kernels.forms.Repacker)
    assert tiler.tile(raw, out) == maybe

    for at in np.random.default_rng(4).integers(0, 2 * 35, 9):
        spoilt = raw.copy().reshape(2, -1)
        scales = _scales(known.split(spoilt[at % 2], *shape), known)
        row = at // 2 * len(scales) // 35
        scales[row, at % scales.shape[1]] = 255 if scales.dtype == np.uint8 else np.inf
        assert tiler.tile(spoilt, out)


@pytest.mark.parametrize(
    "name",
    [
        *("fp8[16x32,f32]", "fp8[1x*,bf16]", "fp8[1x32,f16]", "fp8[1x32,e8m0]", "mxfp4", "nvfp4"),
        *("int4[1x32,bf16]", "int4[1x32,f16]", "int8[1x64,f32]", "int3[1x64,bf16]"),
        *("nvfp4[modelopt]", "int4[1x32,e8m0]"),
        *("gptq4[32,bf16]", "gptq_v28[32,f32]", "gptq2[*,f32]", "awq4[32,f32]", "awq4[32,f16]"),
        *("mxfp4_gguf", "q8_0"),
    ],
)
def test_a_scale_is_refused_from_where_the_largest_code_times_it_is_infinite(name: str) -> None:
    """Of either sign; the tiler finds what the format's check does. Zero points count."""
    known = find_format(name)
    rows, columns = (48 if isinstance(known, GroupedFormat) else 35), 64
    raw = np.zeros(known.nbytes(rows, columns), np.uint8)
    parts = known.split(raw, rows, columns)
    # The codes, and zero points, that are the farthest from zero.
    if "blocks" in parts:
        parts["blocks"][..., 1 if name == "mxfp4_gguf" else 2 :] = 0x77
    else:
        element = getattr(known, "element", "")
        parts["codes"].view(np.uint8)[...] = {"e4m3": 0x7E, "e2m1": 0x77}.get(element, 0)
    if "zeros" in parts:
        parts["zeros"][...] = -1
    place = _scales(parts, known)[-1:, -1:]
    if "global_scale" in parts:
        place[...] = 448
        place = parts["global_scale"]
    tiler = kernels.tiler(name, rows, columns)
    form = np.zeros(tiler.form_bytes, np.uint8)
    found = []
    dtype = place.dtype
    for scale in _candidates(dtype, known):
        place[...] = scale
        with np.errstate(over="ignore", invalid="ignore"):
            is_finite = bool(np.isfinite(known.dequantize(parts)).all())
        is_finite &= dtype == np.uint8 or bool(np.isfinite(np.float64(scale)))
        found.append(is_finite)
        is_sure = not isinstance(tiler, kernels.forms.Repacker) and "global_scale" not in parts
        assert tiler.tile(raw, form) != is_finite or not is_sure
        with nullcontext() if is_finite else pytest.raises(FormatError, match=" scale"):
            known.check(parts)
    assert set(found) == {True, False}


def _candidates(dtype: np.dtype, known: Format) -> list[float]:
    """Return scales around where some code times them is no longer finite, of both signs."""
    if dtype == np.uint8:
        return list(range(235, 256))
    largest = float(ml_dtypes.finfo(dtype).max)
    sizes = [largest, np.inf, np.nan]
    if dtype != np.float16:
        most = (*range(1, 10), *(15, 16, 127, 128, 254, 255, 256, 6, 448, 6 * 448))
        bits = [int(np.array(largest / one, dtype).view(f"u{dtype.itemsize}")) for one in most]
        near = {bit + step for bit in bits for step in range(-2, 3) if step < 1 or bit != bits[0]}
        wide = np.array(sorted(near), f"u{dtype.itemsize}").view(dtype)
        sizes += list(wide.astype(np.float64))
        if known.name == "nvfp4":
            sizes += [1 / size for size in sizes if 1 < size < 1e38]
    return [size * sign for size in sizes for sign in (1, -1)]


def _scales(parts: dict[str, np.ndarray], known: Format) -> np.ndarray:
    if known.name == "mxfp4_gguf":
        return parts["blocks"][..., 0]
    if "blocks" in parts:
        return parts["blocks"][..., :2].view(np.float16)[..., 0]
    return parts["scales"]


def test_a_tiler_takes_whole_matrices() -> None:
    """Others are refused, with the sizes."""
    tiler = kernels.tiler("mxfp4", 16, 32)
    raw, form = np.zeros(272, np.uint8), np.zeros(288, np.uint8)
    with pytest.raises(ValueError, match="of 272 bytes are tiled into 288; got 271 and 288"):
        tiler.tile(raw[1:], form)
    with pytest.raises(ValueError, match="of 272 bytes are tiled into 288; got 272 and 287"):
        tiler.tile(raw, form[1:])
    with pytest.raises(ValueError, match="contiguous"):
        tiler.tile(raw, form[::-1])
    form.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        tiler.tile(raw, form)


@pytest.mark.parametrize("scale", ["f32", "f16", "bf16", "e8m0"])
@pytest.mark.parametrize("group", [16, 32])
def test_every_code_is_expanded_by_every_kind_of_scale(scale: str, group: int) -> None:
    """Infinite, NaN, zero, denormal and largest scales; of FP8 all 256 codes, NaN among them."""
    name = f"fp8[1x{group},{scale}]"
    known = find_format(name)
    special = [0, -0.0, np.inf, -np.inf, np.nan, 1, -3, 2.0**-24, 65504, 2.0**-126, 2.0**-133]
    special += [2.0**-149, 3.4e38]
    scales = np.arange(256, dtype=np.uint8)
    if scale != "e8m0":
        dtype, _ = known.parts(1, 256)["scales"]
        with np.errstate(over="ignore", invalid="ignore"):
            scales = np.array(special, np.float32).astype(dtype)
    codes = np.tile(np.arange(256, dtype=np.uint8), (len(scales), 1))
    every = scales[:, None].repeat(256 // group, 1)
    raw = np.concatenate([codes.view(np.uint8).reshape(-1), every.reshape(-1).view(np.uint8)])
    form = tiled(raw, name, *codes.shape)

    for kind in DTYPES:
        out = np.empty(codes.shape, kind)
        kernels.expand(form, name, *codes.shape, out)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = known.dequantize(known.split(raw, *codes.shape), kind)
        equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_and_scales_that_are_no_numbers_are_multiplied_as_their_values(
    dtype: np.dtype,
) -> None:
    """They count in their rows alone; so does the 255 of e8m0."""
    codes = np.full((35, 64), 0x38, np.uint8)  # 1.0
    scales = np.full((35, 2), 127, np.uint8)
    codes[3, 40], codes[16, 0], scales[20, 1], scales[34, 0] = 0x7F, 0xFF, 255, 0
    raw = np.concatenate([codes.reshape(-1), scales.reshape(-1)])
    parts = find_format("fp8[1x32,e8m0]").split(raw, 35, 64)
    matrix = kernels.matrix_of(parts, "fp8[1x32,e8m0]")
    expected = np.full((5, 35), 64.0)
    expected[:, [3, 16, 20]], expected[:, 34] = np.nan, 32
    found = kernels.products(np.ones((5, 64), dtype), matrix).astype(np.float64)
    np.testing.assert_array_equal(found, expected)


@given(
    group=st.sampled_from([16, 32, 64, 0]),
    columns=st.integers(1, 60).map(lambda half: 2 * half),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
@example(group=16, columns=70, dtype=BF16, seed=0)
def test_fp4_has_any_groups_and_scales_that_only_its_format_knows(
    group: int, columns: int, dtype: np.dtype, seed: int
) -> None:
    """A format of another element for scales gives them as float32."""

    class Halved(ScaledFormat):
        """Scales in quarters, of a byte each."""

        @property
        def form(self):  # type: ignore[no-untyped-def]  # noqa: ANN202
            plain = ScaledFormat(self.name, self.block, self.element, "f32")
            return plain.form

        def parts(self, rows: int, columns: int):  # type: ignore[no-untyped-def]  # noqa: ANN202
            return ScaledFormat(self.name, self.block, self.element, "e8m0").parts(rows, columns)

        def scales(self, parts):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            return parts["scales"].astype(np.float32) / np.float32(4)

    known = Halved("fp4 by quarters", (1, group), "e2m1", "quarters")
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, known.nbytes(21, columns)).astype(np.uint8)
    parts = known.split(raw, 21, columns)
    inputs = rng.standard_normal((3, columns)).astype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMATS, known.name, known)
        matrix = kernels.matrix_of(parts, known.name)
        out = np.empty((21, columns), np.float32)
        kernels.expand(np.asarray(matrix.owner), known.name, 21, columns, out)
        found = kernels.products(inputs, matrix)
        exact = known.dequantize(parts)
        bound = product_error(inputs, exact, known.name)

    assert out.tobytes() == exact.tobytes()
    expected = inputs.astype(np.float64) @ exact.T.astype(np.float64)
    bound += rounding(np.abs(expected) + bound, dtype)
    assert (np.abs(found.astype(np.float64) - expected) <= bound).all()


@pytest.mark.parametrize("name", ["q8_0", "fp8[16x32,f32]"])
@pytest.mark.parametrize("stored", [False, True])
def test_values_of_a_role_of_two_matrices_are_those_of_both(name: str, stored: bool) -> None:
    """Each fills up its own tiles; values may be made in another dtype."""
    role = Role("gate_up", (42, 64), format=name, matrices=2)
    known = find_format(name)
    raw = np.random.default_rng(1).integers(0, 120, (2, known.nbytes(21, 64))).astype(np.uint8)
    values = [known.dequantize(known.split(one, 21, 64)) for one in raw]
    given_array = raw.reshape(-1)
    if not stored:
        given_array = np.concatenate([tiled(one, name, 21, 64) for one in raw])
        assert given_array.nbytes == role.form_bytes
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float64):
        with np.errstate(over="ignore", invalid="ignore"):
            found = kernels.values_in(given_array, role, stored=stored, dtype=dtype)
            assert found.tobytes() == np.concatenate(values).astype(dtype).tobytes()
            assert found.shape == role.shape


def test_what_does_not_fit_is_neither_tiled_nor_expanded() -> None:
    """Nothing is written beyond an array."""
    raw, form = np.zeros(18 * 16, np.uint8), np.zeros(18 * 16, np.uint8)
    for given_raw, given_form in ((raw[:-1], form), (raw, form[1:]), (raw, form[::-1])):
        with pytest.raises(ValueError, match=r"16 x 32 matrix in q4_0|contiguous"):
            kernels.tile(given_raw, "q4_0", 16, 32, given_form)
    out = np.zeros((16, 32), np.float32)
    out.flags.writeable = False
    wrong = (out, out.astype(np.float64), np.zeros((32, 16), np.float32), np.zeros(512, np.float32))
    for target in wrong:
        with pytest.raises(ValueError, match=r"float32 or bfloat16 \[16, 32\], not to"):
            kernels.expand(form, "q4_0", 16, 32, target)
    with pytest.raises(ValueError, match="rows of values must be contiguous"):
        kernels.expand(form, "q4_0", 16, 32, np.zeros((16, 64), np.float32)[:, ::2])
    with pytest.raises(ValueError, match="288 contiguous bytes in its compute form; got 287"):
        kernels.expand(form[1:], "q4_0", 16, 32, np.zeros((16, 32), np.float32))


@pytest.mark.parametrize(
    ("name", "rows"), [("f32", 16), ("zz", 16), ("fp8[1x8,f32]", 16), ("q4_0", -16)]
)
def test_formats_without_a_form_are_neither_tiled_nor_expanded(name: str, rows: int) -> None:
    """The message names the format, or the size."""
    raw, message = np.zeros(1, np.uint8), r"no compute form|cannot have|not supported"
    with pytest.raises(ConfigError, match=message):
        kernels.tile(raw, name, rows, 32, raw)
    with pytest.raises(ConfigError, match=message):
        kernels.expand(raw, name, rows, 32, raw)
    assert not kernels.has_form("")
    assert rows < 0 or not kernels.has_form(name)
