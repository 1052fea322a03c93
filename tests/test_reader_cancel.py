"""Reader.cancel: what was deferred and has not begun is dropped, and nothing else."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache.reader._reader import Reader
from tests.helpers.examples import num_examples
from tests.helpers.pages import MIB, PAGE, write_file
from tests.helpers.readers import Failure, Order, one_range, open_descriptor

LONG = 16 * 65_536


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_file(tmp_path_factory.mktemp("cancel") / "file", 4 * MIB + 77)


@pytest.fixture(name="contents", scope="module")
def _contents(path: Path) -> list[bytes]:
    return [path.read_bytes()]


@pytest.fixture(name="reader")
def _reader(path: Path) -> Iterator[Reader]:
    # Only the thread that waits reads, one piece of 64 KiB after the other.
    descriptor = open_descriptor(path)
    reader = Reader([descriptor], engine="threads", depth=1, piece_bytes=65_536)
    yield reader
    assert reader.close()
    os.close(descriptor)


def submit(reader: Reader, *orders: Order, deferred: bool = True) -> None:
    """Begin to read, each for itself as prefetches are."""
    for order in orders:
        reader.submit([order.entry], deferred=deferred)


def taken(reader: Reader, count: int) -> list[tuple[Order, Failure | None]]:
    """Return so many loads as they are done."""
    found: list[tuple[Order, Failure | None]] = []
    while len(found) < count:
        reader.wait(reader.epoch)
        before = -1
        while len(found) > before:
            before = len(found)
            reader.take(found)
    return found


def test_what_has_not_begun_is_dropped(reader: Reader, contents: list[bytes]) -> None:
    """It ends with ECANCELED and untouched; the others are read as ever."""
    one, two, three = (one_range(contents, start, 5000) for start in (0, 40_000, 80_000))
    submit(reader, one, two, three)
    reader.cancel(two)

    (first, failure), *others = taken(reader, 3)
    assert first is two
    assert failure is not None
    assert failure[0] == errno.ECANCELED
    assert two.is_untouched()
    assert [order for order, _ in others] == [one, three]
    assert all(failed is None and order.is_right() for order, failed in others)
    assert reader.num_in_flight == 0


def test_the_rest_of_what_has_begun_is_dropped(reader: Reader, contents: list[bytes]) -> None:
    """Pieces that were read stay read; time is counted once."""
    long = one_range(contents, 0, LONG)
    submit(reader, long)
    reader.wait(reader.epoch)  # no load is done: it reads until a tenth of a second is over
    submit(reader, one_range(contents, 2 * MIB, LONG))
    reader.cancel(long)
    assert {order is long for order, _ in taken(reader, 2)} == {True, False}
    busy_ns = reader.busy_ns
    assert busy_ns > 0
    reader.cancel(long)
    assert reader.busy_ns == busy_ns


def test_time_ends_with_the_cancel_of_all_there_was(reader: Reader, contents: list[bytes]) -> None:
    """The load was outstanding until then; afterwards nothing is."""
    order = one_range(contents, 0, 5000)
    submit(reader, order)
    reader.cancel(order)
    busy_ns = reader.busy_ns
    assert busy_ns > 0
    assert [owner for owner, _ in taken(reader, 1)] == [order]
    assert reader.busy_ns == busy_ns


@pytest.mark.parametrize("how", ["urgent", "hastened", "unknown"])
def test_what_somebody_waits_for_goes_on(reader: Reader, contents: list[bytes], how: str) -> None:
    """An urgent load goes on, and so does a hastened one; an unknown owner cancels nothing."""
    order = one_range(contents, 0, LONG)
    submit(reader, order, deferred=how != "urgent")
    if how == "hastened":
        reader.hasten(order)
    reader.cancel(object() if how == "unknown" else order)
    assert taken(reader, 1) == [(order, None)]
    assert order.is_right()


def test_a_read_that_another_load_shares_goes_on(reader: Reader, contents: list[bytes]) -> None:
    """Neighbours that were submitted together are one read."""
    one, two = one_range(contents, 0, 5000), one_range(contents, 5000, 5000)
    reader.submit([one.entry, two.entry], deferred=True)
    reader.cancel(one)
    assert [(failure, order.is_right()) for order, failure in taken(reader, 2)] == [
        (None, True),
        (None, True),
    ]


def test_the_owner_may_be_the_first_of_a_tuple(reader: Reader, contents: list[bytes]) -> None:
    """As the loader has it: a load, and its arrays."""
    order = one_range(contents, 0, LONG)
    owner = object()
    _, runs, parts = order.entry
    reader.submit([((owner, parts), runs, parts)], deferred=True)
    reader.cancel(owner)
    found: list[Any] = []
    reader.take(found)
    assert found[0][0] == (owner, parts)
    assert found[0][1][0] == errno.ECANCELED


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.booleans(),
            st.integers(0, 3 * MIB),
            st.sampled_from([0, 1, 700, 70_000, 700_000]),
        ),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("hasten"), st.integers(0, 9)),
        st.just(("wait",)),
        st.just(("poll",)),
    ),
    max_size=25,
)


@settings(max_examples=num_examples(200))
@given(
    steps=STEPS,
    engine=st.sampled_from([None, "threads"]),
    direct=st.booleans(),
    depth=st.sampled_from([1, 2, 16]),
)
def test_of_any_mixture_each_load_is_done_once(
    path: Path,
    contents: list[bytes],
    steps: list[tuple[Any, ...]],
    engine: str | None,
    direct: bool,
    depth: int,
) -> None:
    """Right to the last byte, or cancelled; only what was cancelled fails."""
    descriptor = open_descriptor(path)
    reader = Reader(
        [descriptor],
        engine=engine,
        direct=direct,
        depth=depth,
        piece_bytes=65_536,
        staging_bytes=40 * PAGE,
    )
    orders: list[Order] = []
    cancelled: set[int] = set()
    found: list[tuple[Order, Failure | None]] = []
    try:
        for kind, *rest in steps:
            if kind == "submit":
                deferred, start, nbytes = rest
                orders.append(one_range(contents, start, nbytes))
                submit(reader, orders[-1], deferred=deferred)
            elif kind == "cancel" and orders:
                order = orders[rest[0] % len(orders)]
                reader.cancel(order)
                cancelled.add(id(order))
            elif kind == "hasten" and orders:
                reader.hasten(orders[rest[0] % len(orders)])
            elif kind == "wait" and len(found) < len(orders):
                found += taken(reader, 1)
            elif kind == "poll":
                reader.poll()
        found += taken(reader, len(orders) - len(found))
        assert reader.num_in_flight == 0
        assert sorted(id(order) for order, _ in found) == sorted(map(id, orders))
        for order, failure in found:
            if failure is None:
                assert order.is_right()
            else:
                assert failure[0] == errno.ECANCELED
                assert id(order) in cancelled
    finally:
        assert reader.close()
        os.close(descriptor)
