"""Reader: what arrives, byte by byte, and in how many reads."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache.reader._reader import ENGINES, Reader
from tests.helpers.examples import num_examples
from tests.helpers.pages import MIB, PAGE, num_descriptors, wait_until, write_file
from tests.helpers.readers import (
    Order,
    Run,
    one_range,
    open_descriptor,
    read_all,
    skip_without_direct,
)

# None ends with a block; one is shorter than a block.
SIZES = (3 * MIB + 1007, 300_001, 77)


class Files:
    """Open files of random bytes."""

    def __init__(self, directory: Path) -> None:
        self.paths = [write_file(directory / str(n), size, seed=n) for n, size in enumerate(SIZES)]
        self.contents = [path.read_bytes() for path in self.paths]
        self.descriptors = [open_descriptor(path) for path in self.paths]


@pytest.fixture(name="files", scope="module")
def _files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    files = Files(tmp_path_factory.mktemp("reader"))
    yield files
    for descriptor in files.descriptors:
        os.close(descriptor)


@pytest.fixture(name="reader", params=[(e, d) for e in ENGINES for d in (False, True)], ids=str)
def _reader(request: pytest.FixtureRequest, files: Files) -> Iterator[Reader]:
    engine, direct = request.param
    try:
        reader = Reader(files.descriptors, direct=direct, engine=engine)
    except OSError:
        pytest.skip("this kernel refuses io_uring")
    if direct:
        skip_without_direct(reader)
    yield reader
    reader.close()


GAPS = st.one_of(
    st.sampled_from([0, 0, 1, 100, 4096, 8191, 8192, 8193, 20_000]), st.integers(0, 2**17)
)
LENGTHS = st.one_of(
    st.sampled_from([0, 1, 511, 512, 513, 4096, 16_384, 17_000, 65_536, 70_000]),
    st.integers(0, 40_000),
)


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[list[Run], int | None]]:
    """Draw loads of up to three runs, each after the last one, before it, or at the very end."""
    plans = []
    file, cursor = 0, 0
    for _ in range(draw(st.integers(1, 8))):
        runs: list[Run] = []
        whole = draw(st.booleans())  # one role in several runs, as gate and up are
        end = 0
        for number in range(draw(st.integers(1, 3))):
            if draw(st.integers(0, 3)) == 0:
                file = draw(st.integers(0, len(SIZES) - 1))
                cursor = draw(st.integers(0, SIZES[file]))
            cursor += draw(GAPS)
            cursor = cursor if cursor <= SIZES[file] else SIZES[file] - min(SIZES[file], 5000)
            offset, spans = cursor, []
            for length in draw(st.lists(LENGTHS, max_size=4)):
                length = min(length, SIZES[file] - cursor)
                start = end if whole else draw(st.sampled_from([0, 0, 1, 64]))
                role = "whole" if whole else f"{number} {len(spans)}"
                spans.append((role, start, start + length))
                end = start + length
                cursor += length
            runs.append((file, offset, tuple(spans)))
        plans.append((runs, draw(st.sampled_from([None, 0, 1, 64, 512]))))
    return plans


@settings(max_examples=num_examples(200))
@given(
    plans=requests(),
    engine=st.sampled_from([None, "threads"]),
    direct=st.booleans(),
    depth=st.sampled_from([1, 2, 7, 64]),
    piece_bytes=st.sampled_from([4096, 5000, 16_384, 65_536, MIB]),
    staging_bytes=st.sampled_from([0, 40_000, 16 * MIB]),
)
def test_every_byte_is_the_files_and_nothing_else_is_written(
    files: Files, plans: list[tuple[list[Run], int | None]], **options: Any
) -> None:
    """Whatever lies beside or over what, wherever it goes, however much is read at once."""
    reader = Reader(files.descriptors, **options)
    try:
        # Twice: the second time what the first one used is used again.
        for _ in range(2):
            orders = [Order(files.contents, runs, shift=shift) for runs, shift in plans]
            outcomes = read_all(reader, orders)
            assert set(outcomes) == set(orders)
            assert set(outcomes.values()) == {None}
            assert all(order.is_right() for order in orders)
        wanted = 2 * sum(order.nbytes for order in orders)
        assert reader.bytes_wanted == wanted
        assert reader.bytes_copied <= wanted
        assert reader.num_retries == 0
    finally:
        assert reader.close()


def test_a_request_of_many_loads_comes_in(reader: Reader, files: Files) -> None:
    """More than the kernel's queue holds, and more parts than one read takes."""
    orders = [
        one_range(files.contents, index * 3001, 2990, shift=index % 64) for index in range(1000)
    ]
    orders += [one_range(files.contents, index * 9001, 600) for index in range(300)]

    assert set(read_all(reader, orders).values()) == {None}
    assert all(order.is_right() for order in orders)


