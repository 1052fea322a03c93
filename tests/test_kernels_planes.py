"""Products of integers: the bits that their definition has, on every level and in any company."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moecache import kernels
from moecache.errors import ConfigError
from moecache.formats import FORMATS, find_format, quantize
from moecache.formats.form import Form
from moecache.kernels._matrix import Matrix
from moecache.kernels._tiler import Tiler
from moecache.layout import Role
from tests.helpers.examples import num_examples
from tests.helpers.kernels import BF16, DTYPES, F32, compute_pairs, computing, draw_inputs, fitting
from tests.helpers.kernels_forms import block_parts, grouped_parts
from tests.helpers.kernels_planes import LEAST, MOST, Decoded, plane_products, rounded, values

BLOCKS = (
    *("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4_gguf"),
    *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"),
    *("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"),
)
GROUPED = ("gptq2[32,bf16]", "gptq4[96,f32]", "gptq8[64,f16]", "awq4[128,bf16]", "awq4[*,f16]")
SCALED = (
    *("mxfp4", "nvfp4", "nvfp4[modelopt]", "int4[1x32,bf16]", "int4[1x16,f32]", "int4[1x96,f16]"),
    *("int8[1x64,bf16]", "int8[*x*,f32]", "int8[1x16,f16]", "int3[1x64,bf16]"),
)
NAMES = (*BLOCKS, *GROUPED, *SCALED)
every_format = pytest.mark.parametrize("name", NAMES)
# Around the ends of tiles, of registers and of chunks of inputs.
NUM_INPUTS = (1, 2, 3, 5, 6, 7, 63, 64, 65, 130)


def size_in(name: str, columns: int) -> int:
    """Return the most columns of a format up to a number, or the fewest."""
    if name in BLOCKS:
        each = find_format(name).block[1]
        return max(1, columns // each) * each
    return columns // 32 * 32 if name in GROUPED else fitting(name, columns)


def draw_parts(name: str, rows: int, columns: int, seed: int) -> dict[str, np.ndarray]:
    """Return any codes, with scales and zero points that are numbers."""
    if name in BLOCKS:
        return block_parts(name, rows, columns, seed)
    if name in GROUPED:
        return grouped_parts(name, rows, columns, seed)
    return quantize(draw_inputs(rows, columns, F32, seed), name)


def raw_product(matrix: Matrix, inputs: np.ndarray) -> np.ndarray:
    """Return products in float32."""
    kind = "bf16" if inputs.dtype == BF16 else "f32"
    out = np.full((len(inputs), matrix.rows), np.nan, np.float32)
    matrix.multiply(
        inputs=inputs.ctypes.data,
        input_type=kind,
        num=len(inputs),
        input_row_bytes=inputs.strides[0],
        out=out.ctypes.data,
        out_type="f32",
        out_row_bytes=out.strides[0],
    )
    return out


def check(matrix: Matrix, name: str, inputs: np.ndarray, expected: np.ndarray) -> None:
    """Compare bits on every level, but for which NaN one is."""
    numbers = ~np.isnan(expected)
    for level in kernels.levels():
        with computing(level):
            found = raw_product(matrix, inputs)
        np.testing.assert_array_equal(found, expected, f"{name} {level}")
        assert found[numbers].tobytes() == expected[numbers].tobytes(), (name, level)


@every_format
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 40),
    columns=st.integers(32, 600),
    num=st.integers(1, 8),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@example(dtype=F32, rows=17, columns=544, num=7, threads=1, seed=0)
@settings(max_examples=num_examples(8))
def test_every_level_has_the_bits_of_the_definition(
    name: str, dtype: np.dtype, rows: int, columns: int, num: int, threads: int, seed: int
) -> None:
    """Whatever the sizes; what fills up tiles and blocks counts nothing."""
    rows = (rows + 15) // 16 * 16 if name in GROUPED else rows
    columns = size_in(name, columns)
    matrix = kernels.matrix_of(draw_parts(name, rows, columns, seed), name)
    inputs = draw_inputs(num, columns, dtype, seed + 1)
    expected = plane_products(inputs, np.asarray(matrix.owner), name, rows)
    with computing(threads=threads):
        check(matrix, name, inputs, expected)


@every_format
def test_extreme_integers_saturate_nothing(name: str) -> None:
    """The least and the largest codes, times activations of both signs at their largest."""
    columns = size_in(name, 256)
    parts = draw_parts(name, 64, columns, 1)
    codes = parts.get("blocks", parts.get("codes"))
    assert codes is not None
    keeps = {}
    if name in BLOCKS:
        keeps = {
            at: codes[..., at].copy()
            for one in find_format(name).numbers_at or (0,)
            for at in (one, one + 1)[: 2 if find_format(name).numbers_at else 1]
        }
    patterns = (0x00, 0xFF, 0x80, 0x7F, 0x88, 0x77)
    flat = codes.view(np.uint8).reshape(len(codes), -1)
    for row in range(len(codes)):
        flat[row] = patterns[row % len(patterns)]
    for at, kept in keeps.items():
        codes[..., at] = kept
    matrix = kernels.matrix_of(parts, name)
    inputs = np.full((4, columns), 3.0, np.float32)
    inputs[1] = -3
    inputs[2, ::2] = -3
    inputs[3, 16:] = -3
    check(matrix, name, inputs, plane_products(inputs, np.asarray(matrix.owner), name, 64))


@every_format
def test_the_error_is_that_of_15_bits(name: str) -> None:
    """Below 1e-4 of a product's usual size for normal activations (root of the mean square)."""
    columns = size_in(name, 512)
    parts = draw_parts(name, 64, columns, 3)
    exact = find_format(name).dequantize(parts).astype(np.float64)
    inputs = draw_inputs(16, columns, F32, 4)
    expected = inputs.astype(np.float64) @ exact.T
    error = raw_product(kernels.matrix_of(parts, name), inputs) - expected
    assert 0 < np.sqrt((error**2).mean()) < 1e-4 * np.sqrt((expected**2).mean())


