"""Reader: several threads at once, the GIL, signals, forks."""

import collections
import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from moecache.reader._reader import ENGINES, Reader
from tests.helpers.examples import num_examples
from tests.helpers.pages import MIB, skip_fork_under_sanitizer, wait_until, write_file
from tests.helpers.readers import (
    Failure,
    Order,
    one_range,
    open_descriptor,
    read_all,
    skip_without_direct,
    wait_for,
)


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_file(tmp_path_factory.mktemp("reader") / "file", 4 * MIB + 99)


@pytest.fixture(name="contents", scope="module")
def _contents(path: Path) -> list[bytes]:
    return [path.read_bytes()]


@pytest.fixture(name="reader", params=[(e, d) for e in ENGINES for d in (False, True)], ids=str)
def _reader(request: pytest.FixtureRequest, path: Path) -> Iterator[Reader]:
    engine, direct = request.param
    descriptor = open_descriptor(path)
    try:
        reader = Reader([descriptor], direct=direct, engine=engine)
    except OSError:
        os.close(descriptor)
        pytest.skip("this kernel refuses io_uring")
    if direct:
        skip_without_direct(reader)
    yield reader
    reader.close()
    os.close(descriptor)


class Caller(threading.Thread):
    """Submit loads and wait for them; hand on what is another caller's."""

    def __init__(self, reader: Reader, contents: list[bytes], seed: int) -> None:
        super().__init__(daemon=True)
        self.reader = reader
        self.contents = contents
        self.rng = np.random.default_rng(seed)
        self.arrived: collections.deque[tuple[Order, Failure | None]] = collections.deque()
        self.problems: list[object] = []

    def run(self) -> None:
        """Read many times."""
        try:
            for _ in range(num_examples(40)):
                self.read_some()
        except BaseException as error:  # noqa: BLE001 - the main thread reports it
            self.problems.append(error)

    def read_some(self) -> None:
        """Read a few ranges and check that exactly those came, each once."""
        orders = [
            one_range(
                self.contents,
                int(self.rng.integers(4 * MIB - 70_000)),
                int(self.rng.choice([1, 700, 5000, 66_000])),
                shift=int(self.rng.choice([0, 1])),
            )
            for _ in range(int(self.rng.integers(1, 12)))
        ]
        self.reader.submit([((self, order), order.runs, order.parts) for order in orders])
        left = {id(order): order for order in orders}
        while left:
            seen = self.reader.epoch
            taken: list[tuple[tuple[Caller, Order], Failure | None]] = []
            before = -1
            while len(taken) > before:
                before = len(taken)
                self.reader.take(taken)
            for (caller, order), failure in taken:
                caller.arrived.append((order, failure))
            if taken:
                self.reader.announce()
            while self.arrived:
                order, failure = self.arrived.popleft()
                del left[id(order)]  # a KeyError: not ours, or a second time
                if failure is not None or not order.is_right():
                    self.problems.append((failure, order.runs))
            if left:
                self.reader.wait(seen)


@pytest.mark.parametrize("num_servers", [0, 2])
def test_threads_that_share_a_reader_each_get_their_own_loads(
    reader: Reader, contents: list[bytes], num_servers: int
) -> None:
    """A thread that takes in another one's load hands it on; threads wait for the few buffers."""
    reader.tune(depth=5, piece_bytes=16_384, staging_bytes=0)
    servers = [threading.Thread(target=reader.serve, daemon=True) for _ in range(num_servers)]
    callers = [Caller(reader, contents, seed) for seed in range(4)]
    for thread in (*servers, *callers):
        thread.start()
    for caller in callers:
        caller.join(120)
        assert not caller.is_alive()
        assert caller.problems == []

    assert reader.num_in_flight == 0
    reader.close()
    for server in servers:
        server.join(30)
        assert not server.is_alive()


