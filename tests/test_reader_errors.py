"""Reader: files that end early, arguments that cannot be, readers that are closed."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache.reader import _reader as compiled
from moecache.reader._reader import ENGINES, Reader
from tests.helpers.pages import MIB, PAGE, num_descriptors, run_child, wait_until, write_file
from tests.helpers.readers import (
    Failure,
    Hole,
    num_mappings,
    one_range,
    open_descriptor,
    read_all,
    skip_without_direct,
    wait_for,
)

SIZE = 2 * MIB + 123


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    return write_file(tmp_path / "file", SIZE)


@pytest.fixture(name="contents")
def _contents(path: Path) -> list[bytes]:
    return [path.read_bytes()]


@pytest.fixture(name="descriptor")
def _descriptor(path: Path) -> Iterator[int]:
    descriptor = open_descriptor(path)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(name="reader", params=[(e, d) for e in ENGINES for d in (False, True)], ids=str)
def _reader(request: pytest.FixtureRequest, descriptor: int) -> Iterator[Reader]:
    engine, direct = request.param
    try:
        reader = Reader([descriptor], direct=direct, engine=engine)
    except OSError:
        pytest.skip("this kernel refuses io_uring")
    if direct:
        skip_without_direct(reader)
    yield reader
    reader.close()


@pytest.fixture(name="idle")
def _idle(descriptor: int) -> Iterator[Reader]:
    """Return a reader that reads only while a thread waits: what is submitted stays."""
    reader = Reader([descriptor], engine="threads")
    yield reader
    reader.close()


@pytest.mark.parametrize("size", [0, 1, 5000, PAGE * 20, 100_001, 70_000])
def test_a_load_past_the_end_is_an_error_with_the_place_where_the_file_ends(
    reader: Reader, path: Path, contents: list[bytes], size: int
) -> None:
    """Also where it is read together with others; those are right."""
    os.truncate(path, size)
    orders = [one_range(contents, at, 10_000) for at in range(0, 200_000, 10_000)]
    orders += [one_range(contents, MIB + at, 3000, shift=5) for at in (0, 300_000)]

    for _ in range(2):
        outcomes = read_all(reader, orders)
        for order, failure in outcomes.items():
            _, offset, _ = order.runs[0]
            if offset + order.nbytes <= size:
                assert failure is None
                assert order.is_right()
            else:
                assert failure is not None
                assert failure[:2] == (errno.ENODATA, 0)
                assert failure[2] == size or size <= failure[2] <= offset
            assert order.stays_inside()
    os.truncate(path, SIZE)
    path.write_bytes(contents[0])
    assert set(read_all(reader, orders).values()) == {None}
    assert all(order.is_right() for order in orders)


@pytest.mark.parametrize("cut", [1, 99, 512, 5000])
def test_a_load_over_the_end_names_the_last_byte_there_is(
    reader: Reader, contents: list[bytes], cut: int
) -> None:
    """To the byte, direct reads too."""
    good = one_range(contents, SIZE - 40_000, 40_000, shift=None)
    bad = one_range(contents, SIZE - cut, cut + 1)

    assert read_all(reader, [bad, good]) == {bad: (errno.ENODATA, 0, SIZE), good: None}
    assert good.is_right()


def test_files_cut_and_restored_under_reads_never_give_wrong_bytes(
    reader: Reader, path: Path, contents: list[bytes]
) -> None:
    """While they are in flight: the file's bytes, or zeros of a hole, or an error; then right."""
    for step in range(20):
        orders = [one_range(contents, at, 20_000, shift=1) for at in range(0, 2_000_000, 40_000)]
        reader.submit([order.entry for order in orders])
        os.truncate(path, step * 100_003)
        outcomes = wait_for(reader, len(orders))
        for order, failure in outcomes.items():
            assert failure is None or failure[0] == errno.ENODATA
            assert order.stays_inside()
            if order.runs[0][1] + order.nbytes <= step * 100_003:
                assert failure is None
                assert order.is_right()
        path.write_bytes(contents[0])
    assert read_all(reader, orders[:1]) == {orders[0]: None}
    assert orders[0].is_right()


