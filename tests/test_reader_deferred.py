"""Reader: what is deferred goes behind everything else, until it is hastened."""

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache.reader._reader import ENGINES, HAS_FAULTS, Reader, inject_fault
from tests.helpers.examples import num_examples
from tests.helpers.pages import MIB, PAGE, write_file
from tests.helpers.readers import (
    Failure,
    Order,
    one_range,
    open_descriptor,
    skip_without_direct,
)

# Far apart, and of the same length: each is a read of its own.
NBYTES, STRIDE = 6000, 40_000


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_file(tmp_path_factory.mktemp("deferred") / "file", 4 * MIB + 77)


@pytest.fixture(name="contents", scope="module")
def _contents(path: Path) -> list[bytes]:
    return [path.read_bytes()]


@pytest.fixture(name="descriptor")
def _descriptor(path: Path) -> Iterator[int]:
    descriptor = open_descriptor(path)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(name="reader")
def _reader(descriptor: int) -> Iterator[Reader]:
    # Only the thread that waits reads, one piece after the other: in the order of the queue.
    reader = Reader([descriptor], engine="threads", depth=1)
    yield reader
    reader.close()


def orders_of(contents: list[bytes], count: int, *, shift: int = 0) -> list[Order]:
    """Return loads of a read each."""
    return [one_range(contents, index * STRIDE + 7, NBYTES, shift=shift) for index in range(count)]


def submit(reader: Reader, orders: Sequence[Order], *, deferred: bool = False) -> None:
    """Begin to read some."""
    reader.submit([order.entry for order in orders], deferred=deferred)


def take_all(reader: Reader, count: int) -> list[Order]:
    """Return so many loads in the order in which they were done; their bytes are right."""
    taken: list[tuple[Order, Failure | None]] = []
    while len(taken) < count:
        reader.wait(reader.epoch)
        before = -1
        while len(taken) > before:
            before = len(taken)
            reader.take(taken)
    assert reader.num_in_flight == 0
    for order, failure in taken:
        assert failure is None
        assert order.is_right()
    return [order for order, _ in taken]


def test_what_is_deferred_comes_last(reader: Reader, contents: list[bytes]) -> None:
    """Whatever was submitted before it or after it."""
    a, b, c, d, e, f = orders_of(contents, 6)
    submit(reader, [a])
    submit(reader, [b, c], deferred=True)
    submit(reader, [d])
    submit(reader, [e], deferred=True)
    submit(reader, [f])

    assert take_all(reader, 6) == [a, d, f, b, c, e]


def test_a_deferred_read_alone_is_read(reader: Reader, contents: list[bytes]) -> None:
    """Nothing has to follow."""
    (order,) = orders_of(contents, 1)
    submit(reader, [order], deferred=True)
    assert take_all(reader, 1) == [order]


def test_what_is_hastened_waits_for_nothing_that_comes_later(
    reader: Reader, contents: list[bytes]
) -> None:
    """What is deferred afterwards does again."""
    a, b, c, d, e = orders_of(contents, 5)
    submit(reader, [a], deferred=True)
    submit(reader, [b], deferred=True)
    reader.hasten(a)
    reader.hasten(b)
    submit(reader, [c], deferred=True)
    submit(reader, [d])
    submit(reader, [e], deferred=True)

    assert take_all(reader, 5) == [a, b, d, c, e]


@pytest.mark.parametrize("which", range(4))
def test_one_is_hastened_and_the_others_are_not(
    reader: Reader, contents: list[bytes], which: int
) -> None:
    """Wherever it stands, behind the urgent ones; long ones keep the order of their pieces."""
    reader.tune(depth=1, piece_bytes=4096, staging_bytes=0)
    *deferred, urgent, later = orders_of(contents, 6)
    for order in deferred:
        submit(reader, [order], deferred=True)
    submit(reader, [urgent])
    reader.hasten(deferred[which])
    submit(reader, [later])

    chosen = deferred.pop(which)
    assert take_all(reader, 6) == [urgent, chosen, later, *deferred]


def test_hastening_nothing_changes_nothing(reader: Reader, contents: list[bytes]) -> None:
    """Neither of an empty queue nor of one without deferred reads."""
    a, b, c = orders_of(contents, 3)
    reader.hasten(a)
    submit(reader, [a])
    reader.hasten(a)
    reader.hasten(object())
    submit(reader, [b], deferred=True)
    submit(reader, [c])
    assert take_all(reader, 3) == [a, c, b]
    reader.hasten(b)
    submit(reader, [b], deferred=True)
    submit(reader, [a])
    assert take_all(reader, 2) == [a, b]


def test_an_urgent_read_overtakes_the_rest_of_a_long_deferred_one(
    reader: Reader, contents: list[bytes]
) -> None:
    """After each piece, not after the whole."""
    reader.tune(depth=1, piece_bytes=65_536, staging_bytes=0)
    long = one_range(contents, 0, 16 * 65_536)
    (urgent,) = orders_of(contents, 1)
    submit(reader, [long], deferred=True)
    submit(reader, [urgent])
    assert take_all(reader, 2) == [urgent, long]


def test_after_each_of_many_the_next_goes_where_it_belongs(
    reader: Reader, contents: list[bytes]
) -> None:
    """The queue is emptied, half and wholly, in between."""
    orders = orders_of(contents, 12)
    for start in range(0, 12, 4):
        a, b, c, d = orders[start : start + 4]
        submit(reader, [a], deferred=True)
        submit(reader, [b])
        assert one_done(reader) is b
        submit(reader, [c], deferred=True)
        submit(reader, [d])
        assert take_all(reader, 3) == [d, a, c]


