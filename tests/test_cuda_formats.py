"""Quantised matrices in the kernels' registers are what their formats say, to the bit."""

import shutil
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pytest

from moecache.cuda import open_device
from moecache.cuda._formats import check_matrix, cuda_type
from moecache.cuda._sources import OPTIONS, source_of
from moecache.errors import ConfigError, MoeCacheError
from moecache.formats import find_format
from tests.helpers.cuda_emulator import COMPILER, EmulatedModule, address_of
from tests.helpers.cuda_layers import ends_at_guard, starts_at_guard
from tests.helpers.device_formats import FORMATS, joined, random_parts

# One kernel for each format, in one source: a warp takes two rows, then the next input.
KERNEL = """
extern "C" __global__ void products_{number}(
    const u8* matrix, int rows, int columns, const float* x, int num_inputs, float* out)
{{
    using Format = {type};
    for (int first = 0; first < rows; first += 2)
        for (int input = threadIdx.x / 32; input < num_inputs; input += NUM_WARPS) {{
            const int last = first + 1 < rows ? first + 1 : first;
            const typename Format::At both[2] = {{
                Format::row(matrix, first, rows, columns),
                Format::row(matrix, last, rows, columns)}};
            float sums[2];
            Format::dots<F32>(both, (Row<F32>)x + (long long)input * columns, columns, sums);
            using Sums = RowSums<2>;
            const float sum = Sums::total(sums);
            if (Sums::is_first())
                out[(long long)input * rows + (Sums::row() ? last : first)] = sum;
        }}
}}
"""


class Kernels(Protocol):
    """A kernel for each format."""

    def launch(
        self, kernel: str, arrays: Sequence[np.ndarray], sizes: Sequence[np.int32]
    ) -> np.ndarray:
        """Return the last array, as the kernel leaves it: matrix, rows, columns, x, inputs, out."""


class OnProcessor:
    """Kernels for this processor, in one module."""

    def __init__(self, text: str) -> None:
        self._module = EmulatedModule(text, sanitize=True)

    def launch(
        self, kernel: str, arrays: Sequence[np.ndarray], sizes: Sequence[np.int32]
    ) -> np.ndarray:
        """Run a kernel."""
        matrix, x, out = map(address_of, arrays)
        self._module.launch(kernel, 1, 256, [matrix, *sizes[:2], x, sizes[2], out])
        return arrays[-1]