BYTES = np.zeros(100, np.uint8)
READ_ONLY = BYTES.copy()
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("runs", "parts"),
    [
        ([(0, 0, (("a", 0, 4),))], {}),
        ([(0, 0, (("a", 0, 101),))], {"a": BYTES}),
        ([(0, 0, (("a", 5, 4),))], {"a": BYTES}),
        ([(0, 0, (("a", -1, 4),))], {"a": BYTES}),
        ([(0, 0, (("a", 0, 4),))], {"a": BYTES[::2]}),
        ([(0, 0, (("a", 0, 4),))], {"a": READ_ONLY}),
        ([(1, 0, (("a", 0, 4),))], {"a": BYTES}),
        ([(-1, 0, (("a", 0, 4),))], {"a": BYTES}),
        # Past what a file can have; the sum is past what 64 bits can say.
        ([(0, 2**64 - 1, (("a", 0, 4),))], {"a": BYTES}),
        ([(0, 2**64 - 50, (("a", 0, 99),))], {"a": BYTES}),
    ],
)
def test_a_load_that_cannot_be_is_refused_and_nothing_is_begun(
    reader: Reader, contents: list[bytes], runs: Any, parts: dict[str, np.ndarray]
) -> None:
    """Not even the good one before it, nor the first run of the bad one."""
    good = one_range(contents, 0, 10_000)
    first = (0, 0, (("good", 0, 50),))
    entries = [good.entry, (None, [first, *runs], {"good": np.zeros(50, np.uint8), **parts})]

    with pytest.raises(ValueError):
        reader.submit(entries)
    assert len(entries) == 2
    assert (reader.num_reads, reader.num_in_flight) == (0, 0)
    assert reader.poll() is False
    assert good.is_untouched()
    assert read_all(reader, [good]) == {good: None}


@pytest.mark.parametrize(
    "entry",
    [
        None,
        (1, 2),
        (1, 2, 3),
        (1, [(0, -1, (("a", 0, 4),))], {"a": BYTES}),
        (1, [(0, 2**70, (("a", 0, 4),))], {"a": BYTES}),
        (1, [(0, 0, (("a", 0, 4),))], {"a": b"read-only"}),
        (1, [(0, 0, (("a", 0, "4"),))], {"a": BYTES}),
    ],
    ids=str,
)
def test_nonsense_is_refused_and_nothing_is_begun(
    reader: Reader, contents: list[bytes], entry: Any
) -> None:
    """Of the wrong type, or past any integer."""
    good = one_range(contents, 0, 10_000)
    entries = [good.entry, entry]

    with pytest.raises((ValueError, TypeError, OverflowError)):
        reader.submit(entries)
    assert len(entries) == 2
    assert (reader.num_reads, reader.num_in_flight) == (0, 0)
    assert good.is_untouched()


def test_the_list_is_emptied_once_all_is_begun(idle: Reader, contents: list[bytes]) -> None:
    """After an interrupt the list tells whether the reader has taken the loads."""
    order = one_range(contents, 0, 1000)
    entries = [order.entry]
    idle.submit(entries)
    idle.submit([])

    assert entries == []
    assert idle.num_in_flight == 1
    assert wait_for(idle, 1) == {order: None}