def test_integers_are_the_nearest_and_ties_go_to_the_even_one() -> None:
    """Of both signs; the largest has 127 * 128, and a block of equal numbers is exact."""
    row = np.zeros(32, np.float32)
    row[:8] = [MOST, 0.5, 1.5, 2.5, -0.5, -1.5, 63.49, -MOST]
    assert rounded(row)[1][0][:8].tolist() == [MOST, 0, 2, 2, 0, -2, 63, -MOST]
    eye = np.zeros((32, 1, 34), np.uint8)
    eye[:, 0, 1] = 0x3C  # 1.0
    eye[:, 0, 2:] = np.eye(32)
    matrix = kernels.matrix_of({"blocks": eye}, "q8_0")
    np.testing.assert_array_equal(raw_product(matrix, row[None])[0], values(row))
    same = np.full((1, 32), -2.54, np.float32)
    np.testing.assert_allclose(raw_product(matrix, same), same, rtol=2**-23)


@every_format
@pytest.mark.parametrize("culprit", [np.inf, -np.inf, np.nan])
def test_a_row_with_an_infinity_or_a_nan_gives_nan(name: str, culprit: float) -> None:
    """For every weight, zeros and those of other blocks too; other rows are as they were."""
    columns = size_in(name, 256)
    matrix = kernels.matrix_of(draw_parts(name, 32, columns, 6), name)
    for dtype in DTYPES:
        inputs = draw_inputs(6, columns, dtype, 7)
        expected = raw_product(matrix, inputs)
        inputs[4, columns - 2] = culprit
        expected[4] = np.nan
        check(matrix, name, inputs, expected)


@pytest.mark.parametrize("name", ["q8_0", "q4_k", "mxfp4"])
def test_numbers_without_a_normal_scale_are_zeros(name: str) -> None:
    """Blocks of zeros, of denormals, and just below and at what has one; other blocks count."""
    columns = size_in(name, 256)
    matrix = kernels.matrix_of(draw_parts(name, 17, columns, 8), name)
    tiny = np.array([0, 1e-40, float(LEAST) * 0.99, float(LEAST), 1e-30, 3e38])
    for dtype in DTYPES:
        inputs = np.zeros((len(tiny), columns), dtype)
        inputs[:, 7] = tiny.astype(dtype)
        inputs[:, 40] = 1
        check(matrix, name, inputs, plane_products(inputs, np.asarray(matrix.owner), name, 17))
        inputs[:, 40] = 0
        assert not raw_product(matrix, inputs)[:3].any()
        assert raw_product(matrix, inputs)[3:].any(1).all()


