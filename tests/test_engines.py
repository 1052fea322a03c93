"""What every engine promises: each read is taken once, and nothing waits for ever."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from moecache.errors import ConfigError, MoeCacheError
from moecache.loading._guard import Guard
from moecache.loading._load import Load
from moecache.loading._reader_engine import ReaderEngine
from moecache.loading.engine import Engine
from moecache.loading.load import Cause, ReadCancelledError
from moecache.loading.store_engine import StoreEngine
from moecache.reader.disk import open_reader
from moecache.stores import ExpertStore, open_store
from moecache.study.clock import VirtualClock
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.devices import FaultyDevice
from tests.helpers.pages import wait_until
from tests.helpers.stores import Gate, WrappedStore, numbered_store

Make = Callable[[], tuple[Engine, ExpertStore]]


def of_store(num_threads: int) -> Make:
    """Return what makes an engine over any store."""

    def make() -> tuple[Engine, ExpertStore]:
        store = numbered_store()
        return StoreEngine(store, num_threads), store

    return make


def of_device() -> tuple[Engine, ExpertStore]:
    """Return an engine whose time is simulated."""
    store = numbered_store()
    device = FaultyDevice(VirtualClock(), store.layout.expert_bytes, bandwidth=10**9)
    device.store = store
    return device, store


@pytest.fixture(name="made", params=["store", "threads", "device", "io_uring", "preadv", "direct"])
def _made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Engine, ExpertStore]]:
    if request.param in {"io_uring", "preadv", "direct"}:
        store: ExpertStore = open_store(write_checkpoint(tmp_path / "model").path)
        name = "threads" if request.param == "preadv" else "io_uring"
        try:
            reader = open_reader(store, direct=request.param == "direct", engine=name)
        except OSError:
            pytest.skip("this kernel refuses io_uring")
        engine: Engine = ReaderEngine(reader, store, 0)
    elif request.param == "device":
        engine, store = of_device()
    else:
        engine, store = of_store(0 if request.param == "store" else 2)()
    yield engine, store
    engine.close(2)
    store.close()


def load(store: ExpertStore, expert: int, cause: Cause = Cause.DEMAND) -> Load:
    """Return a load of layer 0 with memory to read to."""
    made = Load(0, expert, expert, cause)
    made.parts = {
        role.name: np.zeros(role.nbytes, np.uint8).view(role.dtype).reshape(role.shape)
        for role in store.layout.layers[0]
    }
    return made


def take_all(engine: Engine, count: int) -> dict[Any, Exception | None]:
    """Wait for so many reads, and see that there are no more."""
    done: list[tuple[Any, Exception | None]] = []
    while len(done) < count:
        engine.wait(engine.epoch)
        before = -1
        while len(done) > before:
            before = len(done)
            engine.take(done)
    assert not engine.poll()
    assert len(dict(done)) == len(done) == count
    return dict(done)


def test_every_read_is_taken_once_and_right(made: tuple[Engine, ExpertStore]) -> None:
    """Also deferred ones, and one that is hastened."""
    engine, store = made
    reads: list[Any] = [load(store, expert) for expert in range(4)]
    ahead: list[Any] = [load(store, expert, Cause.PREFETCH) for expert in (4, 5)]
    every = reads + ahead
    submitted = list(reads)
    engine.submit(submitted)
    assert submitted == []
    engine.submit(list(ahead), deferred=True)
    engine.hasten(ahead[1])

    assert take_all(engine, 6) == dict.fromkeys(every)
    for read in every:
        for name, part in store.view(0, read.expert).items():
            assert read.parts[name].tobytes() == np.ascontiguousarray(part).tobytes()


def test_a_read_that_is_taken_while_the_engine_closes_is_taken_back(tmp_path: Path) -> None:
    """Its file is not looked at any more: the engine has given it up."""
    store = open_store(write_checkpoint(tmp_path / "model").path)
    reader = open_reader(store, direct=False, engine="threads")
    engine = ReaderEngine(reader, store, 0)
    calls: list[int] = []

    class Closing:
        layout = store.layout

        def runs(self, layer: int, expert: int) -> Any:
            calls.append(expert)
            if len(calls) == 2:
                engine.close(2)
            return store.runs(layer, expert)

    engine._store = Closing()  # type: ignore[assignment]
    read = load(store, 1)
    engine.submit([read])
    assert isinstance(take_all(engine, 1)[read], ReadCancelledError)
    store.close()


def test_files_of_any_date_are_read(tmp_path: Path) -> None:
    """Also of one whose nanoseconds are no 64-bit integer."""
    path = write_checkpoint(tmp_path / "model").path
    for file in [path] if path.is_file() else path.glob("*.safetensors"):
        os.utime(file, (0, 9_300_000_000))
    store = open_store(path)
    engine = ReaderEngine(open_reader(store, direct=False, engine="threads"), store, 0)
    read = load(store, 1)
    engine.submit([read])
    assert take_all(engine, 1) == {read: None}
    engine.close(2)
    store.close()


def test_what_is_taken_back_is_taken_all_the_same(made: tuple[Engine, ExpertStore]) -> None:
    """It comes as cancelled, unless it was read by then; an unknown read is ignored."""
    engine, store = made
    ahead: list[Any] = [load(store, expert, Cause.PREFETCH) for expert in (1, 2)]
    engine.submit(list(ahead), deferred=True)
    engine.cancel(ahead[0])
    engine.cancel(load(store, 3))
    engine.hasten(load(store, 3))

    done = take_all(engine, 2)
    assert done[ahead[1]] is None
    assert done[ahead[0]] is None or isinstance(done[ahead[0]], ReadCancelledError)


def test_an_announcement_ends_a_wait(made: tuple[Engine, ExpertStore]) -> None:
    """Also one that came before it."""
    engine, _ = made
    seen = engine.epoch
    engine.announce()
    assert engine.epoch != seen
    assert not engine.wait(seen)


def test_closing_ends_every_read_and_every_wait(made: tuple[Engine, ExpertStore]) -> None:
    """Twice is once; nothing more is begun."""
    engine, store = made
    engine.submit([load(store, expert) for expert in range(3)])
    assert engine.close(2) == 0
    assert engine.close(2) == 0
    engine.wait(engine.epoch)


def test_a_failing_read_is_the_reads_own_error() -> None:
    """The next one is read; errors keep no frames, and with them no memory."""
    failing = WrappedStore(numbered_store(), lambda layer, expert: [][expert] if expert else None)
    engine = StoreEngine(failing, 1)
    reads: list[Any] = [load(failing, 0), load(failing, 1)]
    engine.submit(list(reads))
    done = take_all(engine, 2)
    assert done[reads[0]] is None
    assert isinstance(done[reads[1]], IndexError)
    assert done[reads[1]].__traceback__ is None
    engine.close(2)


def test_a_read_that_hangs_is_counted_by_close() -> None:
    """It is not waited for longer than that."""
    gate = Gate()
    engine = StoreEngine(WrappedStore(numbered_store(), gate), 1)
    engine.submit([load(numbered_store(), 0), load(numbered_store(), 1)])
    assert gate.entered.acquire(timeout=30)
    assert engine.close(0.01) == 1
    with pytest.raises(ReadCancelledError):
        engine.submit([load(numbered_store(), 2)])
    gate.opened.set()
    wait_until(lambda: engine.close(0) == 0)


def test_a_store_without_files_has_no_reader(tmp_path: Path) -> None:
    """The error comes before any thread is started."""
    store = open_store(write_checkpoint(tmp_path / "model").path)
    with pytest.raises(ConfigError, match="a MemoryStore has no files"):
        ReaderEngine(open_reader(store, direct=False), numbered_store(), 1)
    store.close()


def test_threads_that_cannot_be_had_end_those_that_could(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit that is in the way."""
    start, left = threading.Thread.start, [1]

    def some(self: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(self)

    before = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", some)
    with pytest.raises(MoeCacheError, match=r"can't start new thread.*ulimit -u.*loader_threads=0"):
        StoreEngine(numbered_store(), 3)
    wait_until(lambda: threading.active_count() == before)


def test_a_guard_gives_back_once_however_it_ends() -> None:
    """Closed twice, or dropped; with the item that it has then."""
    queue: SimpleQueue[str] = SimpleQueue()
    guard = Guard(queue, "first")
    guard.item = "closed"
    guard.close()
    guard.close()
    del guard
    Guard(queue, "dropped")
    assert [queue.get_nowait(), queue.get_nowait()] == ["closed", "dropped"]
    assert queue.empty()
