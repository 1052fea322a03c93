"""The CUDA kernels, their very source run on the CPU, against NumPy."""

import itertools
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from moecache.compute.experts import silu
from moecache.cuda._sources import source_of
from moecache.cuda._structs import STRUCTS
from tests.helpers.cuda_emulator import COMPILER, EmulatedKernels, EmulatedModule, address_of
from tests.helpers.cuda_layers import (
    ACTIVATIONS,
    BLOCK,
    DTYPES,
    TOLERANCES,
    Layer,
    Place,
    Sizes,
    argument,
    ends_at_guard,
    relative_error,
    starts_at_guard,
)
from tests.helpers.nightly import some
from tests.helpers.pairs import pairwise

# Tokens, top_k, experts, hidden, width: ragged rows, whole chunks, more than lanes take at once.
SIZES = [
    (1, 1, 4, 7, 5),
    (2, 3, 8, 8, 5),
    (2, 2, 4, 7, 48),
    (1, 8, 513, 64, 48),
    (3, 5, 9, 64, 48),
    (4, 8, 16, 72, 48),
    (1, 2, 4, 1032, 520),
]

either = pytest.mark.parametrize("is_gated", [True, False], ids=["gate", "no gate"])
every_type = pytest.mark.parametrize("suffix", DTYPES)
every_size = pytest.mark.parametrize(
    ("sizes", "suffix"),
    some(
        itertools.product(SIZES, DTYPES),
        lambda case: SIZES.index(case[0]) % len(DTYPES) == list(DTYPES).index(case[1]),
    ),
    ids=str,
)


@pytest.fixture(scope="module")
def kernels() -> EmulatedKernels:
    """Return the kernels, compiled for this processor."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} compiles the kernels for the CPU and is not here")
    return EmulatedKernels(sanitize=True)


def bits(array: np.ndarray) -> bytes:
    """Return what equality bit for bit compares."""
    return array.tobytes()


@every_size
@either
def test_decode_is_the_routed_feed_forward(
    kernels: EmulatedKernels, suffix: str, sizes: Sizes, is_gated: bool
) -> None:
    """One launch gives what float64 gives, to the type's precision."""
    layer = Layer(suffix, sizes, is_gated=is_gated)
    assert relative_error(layer.decode(kernels), layer.expected()) < TOLERANCES[suffix]


@every_type
@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)))
@either
def test_decode_knows_every_activation(
    kernels: EmulatedKernels, suffix: str, activation: int, is_gated: bool
) -> None:
    """The activation is the one asked for, with ids of 64 bits and weights of the type."""
    layer = Layer(
        suffix,
        (2, 3, 6, 64, 48),
        activation=activation,
        ids_dtype=np.int64,
        own_weights=True,
        padding_bytes=16,
        is_gated=is_gated,
    )
    assert relative_error(layer.decode(kernels), layer.expected()) < TOLERANCES[suffix]


@every_size
@either
def test_decode_equals_its_parts(
    kernels: EmulatedKernels, suffix: str, sizes: Sizes, is_gated: bool
) -> None:
    """Bit for bit, whatever the grid and however pairs are split into lists."""
    layer = Layer(suffix, sizes, is_gated=is_gated)
    decoded = bits(layer.decode(kernels))
    order = np.random.default_rng(1).permutation(layer.ids.size).tolist()
    splits = [[order], [order[:1], order[1:]], [[pair] for pair in range(layer.ids.size)]]
    for number, split in enumerate(splits):
        lists = [part for part in split if part]
        assert bits(layer.by_parts(kernels, lists, grid=number + 1, seed=number)) == decoded


@every_type
@either
def test_decode_does_not_depend_on_grid_and_order(
    kernels: EmulatedKernels, suffix: str, is_gated: bool
) -> None:
    """Every grid, every order of warps: the same bits, or a barrier is missing."""
    layer = Layer(suffix, (2, 3, 6, 72, 48), is_gated=is_gated)
    decoded = bits(layer.decode(kernels, grid=1))
    for seed in range(6):
        assert bits(layer.decode(kernels, grid=seed % 4 + 2, seed=seed)) == decoded


