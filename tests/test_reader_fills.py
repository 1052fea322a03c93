"""Reader: experts that are brought into compute form by the threads that read them."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache import kernels
from moecache.formats import find_format
from moecache.kernels._tiler import Tiler
from moecache.reader._reader import ENGINES, Reader
from tests.helpers.readers import open_descriptor, skip_without_direct

ROWS, COLUMNS, EXPERTS = 48, 512, 12
# Of a matrix: blocks of 34 bytes, a scale and 32 codes.
NBYTES = ROWS * COLUMNS // 32 * 34


class Experts:
    """A file of matrices in q8_0, the last with a wrong scale, and what a reader is told."""

    def __init__(self, path: Path) -> None:
        raw = np.random.default_rng(0).integers(0, 256, (EXPERTS, NBYTES // 34, 34), np.uint8)
        raw[:, :, :2] = np.array([0.5], np.float16).view(np.uint8)
        raw[-1, 0, :2] = np.array([np.inf], np.float16).view(np.uint8)
        self.raw = raw.reshape(EXPERTS, NBYTES)
        path.write_bytes(raw.tobytes())
        self.descriptor = open_descriptor(path)
        made = kernels.tiler("q8_0", ROWS, COLUMNS)
        assert isinstance(made, Tiler)
        self.tiler = made

    def load(self, expert: int, *, offset: int | None = None) -> tuple[Any, ...]:
        """Return what `submit` takes; its owner has the form that is to be written."""
        part = np.zeros(NBYTES, np.uint8)
        form = np.zeros(self.tiler.form_bytes, np.uint8)
        at = expert * NBYTES if offset is None else offset
        runs = ((0, at, (("down", 0, NBYTES),)),)
        return (expert, form), runs, {"down": part}, ((self.tiler, "down", 0, form),)

    def form(self, expert: int) -> np.ndarray:
        """Return a matrix in compute form, as it is made by itself."""
        known = find_format("q8_0").form
        assert known is not None
        form = np.zeros(known.nbytes(ROWS, COLUMNS), np.uint8)
        kernels.tile(self.raw[expert], "q8_0", ROWS, COLUMNS, form)
        return form


@pytest.fixture(name="experts")
def _experts(tmp_path: Path) -> Iterator[Experts]:
    experts = Experts(tmp_path / "experts")
    yield experts
    os.close(experts.descriptor)


@pytest.fixture(name="reader", params=[(e, d) for e in ENGINES for d in (False, True)], ids=str)
def _reader(request: pytest.FixtureRequest, experts: Experts) -> Iterator[Reader]:
    engine, direct = request.param
    try:
        reader = Reader([experts.descriptor], direct=direct, engine=engine, piece_bytes=8192)
    except OSError:
        pytest.skip("this kernel refuses io_uring")
    if direct:
        skip_without_direct(reader)
    yield reader
    reader.close()


def _serve(reader: Reader, num_threads: int) -> list[threading.Thread]:
    threads = [
        threading.Thread(target=reader.serve, kwargs={"fills": True}) for _ in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.02 * num_threads)  # they take part from now on
    return threads


def _take(reader: Reader, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        reader.wait(reader.epoch)
        reader.take(found)
    assert reader.num_in_flight == 0
    return found


@pytest.mark.parametrize("num_threads", [0, 1, 2])
@pytest.mark.parametrize("is_cached", [True, False])
def test_forms_are_those_of_the_kernels(
    reader: Reader, experts: Experts, num_threads: int, is_cached: bool
) -> None:
    """Whoever fills, and wherever the bytes come from."""
    threads = _serve(reader, num_threads)
    for _ in range(3):
        if not is_cached:
            os.fsync(experts.descriptor)
            os.posix_fadvise(experts.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        reader.submit([experts.load(expert) for expert in range(EXPERTS - 1)])
        for (expert, form), error in _take(reader, EXPERTS - 1):
            assert error is None
            np.testing.assert_array_equal(form, experts.form(expert))
    reader.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("num_threads", [0, 1])
def test_experts_are_filled_while_the_caller_computes(
    reader: Reader, experts: Experts, num_threads: int
) -> None:
    """With a thread that serves nobody has to wait, or to look; without, `poll` fills."""
    _serve(reader, num_threads)
    load = experts.load(3)
    form, expected = load[0][1], experts.form(3)
    reader.submit([load])
    deadline = time.monotonic() + 20
    while not np.array_equal(form, expected):
        assert time.monotonic() < deadline
        if not num_threads and reader.engine == "threads":
            reader.wait(reader.epoch)  # only callers read
        elif not num_threads:
            reader.poll()
        time.sleep(0.001)


@pytest.mark.parametrize("num_threads", [0, 1])
def test_roles_may_lie_apart(reader: Reader, experts: Experts, num_threads: int) -> None:
    """An expert of three roles, in three places of the file, and not in their order."""
    threads = _serve(reader, num_threads)
    places = {"gate": 7, "up": 1, "down": 4}
    parts = {name: np.zeros(NBYTES, np.uint8) for name in places}
    forms = {name: np.zeros(experts.tiler.form_bytes, np.uint8) for name in places}
    runs = [(0, at * NBYTES, ((name, 0, NBYTES),)) for name, at in places.items()]
    reader.submit(
        [("expert", runs, parts, [(experts.tiler, name, 0, forms[name]) for name in places])]
    )
    assert _take(reader, 1) == [("expert", None)]
    for name, at in places.items():
        np.testing.assert_array_equal(forms[name], experts.form(at))
    reader.close()
    for thread in threads:
        thread.join(10)


@pytest.mark.parametrize("num_threads", [0, 1])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_scale_is_told_of_whatever_comes_last(
    experts: Experts, tmp_path: Path, engine: str, num_threads: int
) -> None:
    """A role that is not filled may arrive after one that was, and was found to be wrong."""
    path, num_behind = tmp_path / "wrong", 300_000
    path.write_bytes(experts.raw[-1].tobytes() + bytes(num_behind))
    descriptor = open_descriptor(path)
    try:
        reader = Reader([descriptor], engine=engine, piece_bytes=8192)
    except OSError:
        pytest.skip("this kernel refuses io_uring")
    threads = _serve(reader, num_threads)
    for _ in range(10):
        owner, runs, parts, fills = experts.load(0)
        both = (*runs, (0, NBYTES, (("plain", 0, num_behind),)))
        reader.submit([(owner, both, {**parts, "plain": np.zeros(num_behind, np.uint8)}, fills)])
        ((_, error),) = _take(reader, 1)
        assert error is not None
        assert error[0] == errno.EILSEQ
    reader.close()
    for thread in threads:
        thread.join(10)
    os.close(descriptor)


@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_failed_read_leaves_its_slot_alone(
    reader: Reader, experts: Experts, num_threads: int
) -> None:
    """The others of the same call arrive; a wrong scale is told of, and only of its expert."""
    _serve(reader, num_threads)
    end = (EXPERTS - 1) * NBYTES
    beyond = experts.load(77, offset=end + 1000)
    reader.submit([experts.load(0), beyond, experts.load(EXPERTS - 1), experts.load(2)])
    found = {owner[0]: (owner[1], error) for owner, error in _take(reader, 4)}
    assert found[0][1] is None
    assert found[2][1] is None
    np.testing.assert_array_equal(found[2][0], experts.form(2))
    assert found[77][1][0] == errno.ENODATA
    assert not found[77][0].any()
    assert found[EXPERTS - 1][1][0] == errno.EILSEQ


@pytest.mark.parametrize("num_threads", [0, 1])
def test_close_drops_what_is_not_filled(experts: Experts, num_threads: int) -> None:
    """A form is either whole or untouched."""
    for _ in range(10):
        reader = Reader([experts.descriptor])
        threads = _serve(reader, num_threads)
        loads = [experts.load(expert) for expert in range(EXPERTS - 1)]
        kept = [load[0] for load in loads]
        reader.submit(loads)
        assert reader.close()
        for thread in threads:
            thread.join(10)
        for expert, form in kept:
            assert not form.any() or np.array_equal(form, experts.form(expert))


def test_parts_must_fit_what_they_are_tiled_into(experts: Experts) -> None:
    """Nothing is begun then."""
    reader = Reader([experts.descriptor])
    owner, runs, parts, fills = experts.load(0)
    short = np.zeros(experts.tiler.form_bytes - 16, np.uint8)
    with pytest.raises(ValueError, match="matrices of"):
        reader.submit([experts.load(1), (owner, runs, parts, ((experts.tiler, "down", 0, short),))])
    for start in (-1, 1, NBYTES, NBYTES + 1):
        with pytest.raises(ValueError, match="matrices of"):
            reader.submit([(owner, runs, parts, ((experts.tiler, "down", start, owner[1]),))])
    with pytest.raises(ValueError, match="no array for role 'up'"):
        reader.submit([(owner, runs, parts, ((experts.tiler, "up", 0, owner[1]),))])
    assert reader.num_in_flight == 0
    reader.submit([(owner, runs, parts, fills)])
    assert [error for _, error in _take(reader, 1)] == [None]
    reader.close()


@pytest.mark.parametrize("num_threads", [0, 1])
def test_deferred_experts_are_filled_or_taken_back(
    reader: Reader, experts: Experts, num_threads: int
) -> None:
    """Each is given back once, whole or cancelled."""
    _serve(reader, num_threads)
    for _ in range(10):
        loads = [experts.load(expert) for expert in range(EXPERTS - 1)]
        owners = [load[0] for load in loads]
        reader.submit(loads, deferred=True)
        for owner in owners[::2]:
            reader.cancel(owner)
        for owner in owners[1::4]:
            reader.hasten(owner)
        found = _take(reader, len(owners))
        assert sorted(owner[0] for owner, _ in found) == list(range(EXPERTS - 1))
        for (expert, form), error in found:
            if error is None:
                np.testing.assert_array_equal(form, experts.form(expert))
            else:
                assert error[0] == errno.ECANCELED
                assert expert % 2 == 0
                assert not form.any()


@pytest.mark.parametrize("num_threads", [0, 2])
def test_threads_share_an_experts_matrices(
    reader: Reader, experts: Experts, num_threads: int
) -> None:
    """Each is filled once, and a wrong one makes its expert wrong."""
    _serve(reader, num_threads)
    nbytes = experts.tiler.form_bytes
    for _ in range(5):
        part = np.zeros(EXPERTS * NBYTES, np.uint8)
        forms = np.zeros((EXPERTS, nbytes), np.uint8)
        runs = ((0, 0, (("down", 0, EXPERTS * NBYTES),)),)
        end = (EXPERTS - 1) * NBYTES
        parts = {"down": part, "none": part[:0]}
        fills = [
            (experts.tiler, "down", 0, forms[: EXPERTS - 1]),
            (experts.tiler, "down", end, forms[EXPERTS - 1 :]),
            (experts.tiler, "none", 0, forms[:0]),
        ]
        reader.submit([("owner", runs, parts, fills)])
        assert [error[0] for _, error in _take(reader, 1)] == [errno.EILSEQ]
        for expert in range(EXPERTS - 1):
            np.testing.assert_array_equal(forms[expert], experts.form(expert))
