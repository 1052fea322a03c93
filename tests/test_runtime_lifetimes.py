"""ExpertRuntime: errors, interrupts, threads, forks, close: nothing is lost or left in use."""

import gc
import logging
import os
import resource
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import moecache
from moecache.errors import MoeCacheError
from tests.helpers.cuts import cut_at
from tests.helpers.pages import wait_until
from tests.helpers.runtimes import drain, expected, make_runtime
from tests.helpers.stores import Gate, WrappedStore, nothing, numbered_store


def test_iterators_collected_as_garbage_end_their_leases_without_a_deadlock() -> None:
    """The garbage collector may close one while this very thread holds the loader's lock."""

    def orphan(runtime: moecache.ExpertRuntime, ids: np.ndarray) -> None:
        waves = runtime.waves(0, ids)
        next(waves)
        cycle: list[object] = [waves]
        cycle.append(cycle)

    thresholds = gc.get_threshold()
    with make_runtime(6, loader_threads=1) as runtime:
        gc.set_threshold(7)
        try:
            for step in range(1500):
                orphan(runtime, np.array([[step % 8, (step + 3) % 8]]))
        finally:
            gc.set_threshold(*thresholds)
        gc.collect()
        assert drain(runtime, 1, np.array([[1, 2]])) == {0: 9, 1: 10}
        with runtime.lease(1, np.arange(6)):  # every slot can be had
            pass
        runtime.cache.check()


def test_an_interrupted_read_interrupts_its_own_thread_and_no_other() -> None:
    """Another step that waits for the expert has it read again, and nothing stays claimed."""
    gate, reads = Gate(), []

    def interrupt(layer: int, expert: int) -> None:
        reads.append(expert)
        gate(layer, expert)
        if len(reads) == 1:
            raise KeyboardInterrupt

    store = WrappedStore(numbered_store(), interrupt)
    with make_runtime(4, store=store, loader_threads=0) as runtime:
        outcomes: list[BaseException] = []

        def step() -> None:
            try:
                list(runtime.waves(0, np.array([[5]])))
            except BaseException as error:  # noqa: BLE001
                outcomes.append(error)

        first = threading.Thread(target=step)
        first.start()
        gate.entered.acquire()
        second = threading.Thread(target=step)
        second.start()
        while runtime.profiler.num_misses < 2:  # the second has joined
            threading.Event().wait(0.001)
        gate.opened.set()
        first.join(30)
        second.join(30)

        assert [type(error).__name__ for error in outcomes] == ["KeyboardInterrupt"]
        assert reads == [5, 5]
        store.before_read = nothing
        assert drain(runtime, 0, np.array([[5]])) == {0: 5}
        runtime.cache.check()


def test_a_failure_nobody_waits_for_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The step was closed meanwhile; the reader's error must not vanish."""
    gate = Gate()

    def fail(layer: int, expert: int) -> None:
        gate(layer, expert)
        raise moecache.StoreError("bad sector")

    store = WrappedStore(numbered_store(), nothing)
    with caplog.at_level(logging.WARNING), make_runtime(6, store=store) as runtime:
        drain(runtime, 0, np.array([[1, 2]]))
        store.before_read = fail
        for expert in (5, 6):
            waves = runtime.waves(0, np.array([[1, expert]]))
            next(waves)  # the hit; the miss is being read
            gate.entered.acquire()
            waves.close()
            gate.opened.set()
        runtime.close()
    assert caplog.text.count("loader.read_failed") == 1
    assert runtime.stats().num_failed_reads == 2


@pytest.mark.parametrize("loader_threads", [0, 2])
def test_a_step_broken_off_leaves_nothing_in_use(loader_threads: int) -> None:
    """Leases end and loads are dropped or finish when the iterator is closed."""
    with make_runtime(4, loader_threads=loader_threads) as runtime:
        drain(runtime, 0, np.array([[0, 1]]))
        for _ in range(20):
            for ids in (np.array([[0, 2, 3, 4, 5]]), np.array([[0, 1], [2, 3], [4, 5], [6, 7]])):
                waves = runtime.waves(0, ids)
                next(waves)
                waves.close()
        with runtime.lease(1, np.arange(4)):  # all four slots can be had
            pass
        assert drain(runtime, 2, np.arange(8).reshape(4, 2)).keys() == set(range(8))
        runtime.cache.check()