@every_type
@either
def test_alignment_has_no_say(kernels: EmulatedKernels, suffix: str, is_gated: bool) -> None:
    """Rows read by the element are summed in the order of those read in chunks."""
    layer = Layer(suffix, (2, 3, 6, 64, 48), is_gated=is_gated)
    moved = Layer(suffix, (2, 3, 6, 64, 48), padding_bytes=4, is_gated=is_gated)
    assert bits(moved.decode(kernels)) == bits(layer.decode(kernels))
    shifted = np.empty(layer.x.size + 1, layer.x.dtype)[1:].reshape(layer.x.shape)
    shifted[...] = layer.x
    moved.x = shifted
    assert bits(moved.decode(kernels)) == bits(layer.decode(kernels))


@pytest.mark.parametrize("start", [0, 2**32 - 2])
def test_a_barrier_serves_any_number_of_launches(kernels: EmulatedKernels, start: int) -> None:
    """With any grids, and also where the number of barriers passed leaves its 32 bits."""
    layer = Layer("f32", (2, 3, 6, 8, 48))
    expected = bits(layer.decode(kernels))
    barrier = np.array([start << 32], np.uint64)
    for number, grid in enumerate((2, 5, 1, 3)):
        assert bits(layer.decode(kernels, grid, seed=number, barrier=barrier)) == expected
    assert barrier[0] == (start + 4) % 2**32 << 32


@pytest.mark.parametrize(
    ("suffix", "ids_dtype", "top_k"), pairwise(list(DTYPES), (np.int32, np.int64), (1, 3, 4))
)
def test_experts_that_are_not_there_make_their_tokens_nan(
    kernels: EmulatedKernels, suffix: str, ids_dtype: type[np.signedinteger], top_k: int
) -> None:
    """Only those tokens, and nothing is read for them."""
    for place in (ends_at_guard, starts_at_guard):
        layer = Layer(suffix, (4, top_k, 6, 8, 48), ids_dtype=ids_dtype, place=place)
        whole = layer.decode(kernels)
        for wrong in (-1, 6, 2**31 - 1, -(2**31)):
            kept = layer.ids[1:3].copy()
            layer.ids[1, -1] = wrong
            layer.ids[2, 0] = -(2**62) if ids_dtype is np.int64 else wrong
            found = layer.decode(kernels).astype(np.float32)
            layer.ids[1:3] = kept
            assert np.isnan(found[1:3]).all()
            assert np.array_equal(found[[0, 3]], whole.astype(np.float32)[[0, 3]])


@pytest.mark.parametrize("slot", [-1, -(2**31), 1, 2**31 - 1])
def test_slots_that_are_not_there_make_their_tokens_nan(
    kernels: EmulatedKernels, slot: int
) -> None:
    """A table may name a slot outside the pool: nothing is read there."""
    layer = Layer("bf16", (2, 2, 4, 64, 48), place=ends_at_guard)
    layer.ids[...] = [[0, 1], [2, 3]]
    layer.slot_table[...] = [0, 0, slot, 0]
    layer.slots = ends_at_guard(layer.slots[:1])
    found = layer.decode(kernels).astype(np.float32)
    assert np.isnan(found).all(1).tolist() == [False, True]


@every_type
@pytest.mark.parametrize("place", [ends_at_guard, starts_at_guard])
@pytest.mark.parametrize("sizes", [(2, 3, 4, 7, 5), (3, 2, 4, 72, 48)], ids=str)
@either
def test_nothing_is_touched_outside_the_buffers(
    kernels: EmulatedKernels, suffix: str, place: Place, sizes: Sizes, is_gated: bool
) -> None:
    """Every buffer adjoins a page where an access is an error."""
    layer = Layer(suffix, sizes, place=place, is_gated=is_gated)
    decoded = layer.decode(kernels)
    assert relative_error(decoded, layer.expected()) < TOLERANCES[suffix]
    assert bits(layer.by_parts(kernels, [[1, 0], [*range(2, layer.ids.size)]])) == bits(decoded)
    for kernel in (gathered, activated, combined):
        kernel(kernels, suffix, sizes[3], place)


