"""Matrices of numbers that are stored transposed, and become rows as slots are filled."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecache.errors import ConfigError
from moecache.kernels.forms import transposer
from moecache.reader._reader import Reader
from tests.helpers.readers import open_descriptor

# A line of a cache.
LINE = 64


def stored(rows: int, columns: int, dtype: type, *, number: int = 1, seed: int = 0) -> np.ndarray:
    """Return matrices as a file has them, of any bits."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**16, (number, columns, rows)).astype(dtype)


@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    dtype=st.sampled_from([np.uint16, np.uint32]),
    number=st.integers(1, 3),
    offset=st.integers(0, LINE - 1),
)
def test_rows_are_the_columns_of_the_file(
    rows: int, columns: int, dtype: type, number: int, offset: int
) -> None:
    """Wherever they are written: whole lines of a cache go past it. Nothing beside them changes."""
    given_ = stored(rows, columns, dtype, number=number)
    memory = np.full(given_.nbytes + 3 * LINE, 7, np.uint8)
    start = -memory.ctypes.data % LINE + offset
    start += -start % np.dtype(dtype).itemsize
    out = memory[start : start + given_.nbytes]

    assert not transposer(np.dtype(dtype), rows, columns).tile(given_, out)

    found = out.view(dtype).reshape(number, rows, columns)
    np.testing.assert_array_equal(found, given_.transpose(0, 2, 1))
    assert (memory[:start] == 7).all()
    assert (memory[start + given_.nbytes :] == 7).all()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_a_matrix_of_nothing_is_done_at_once(shape: tuple[int, int]) -> None:
    """As there are experts without weights in plans."""
    empty = np.empty(0, np.uint16)
    assert not transposer(np.dtype(np.uint16), *shape).tile(empty, empty)


@pytest.mark.parametrize("dtype", [np.uint8, np.float64, np.complex128])
def test_numbers_of_other_sizes_are_refused(dtype: type) -> None:
    """NumPy transposes these."""
    with pytest.raises(ConfigError, match="are not transposed here"):
        transposer(np.dtype(dtype), 4, 4)


@pytest.mark.parametrize("sizes", [(62, 64), (64, 62), (64, 128)])
def test_arrays_that_do_not_fit_are_refused(sizes: tuple[int, int]) -> None:
    """A matrix of 4 x 8 numbers has 64 bytes."""
    making = transposer(np.dtype(np.uint16), 4, 8)
    raw, out = (np.zeros(size, np.uint8) for size in sizes)
    with pytest.raises(ValueError, match="matrices of 64 bytes are tiled into 64"):
        making.tile(raw, out)


def test_a_reader_fills_slots_with_rows(tmp_path: Path) -> None:
    """As its threads bring codes into their compute form."""
    rows, columns, number = 40, 72, 6
    matrices = stored(rows, columns, np.uint16, number=number)
    (tmp_path / "experts").write_bytes(matrices.tobytes())
    descriptor = open_descriptor(tmp_path / "experts")
    making, nbytes = transposer(np.dtype(np.uint16), rows, columns), matrices[0].nbytes
    reader = Reader([descriptor])
    loads = []
    for expert in range(number):
        part, form = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        runs = ((0, expert * nbytes, (("down", 0, nbytes),)),)
        loads.append(((expert, form), runs, {"down": part}, ((making, "down", 0, form),)))
    reader.submit(loads)
    found: list[Any] = []
    while len(found) < number:
        reader.wait(reader.epoch)
        reader.take(found)
    for (expert, form), error in found:
        assert error is None
        rows_of = form.view(np.uint16).reshape(rows, columns)
        np.testing.assert_array_equal(rows_of, matrices[expert].T)
    reader.close()
    os.close(descriptor)