class OnGpu:
    """Kernels on a GPU, to which arrays are copied, aligned as they are here."""

    def __init__(self, text: str) -> None:
        import cupy

        self._cupy = cupy
        self._module = cupy.RawModule(code=text, options=OPTIONS)

    def launch(
        self, kernel: str, arrays: Sequence[np.ndarray], sizes: Sequence[np.int32]
    ) -> np.ndarray:
        """Run a kernel."""
        places = [self._copied(array) for array in arrays]
        matrix, x, out = (np.uint64(place.data.ptr) for place in places)
        args = (matrix, *sizes[:2], x, sizes[2], out)
        self._module.get_function(kernel)((1,), (256,), args)
        found: np.ndarray = places[-1].get()
        return found.view(arrays[-1].dtype).reshape(arrays[-1].shape)

    def _copied(self, array: np.ndarray) -> Any:
        # Behind it, as in a slot, whole words can be read.
        room = self._cupy.zeros(array.nbytes + 512, np.uint8)
        start = (array.ctypes.data - room.data.ptr) % 256
        place = room[start : start + array.nbytes]
        place.set(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return place


@pytest.fixture(scope="module", params=["emulated", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Return the kernels for this processor, and then for a GPU, if there is one."""
    text = source_of("decode_f32").text.partition("using Hidden")[0]
    for number, name in enumerate(FORMATS):
        text += KERNEL.format(number=number, type=cuda_type(name))
    if request.param == "emulated":
        if shutil.which(COMPILER) is None:
            pytest.skip(f"{COMPILER} compiles the kernels for the CPU and is not here")
        return OnProcessor(text)
    try:
        open_device(request.param)
    except MoeCacheError as error:
        pytest.skip(str(error))
    return OnGpu(text)


def products(kernels: Kernels, name: str, raw: np.ndarray, rows: int, x: np.ndarray) -> np.ndarray:
    """Return the products of a matrix with inputs, [inputs, rows]."""
    out = np.full((len(x), rows), np.nan, np.float32)
    sizes = np.int32(rows), np.int32(x.shape[1]), np.int32(len(x))
    return kernels.launch(f"products_{FORMATS.index(name)}", (raw, x, out), sizes)


def columns_of(name: str) -> list[int]:
    """Return numbers of columns: several units for some lane, or a row that ends within a unit."""
    block = find_format(name).block[1]
    if name.startswith(("fp8", "int8")):
        return [1056, 44]
    return [1280] if block == 256 else [1056, 32 if block == 32 else 192]


@pytest.mark.parametrize("name", FORMATS)
def test_a_column_alone_is_the_formats_value(kernels: Kernels, name: str) -> None:
    """Each weight in turn, by inputs that are zero but for one column."""
    for columns in columns_of(name):
        parts = random_parts(name, 4, columns)
        expected = find_format(name).dequantize(parts)
        chosen = np.unique(np.linspace(0, columns - 1, 130).astype(int))
        x = np.zeros((len(chosen), columns), np.float32)
        x[np.arange(len(chosen)), chosen] = 1
        found = products(kernels, name, aligned(joined(parts)), 4, x)
        assert np.array_equal(found, expected[:, chosen].T)


@pytest.mark.parametrize("name", FORMATS)
def test_alignment_and_neighbours_have_no_say(kernels: Kernels, name: str) -> None:
    """Sums are the same wherever a matrix lies; no byte outside whole words is touched."""
    columns = columns_of(name)[0]
    parts = random_parts(name, 4, columns, seed=1)
    raw = joined(parts)
    x = aligned(np.random.default_rng(0).normal(size=(2, columns)).astype(np.float32))
    expected = find_format(name).dequantize(parts).astype(np.float64) @ x.T.astype(np.float64)
    found = products(kernels, name, aligned(raw), 4, x)
    assert np.linalg.norm(found - expected.T) < 1e-5 * np.linalg.norm(expected)
    # Scales of 4 bytes are aligned to them in every slot.
    padded = np.concatenate([np.zeros(4, np.uint8), raw])
    for place in (aligned(padded)[4:], starts_at_guard(raw)):
        assert np.array_equal(products(kernels, name, place, 4, x), found)
    # A slot ends at whole words.
    at_end = ends_at_guard(np.concatenate([raw, np.zeros(-raw.size % 4, np.uint8)]))
    assert np.array_equal(products(kernels, name, at_end, 4, x), found)
    shifted = np.concatenate([np.zeros(1, np.float32), x.ravel()])[1:].reshape(x.shape)
    assert np.array_equal(products(kernels, name, aligned(raw), 4, shifted), found)


@pytest.mark.parametrize("name", ["fp8[16x32,bf16]", "fp8[1x32,e8m0]", "mxfp4", "nvfp4"])
def test_what_is_no_number_reaches_its_row_alone(kernels: Kernels, name: str) -> None:
    """A code, or a scale, that is NaN."""
    x = np.ones((1, 64), np.float32)
    for part in ("codes", "scales"):
        parts = random_parts(name, 20, 64)
        array = parts[part].view(np.uint8)
        if part == "codes" and not name.startswith("fp8"):
            continue
        if parts[part].dtype.itemsize == 2:
            parts[part][-1, 1] = np.nan
        else:
            array[-1, 1] = 0xFF
        found = products(kernels, name, aligned(joined(parts)), 20, x)[0]
        expected = np.isnan(find_format(name).dequantize(parts)).any(1)
        assert np.array_equal(np.isnan(found), expected)
        assert expected.any()
        assert not expected.all()


def test_every_code_is_read(kernels: Kernels) -> None:
    """All 256 bytes of FP8 that are numbers, and 16 of FP4, with and without a scale's extremes."""
    for name, scales in (("fp8[1x32,e8m0]", [0, 1, 127, 200]), ("mxfp4", [0, 1, 127, 254])):
        for scale in scales:
            parts = random_parts(name, 2, 256)
            codes = parts["codes"].view(np.uint8).reshape(2, -1)
            codes[...] = np.arange(codes.shape[1])
            if name.startswith("fp8"):
                codes[:, [127, 255]] = 0
            parts["scales"][...] = scale
            expected = find_format(name).dequantize(parts)
            x = np.eye(256, dtype=np.float32)
            assert np.array_equal(products(kernels, name, aligned(joined(parts)), 2, x), expected.T)


@pytest.mark.parametrize("power", [0, 1, 2, 127, 254])
def test_every_power_of_ggmls_fp4_is_read(kernels: Kernels, power: int) -> None:
    """Those below the normal numbers, too."""
    parts = random_parts("mxfp4_gguf", 2, 32)
    parts["blocks"][..., 0] = power
    expected = find_format("mxfp4_gguf").dequantize(parts)
    x = np.eye(32, dtype=np.float32)
    raw = aligned(joined(parts))
    assert np.array_equal(products(kernels, "mxfp4_gguf", raw, 2, x), expected.T)


def test_formats_without_kernels_are_refused() -> None:
    """With what there is instead."""
    for name in ("q2_k", "iq4_xs", "awq4[128,f16]", "int3[1x32,bf16]", "fp8[1x8,f32]", "q4_k+q6_k"):
        with pytest.raises(ConfigError, match=r"no kernel on a GPU.*bf16"):
            cuda_type(name)
    with pytest.raises(ConfigError, match="scales at byte 35"):
        check_matrix("down", "fp8[128x128,f32]", 5, 7)
    check_matrix("down", "fp8[128x128,f32]", 6, 10)


def aligned(array: np.ndarray) -> np.ndarray:
    """Return a copy that begins at a multiple of 256 bytes."""
    room = np.zeros(array.nbytes + 512, np.uint8)
    start = -room.ctypes.data % 256
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