def test_slots_beyond_two_gigabytes_are_reached(kernels: EmulatedKernels, tmp_path: Path) -> None:
    """Offsets of slots are computed in 64 bits."""
    layer = Layer("bf16", (1, 2, 2, 64, 48))
    expected = bits(layer.decode(kernels))
    stride = 5 * 2**29
    sparse = np.memmap(tmp_path / "slots", np.uint8, "w+", shape=(3 * stride,))
    for slot, destination in ((0, 1), (1, 2)):
        size = layer.slot_stride
        sparse[destination * stride : destination * stride + size] = layer.slots[slot]
    far = Layer("bf16", (1, 2, 2, 64, 48))
    far.slots = sparse.reshape(3, stride)
    far.slot_table += 1
    far.slot_stride = stride
    assert bits(far.decode(kernels)) == expected
    assert bits(far.by_parts(kernels, [[0, 1]])) == expected


def test_pairs_beyond_two_billion_elements_are_reached(
    kernels: EmulatedKernels, tmp_path: Path
) -> None:
    """Rows of x, h and out are found in 64 bits."""
    layer = Layer("f32", (1, 1, 1, 8, 8))
    far = 2**28 + 1
    arrays = [
        np.memmap(tmp_path / name, np.float32, "w+", shape=(far + 2, 8))
        for name in ("x", "h", "rows", "out")
    ]
    x, h, rows, out = arrays
    x[far] = layer.x[0]
    pairs = np.array([far], np.int32)
    arrays = {
        "pair_slots": layer.slot_table,
        "pairs": pairs,
        "first_slot": layer.slots,
        "h": h,
    }
    given = argument("gate_up", {**arrays, "x": x}, {"num_pairs": 1, "top_k": 1, **layer.of_gate})
    kernels.launch("gate_up_f32", 1, BLOCK, given)
    given = argument("down", {**arrays, "rows": rows}, {"num_pairs": 1, **layer.of_down})
    kernels.launch("down_f32", 1, BLOCK, given)
    weighted = layer.weights[0, 0] * rows[far]
    assert relative_error(weighted, layer.expected()[0]) < 1e-5
    # Rows of seven are copied by the element, and so counted by it.
    pairs[0] = 2**31 // 7 + 1
    first = 7 * int(pairs[0])
    x.reshape(-1)[first : first + 7] = range(1, 8)
    given = argument(
        "gather", {"x": x, "pairs": pairs, "out": out}, {"num_pairs": 1, "top_k": 1, "hidden": 7}
    )
    kernels.launch("gather_f32", 1, BLOCK, given)
    assert out[0, :7].tolist() == [*range(1, 8)]


