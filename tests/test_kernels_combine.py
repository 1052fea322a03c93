"""combine: each token's weighted sum of its rows, in the order of the choices, to the bit."""

import numpy as np
import pytest

from moecache import kernels
from tests.helpers.kernels import BF16, DTYPES, F32, combined, computing, draw_inputs

TYPES = {F32: "f32", BF16: "bf16"}


def combine(rows: np.ndarray, weights: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the sums; around them nothing is written."""
    num_tokens, top_k = weights.shape
    around = np.full((num_tokens + 2, rows.shape[1] + 1), 42, dtype)
    out = around[1:-1, :-1]
    kernels.combine(
        rows=rows.ctypes.data,
        num_tokens=num_tokens,
        top_k=top_k,
        columns=rows.shape[1],
        weights=weights.ctypes.data,
        weight_type=TYPES[weights.dtype],
        weight_row_bytes=weights.strides[0],
        out=out.ctypes.data,
        out_type=TYPES[dtype],
        out_row_bytes=out.strides[0],
    )
    assert (around[[0, -1]] == 42).all()
    assert (around[:, -1] == 42).all()
    return out.copy()


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "columns"),
    [(1, 1, 1), (3, 8, 37), (15, 2, 1024), (16, 3, 1025), (40, 5, 7), (2, 1, 2100), (0, 2, 4)],
)
def test_sums_are_those_of_a_loop_over_choices(
    weight_dtype: np.dtype, dtype: np.dtype, num_tokens: int, top_k: int, columns: int
) -> None:
    """With any number of threads; more columns than are summed at once."""
    rows = draw_inputs(num_tokens * top_k, columns, F32, 1)
    weights = draw_inputs(num_tokens, top_k, weight_dtype, 2)
    expected = combined(rows, weights, dtype)
    for threads in (1, 2, 4):
        with computing(threads=threads):
            assert combine(rows, weights, dtype).tobytes() == expected.tobytes()


def test_the_order_of_choices_is_kept() -> None:
    """A sum from the other end would be 0."""
    rows = np.array([[-1e8], [1e8], [1.0]], np.float32)
    ones = np.ones((1, 3), np.float32)
    assert combine(rows, ones, F32) == 1
    assert combine(rows[::-1].copy(), ones, F32) == 0


def test_weights_may_lie_apart() -> None:
    """As columns of a router's table do."""
    rows = draw_inputs(8, 5, F32, 3)
    weights = draw_inputs(4, 6, F32, 4)[:, :2]
    assert combine(rows, weights, F32).tobytes() == combined(rows, weights, F32).tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_nan_and_denormals_pass(dtype: np.dtype) -> None:
    """No weight makes an infinity vanish; sums beyond bfloat16 round to infinity."""
    rows = np.array([[np.inf, np.nan, 2.0**-130, 3.4e38, -np.inf]], np.float32)
    one, zero = np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32)

    with np.errstate(over="ignore"):
        expected = rows.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(combine(rows, one, dtype).astype(np.float32), expected)
    found = combine(rows, zero, dtype).astype(np.float32)
    np.testing.assert_array_equal(found, [[np.nan, np.nan, 0, 0, np.nan]])


def test_tokens_without_choices_are_zeros() -> None:
    """Rather than what was there."""
    found = combine(np.empty((0, 3), np.float32), np.empty((20, 0), np.float32), F32)
    assert (found == 0).all()