def test_taking_from_an_idle_reader_adds_nothing(reader: Reader) -> None:
    """There is nothing, and it does not wait."""
    taken: list[object] = []
    reader.take(taken)

    assert taken == []
    assert reader.poll() is False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depth": 0}, r"depth must be in \[1, 256\], got 0"),
        ({"depth": 257}, r"depth must be in \[1, 256\], got 257"),
        ({"piece_bytes": 4095}, r"piece_bytes must be in \[4 KiB, 1 GiB\], got 4095"),
        ({"piece_bytes": 2**30 + 1}, "got 1073741825"),
        ({"engine": "magic"}, "engine 'magic' is not one of io_uring, threads"),
    ],
)
def test_figures_out_of_range_make_no_reader(
    descriptor: int, options: dict[str, Any], words: str
) -> None:
    """And leave no descriptor open."""
    before = num_descriptors()
    with pytest.raises(ValueError, match=words):
        Reader([descriptor], direct=True, **options)
    with pytest.raises(TypeError):
        Reader([descriptor, "name"], direct=True)
    assert num_descriptors() == before


def test_a_reader_is_not_tuned_while_it_reads(idle: Reader, contents: list[bytes]) -> None:
    """The buffers are in use; all stays as it was."""
    order = one_range(contents, 0, 10_000)
    idle.submit([order.entry])
    with pytest.raises(ValueError, match="1 reads are in flight"):
        idle.tune(depth=1, piece_bytes=4096, staging_bytes=0)

    assert (idle.depth, idle.piece_bytes) == (16, 256 * 1024)
    assert wait_for(idle, 1) == {order: None}
    assert order.is_right()


def test_figures_out_of_range_do_not_tune(reader: Reader, contents: list[bytes]) -> None:
    """All stays as it was."""
    for depth, piece_bytes in ((0, 4096), (257, 4096), (1, 100), (1, 2**40)):
        with pytest.raises(ValueError, match="must be in"):
            reader.tune(depth=depth, piece_bytes=piece_bytes, staging_bytes=0)
    with pytest.raises(MemoryError, match="no memory for staging buffers"):
        reader.tune(depth=256, piece_bytes=2**30, staging_bytes=2**46)

    assert (reader.depth, reader.piece_bytes) == (16, 256 * 1024)
    order = one_range(contents, 1, 1_000_000, shift=2)
    assert read_all(reader, [order]) == {order: None}
    assert order.is_right()


def test_a_closed_reader_refuses_and_wakes_nobody(reader: Reader, contents: list[bytes]) -> None:
    """With an error, not a hang."""
    order = one_range(contents, 0, 1000)
    entries, taken = [order.entry], list[object]()
    assert reader.close() is True
    assert reader.close() is True

    with pytest.raises(ValueError, match="the reader is closed"):
        reader.submit(entries)
    assert len(entries) == 1
    assert reader.wait(reader.epoch) is False
    reader.announce()
    reader.serve()
    reader.take(taken)
    assert taken == []
    assert order.is_untouched()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_closed_reader_can_be_asked_whether_anything_is_done(path: Path, engine: str) -> None:
    """Nothing is, and the ring's memory is gone: in a child, which must not die of it."""
    code = (
        "import os\n"
        "from moecache.reader._reader import Reader\n"
        "reader = Reader([os.open(sys.argv[1], os.O_RDONLY)], engine=sys.argv[2])\n"
        "reader.close()\n"
        "print(reader.poll())\n"
    )
    done = run_child(code, path, engine)
    if "io_uring: " in done.stderr:
        pytest.skip("this kernel refuses io_uring")
    assert (done.returncode, done.stdout) == (0, "False\n")


def test_tuning_a_closed_reader_takes_no_memory_for_good(descriptor: int) -> None:
    """A calibration that is interrupted closes the reader, and tunes it back at its end."""
    before = num_mappings()
    for _ in range(50):
        reader = Reader([descriptor])
        reader.close()
        try:
            reader.tune(depth=1, piece_bytes=4096, staging_bytes=64 * MIB)
        except ValueError:
            continue  # to refuse is right too
        finally:
            reader.close()
        del reader

    assert num_mappings() < before + 25


