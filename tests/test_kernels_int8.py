"""Activations of 8 bits: the bits that plain loops have, on every level and in any company."""

from collections.abc import Iterator

import numpy as np
import pytest

import moecache
from moecache import experts, kernels
from moecache.errors import ConfigError
from moecache.formats import find_format, quantize
from moecache.layout import Role
from moecache.slots import HostSlots
from moecache.stores import MemoryStore
from tests.helpers.formats import random_blocks
from tests.helpers.kernels import (
    BF16,
    BLOCKED,
    DTYPES,
    F32,
    SCALED,
    computing,
    draw_inputs,
    wave_of,
)
from tests.helpers.kernels_int8 import int8_products, rounded, values

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_blocked = pytest.mark.parametrize("name", BLOCKED)
# Around the ends of tiles and of chunks of inputs.
NUM_INPUTS = (1, 2, 3, 4, 5, 7, 63, 64, 65, 130)


@pytest.fixture(name="level", params=kernels.levels(), autouse=True, scope="module")
def _level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute with each level that this processor has."""
    with computing(request.param):
        yield request.param


def product(inputs: np.ndarray, blocks: np.ndarray, name: str) -> np.ndarray:
    """Return products of activations of 8 bits, float32 whatever the inputs are."""
    matrix = kernels.matrix_of({"blocks": blocks}, name)
    out = np.full((len(inputs), matrix.rows), np.nan, np.float32)
    kind = "bf16" if inputs.dtype == BF16 else "f32"
    matrix.multiply(
        *(inputs.ctypes.data, kind, len(inputs), inputs.strides[0]),
        *(out.ctypes.data, "f32", out.strides[0]),
        activations="int8",
    )
    return out


def equal(found: np.ndarray, expected: np.ndarray) -> None:
    """Compare bits, but for which NaN one is."""
    np.testing.assert_array_equal(found, expected)
    numbers = ~np.isnan(expected)
    assert found[numbers].tobytes() == expected[numbers].tobytes()


def blocks_of_integers(name: str, integers: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """Return blocks of one block a row, each of one integer; -8 to 7 in q4_0."""
    blocks = np.zeros((len(integers), 1, find_format(name).nbytes(1, 32)), np.uint8)
    blocks[:, 0, :2] = np.array([scale], np.float16).view(np.uint8)
    raw = (integers + 8) * 17 if name == "q4_0" else integers.astype(np.int8).view(np.uint8)
    blocks[:, 0, 2:] = raw[:, None]
    return blocks


@every_blocked
@every_dtype
@pytest.mark.parametrize(("rows", "num_blocks"), [(1, 1), (16, 2), (37, 3), (15, 0), (0, 1)])
def test_products_are_those_of_plain_loops(
    name: str, dtype: np.dtype, rows: int, num_blocks: int
) -> None:
    """Bit for bit, so that levels are equal; of any bytes a block may have, -128 included."""
    blocks = random_blocks(name, rows, num_blocks, 1)
    inputs = draw_inputs(5, num_blocks * 32, dtype, 2)
    equal(product(inputs, blocks, name), int8_products(inputs, blocks, name))


@every_blocked
@every_dtype
def test_the_error_is_that_of_activations_rounded_to_8_bits(name: str, dtype: np.dtype) -> None:
    """Half a step of each block, a 254th of its largest, times the sizes of the weights."""
    weights = draw_inputs(40, 512, F32, 3)
    parts = quantize(weights, name)
    exact = find_format(name).dequantize(parts).astype(np.float64)
    inputs = draw_inputs(6, 512, dtype, 4)
    wide = inputs.astype(np.float64)
    largest = np.abs(wide).reshape(6, 16, 32).max(2)
    sizes = np.abs(exact).reshape(40, 16, 32).sum(2)
    bound = largest @ sizes.T / 254 + 1e-5 * (np.abs(wide) @ np.abs(exact).T)

    error = np.abs(product(inputs, parts["blocks"], name) - wide @ exact.T)
    assert (error <= bound).all()
    # In practice errors cancel: below one per cent of what a product is.
    assert np.sqrt((error**2).mean()) < 0.01 * np.sqrt(((wide @ exact.T) ** 2).mean())


@every_blocked
def test_extreme_integers_saturate_nothing(name: str) -> None:
    """The least and the largest weight by activations of 127 and -127, and by both in turn."""
    integers = np.array([-128, -127, 0, 1, 127] if name == "q8_0" else [-8, -7, 0, 7])
    blocks = blocks_of_integers(name, integers)
    inputs = np.full((4, 32), 127.0, np.float32)
    inputs[1] = -127
    inputs[2, ::2] = -127
    inputs[3, 16:] = -127
    expected = 127.0 * 32 * np.stack([integers, -integers, 0 * integers, 0 * integers])

    found = product(inputs, blocks, name)
    np.testing.assert_array_equal(found, expected)
    equal(found, int8_products(inputs, blocks, name))


@every_blocked
@every_dtype
def test_columns_keep_their_places(name: str, dtype: np.dtype) -> None:
    """Each column of each row has a value of its own; an input of one 1 is exact but its scale."""
    blocks = random_blocks(name, 35, 2, 5)
    inputs = 127 * np.eye(64, dtype=dtype)
    values_of_rows = find_format(name).dequantize({"blocks": blocks})

    np.testing.assert_array_equal(product(inputs, blocks, name), 127 * values_of_rows.T)


def test_integers_are_the_nearest_and_ties_go_to_the_even_one() -> None:
    """Of both signs; a block of equal numbers is exact."""
    row = np.zeros(32, np.float32)
    row[:8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, 3.49, -3.51]
    assert rounded(row)[0][1][:8] == [127, 0, 2, 2, 0, -2, 3, -4]
    eye = np.zeros((32, 1, 34), np.uint8)
    eye[:, 0, 1] = 0x3C  # 1.0
    eye[:, 0, 2:] = np.eye(32)
    np.testing.assert_array_equal(product(row[None], eye, "q8_0")[0], values(row))
    same = np.full((1, 32), -2.54, np.float32)
    np.testing.assert_array_equal(product(same, eye, "q8_0"), same / np.float32(127) * 127)


@every_blocked
@every_dtype
@pytest.mark.parametrize("culprit", [np.inf, -np.inf, np.nan])
def test_a_row_with_an_infinity_or_a_nan_gives_nan(
    name: str, dtype: np.dtype, culprit: float
) -> None:
    """For every weight, zeros and those of other blocks too; other rows are as they were."""
    blocks = random_blocks(name, 20, 3, 6)
    blocks[3] = 0
    inputs = draw_inputs(6, 96, dtype, 7)
    expected = product(inputs, blocks, name)
    inputs[4, 70] = culprit
    expected[4] = np.nan

    found = product(inputs, blocks, name)
    equal(found, expected)
    equal(found, int8_products(inputs, blocks, name))


@every_blocked
def test_infinite_and_nan_scales_of_weights_count_in_their_rows_alone(name: str) -> None:
    """As ieee has them: an infinity times a sum that is not zero is one."""
    blocks = blocks_of_integers(name, np.full(20, 3))
    blocks[4, 0, :2] = np.array([np.inf], np.float16).view(np.uint8)
    blocks[18, 0, :2] = np.array([np.nan], np.float16).view(np.uint8)
    inputs = np.ones((2, 32), np.float32)
    inputs[1, ::2] = -1
    expected = np.full((2, 20), 96.0)
    expected[1] = 0
    expected[:, 4], expected[:, 18] = (np.inf, np.nan), np.nan
    np.testing.assert_allclose(product(inputs, blocks, name), expected, rtol=1e-6)


@every_blocked
@every_dtype
def test_numbers_without_a_normal_scale_are_zeros(name: str, dtype: np.dtype) -> None:
    """Blocks of zeros, of denormals, and just below and at what has one; other blocks count."""
    blocks = random_blocks(name, 17, 2, 8)
    least = np.array([127 * np.finfo(np.float32).tiny], np.float32).astype(dtype)[0]
    tiny = np.array([0, 1e-40, float(least) * 0.99, float(least) * 1.01, 1e-30, 3e38])
    inputs = np.zeros((len(tiny), 64), dtype)
    inputs[:, 7] = tiny.astype(dtype)
    inputs[:, 40] = 1
    with np.errstate(over="ignore"):
        expected = int8_products(inputs, blocks, name)
    found = product(inputs, blocks, name)
    equal(found, expected)
    assert found[1].tobytes() == found[0].tobytes()
    inputs[:, 40] = 0
    alone = product(inputs, blocks, name)
    assert not alone[:3].any()
    assert alone[3:].any(1).all()


@every_blocked
@every_dtype
def test_a_row_has_the_same_bits_in_any_company(name: str, dtype: np.dtype) -> None:
    """At the start and the end of any number of inputs, with any number of threads."""
    blocks = random_blocks(name, 700, 6, 9)
    inputs = draw_inputs(max(NUM_INPUTS), 192, dtype, 10)
    with computing(threads=1):
        alone = np.concatenate([product(row[None], blocks[:37], name) for row in inputs])
        whole = product(inputs[:9], blocks, name)
    for num in NUM_INPUTS:
        assert product(inputs[:num], blocks[:37], name).tobytes() == alone[:num].tobytes()
        assert product(inputs[-num:], blocks[:37], name).tobytes() == alone[-num:].tobytes()
    for threads in (2, 4):
        with computing(threads=threads):
            assert product(inputs[:9], blocks, name).tobytes() == whole.tobytes()


@every_dtype
def test_other_formats_have_inputs_as_given(dtype: np.dtype) -> None:
    """Floats, and codes by other scales; biases are added as ever."""
    inputs, bias = draw_inputs(3, 64, dtype, 11), draw_inputs(1, 20, F32, 12)[0]
    for name in ("f32", "f16", "bf16", *SCALED, *BLOCKED):
        matrix = kernels.matrix_of(quantize(draw_inputs(20, 64, F32, 13), name), name)
        plain = kernels.products(inputs, matrix, bias=bias)
        found = kernels.products(inputs, matrix, bias=bias, activations="int8")
        assert (found.tobytes() == plain.tobytes()) == (name not in BLOCKED)
        assert kernels.takes_int8(name) == (name in BLOCKED)


@every_dtype
def test_a_format_whose_form_is_that_of_blocks_takes_8_bits(dtype: np.dtype) -> None:
    """Columns that are no whole blocks are as those with zeros behind them."""
    inputs, weights = draw_inputs(5, 64, dtype, 18), draw_inputs(20, 64, F32, 19)
    inputs[:, 40:] = weights[:, 40:] = 0
    found, expected = (
        kernels.products(
            inputs[:, :columns],
            kernels.matrix_of(quantize(weights[:, :columns], "int4[1x32,f16]"), "int4[1x32,f16]"),
            activations="int8",
        )
        for columns in (40, 64)
    )
    assert found.tobytes() == expected.tobytes()
    exact = inputs.astype(np.float64) @ weights.T.astype(np.float64)
    assert 0 < np.abs(found - exact).max() < 0.2 * np.abs(exact).max()


def test_other_activations_are_refused() -> None:
    """The message lists what there is."""
    with pytest.raises(ConfigError, match="activations 'int4' are not one of float, int8"):
        kernels.products(np.ones((1, 32), F32), np.ones((1, 32), F32), activations="int4")


class Slots:
    """Experts of q8_0 and q4_0 in slots, with an activation that NumPy has bit for bit."""

    hidden_size, width, num = 64, 96, 3

    def __init__(self, up: str, down: str) -> None:
        shapes = {"gate_up": (2 * self.width, self.hidden_size)}
        shapes["down"] = (self.hidden_size, self.width)
        self.names = {"gate_up": up, "down": down}
        self.blocks, arrays, roles = {}, {}, []
        for role, (rows, columns) in shapes.items():
            name = self.names[role]
            given = [quantize(draw_inputs(rows, columns, F32, i), name) for i in range(self.num)]
            self.blocks[role] = [next(iter(parts.values())) for parts in given]
            if name == "bf16":
                arrays[role] = np.stack(self.blocks[role])
                roles.append(Role(role, (rows, columns), np.dtype(BF16)))
                continue
            arrays[role] = np.zeros((self.num, find_format(name).nbytes(rows, columns)), np.uint8)
            for blocks, form in zip(self.blocks[role], arrays[role], strict=True):
                kernels.tile(blocks, name, rows, columns, form)
            roles.append(Role(role, (rows, columns), format=name))
        self.kernel = kernels.SlotKernel(
            lambda slot: {role: array[slot] for role, array in arrays.items()},
            self.num,
            roles=roles,
            activation="relu",
            activations="int8",
        )

    def compute(self, inputs: np.ndarray, slots: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        """Return the rows of a wave's pairs, the others NaN."""
        rows = np.full((2 * len(inputs), self.hidden_size), np.nan, np.float32)
        self.kernel.compute(inputs, *wave_of(slots, pairs), 2, rows)
        return rows

    def expected(self, slot: int, inputs: np.ndarray) -> np.ndarray:
        """Return an expert's output by plain loops."""
        both = int8_products(inputs, self.blocks["gate_up"][slot], self.names["gate_up"])
        hidden = np.maximum(both[:, : self.width], 0) * both[:, self.width :]
        if self.names["down"] != "bf16":
            return int8_products(hidden, self.blocks["down"][slot], self.names["down"])
        return hidden @ self.blocks["down"][slot].astype(np.float32).T