def test_threads_that_serve_read_while_nobody_waits(reader: Reader, contents: list[bytes]) -> None:
    """With io_uring the kernel does, and one that serves gives it what exceeds two queues."""
    reader.tune(depth=2, piece_bytes=4096, staging_bytes=0)
    server = threading.Thread(target=reader.serve, daemon=True)
    server.start()
    orders = [one_range(contents, at, 40_000, shift=1) for at in range(0, MIB, 50_000)]
    reader.submit([order.entry for order in orders])
    # The reads that finish last are taken in by the thread that waits for them.
    wait_until(lambda: reader.num_in_flight <= (4 if reader.engine == "io_uring" else 0))

    assert wait_for(reader, len(orders)) == dict.fromkeys(orders)
    assert all(order.is_right() for order in orders)


def test_reads_survive_the_thread_that_began_them(reader: Reader, contents: list[bytes]) -> None:
    """The kernel cancels some of what an ending thread submitted: those are read again."""
    for _ in range(20):
        orders = [one_range(contents, at, MIB - 5, shift=1) for at in range(0, 4 * MIB, MIB)]
        thread = threading.Thread(
            target=reader.submit, args=([order.entry for order in orders],), daemon=True
        )
        thread.start()
        thread.join(30)
        assert wait_for(reader, len(orders)) == dict.fromkeys(orders)
        assert all(order.is_right() for order in orders)


def test_other_threads_run_while_one_waits(reader: Reader) -> None:
    """One that is woken just before announces during the wait, not after it."""
    # No thread asks the waiting one for the GIL meanwhile: it has to give it up by itself.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    wake, seen = threading.Event(), reader.epoch

    def announce() -> None:
        wake.wait(30)
        reader.announce()

    other = threading.Thread(target=announce, daemon=True)
    try:
        other.start()
        wake.set()
        reader.wait(seen)
        epoch = reader.epoch
    finally:
        sys.setswitchinterval(interval)
        other.join(30)
    assert epoch == seen + 1


def test_announcing_ends_every_wait(reader: Reader) -> None:
    """Also of threads that wait for a read that another thread takes in."""
    returned = threading.Semaphore(0)
    seen = reader.epoch

    def wait() -> None:
        while reader.epoch == seen:
            reader.wait(seen)
        returned.release()

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    reader.announce()
    for _ in threads:
        assert returned.acquire(timeout=30)
    assert reader.wait(seen) is False  # it returns at once: the epoch is another


@pytest.mark.parametrize("busy", [False, True])
def test_a_signal_interrupts_a_wait(reader: Reader, contents: list[bytes], busy: bool) -> None:
    """And loses no load: they come in afterwards."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    orders = [one_range(contents, at, 500_000, shift=1) for at in range(0, 3 * MIB, 600_000)]
    if busy:
        reader.submit([order.entry for order in orders])
    previous = signal.signal(signal.SIGALRM, interrupt)
    # A loop in C: no bytecode is run that would look for signals itself.
    waits = iter(functools.partial(reader.wait, reader.epoch), None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(KeyboardInterrupt):
            collections.deque(waits, maxlen=0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)

    if busy:
        assert wait_for(reader, len(orders)) == dict.fromkeys(orders)
        assert all(order.is_right() for order in orders)


def test_a_signal_during_a_wait_for_slow_reads_is_handled(
    reader: Reader, contents: list[bytes]
) -> None:
    """Many times in the middle of reading, without a read that is lost or comes twice."""
    calls: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda number, _: calls.append(number))
    reader.tune(depth=3, piece_bytes=4096, staging_bytes=0)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for _ in range(5):
            orders = [one_range(contents, at, 90_000, shift=1) for at in range(0, MIB, 100_000)]
            assert read_all(reader, orders) == dict.fromkeys(orders)
            assert all(order.is_right() for order in orders)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert calls


def test_a_forked_child_ends_cleanly_and_the_parents_reads_go_on(
    reader: Reader, contents: list[bytes]
) -> None:
    """The child drops or closes what it inherited, with reads in flight; nothing is lost."""
    skip_fork_under_sanitizer()
    for how in ("drop", "close"):
        orders = [one_range(contents, at, 90_000, shift=1) for at in range(0, 2 * MIB, 100_000)]
        reader.submit([order.entry for order in orders])
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            closed = reader.close() if how == "close" else True
            del reader
            gc.collect()
            os._exit(0 if closed else 3)
        assert os.waitpid(child, 0)[1] == 0
        assert wait_for(reader, len(orders)) == dict.fromkeys(orders)
        assert all(order.is_right() for order in orders)
