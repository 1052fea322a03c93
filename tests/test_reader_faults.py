"""Reader: what the kernel may answer, injected below it. Debug and sanitizer builds only."""

import errno
import gc
import itertools
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import moecache
from moecache.reader._reader import ENGINES, HAS_FAULTS, Reader, inject_fault
from tests.helpers.checkpoints import Checkpoint, same_parts, write_checkpoint
from tests.helpers.pages import MIB, num_descriptors, write_file
from tests.helpers.pairs import pairwise
from tests.helpers.readers import (
    Failure,
    Order,
    one_range,
    open_descriptor,
    read_all,
    skip_without_direct,
    wait_for,
)

if not HAS_FAULTS:
    pytest.skip("this build has no faults: make debug, make sanitize", allow_module_level=True)

FOR_EVER = 2**40
SIZE = 3 * MIB + 501
# One read each: far apart, and shorter than a piece.
NBYTES, STRIDE = 6001, 40_000
RETRIED = ("EINTR", "EAGAIN", "EBUSY", "ENOMEM", "ECANCELED")
NUM_LOADS = (1, 2, 8, 64)


@pytest.fixture(autouse=True)
def no_faults_and_nothing_left() -> Iterator[None]:
    """End what a test injected; check that failures give back their files."""
    inject_fault("none")
    gc.collect()
    before = num_descriptors()
    yield
    inject_fault("none")
    gc.collect()
    assert num_descriptors() == before


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_file(tmp_path_factory.mktemp("faults") / "file", SIZE)


@pytest.fixture(name="contents", scope="module")
def _contents(path: Path) -> list[bytes]:
    return [path.read_bytes()]


@pytest.fixture(name="reader", params=[(e, d) for e in ENGINES for d in (False, True)], ids=str)
def _reader(request: pytest.FixtureRequest, path: Path) -> Iterator[Reader]:
    engine, direct = request.param
    descriptor = open_descriptor(path)
    try:
        reader = Reader([descriptor], direct=direct, engine=engine, depth=16, staging_bytes=MIB)
    except OSError:
        os.close(descriptor)
        pytest.skip("this kernel refuses io_uring")
    if direct:
        skip_without_direct(reader)
    yield reader
    reader.close()
    os.close(descriptor)


def separate(contents: list[bytes], count: int, *, shift: int | None = 1) -> list[Order]:
    """Return loads of a read each."""
    return [one_range(contents, index * STRIDE + 7, NBYTES, shift=shift) for index in range(count)]


def read_with(
    reader: Reader, orders: list[Order], kind: str, *, error: int = 0, skip: int = 0, times: int = 1
) -> dict[Order, Failure | None]:
    """Read under a fault; check that what did not fail is right, and that all is well after."""
    inject_fault(kind, error=error, skip=skip, times=times)
    outcomes = read_all(reader, orders)
    inject_fault("none")
    assert set(outcomes) == set(orders)
    for order, failure in outcomes.items():
        assert order.stays_inside()
        if failure is None:
            assert order.is_right()
        else:
            assert failure[1] == 0
            offset = order.runs[0][1]
            assert offset - 4096 < failure[2] <= offset + order.nbytes
    # Every buffer came back: this takes more than all of them.
    whole = one_range(reader_contents(orders), 3, SIZE - 3, shift=1)
    assert read_all(reader, [whole]) == {whole: None}
    assert whole.is_right()
    again = [one_range(whole.contents, order.runs[0][1], order.nbytes) for order in orders]
    assert read_all(reader, again) == dict.fromkeys(again)
    assert all(order.is_right() for order in again)
    return outcomes


def reader_contents(orders: list[Order]) -> list[bytes]:
    """Return the file that loads are of."""
    return orders[0].contents


def failures(outcomes: dict[Order, Failure | None]) -> list[int]:
    """Return the errors of the loads that failed."""
    return [failure[0] for failure in outcomes.values() if failure is not None]


@pytest.mark.parametrize(("name", "times", "count"), pairwise(RETRIED, (1, 5), NUM_LOADS))
def test_what_passes_is_tried_again(
    reader: Reader, contents: list[bytes], name: str, times: int, count: int
) -> None:
    """And comes in right, each try counted."""
    error = getattr(errno, name)
    outcomes = read_with(reader, separate(contents, count), "error", error=error, times=times)

    assert failures(outcomes) == []
    assert reader.num_retries == times