@every_dtype
@pytest.mark.parametrize("names", [("q8_0", "q4_0"), ("q4_0", "q8_0")], ids=str)
def test_experts_are_those_of_plain_loops(names: tuple[str, str], dtype: np.dtype) -> None:
    """What goes down has 8 bits, too; the same bits in any wave, with any number of threads."""
    slots = Slots(*names)
    inputs = draw_inputs(9, slots.hidden_size, dtype, 14)
    chosen = np.arange(18) % slots.num
    rows = slots.compute(inputs, chosen, np.arange(18))

    for slot in range(2):
        pairs = np.flatnonzero(chosen == slot)[:2]
        equal(rows[pairs], slots.expected(slot, inputs[pairs // 2]))
    for threads in (1, 3):
        with computing(threads=threads):
            for first in (0, 5):
                part = slots.compute(inputs, chosen[first:], np.arange(first, 18))
                assert part[first:].tobytes() == rows[first:].tobytes()
    alone = slots.compute(inputs[4:5], chosen[8:10], np.arange(2))
    assert alone.tobytes() == rows[8:10].tobytes()


@every_dtype
def test_a_role_of_floats_has_float_activations(dtype: np.dtype) -> None:
    """Rounded as ever; its neighbour's have 8 bits."""
    slots = Slots("q8_0", "bf16")
    inputs = draw_inputs(2, slots.hidden_size, dtype, 15)
    rows = slots.compute(inputs, np.zeros(2, int), np.array([0, 2]))
    expected = slots.expected(0, inputs)
    bound = 0.01 * np.abs(expected).max()
    np.testing.assert_allclose(rows[::2], expected, rtol=0, atol=bound)


def test_feed_forward_takes_activations_of_8_bits() -> None:
    """Beside "fast" on the same runtime; a layer of floats is refused with the remedy."""
    rng = np.random.default_rng(16)
    stacks = {
        role: np.stack(
            [[quantize(rng.standard_normal(shape) / 8, "q4_0")["blocks"] for _ in range(4)]]
        )
        for role, shape in (("gate_up", (64, 64)), ("down", (64, 32)))
    }
    shapes = {"gate_up": ("q4_0", (64, 64)), "down": ("q4_0", (64, 32))}
    hidden, ids = draw_inputs(3, 64, F32, 17), np.array([[0, 1], [2, 3], [1, 2]])
    weights = np.full((3, 2), 0.5, np.float32)
    store = MemoryStore(stacks, top_k=2, formats=shapes)
    cache = moecache.ExpertCache(1, 4, 2)
    with moecache.ExpertRuntime(store, HostSlots(store.layout, 4), cache) as runtime:
        fast, int8 = (
            experts.feed_forward(runtime, 0, hidden, ids, weights, compute=compute)
            for compute in ("fast", "fast-int8")
        )
    assert 0 < np.abs(int8 - fast).max() < 0.02 * np.abs(fast).max()

    floats = MemoryStore(
        {"gate_up": np.ones((1, 4, 64, 64), F32), "down": np.ones((1, 4, 64, 32), F32)}, top_k=2
    )
    raw = {
        role: np.zeros((1, 4, find_format("mxfp4").nbytes(*shapes[role][1])), np.uint8)
        for role in shapes
    }
    fp4 = MemoryStore(raw, top_k=2, formats={role: ("mxfp4", shapes[role][1]) for role in shapes})
    for others in (floats, fp4):
        cache = moecache.ExpertCache(1, 4, 2)
        with (
            moecache.ExpertRuntime(others, HostSlots(others.layout, 4), cache) as runtime,
            pytest.raises(ConfigError, match=r'"fast-int8": .* q8_0 and q4_0; use "fast"'),
        ):
            experts.feed_forward(runtime, 0, hidden, ids, weights, compute="fast-int8")
