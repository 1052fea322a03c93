"""Kernels read and write no byte beyond their arrays: the page after each is not mapped."""

import subprocess
import sys
from pathlib import Path

import pytest

import moecache
from tests.helpers.kernels import LEVELS

# A child imports the build that is tested here.
PACKAGE = Path(moecache.__file__).parents[1]

# Places arrays so that their last byte is a page's last, and the next page may not be touched; or
# so that their first byte is a page's first, and the page before may not.
GUARDED = """
import ctypes, itertools, mmap, sys
import ml_dtypes
import numpy as np
from moecache import kernels
from moecache.errors import ConfigError
from moecache.formats import find_format, quantize
from moecache.kernels import _page
from moecache.kernels._experts import Experts
from moecache.kernels._matrix import Matrix

FORMS = (
    "q8_0", "q4_0", "int4[1x32,f16]", "mxfp4", "fp8[128x128,f32]", "fp8[2x16,f16]",
    "fp8[*x*,bf16]", "int4[1x96,bf16]",
    "int8[1x64,bf16]", "int3[1x32,f16]", "nvfp4", "nvfp4[modelopt]",
)
GROUPED = ("gptq2[*,f16]", "gptq4[32,bf16]", "gptq_v28[64,f16]", "awq4[64,f32]")
BLOCKS = ("q4_1", "q5_0", "mxfp4_gguf", "q2_k", "q5_k", "q6_k", "iq4_xs")
READ = (*GROUPED, *BLOCKS)
NAMES = ("f32", "f16", "bf16", *FORMS, *READ)
PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
kept = []
BF16 = np.dtype(ml_dtypes.bfloat16)
TYPES = {np.dtype(np.float32): "f32", BF16: "bf16"}


def forbid(address):
    if libc.mprotect(address, PAGE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")


def guarded(array, at_end=True):
    "Return a copy of an array that ends, or begins, where memory does."
    array = np.ascontiguousarray(array)
    pages = -(-max(1, array.nbytes) // PAGE)
    area = mmap.mmap(-1, (pages + 2) * PAGE)
    start = np.frombuffer(area, np.uint8).ctypes.data
    forbid(start), forbid(start + (pages + 1) * PAGE)
    first = (pages + 1) * PAGE - array.nbytes if at_end else PAGE
    copy = np.frombuffer(area, np.uint8, array.nbytes, first).view(array.dtype)
    copy = copy.reshape(array.shape)
    copy[...] = array
    kept.append(area)
    return copy


def draw(shape, dtype=np.float32):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def fitting(name, columns):
    "Return the fewest columns, `columns` at least, of which the format stores a square matrix."
    while True:
        try:
            find_format(name).parts(columns, columns)
        except ConfigError:
            columns += 1
        else:
            return columns


def parts_of(name, rows, columns):
    if name not in READ:
        return quantize(draw((rows, columns)), name)
    # What no one makes: any codes and zero points.
    known = find_format(name)
    raw = np.random.default_rng(1).integers(0, 256, known.nbytes(rows, columns)).astype(np.uint8)
    parts = known.split(raw, rows, columns)
    if name in BLOCKS:
        for at in known.numbers_at:
            parts["blocks"][..., at : at + 2] = (0, 0x2c)
        if name == "mxfp4_gguf":
            parts["blocks"][..., 0] = 120
        return parts
    return parts | {"scales": draw(parts["scales"].shape, parts["scales"].dtype)}


def matrix(name, rows, columns, at_end):
    parts = parts_of(name, rows, columns)
    if "values" in parts:
        return kernels.matrix_of(guarded(parts["values"], at_end))
    plain = kernels.matrix_of({part: guarded(a, at_end) for part, a in parts.items()}, name)
    raw = np.concatenate([part.reshape(-1).view(np.uint8) for part in parts.values()])
    form = guarded(np.zeros(find_format(name).form.nbytes(rows, columns), np.uint8), at_end)
    kernels.tile(guarded(raw, at_end), name, rows, columns, form)
    assert form.tobytes() == plain.owner.tobytes()
    for dtype in TYPES:
        values = guarded(np.zeros((rows, columns), dtype), at_end)
        kernels.expand(form, name, rows, columns, values)
    return Matrix(form.ctypes.data, name, rows, columns, None, form)


def products():
    shapes = [(1, 1), (3, 5), (16, 16), (17, 31), (33, 65)]
    for name, at_end in itertools.product(NAMES, (True, False)):
        for rows, columns in shapes:
            columns = fitting(name, columns)
            rows = fitting(name, rows) if name in GROUPED else rows
            weights = matrix(name, rows, columns, at_end)
            for dtype, count in itertools.product(TYPES, (1, 2, 9)):
                inputs = guarded(draw((count, columns), dtype), at_end)
                bias = guarded(draw((rows,), dtype), at_end)
                out = guarded(np.zeros((count, rows), dtype), at_end)
                weights.multiply(
                    inputs.ctypes.data, TYPES[inputs.dtype], count, inputs.strides[0],
                    out.ctypes.data, TYPES[out.dtype], out.strides[0],
                    bias.ctypes.data, TYPES[bias.dtype],
                )
                expected = kernels.products(inputs.copy(), weights, bias=bias.copy())
                assert out.tobytes() == expected.tobytes()


def experts():
    weight_dtypes = [np.float32, np.float16, BF16]
    forms = [(True, False), (True, True), (False, False)]
    sizes = [(1, 1), (17, 33), (37, 15)]
    for dtype, (is_gated, is_interleaved), (hidden_size, width), at_end in itertools.product(
        weight_dtypes, forms, sizes, (True, False)
    ):
        wide = "gate_up" if is_gated else "up"
        rows = width * (1 + is_gated)
        slots = {
            wide: guarded(draw((3, rows, hidden_size), dtype), at_end),
            "down": guarded(draw((3, hidden_size, width), dtype), at_end),
            wide + "_bias": guarded(draw((3, rows)), at_end),
            "down_bias": guarded(draw((3, hidden_size)), at_end),
        }
        kernel = kernels.SlotKernel(
            lambda slot: {name: array[slot] for name, array in slots.items()},
            3,
            is_interleaved=is_interleaved,
        )
        for input_dtype in TYPES:
            hidden = guarded(draw((7, hidden_size), input_dtype), at_end)
            out = guarded(np.full((14, hidden_size), np.nan, input_dtype), at_end)
            kernel.compute(
                hidden,
                guarded(np.array([2, 0, 1], np.int32), at_end),
                guarded(np.array([0, 5, 6, 14]), at_end),
                guarded(np.arange(14), at_end),
                2,
                out,
            )
            assert not np.isnan(out).any()


def coded_experts():
    for name, width, at_end in itertools.product((*FORMS, *READ), (32, 88), (True, False)):
        width = fitting(name, width)
        size = fitting(name, 51)
        shapes = (width, size), (width, size), (size, width)
        *ups, down = (matrix(name, *shape, at_end) for shape in shapes)
        kernel = Experts(ups, 0, down, 0, width)
        for dtype in TYPES:
            hidden = guarded(draw((7, size), dtype), at_end)
            out = guarded(np.full((7, size), np.nan, dtype), at_end)
            kernel.compute(
                guarded(np.array([0], np.int32), at_end), guarded(np.array([0, 7]), at_end),
                guarded(np.arange(7), at_end), 1,
                kernel.inputs(hidden.ctypes.data, TYPES[hidden.dtype], 7, hidden.strides[0]),
                out.ctypes.data, TYPES[out.dtype], out.strides[0],
            )
            assert not np.isnan(out).any()


def combine():
    for columns, at_end, dtype, weight_dtype in itertools.product(
        (1, 5, 1023, 1025), (True, False), TYPES, TYPES
    ):
        rows = guarded(draw((6, columns)), at_end)
        weights = guarded(draw((2, 3), weight_dtype), at_end)
        out = guarded(np.zeros((2, columns), dtype), at_end)
        kernels.combine(
            rows.ctypes.data, 2, 3, columns,
            weights.ctypes.data, TYPES[weights.dtype], weights.strides[0],
            out.ctypes.data, TYPES[out.dtype], out.strides[0],
        )


def page():
    for at_end, dtype, (num, length, width, wide) in itertools.product(
        (True, False), TYPES, ((1, 1, 1, 1), (9, 65, 33, 17), (7, 128, 64, 64))
    ):
        queries, keys, values = (
            guarded(draw(shape, dtype), at_end)
            for shape in ((4, num, width), (2, length, width), (2, length, wide))
        )
        out = guarded(np.full((num, 4, wide), np.nan, dtype), at_end)
        mask = guarded(np.ones((num, length), bool), at_end)
        for seen in (None, (mask.ctypes.data, length)):
            _page.attend(
                queries=(queries.ctypes.data, *queries.strides[1::-1]),
                keys=(keys.ctypes.data, *keys.strides[1::-1]),
                values=(values.ctypes.data, *values.strides[1::-1]),
                out=(out.ctypes.data, out.strides[0]), mask=seen, num_queries=num,
                num_keys=length, num_heads=4, num_kv_heads=2, width=width, value_width=wide,
                kind=TYPES[out.dtype], scale=1.0,
            )
            assert not np.isnan(out).any()


def overrun():
    array = guarded(draw((3, 5)))
    print("placed", flush=True)
    too_long = Matrix(array.ctypes.data, "f32", 4, 5, 20, array)
    kernels.products(np.ones((1, 5), np.float32), too_long)


kernels.use_level(sys.argv[1])
for name in sys.argv[2:]:
    globals()[name]()
print("done")
"""


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run parts of the program above, with two threads."""
    return subprocess.run(
        [sys.executable, "-c", GUARDED, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=PACKAGE,
    )


@pytest.mark.parametrize("level", LEVELS)
def test_no_byte_beyond_an_array_is_touched(level: str) -> None:
    """Of weights, inputs, biases, waves and outputs, in ragged columns and rows too."""
    done = run(level, "products", "experts", "coded_experts", "combine", "page")

    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


def test_the_guard_notices_a_row_too_many() -> None:
    """Or the test above would prove nothing."""
    done = run("generic", "overrun")
    assert done.returncode != 0
    assert done.stdout == "placed\n"