@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("name", [*RETRIED, "EIO", "EINVAL", "EOPNOTSUPP", "ESTALE", "EBADF"])
def test_what_does_not_pass_is_every_loads_error(
    reader: Reader, contents: list[bytes], name: str, count: int
) -> None:
    """With the errno, after as many tries as make sense; nothing hangs."""
    error = getattr(errno, name)
    orders = separate(contents, count)
    outcomes = read_with(reader, orders, "error", error=error, times=FOR_EVER)

    assert failures(outcomes) == [error] * count


@pytest.mark.parametrize("count", NUM_LOADS)
@pytest.mark.parametrize("skip", [0, 1, 5])
def test_an_error_of_the_disk_is_one_loads_error_at_most(
    reader: Reader, contents: list[bytes], skip: int, count: int
) -> None:
    """EIO is tried again: a path that fails over. ESTALE is not: one load fails."""
    orders = separate(contents, count)
    assert failures(read_with(reader, orders, "error", error=errno.EIO, skip=skip)) == []

    outcomes = read_with(reader, orders, "error", error=errno.ESTALE, skip=skip)
    assert failures(outcomes) == [errno.ESTALE] * (skip < count)


@pytest.mark.parametrize(
    ("name", "times", "count"), pairwise(("EINVAL", "EOPNOTSUPP"), (1, 5), NUM_LOADS)
)
def test_a_direct_read_that_is_refused_goes_through_the_page_cache(
    reader: Reader, contents: list[bytes], name: str, times: int, count: int
) -> None:
    """Without direct reads it is an error: there is no other way."""
    orders = separate(contents, count)
    error = getattr(errno, name)
    outcomes = read_with(reader, orders, "error", error=error, times=times)

    # A load has one other way: two of the refusals may meet on it.
    assert len(failures(outcomes)) <= times // 2 if reader.direct else True
    assert reader.direct or failures(outcomes) == [error] * min(times, count)


@pytest.mark.parametrize(("times", "shift", "count"), pairwise((1, 3, 20), (None, 1), NUM_LOADS))
def test_short_reads_are_continued(
    reader: Reader, contents: list[bytes], times: int, shift: int | None, count: int
) -> None:
    """In the middle of a part, of a block, in staging or in place."""
    orders = [one_range(contents, n * STRIDE + 7, 33_000, shift=shift) for n in range(count)]
    outcomes = read_with(reader, orders, "short", times=times)

    # Direct reads take a few that bring no block for the file's end: those of 20 may.
    allowed = {errno.ENODATA} if reader.direct and times == 20 else set()
    assert set(failures(outcomes)) <= allowed


@pytest.mark.parametrize("count", NUM_LOADS)
def test_reads_that_are_always_short_end(reader: Reader, contents: list[bytes], count: int) -> None:
    """Byte by byte in the end; or, where only whole blocks count, with an error."""
    outcomes = read_with(reader, separate(contents, count), "short", times=FOR_EVER)

    assert set(failures(outcomes)) <= ({errno.ENODATA} if reader.direct else set())


@pytest.mark.parametrize("count", NUM_LOADS)
@pytest.mark.parametrize(("kind", "error"), [("zero", errno.ENODATA), ("long", errno.EPROTO)])
def test_an_answer_that_cannot_go_on_fails_the_loads_it_was_for(
    reader: Reader, contents: list[bytes], kind: str, error: int, count: int
) -> None:
    """One, a few, all: no bytes, as at the file's end, or more than were asked for."""
    orders = separate(contents, count)
    for times in (1, 3, FOR_EVER):
        outcomes = read_with(reader, orders, kind, times=times)
        assert failures(outcomes) == [error] * min(times, count)