def test_adjacent_experts_of_one_request_are_one_read(reader: Reader, files: Files) -> None:
    """In whatever order they were asked for."""
    orders = [one_range(files.contents, 8192 + 4000 * index, 4000) for index in (2, 0, 3, 1)]

    read_all(reader, orders)
    assert reader.num_reads == 1
    assert all(order.is_right() for order in orders)


@pytest.mark.parametrize(("gap", "reads"), [(1, 1), (8192, 1), (8193, 2), (100_000, 2)])
def test_a_small_gap_is_read_across_and_a_large_one_is_not(
    reader: Reader, files: Files, gap: int, reads: int
) -> None:
    """A pack's padding costs nothing; what is far away is not read."""
    orders = [one_range(files.contents, at, 4096) for at in (4096, 8192 + gap)]

    read_all(reader, orders)
    assert reader.num_reads == reads
    blocks = 2 * 4096 + (gap if reads == 1 else 0)
    assert blocks <= reader.bytes_read <= blocks + 4 * reader.alignment
    assert all(order.is_right() for order in orders)


def test_ranges_of_two_files_are_two_reads(reader: Reader, files: Files) -> None:
    """At offsets that would adjoin in one file."""
    orders = [
        one_range(files.contents, 4096, 4096, file=0),
        one_range(files.contents, 8192, 4096, file=1),
    ]

    read_all(reader, orders)
    assert reader.num_reads == 2
    assert all(order.is_right() for order in orders)


def test_a_long_range_is_read_in_pieces(reader: Reader, files: Files) -> None:
    """None longer than was said."""
    reader.tune(depth=4, piece_bytes=65_536, staging_bytes=0)
    order = one_range(files.contents, 0, 10 * 65_536)

    assert read_all(reader, [order]) == {order: None}
    assert reader.num_reads == 10
    assert order.is_right()


def test_what_lies_in_blocks_and_goes_to_blocks_is_read_in_place(
    reader: Reader, files: Files
) -> None:
    """As a pack's experts do: nothing goes through staging."""
    orders = [one_range(files.contents, 2 * index * 65_536, 65_536) for index in range(8)]

    read_all(reader, orders)
    assert (reader.bytes_copied, reader.bytes_read) == (0, 8 * 65_536)
    assert reader.bytes_wanted == 8 * 65_536
    assert all(order.is_right() for order in orders)


def test_only_the_ends_of_a_range_that_is_aligned_like_its_target_are_copied(
    reader: Reader, files: Files
) -> None:
    """The blocks between its first and last one are read in place."""
    order = one_range(files.contents, 10_000, 100_000, shift=None)

    read_all(reader, [order])
    assert reader.bytes_copied < 2 * reader.alignment
    assert (reader.bytes_copied > 0) == reader.direct
    assert order.is_right()


def test_what_is_not_aligned_is_copied_once(reader: Reader, files: Files) -> None:
    """And only with direct reads."""
    orders = [one_range(files.contents, index * 200_000, 65_536, shift=1) for index in range(4)]

    read_all(reader, orders)
    assert reader.bytes_copied == (4 * 65_536 if reader.direct else 0)
    assert all(order.is_right() for order in orders)


def test_two_loads_of_the_same_bytes_both_get_them(reader: Reader, files: Files) -> None:
    """Also where one is part of the other."""
    orders = [
        one_range(files.contents, offset, nbytes)
        for offset, nbytes in ((0, 50_000), (0, 50_000), (10_000, 20_000), (49_999, 9000))
    ]

    assert set(read_all(reader, orders).values()) == {None}
    assert all(order.is_right() for order in orders)