def gathered(kernels: EmulatedKernels, suffix: str, hidden: int, place: Place = np.array) -> None:
    """Check that rows of x come in the order of pairs."""
    rng = np.random.default_rng(0)
    x = place(rng.standard_normal((3, hidden)).astype(DTYPES[suffix]))
    pairs = place(rng.permutation(12)[:7].astype(np.int32))
    out = place(np.zeros((7, hidden), DTYPES[suffix]))
    given = argument(
        "gather",
        {"x": x, "pairs": pairs, "out": out},
        {"num_pairs": 7, "top_k": 4, "hidden": hidden},
    )
    kernels.launch(f"gather_{suffix}", 2, BLOCK, given)
    assert bits(out) == bits(x[pairs // 4])


def activated(kernels: EmulatedKernels, suffix: str, width: int, place: Place = np.array) -> None:
    """Check activation(gate) * up, and activation(up) alone, every activation."""
    rng = np.random.default_rng(0)
    drawn = (3 * rng.standard_normal((5, 2 * width))).astype(DTYPES[suffix])
    for is_gated, (number, activation) in itertools.product((1, 0), enumerate(ACTIVATIONS)):
        both = place(np.ascontiguousarray(drawn[:, : width * (1 + is_gated)]))
        wide = both.astype(np.float64)
        out = place(np.zeros((5, width), DTYPES[suffix]))
        given = argument(
            "activate",
            {"both": both, "out": out},
            {"num_rows": 5, "width": width, "is_gated": is_gated, "activation": number},
        )
        kernels.launch(f"activate_{suffix}", 2, BLOCK, given)
        expected = activation(wide[:, :width]) * (wide[:, width:] if is_gated else 1)
        assert relative_error(out, expected) < TOLERANCES[suffix]


def combined(kernels: EmulatedKernels, suffix: str, hidden: int, place: Place = np.array) -> None:
    """Check the weighted sums of rows in another order, some of them dropped."""
    rng = np.random.default_rng(0)
    rows = place(rng.standard_normal((12, hidden)).astype(DTYPES[suffix]))
    where = rng.permutation(12).astype(np.int32)
    where[[1, 5]] = -1
    where = place(where)
    for own_weights in (False, True):
        dtype = DTYPES[suffix] if own_weights else np.dtype(np.float32)
        weights = place(rng.random(12).astype(dtype))
        out = place(np.zeros((3, hidden), DTYPES[suffix]))
        given = argument(
            "combine",
            {"rows": rows, "place": where, "weights": weights, "out": out},
            {"weights_kind": own_weights, "num_tokens": 3, "top_k": 4, "hidden": hidden},
        )
        kernels.launch(f"combine_{suffix}", 2, BLOCK, given)
        kept = np.where(where < 0, 0, weights.astype(np.float64))
        expected = (kept[:, None] * rows[where].astype(np.float64)).reshape(3, 4, -1).sum(1)
        assert relative_error(out, expected) < TOLERANCES[suffix]


@every_type
@pytest.mark.parametrize("size", [5, 7, 8, 72, 2056])
def test_bulk_kernels(kernels: EmulatedKernels, suffix: str, size: int) -> None:
    """What lies around the products of many tokens: gather, activate, combine."""
    gathered(kernels, suffix, size)
    activated(kernels, suffix, size)
    combined(kernels, suffix, size)


@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)))
@either
def test_extreme_values_are_numpys(
    kernels: EmulatedKernels, activation: int, is_gated: bool
) -> None:
    """Infinity, NaN and what overflows an exponential."""
    gate = np.array([-1e4, 1e4, -np.inf, np.inf, np.nan, -0.0, 1e-40, 88.8, -88.8], np.float32)
    both = np.concatenate([gate, np.ones_like(gate)]) if is_gated else gate
    out = np.zeros_like(gate)
    given = argument(
        "activate",
        {"both": both, "out": out},
        {"num_rows": 1, "width": gate.size, "is_gated": is_gated, "activation": activation},
    )
    kernels.launch("activate_f32", 1, BLOCK, given)
    with np.errstate(all="ignore"):
        expected = silu(gate) if activation == 0 else ACTIVATIONS[activation](gate)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize("suffix", ["f16", "bf16"])