def test_closing_drops_what_is_in_flight(reader: Reader, contents: list[bytes]) -> None:
    """From then on nothing is written any more."""
    for _ in range(10):
        orders = [one_range(contents, at, 50_000, shift=1) for at in range(0, MIB, 60_000)]
        reader.submit([order.entry for order in orders])
    assert reader.close() is True
    assert reader.num_in_flight == 0
    assert reader.close() is True
    then = [order.parts["weights"].copy() for order in orders]

    assert reader.wait(reader.epoch) is False
    for order, bytes_then in zip(orders, then, strict=True):
        assert np.array_equal(order.parts["weights"], bytes_then)
        assert order.stays_inside()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("direct", [False, True])
def test_nothing_is_left_of_readers_that_are_dropped(
    descriptor: int, contents: list[bytes], engine: str, direct: bool
) -> None:
    """Neither descriptors nor memory, closed or not, with reads in flight or without."""

    def use(how: int) -> None:
        try:
            reader = Reader([descriptor, descriptor], direct=direct, engine=engine)
        except OSError:
            pytest.skip("this kernel refuses io_uring")
        order = one_range(contents, 100, MIB, shift=1)
        if how == 0:
            read_all(reader, [order])
        else:
            reader.submit([order.entry])
        if how == 2:
            reader.close()

    for how in (0, 1, 2):
        use(how)
    descriptors, mappings = num_descriptors(), num_mappings()
    for step in range(60):
        use(step % 3)

    assert num_descriptors() == descriptors
    assert num_mappings() < mappings + 30


@pytest.mark.parametrize("engine", ENGINES)
def test_a_read_that_never_comes_back_does_not_hang_close(
    descriptor: int, contents: list[bytes], engine: str
) -> None:
    """Close says so and gives nothing back; once it is back, a second close does."""
    nbytes = 512 * 1024  # so much is copied by a thread of the kernel, not by `submit`
    try:
        reader = Reader([descriptor], engine=engine, depth=1, piece_bytes=nbytes)
    except OSError:
        pytest.skip("this kernel refuses io_uring")
    hole = Hole(nbytes)
    queued, late = (one_range(contents, MIB + at, 1000) for at in (0, 100_000))
    run = (0, 0, (("weights", 0, nbytes),))
    stuck = threading.Thread(target=reader.serve, daemon=True)
    reader.submit([("stuck", (run,), {"weights": hole.array}), queued.entry])
    stuck.start()
    wait_until(lambda: reader.num_reads == 1)
    taken: list[tuple[object, Failure | None]] = []
    try:
        assert reader.close(0.05) is False
        assert reader.num_in_flight == 1
        with pytest.raises(ValueError, match="the reader is closed"):
            reader.submit([late.entry])
        # A load that was not begun is an error, or is dropped.
        reader.take(taken)
        assert taken in ([], [(queued, (errno.ECANCELED, 0, 0))])
        assert queued.is_untouched()
    finally:
        hole.fill()
        stuck.join(30)
        hole.close()
    wait_until(reader.close)
    assert hole.array.tobytes() == contents[0][:nbytes]
    assert reader.num_in_flight == 0


def test_a_slow_close_gives_everything_back_later(reader: Reader, contents: list[bytes]) -> None:
    """What is in flight keeps its arrays until it is back, and no longer."""
    order = one_range(contents, 0, 2 * MIB)
    reader.submit([order.entry])
    if not reader.close(0.0):
        assert compiled._stuck
        wait_until(reader.close)
    assert not compiled._stuck
    assert reader.num_in_flight == 0


@pytest.mark.parametrize("dtype", [object, [("weight", "f4"), ("name", object)]], ids=str)
def test_an_array_of_objects_is_no_target(idle: Reader, dtype: Any) -> None:
    """Bytes of a file are no references: to use one as such would crash."""
    with pytest.raises(ValueError, match="'weights' holds references to objects"):
        idle.submit([("load", ((0, 0, (("weights", 0, 64),)),), {"weights": np.empty(16, dtype)})])
    assert idle.num_in_flight == 0