def test_two_steps_share_one_read() -> None:
    """A demand for an expert in flight waits for that read instead of starting another."""
    gate = Gate()
    store = WrappedStore(numbered_store(), gate)
    with make_runtime(6, store=store) as runtime:
        found: list[dict[int, int]] = []
        threads = [
            threading.Thread(target=lambda: found.append(drain(runtime, 0, np.array([[5, 6]]))))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        gate.entered.acquire()
        gate.opened.set()
        for thread in threads:
            thread.join(30)

        assert found == [{0: 5, 1: 6}] * 3
        assert sorted(store.reads) == [(0, 5), (0, 6)]
        assert runtime.stats().num_reads == 2
        runtime.cache.check()


def test_a_failed_read_reaches_the_caller_and_loses_nothing() -> None:
    """The error carries the store's text; the next call works."""

    def fail(layer: int, expert: int) -> None:
        if expert == 3:
            raise moecache.StoreError("expert 3 is on a bad sector")

    store = WrappedStore(numbered_store(), fail)
    with make_runtime(4, store=store) as runtime:
        drain(runtime, 0, np.array([[1, 2]]))
        for _ in range(3):
            with pytest.raises(moecache.StoreError, match="bad sector"):
                list(runtime.waves(0, np.array([[1, 3]])))
            with pytest.raises(moecache.StoreError, match="bad sector"):
                runtime.lease(0, np.array([1, 3, 4]))
        store.before_read = nothing

        assert drain(runtime, 0, np.array([[1, 3]])) == {0: 1, 1: 3}
        assert runtime.stats().num_failed_reads == 6
        runtime.cache.check()


@pytest.mark.parametrize(
    "target",
    [
        "moecache.runtime.steps._Parts",
        "moecache.runtime.steps._group",
    ],
)
def test_a_failed_allocation_inside_a_step_leaves_nothing_in_use(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that runs out between claim and wave ends leases and claims."""

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    ids = np.arange(6).reshape(3, 2)
    with make_runtime(4, loader_threads=0) as runtime:
        drain(runtime, 0, np.array([[0, 1]]))
        with monkeypatch.context() as patch:
            patch.setattr(target, no_memory)
            with pytest.raises(MemoryError):
                list(runtime.waves(0, ids))
        runtime.cache.check()
        with runtime.lease(1, np.arange(4)):  # every slot can be had
            pass
        assert drain(runtime, 0, ids) == expected(0, ids)


def test_threads_with_steps_of_their_own_get_the_right_experts() -> None:
    """Four threads, few slots, a bad sector now and then."""
    rng = np.random.default_rng(0)
    bad = {(int(rng.integers(3)), int(rng.integers(8))) for _ in range(4)}
    tries: dict[tuple[int, int], int] = {}

    def sometimes(layer: int, expert: int) -> None:
        tries[layer, expert] = tries.get((layer, expert), 0) + 1
        if (layer, expert) in bad and tries[layer, expert] % 3 == 1:
            raise moecache.StoreError("try again")

    problems: list[BaseException] = []
    with make_runtime(
        5, store=WrappedStore(numbered_store(), sometimes), staging=3, loader_threads=2
    ) as runtime:

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                for _ in range(150):
                    layer = int(random.integers(3))
                    num_tokens = int(random.choice([1, 1, 3, 20]))
                    ids = np.argsort(random.random((num_tokens, 8)), axis=1)[:, :2]
                    while True:
                        try:
                            assert drain(runtime, layer, ids) == expected(layer, ids)
                            break
                        except moecache.StoreError:
                            continue
            except BaseException as error:  # noqa: BLE001
                problems.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert problems == []
        runtime.cache.check()
        bad.clear()
        with runtime.lease(0, np.arange(5)):  # every slot can be had again
            pass


def test_unfinished_steps_of_one_thread_do_not_hang_it() -> None:
    """Staging slots all held by the caller itself are an error, not a deadlock."""
    ids = np.arange(8).reshape(4, 2)
    with make_runtime(1, staging=1, loader_threads=0) as runtime:
        outer = runtime.waves(0, ids)
        for wave in outer:
            if runtime.cache.slot_table[0].max() >= 0 and wave.slots[0] == 1:
                break
        with pytest.raises(moecache.CapacityError, match="unfinished step of this thread"):
            list(runtime.waves(1, ids))
        outer.close()
        assert drain(runtime, 1, ids) == expected(1, ids)


def test_two_threads_with_unfinished_steps_do_not_wait_for_each_other() -> None:
    """Each holds a staging slot and wants another: an error, not a deadlock."""
    barrier = threading.Barrier(2)
    outcomes: list[str] = []
    with make_runtime(1, staging=2, loader_threads=1) as runtime, runtime.lease(2, np.array([0])):

        def nested(expert: int) -> None:
            outer = runtime.waves(0, np.array([[expert]]))
            next(outer)  # in one of the two staging slots: the cache's is leased
            barrier.wait(30)
            try:
                list(runtime.waves(1, np.array([[expert]])))
                outcomes.append("done")
            except moecache.CapacityError as error:
                outcomes.append("refused" if "unfinished step" in str(error) else str(error))
            outer.close()

        threads = [threading.Thread(target=nested, args=(e,), daemon=True) for e in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(outcomes) == 2
        assert "refused" in outcomes
        assert set(outcomes) <= {"done", "refused"}
        assert drain(runtime, 1, np.array([[4, 5]])) == {0: 12, 1: 13}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_while_loads_are_made_loses_no_expert(error: type[BaseException]) -> None:
    """Ctrl-C, or memory that runs out, between claim and queue ends the claims."""
    ids = np.array([[1, 2, 3]])
    with make_runtime(4, loader_threads=0) as runtime:
        counts = runtime._loader.counts
        clock = counts.clock

        def failing() -> int:
            raise error

        for step in (lambda: list(runtime.waves(0, ids)), lambda: runtime.lease(0, ids)):
            counts.clock = failing
            with pytest.raises(error):
                step()
            counts.clock = clock
        runtime.cache.check()
        assert not runtime._loader.num_in_flight
        assert drain(runtime, 0, ids) == expected(0, ids)
        assert counts.num_urgent_reads == 3
        with runtime.lease(1, np.arange(4)):
            pass


def test_an_expert_claimed_from_outside_is_a_clear_error() -> None:
    """The cache is public; a claim of one's own is not the runtime's to wait for."""
    with make_runtime(4) as runtime:
        slot = runtime.cache.claim(0, 5)
        with pytest.raises(moecache.MoeCacheError, match="expert 5 of layer 0 was claimed"):
            list(runtime.waves(0, np.array([[1, 5]])))
        runtime.cache.abandon(slot)
        assert drain(runtime, 0, np.array([[1, 5]])) == {0: 1, 1: 5}
        runtime.cache.check()


def test_a_dropped_lease_ends() -> None:
    """Forgetting to close one does not take the slots for good."""
    with make_runtime(4) as runtime:
        runtime.lease(0, np.arange(4))
        gc.collect()
        with runtime.lease(1, np.arange(4)) as lease, pytest.raises(ValueError, match="read-only"):
            lease.slots[:] = -1
        with pytest.raises(ValueError, match="read-only"):
            next(runtime.waves(1, np.array([[0, 1]]))).slots[:] = -1
        for wave in runtime.waves(1, np.array([[0, 1]])):
            assert not wave.pairs.flags.writeable


def test_a_forked_child_can_drop_what_it_inherited() -> None:
    """Open waves and leases end at once in the child, even with the lock held elsewhere."""
    with make_runtime(4) as runtime:
        lease = runtime.lease(0, np.array([1]))
        waves = runtime.waves(0, np.array([[1, 2]]))
        next(waves)
        with runtime._loader._table.lock:
            child = os.fork()
            if child == 0:
                waves.close()
                lease.close()
                os._exit(0)
        deadline = time.monotonic() + 60
        while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if done[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert done == (child, 0)
        lease.close()
        waves.close()


def test_close_is_final_and_idempotent(tmp_path: Path) -> None:
    """A closed runtime says so, writes its report once and keeps its figures."""
    runtime = make_runtime(4, expert_stats=tmp_path / "report.txt")
    drain(runtime, 0, np.array([[1, 2]]))
    runtime.close()
    runtime.close()

    assert "hit rate" in (tmp_path / "report.txt").read_text()
    assert runtime.stats().num_misses == 2
    assert "layer 0" in runtime.report()
    with pytest.raises(moecache.MoeCacheError, match="closed"):
        next(runtime.waves(0, np.array([[1]])))
    with pytest.raises(moecache.MoeCacheError, match="closed"):
        runtime.lease(0, np.array([1]))


def test_a_timeout_at_any_line_of_close_leaves_none_of_it_out() -> None:
    """What its handler raises comes out, and everything is closed all the same."""
    files = ("runtime/runtime.py", "runtime/_closing.py")
    found: list[bool | None] = []
    while None not in found:
        threads = threading.active_count()
        runtime = make_runtime(4, loader_threads=1)
        drain(runtime, 0, np.array([[1, 2]]))
        found.append(cut_at(runtime.close, files, len(found) + 1))
        runtime.close()
        assert runtime.closed, found
        wait_until(lambda threads=threads: threading.active_count() <= threads)
    assert found.count(True) > 10


def test_a_report_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing never fails because of the report."""
    with caplog.at_level(logging.WARNING):
        for name in ("no/such/directory", "x" * 300, "a\0b"):
            make_runtime(4, expert_stats=tmp_path / name).close()
    assert caplog.text.count("runtime.no_report") == 3


@pytest.mark.parametrize("before", [None, "the last report"])
def test_a_report_is_written_whole_or_not_at_all(
    before: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk leaves the file that was there, or none, and not an empty one."""
    path = tmp_path / "report.txt"
    if before is not None:
        path.write_text(before)
    runtime = make_runtime(4, expert_stats=path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        runtime.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "runtime.no_report" in caplog.text
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == (
        [] if before is None else [("report.txt", before)]
    )


def test_close_during_a_read_wakes_the_waiting_step() -> None:
    """Closing while a step waits gives the step an error and does not hang."""
    gate = Gate()
    runtime = make_runtime(4, store=WrappedStore(numbered_store(), gate))
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            drain(runtime, 0, np.array([[1, 2]]))
        except moecache.MoeCacheError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    gate.entered.acquire()
    closing = threading.Thread(target=runtime.close)
    closing.start()
    closing.join(0.2)
    gate.opened.set()
    closing.join(30)
    waiting.join(30)
    assert not waiting.is_alive()
    assert not closing.is_alive()


def test_a_forked_child_is_refused() -> None:
    """The child gets a clear error and its close leaves the parent's runtime alone."""
    with make_runtime(4) as runtime:
        drain(runtime, 0, np.array([[1, 2]]))
        child = os.fork()
        if child == 0:
            try:
                next(runtime.waves(0, np.array([[1, 2]])))
            except moecache.MoeCacheError as error:
                runtime.close()
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert drain(runtime, 0, np.array([[1, 2]])) == {0: 1, 1: 2}


def test_a_lease_waits_for_reads_that_closed_steps_left() -> None:
    """They hold slots until they end; that is no lack of capacity."""
    gate = Gate()
    store = WrappedStore(numbered_store(), nothing)
    with make_runtime(6, store=store, loader_threads=2) as runtime:
        drain(runtime, 0, np.array([[0, 1]]))
        store.before_read = gate
        for expert in (4, 5, 6):  # the last one is queued behind the others
            waves = runtime.waves(0, np.array([[0, expert]]))
            next(waves)  # the hit; the miss is being read
            if expert < 6:
                gate.entered.acquire()
            waves.close()
        threading.Timer(0.1, gate.opened.set).start()
        with runtime.lease(1, np.arange(6)) as lease:
            assert (lease.slots >= 0).all()
        runtime.cache.check()


def test_what_works_in_the_slots_is_closed_before_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest first, and once nothing fills slots; an error of one leaves none out."""
    runtime = make_runtime(6)
    ended: list[str] = []

    def fail() -> None:
        ended.append("second")
        raise MoeCacheError("the second")

    for part, name in ((runtime.pool, "pool"), (runtime._loader.engine, "loader")):
        close = part.close
        monkeypatch.setattr(
            part,
            "close",
            lambda *given, name=name, close=close: (ended.append(name), close(*given))[1],
        )
    runtime.closing(lambda: ended.append("first"))
    runtime.closing(fail)
    with pytest.raises(MoeCacheError, match="the second"):
        runtime.close()
    assert ended == ["loader", "second", "first", "pool"]
    with pytest.raises(MoeCacheError, match="the runtime is closed"):
        runtime.closing(fail)