def test_sums_are_rounded_to_the_nearest_even(kernels: EmulatedKernels, suffix: str) -> None:
    """Ties, subnormal numbers, overflow and NaN become what NumPy makes of them."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 2**32, 4096, np.uint64).astype(np.uint32)
    halfway = np.arange(4096, dtype=np.uint32) << 12 | 0x38000000
    quiet = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7F800000, 0x477FF000], np.uint32)
    rows = np.concatenate([patterns, halfway, halfway << 3, quiet]).view(np.float32)
    out = np.zeros(rows.size, DTYPES[suffix])
    weight = np.ones(1, np.float32)
    given = argument(
        "combine_rows",
        {"rows": rows, "weights": weight, "out": out},
        {"num_tokens": 1, "top_k": 1, "hidden": rows.size},
    )
    kernels.launch(f"combine_rows_{suffix}", 2, BLOCK, given)
    with np.errstate(all="ignore"):
        # The sum starts at +0.
        expected = (rows + np.float32(0)).astype(DTYPES[suffix])
    is_nan = np.isnan(expected.astype(np.float32))
    assert np.array_equal(np.isnan(out.astype(np.float32)), is_nan)
    assert bits(out[~is_nan]) == bits(expected[~is_nan])


@pytest.mark.parametrize("suffix", ["f16", "bf16"])
def test_every_half_is_widened(kernels: EmulatedKernels, suffix: str) -> None:
    """All 65536 patterns come through a sum of one as they were; NaN stays NaN."""
    rows = np.arange(2**16, dtype=np.uint16).view(DTYPES[suffix])
    out = np.zeros_like(rows)
    place = np.zeros(1, np.int32)
    weight = np.ones(1, np.float32)
    given = argument(
        "combine",
        {"rows": rows, "place": place, "weights": weight, "out": out},
        {"num_tokens": 1, "top_k": 1, "hidden": rows.size},
    )
    kernels.launch(f"combine_{suffix}", 2, BLOCK, given)
    with np.errstate(all="ignore"):
        wide = rows.astype(np.float32)
    np.testing.assert_array_equal(out.astype(np.float32), wide)


# Kinds of fields as NumPy has them, by overloads that take a field's address.
KINDS = """
template <class T> int kind_of(T* const*) { return 'Q'; }
int kind_of(const long long*) { return 'q'; }
int kind_of(const int*) { return 'i'; }
int kind_of(const float*) { return 'f'; }
"""


@pytest.mark.parametrize("entry", STRUCTS)
def test_arguments_are_laid_out_alike_on_both_sides(entry: str) -> None:
    """Each field where the kernel looks for it, and of the type that it is there."""
    wanted = STRUCTS[entry].dtype
    names = wanted.names or ()
    source = source_of(f"{entry}_bf16").text
    found = re.search(rf"\b{entry}\(\s*const (?:__grid_constant__ )?(\w+) given\)", source)
    assert found is not None
    own = found[1]
    fields = ", ".join(
        f"{{(int)__builtin_offsetof({own}, {name}), kind_of(&none->{name})}}" for name in names
    )
    source += f"""{KINDS}
extern "C" __global__ void lay_out(int* out)
{{
    if (threadIdx.x) return;
    const {own}* none = nullptr;
    const int found[][2] = {{{fields}, {{sizeof({own}), 0}}}};
    for (int i = 0; i < {len(names) + 1}; i++)
        for (int k = 0; k < 2; k++) out[2 * i + k] = found[i][k];
}}"""
    places = np.zeros((len(names) + 1, 2), np.int32)
    EmulatedModule(source).launch("lay_out", 1, 32, [address_of(places)])
    assert wanted.fields is not None
    rows = [[wanted.fields[name][1], ord(wanted[name].char)] for name in names]
    assert places.tolist() == [*rows, [wanted.itemsize, 0]]


@pytest.mark.parametrize("entry", STRUCTS)
def test_a_struct_is_packed_as_its_fields_say(entry: str) -> None:
    """What launches share, and what each has of its own: every value comes where it belongs."""
    made = STRUCTS[entry]
    names = made.dtype.names or ()
    num_shared = sum(name.startswith(("gate.", "down.")) for name in names)
    values = [100 + number for number in range(len(names))]
    split = len(names) - num_shared
    shared = made.share(*values[split:])
    packed = [made.pack(shared, *values[:split]), made.pack(shared, *reversed(values[:split]))]
    first, second = (np.frombuffer(bytes(one), made.dtype)[0].tolist() for one in packed)
    assert first == tuple(values)
    assert second == (*reversed(values[:split]), *values[split:])