@every_format
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    """At the start and the end of any number of inputs, with any number of threads."""
    columns = size_in(name, 256)
    inputs = draw_inputs(max(NUM_INPUTS), columns, BF16, 10)
    # Tiles do not know of each other: a few are enough, and as many as threads share are slow.
    few, many = (kernels.matrix_of(draw_parts(name, rows, columns, 9), name) for rows in (48, 704))
    for level in kernels.levels():
        with computing(level, threads=1):
            whole = raw_product(few, inputs)
            for i in (0, 64, 129):
                assert raw_product(few, inputs[i : i + 1]).tobytes() == whole[i].tobytes()
            for num in NUM_INPUTS:
                assert raw_product(few, inputs[:num]).tobytes() == whole[:num].tobytes()
                assert raw_product(few, inputs[-num:]).tobytes() == whole[-num:].tobytes()
            whole = raw_product(many, inputs[:67])
        with computing(level, threads=3):
            for num in (1, 7, 67):
                assert raw_product(many, inputs[:num]).tobytes() == whole[:num].tobytes()
            assert raw_product(many, inputs[60:67]).tobytes() == whole[60:].tobytes()


def test_a_form_without_a_kernel_is_refused() -> None:
    """Codes that no level knows, and properties that no tile has together."""
    known = find_format("q5_0")

    class Odd(type(known)):  # type: ignore[misc]
        """q5_0 under another form."""

        odd: Form

        @property
        def form(self) -> Form:
            return self.odd

    for form, message in (
        (Form("i7", "f16", 32), "codes 'i7' have no kernel; i8, i4"),
        (Form("i5", "f16", 32, has_zeros=True), "has_zeros=True.*, for which is no kernel"),
        (Form("i6", "f16", 32), "for which is no kernel"),
    ):
        odd = object.__new__(Odd)
        odd.__dict__.update(known.__dict__)
        object.__setattr__(odd, "odd", form)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FORMATS, "odd", odd)
            with pytest.raises(ConfigError, match=message):
                Matrix(64, "odd", 16, 32)
    with pytest.raises(ConfigError, match="order 'q7_k' is not one of bytes, offset bytes"):
        Tiler(
            rows=16, columns=32, group=32, raw_bytes=1, form_bytes=1, order="q7_k", row_bytes=1,
            scale="f16", largest=1, scale_row_bytes=0,
        )  # fmt: skip


def experts_of(names: Sequence[str], seed: int) -> tuple[kernels.SlotKernel, dict[str, Decoded]]:
    """Return the kernel of one expert with an activation that NumPy has, and its matrices."""
    shapes = {"gate_up": (64, 64), "down": (64, 32)}
    layer, slots, decoded = [], {}, {}
    for name, (role, (rows, columns)) in zip(names, shapes.items(), strict=True):
        matrix = kernels.matrix_of(draw_parts(name, rows, columns, seed), name)
        layer.append(Role(role, (rows, columns), format=name))
        slots[role] = np.asarray(matrix.owner).reshape(1, -1).copy()
        decoded[role] = Decoded(slots[role][0], name, rows, columns)
    kernel = kernels.SlotKernel(
        lambda slot: {role: array[slot] for role, array in slots.items()},
        1,
        roles=layer,
        activation="relu",
    )
    return kernel, decoded


@pytest.mark.parametrize("names", [("q8_0", "q4_0"), ("mxfp4", "q5_1"), ("awq4[*,f16]", "q8_0")])
def test_experts_are_those_of_the_definition(names: tuple[str, str]) -> None:
    """What goes down has 15 bits, too; the same bits on every level, with any threads."""
    kernel, decoded = experts_of(names, 14)
    for dtype in DTYPES:
        inputs = draw_inputs(9, 64, dtype, 15)
        both = decoded["gate_up"].products(inputs)
        expected = decoded["down"].products(np.maximum(both[:, :32], 0) * both[:, 32:])
        for level in kernels.levels():
            for threads in (1, 3):
                rows = np.full((9, 64), np.nan, np.float32)
                with computing(level, threads):
                    compute_pairs(kernel, inputs, rows, slots=np.zeros(9, int))
                assert rows.tobytes() == expected.tobytes(), (level, threads)