def one_done(reader: Reader) -> Order:
    """Return the next load that is done; the others stay in the queue."""
    taken: list[tuple[Order, Failure | None]] = []
    while not taken:
        reader.wait(reader.epoch)
        reader.take(taken)
    return taken[0][0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("direct", [False, True])
def test_where_the_kernel_has_one_read_the_next_is_the_urgent_one(
    descriptor: int, contents: list[bytes], engine: str, direct: bool
) -> None:
    """With io_uring, too: what it was given first is read first, and then what is urgent."""
    try:
        reader = Reader([descriptor], direct=direct, engine=engine, depth=1)
    except OSError:
        pytest.skip("this kernel refuses io_uring")
    if direct:
        skip_without_direct(reader)
    first, *deferred, urgent = orders_of(contents, 5, shift=1)
    submit(reader, [first])
    submit(reader, deferred, deferred=True)
    submit(reader, [urgent])
    # Cached files are read as soon as the kernel is asked: then the first deferred one is, too.
    done = take_all(reader, 5)
    reader.close()
    assert done[0] is first
    assert done.index(urgent) <= 2
    assert [order for order in done if order in deferred] == deferred


def test_empty_loads_that_are_deferred_are_done_at_once(
    reader: Reader, contents: list[bytes]
) -> None:
    """There is nothing to wait for."""
    empty = Order(contents, [])
    (order,) = orders_of(contents, 1)
    submit(reader, [empty], deferred=True)
    submit(reader, [order], deferred=True)
    assert take_all(reader, 2) == [empty, order]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_reader_closes_with_deferred_reads_pending(
    descriptor: int, contents: list[bytes], engine: str
) -> None:
    """They are dropped; a second close does nothing, and nothing can be submitted."""
    try:
        reader = Reader([descriptor], engine=engine, depth=1)
    except OSError:
        pytest.skip("this kernel refuses io_uring")
    orders = orders_of(contents, 20)
    submit(reader, orders[:5])
    submit(reader, orders[5:], deferred=True)
    assert reader.close()
    assert reader.close()
    assert reader.num_in_flight == 0
    assert all(order.stays_inside() for order in orders)
    entries: list[Any] = [orders[0].entry]
    with pytest.raises(ValueError, match="the reader is closed"):
        reader.submit(entries, deferred=True)
    assert len(entries) == 1
    reader.hasten(orders[7])


def test_a_load_that_cannot_be_deferred_begins_nothing(
    reader: Reader, contents: list[bytes]
) -> None:
    """The list is left as it was."""
    (order,) = orders_of(contents, 1)
    entries: list[Any] = [order.entry, (order, order.runs, {})]
    with pytest.raises(ValueError, match="no array for role"):
        reader.submit(entries, deferred=True)
    assert len(entries) == 2
    assert reader.num_in_flight == 0
    assert order.is_untouched()


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.booleans(),
            st.lists(
                st.tuples(st.integers(0, 4 * MIB - 70_000), st.sampled_from([0, 1, 700, 70_000])),
                min_size=1,
                max_size=4,
            ),
        ),
        st.tuples(st.just("hasten"), st.integers(0, 99)),
        st.just(("take",)),
    ),
    max_size=25,
)


@settings(max_examples=num_examples(200))
@given(
    steps=STEPS,
    engine=st.sampled_from([None, "threads"]),
    direct=st.booleans(),
    depth=st.sampled_from([1, 2, 16]),
    piece_bytes=st.sampled_from([4096, 16_384, 262_144]),
    shift=st.sampled_from([0, 1]),
)
def test_of_any_mixture_every_byte_is_the_files(
    path: Path,
    contents: list[bytes],
    steps: list[tuple[Any, ...]],
    engine: str | None,
    direct: bool,
    depth: int,
    piece_bytes: int,
    shift: int,
) -> None:
    """Each load is done once, and nothing stays in the queue."""
    descriptor = open_descriptor(path)
    options = {"depth": depth, "piece_bytes": piece_bytes, "staging_bytes": 3 * PAGE}
    reader = Reader([descriptor], engine=engine, direct=direct, **options)
    left = 0
    orders: list[Order] = []
    try:
        for kind, *rest in steps:
            if kind == "submit":
                deferred, ranges = rest
                orders = [one_range(contents, *where, shift=shift) for where in ranges]
                submit(reader, orders, deferred=deferred)
                left += len(orders)
            elif kind == "hasten" and orders:
                reader.hasten(orders[rest[0] % len(orders)])
            elif left:
                assert one_done(reader).is_right()
                left -= 1
        take_all(reader, left)
        assert reader.num_retries == 0
    finally:
        assert reader.close()
        os.close(descriptor)


@pytest.mark.skipif(not HAS_FAULTS, reason="this build has no faults: make debug, make sanitize")
@pytest.mark.parametrize("num_deferred", [0, 1, 3])
@pytest.mark.parametrize("num_urgent", [0, 1, 3])
@pytest.mark.parametrize(("kind", "times"), [("short", 1), ("short", 7), ("error", 5)])
def test_what_is_put_back_keeps_its_place(
    reader: Reader, contents: list[bytes], kind: str, times: int, num_urgent: int, num_deferred: int
) -> None:
    """A short read goes on at once, whatever waits, and the queue's ends stay where they are."""
    orders = orders_of(contents, 2 * (num_urgent + num_deferred))
    inject_fault(kind, error=errno.EAGAIN, times=times)
    try:
        for half in (orders[: len(orders) // 2], orders[len(orders) // 2 :]):
            submit(reader, half[num_urgent:], deferred=True)
            if num_urgent:
                submit(reader, half[:num_urgent])
        expected = [order for at in (0, len(orders) // 2) for order in orders[at : at + num_urgent]]
        expected += [order for order in orders if order not in expected]
        assert take_all(reader, len(orders)) == expected
        if orders:
            assert reader.num_retries > 0
    finally:
        inject_fault("none")
