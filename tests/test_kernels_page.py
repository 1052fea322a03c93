"""Attention of a page: the values of float64, each row's bits its own."""

import itertools

import numpy as np
import pytest

from moecache.kernels import _page
from tests.helpers.kernels import BF16, DTYPES, LEVELS, computing

# Heads, heads of keys, queries, keys, and the widths of keys and of values.
SHAPES = (
    (1, 1, 1, 1, 1, 1),
    (8, 2, 5, 5, 16, 16),
    (6, 6, 70, 200, 33, 17),
    (3, 3, 1, 65, 192, 128),
    (16, 2, 30, 130, 64, 256),
)
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def drawn(shape: tuple[int, ...], dtype: np.dtype, seed: int = 0) -> Arrays:
    """Return queries [heads, queries, width], keys and values [kv_heads, keys, width]."""
    heads, kv_heads, num_queries, num_keys, width, value_width = shape
    rng = np.random.default_rng(seed)
    shapes = (heads, num_queries, width), (kv_heads, num_keys, width)
    made = (rng.standard_normal(one) for one in (*shapes, (kv_heads, num_keys, value_width)))
    queries, keys, values = (one.astype(dtype) for one in made)
    return queries, keys, values


def attended(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray | None = None
) -> np.ndarray:
    """Return what the kernel makes of arrays, [queries, heads, value_width]."""
    heads, num_queries, width = queries.shape
    out = np.full((num_queries, heads, values.shape[2]), np.nan, queries.dtype)

    def place(array: np.ndarray) -> tuple[int, int, int]:
        assert array.strides[2] == array.itemsize
        return array.ctypes.data, array.strides[1], array.strides[0]

    _page.attend(
        queries=place(queries),
        keys=place(keys),
        values=place(values),
        out=(out.ctypes.data, out.strides[0]),
        mask=None if mask is None else (mask.ctypes.data, mask.strides[0]),
        num_queries=num_queries,
        num_keys=keys.shape[1],
        num_heads=heads,
        num_kv_heads=len(keys),
        width=width,
        value_width=values.shape[2],
        kind="bf16" if queries.dtype == BF16 else "f32",
        scale=width**-0.5,
    )
    return out


def causal(num_queries: int, num_keys: int) -> np.ndarray:
    """Return what is seen where the last query is of the last position."""
    return np.tri(num_queries, num_keys, num_keys - num_queries, dtype=bool)


def expected(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """Return the same in float64."""
    times = len(queries) // len(keys)
    keys, values = (np.repeat(one.astype(np.float64), times, 0) for one in (keys, values))
    scores = queries.astype(np.float64) @ keys.transpose(0, 2, 1) * queries.shape[2] ** -0.5
    scores = np.where(mask, scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return (shares / shares.sum(-1, keepdims=True) @ values).transpose(1, 0, 2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_has_the_values_of_attention(level: str, dtype: np.dtype) -> None:
    """Causal, and with a mask of any kind in which each query sees something."""
    for shape in SHAPES:
        arrays = drawn(shape, dtype)
        known = causal(*shape[2:4])
        some = known & (np.random.default_rng(1).random(known.shape) < 0.4)
        some[:, 0] = True
        with computing(level):
            for mask, given in ((known, None), (known, known), (some, some)):
                found = attended(*arrays, given).astype(np.float64)
                wanted = expected(*arrays, mask)
                error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
                assert error < (4e-3 if dtype == BF16 else 2e-6), (shape, error)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_bits_that_it_has_alone(level: str, dtype: np.dtype) -> None:
    """With other queries or none, with a mask or none, whatever later keys are, on any threads."""
    queries, keys, values = drawn((12, 3, 90, 150, 20, 24), dtype)
    mask = causal(90, 150)
    with computing(level):
        whole = attended(queries, keys, values)
        assert np.array_equal(attended(queries, keys, values, mask), whole)
        with computing(threads=3):
            assert np.array_equal(attended(queries, keys, values), whole)
        for query in (0, 7, 89):
            one = queries[:, query : query + 1]
            seen = slice(60 + query + 1)
            alone = attended(one, keys[:, seen], values[:, seen])
            assert np.array_equal(alone[0], whole[query])
            others = values.copy()
            others[:, 60 + query + 1 :] = 3
            assert np.array_equal(attended(queries, keys, others)[query], whole[query])


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_that_sees_nothing_is_zero(level: str) -> None:
    """As torch has it: a row of padding is no NaN that spreads."""
    for dtype in DTYPES:
        arrays = drawn((4, 2, 9, 100, 8, 8), dtype)
        mask = causal(9, 100)
        mask[3] = False
        with computing(level):
            found = attended(*arrays, mask)
        assert not found[3].any()
        assert np.isfinite(found.astype(np.float32)).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_none_reaches_who_sees_it(level: str, bad: float) -> None:
    """A NaN or an infinity in a key makes rows that see it NaN, and no others."""
    for dtype in DTYPES:
        queries, keys, values = drawn((2, 1, 80, 80, 8, 8), dtype)
        keys[0, 70] = bad
        with computing(level):
            found = attended(queries, keys, values).astype(np.float32)
        assert np.isfinite(found[:70]).all()
        # An infinite product that is negative is a share of zero.
        rows = found[70:].reshape(10, -1)
        assert np.isnan(rows).any()
        if np.isnan(bad):
            assert np.isnan(rows).all()


def test_heads_may_lie_anywhere() -> None:
    """Positions before heads, as modules make them, and rows with gaps."""
    queries, keys, values = drawn((4, 2, 6, 70, 16, 16), np.dtype(np.float32))
    moved = [np.ascontiguousarray(one.transpose(1, 0, 2)) for one in (queries, keys, values)]
    wide = [np.concatenate([one, one], 2)[:, :, : one.shape[2]] for one in moved]
    wanted = attended(queries, keys, values)
    for some in (moved, wide):
        assert np.array_equal(attended(*(one.transpose(1, 0, 2) for one in some)), wanted)


def test_sizes_that_do_not_fit_are_refused() -> None:
    """Nothing is read or written then."""
    queries, keys, values = drawn((4, 2, 3, 3, 8, 8), np.dtype(np.float32))
    wide = np.zeros((1, 1, _page.MOST_WIDTH + 1), np.float32)
    for arrays, problem in (
        ((queries[:3], keys, values), "3 heads of 2"),
        ((wide, wide, wide), "257"),
        ((queries, keys[:, :2], values), "3 queries are of 2 positions"),
        ((queries[:, :0], keys, values), "one query"),
    ):
        with pytest.raises(ValueError, match=problem):
            attended(*arrays)


def test_all_widths_up_to_the_most_have_a_kernel() -> None:
    """Odd ones, whose last pair of bfloat16 is half empty, and those beside a step's."""
    for width, dtype in itertools.product((1, 2, 15, 63, 64, 65, 255, 256), DTYPES):
        arrays = drawn((1, 1, 2, 3, width, width), dtype)
        wanted = expected(*arrays, causal(2, 3))
        assert np.allclose(attended(*arrays).astype(np.float64), wanted, atol=0.05), width