def test_a_fault_in_a_shared_read_fails_those_whose_bytes_did_not_come(
    reader: Reader, contents: list[bytes]
) -> None:
    """Adjacent experts of one read: what came before the end is good."""
    orders = [one_range(contents, at, 8192) for at in range(0, 32_768, 8192)]
    # A third of the read arrives, then nothing more.
    inject_fault("short")
    reader.submit([order.entry for order in orders])
    if reader.engine == "threads":
        while reader.num_retries == 0:
            reader.wait(reader.epoch)
    else:
        while reader.num_retries == 0 and reader.num_in_flight:
            reader.poll()
    outcomes = wait_for(reader, len(orders))

    assert outcomes == dict.fromkeys(orders)
    assert all(order.is_right() for order in orders)
    inject_fault("zero", skip=0)
    outcomes = read_all(reader, orders)
    assert failures(outcomes) == [errno.ENODATA] * 4


@pytest.mark.parametrize("name", ["EAGAIN", "EINTR", "EIO"])
def test_a_reader_closes_while_reads_fail(reader: Reader, contents: list[bytes], name: str) -> None:
    """Without a hang; threads that wait are let go."""
    inject_fault("error", error=getattr(errno, name), times=FOR_EVER)
    for order in separate(contents, 64):
        reader.submit([order.entry])
    server = threading.Thread(target=reader.serve, daemon=True)
    server.start()

    assert reader.close() is True
    server.join(30)
    assert not server.is_alive()
    assert reader.num_in_flight == 0


@pytest.mark.parametrize("name", ["EPERM", "ENOSYS", "ENOMEM"])
def test_where_io_uring_is_refused_threads_read(
    path: Path, contents: list[bytes], name: str
) -> None:
    """A caller that insists on it gets the kernel's error."""
    error = getattr(errno, name)
    inject_fault("none", refuse_ring=error)
    descriptor = open_descriptor(path)
    reader = Reader([descriptor], direct=True)
    order = one_range(contents, 5, 100_000)
    assert (reader.engine, reader.refusal) == ("threads", error)
    assert read_all(reader, [order]) == {order: None}
    assert order.is_right()
    reader.close()
    with pytest.raises(OSError, match="io_uring") as caught:
        Reader([descriptor], direct=True, engine="io_uring")
    assert caught.value.errno == error
    os.close(descriptor)


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path / "model", num_layers=2)


def expert_of(runtime: moecache.ExpertRuntime, layer: int, expert: int) -> dict[str, object]:
    """Return one expert as it is in its slot."""
    with runtime.lease(layer, [expert]) as lease:
        parts = runtime.expert(int(lease.slots[0]), layer)
        return {role: part.copy() for role, part in parts.items()}


@pytest.mark.parametrize("refuse", [0, errno.EPERM])
@pytest.mark.parametrize("read", ["direct", "buffered"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [("error", "Stale file handle"), ("zero", "it was changed while in use"), ("long", "Protocol")],
)
def test_a_runtimes_error_names_expert_file_and_offset(
    model: Checkpoint, read: str, kind: str, words: str, refuse: int
) -> None:
    """And the next call reads it right."""
    inject_fault("none", refuse_ring=refuse)
    with moecache.open(model.path, slots=4, read=read, prefault="off") as runtime:
        for layer, expert in itertools.product(range(2), range(12)):
            inject_fault(kind, error=errno.ESTALE)
            with pytest.raises(moecache.StoreError, match=words) as caught:
                expert_of(runtime, layer, expert)
            assert f"expert {expert} of layer {layer}" in str(caught.value)
            assert "model.safetensors" in str(caught.value)
            runtime.cache.check()
            inject_fault("none")
            assert same_parts(expert_of(runtime, layer, expert), model.experts[layer][expert])
        assert runtime.stats().num_failed_reads == 24


def test_a_calibration_that_cannot_read_is_a_warning(
    model: Checkpoint, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime opens; requests say what is wrong, until nothing is."""
    inject_fault("error", error=errno.EIO, times=FOR_EVER)
    with (
        caplog.at_level(logging.WARNING),
        moecache.open(model.path, slots=4, read="direct", prefault="off") as runtime,
    ):
        assert "reading.calibration_failed" in caplog.text
        assert runtime.disk is None
        with pytest.raises(moecache.StoreError, match="Input/output error"):
            expert_of(runtime, 1, 5)
        inject_fault("none")
        assert same_parts(expert_of(runtime, 1, 5), model.experts[1][5])