def test_a_load_of_no_bytes_is_done_at_once(reader: Reader, files: Files) -> None:
    """Nothing is read for it, beside others or alone."""
    empty = [one_range(files.contents, 100, 0), Order(files.contents, [])]
    reader.submit([order.entry for order in empty])
    taken: list[object] = []
    assert reader.poll()
    for _ in range(3):
        reader.take(taken)

    assert taken == [(order, None) for order in empty]
    assert (reader.num_reads, reader.bytes_read) == (0, 0)


def test_tuning_changes_nothing_but_the_speed(reader: Reader, files: Files) -> None:
    """Between two requests, to anything."""
    for depth, piece_bytes, staging_bytes in ((1, 4096, 0), (256, MIB, 64 * MIB), (3, 4097, 9000)):
        reader.tune(depth=depth, piece_bytes=piece_bytes, staging_bytes=staging_bytes)
        assert (reader.depth, reader.piece_bytes) == (depth, piece_bytes)
        assert reader.staging_bytes >= 2 * piece_bytes
        order = one_range(files.contents, 100, 300_000, shift=1)
        assert read_all(reader, [order]) == {order: None}
        assert order.is_right()


def test_tmpfs_is_read_through_memory(files: Files) -> None:
    """It would take the flag and copy all the same."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("there is no /dev/shm")
    path = write_file(shared / f"moecache-test-{os.getpid()}", 50_000)
    try:
        content, descriptor, before = path.read_bytes(), open_descriptor(path), num_descriptors()
        reader = Reader([descriptor], direct=True)
        order = one_range([content], 1234, 40_000)
        assert (reader.direct, reader.alignment) == (False, 1)
        assert num_descriptors() <= before + 1  # the ring's; the direct one was given back
        assert read_all(reader, [order]) == {order: None}
        assert order.is_right()
        reader.close()
        os.close(descriptor)
    finally:
        path.unlink()


def test_a_mixture_of_file_systems_is_read_each_its_way(files: Files) -> None:
    """Direct where it can be, else not."""
    with Path("/proc/self/status").open("rb") as odd:
        reader = Reader([files.descriptors[0], odd.fileno()], direct=True)
        skip_without_direct(reader)
        good, other = (
            one_range([files.contents[0], b""], 77, 50_000),
            one_range([files.contents[0], bytes(8)], 0, 8, file=1),
        )
        outcomes = read_all(reader, [good, other])
        reader.close()

    assert outcomes == {good: None, other: None}
    assert good.is_right()
    assert other.parts["weights"].tobytes() == Path("/proc/self/status").read_bytes()[:8]


@pytest.mark.skipif(PAGE != 4096, reason="the pieces are counted in pages of 4 KiB")
def test_counters_say_what_was_read(reader: Reader, files: Files) -> None:
    """Reads, bytes, and time in which anything was outstanding."""
    read_all(reader, [one_range(files.contents, 4096, 4096)])
    busy = reader.busy_ns

    assert (reader.num_reads, reader.bytes_read, reader.bytes_wanted) == (1, 4096, 4096)
    assert busy > 0
    assert reader.wait(reader.epoch) is False
    assert reader.busy_ns == busy


def test_a_descriptor_that_is_closed_is_that_loads_error(files: Files) -> None:
    """Not the reader's."""
    descriptor = open_descriptor(files.paths[1])
    reader = Reader([files.descriptors[0], descriptor])
    os.close(descriptor)
    good, bad = (one_range(files.contents, 0, 5000, file=number) for number in (0, 1))

    outcomes = read_all(reader, [bad, good])
    reader.close()
    assert outcomes == {good: None, bad: (errno.EBADF, 1, 0)}
    assert good.is_right()


def test_reads_that_nobody_waits_for_all_arrive(files: Files) -> None:
    """With few buffers, each one that comes back begins the next read, also when only polled."""
    try:
        reader = Reader(
            files.descriptors,
            direct=True,
            engine="io_uring",
            depth=16,
            piece_bytes=65536,
            staging_bytes=0,
        )
    except OSError:
        pytest.skip("this kernel refuses io_uring")
    skip_without_direct(reader)
    orders = [one_range(files.contents, 1 + 70_001 * n, 60_000) for n in range(12)]
    reader.submit([order.entry for order in orders])
    taken: list[Any] = []

    wait_until(lambda: not reader.num_in_flight or reader.poll() is None)
    for _ in orders:
        reader.take(taken)
    reader.close()

    assert len(taken) == len(orders)
    assert all(order.is_right() for order in orders)
