"""SlotLoader.prefetch: experts that no step asked for, and the demands that meet them."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from moecache.cache._cache import ExpertCache
from moecache.errors import CapacityError, StoreError
from moecache.loading._load import Load
from moecache.loading._loader import SlotLoader
from moecache.loading._step import Step
from moecache.loading.load import Cause
from moecache.loading.store_engine import StoreEngine
from moecache.runtime import steps
from moecache.slots import HostSlots
from tests.helpers.pages import wait_until
from tests.helpers.stores import FailEachOnce, Gate, WrappedStore, nothing, numbered_store

ReadHook = Callable[[int, int], None]
NUM_BYTES = numbered_store().layout.expert_bytes(0)


class Bench:
    """A loader over 3 layers of 8 experts that hold their own key, read by callers only."""

    def __init__(self, capacity: int, before_read: ReadHook = nothing, *, staging: int = 0) -> None:
        self.store = WrappedStore(numbered_store(), before_read)
        layout = self.store.layout
        self.cache = ExpertCache(3, 8, capacity, policy="lfu")
        self.pool = HostSlots(layout, capacity + staging)
        self.loader = SlotLoader(self.store, self.pool, self.cache, StoreEngine(self.store, 0))
        self.done: list[Load] = []
        self.loader.prefetch_done = self.done.append

    def lease(self, layer: int, *experts: int) -> list[float]:
        """Return what stands in the experts' slots, and give them back."""
        with steps.lease(self.loader, self.cache, layer, np.array(experts)) as lease:
            return [float(self.pool.expert(slot, layer)["down"].flat[0]) for slot in lease.slots]

    def make_worth_it(self, layer: int, expert: int) -> None:
        """Let an expert be used twice, others of layer 0 more often, and one once instead."""
        self.lease(layer, expert)
        self.lease(layer, expert)
        for busier in range(self.cache.capacity - 1):
            for _ in range(4):
                self.lease(0, busier)
        self.lease(2, 6)
        assert self.cache.slot_table[layer, expert] < 0

    def close(self) -> None:
        """Check that nothing is left over, and close everything."""
        self.cache.check()
        assert self.loader.num_in_flight == 0
        assert self.loader.counts.prefetch_bytes_in_flight == 0
        self.loader.close()
        self.pool.close()
        self.store.close()


class Failing:
    """A `before_read` that fails so many times."""

    def __init__(self, times: int, *, message: str = "the disk is gone") -> None:
        self.times = times
        self.message = message

    def __call__(self, layer: int, expert: int) -> None:
        """Raise StoreError while there are failures left."""
        if self.times:
            self.times -= 1
            raise StoreError(self.message)


@pytest.fixture(name="pool")
def _pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_a_prefetched_expert_is_there_when_it_is_asked_for() -> None:
    """A hit, whose bytes are counted as the prefetch's."""
    bench = Bench(4)
    assert bench.loader.prefetch(1, 3)
    assert bench.lease(1, 3) == [11.0]

    assert bench.store.reads == [(1, 3)]
    assert bench.cache.profiler.num_hits == 1
    assert bench.cache.num_foreseen_hits == 1
    assert bench.loader.counts.bytes_read[Cause.PREFETCH] == NUM_BYTES
    assert bench.loader.counts.bytes_read[Cause.DEMAND] == 0
    assert bench.loader.counts.num_urgent_reads == 0
    assert [(load.layer, load.expert, load.error) for load in bench.done] == [(1, 3, None)]
    bench.close()


def test_a_warm_start_counts_its_own_bytes_and_foresees_nothing() -> None:
    """Free slots are filled with what an earlier run used."""
    bench = Bench(1)
    assert bench.loader.prefetch(0, 2, cause=Cause.WARM_START)
    assert not bench.loader.prefetch(0, 3, cause=Cause.WARM_START)
    assert bench.lease(0, 2) == [2.0]
    assert bench.loader.counts.bytes_read[Cause.WARM_START] == NUM_BYTES
    assert bench.cache.num_foreseen_hits == 0
    bench.close()


def test_what_is_there_is_not_read_again() -> None:
    """Nor is what the policy values less than those that would have to leave, if not likely."""
    bench = Bench(2)
    bench.lease(0, 1, 2)
    assert not bench.loader.prefetch(0, 1, likely=True)
    assert not bench.loader.prefetch(0, 5)
    assert bench.store.reads == [(0, 1), (0, 2)]
    assert not bench.loader.prefetch(0, 5, likely=True)  # for one of the same layer
    assert bench.loader.prefetch(1, 5, likely=True)
    assert bench.cache.num_evictions == 1
    bench.close()


def test_a_warm_start_takes_only_free_slots() -> None:
    """Else the expert that was used more often takes one."""
    bench = Bench(1)
    for expert in (5, 5, 6):
        bench.lease(0, expert)
    assert not bench.loader.prefetch(0, 5, cause=Cause.WARM_START)
    assert bench.loader.prefetch(0, 5)
    assert bench.cache.slot_table[0, 5] >= 0
    bench.close()


def test_a_demand_joins_a_prefetch_that_is_being_read(pool: ThreadPoolExecutor) -> None:
    """One read for both, which is urgent from then on."""
    gate = Gate()
    bench = Bench(4, gate)
    ahead = pool.submit(bench.loader.prefetch, 2, 4)
    assert gate.entered.acquire(timeout=30)
    assert bench.loader.num_in_flight == 1
    assert bench.loader.counts.prefetch_bytes_in_flight == NUM_BYTES
    assert not bench.loader.prefetch(2, 4)
    demand = pool.submit(bench.lease, 2, 4)
    wait_until(lambda: bench.cache.num_foreseen_late == 1)
    gate.opened.set()

    assert demand.result(30) == [20.0]
    assert ahead.result(30)
    assert bench.store.reads == [(2, 4)]
    assert bench.loader.counts.num_urgent_reads == 1
    assert bench.loader.counts.urgent_ns > 0
    bench.close()


def test_an_error_while_a_prefetch_is_joined_leaves_the_counters_right(
    pool: ThreadPoolExecutor,
) -> None:
    """It is not urgent then, and the next demand that joins it is."""
    gate = Gate()
    bench = Bench(4, gate)
    counts = bench.loader.counts
    ahead = pool.submit(bench.loader.prefetch, 2, 4)
    assert gate.entered.acquire(timeout=30)
    clock = counts.clock

    def failing() -> int:
        raise MemoryError

    counts.clock = failing
    with pytest.raises(MemoryError):
        bench.lease(2, 4)
    counts.clock = clock
    demand = pool.submit(bench.lease, 2, 4)
    wait_until(lambda: next(iter(bench.loader._table.by_slot.values())).urgent)
    gate.opened.set()
    assert demand.result(30) == [20.0]
    assert ahead.result(30)
    assert (counts.num_urgent_reads, counts.urgent_ns > 0) == (1, True)
    bench.close()


def test_a_demand_for_others_does_not_wait_for_a_prefetch(pool: ThreadPoolExecutor) -> None:
    """It is read by its own caller meanwhile."""
    gate = Gate()

    def hold_the_first(layer: int, expert: int) -> None:
        if expert == 4:
            gate(layer, expert)

    bench = Bench(4, hold_the_first)
    ahead = pool.submit(bench.loader.prefetch, 2, 4)
    assert gate.entered.acquire(timeout=30)
    assert bench.lease(2, 5) == [21.0]
    assert not ahead.done()
    gate.opened.set()
    assert ahead.result(30)
    bench.close()


def test_a_failing_prefetch_is_read_again_for_who_joined_it(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    """The demand succeeds, without a warning."""
    gate, fail = Gate(), FailEachOnce()

    def hold_and_fail(layer: int, expert: int) -> None:
        gate(layer, expert)
        fail(layer, expert)

    bench = Bench(4, hold_and_fail)
    ahead = pool.submit(bench.loader.prefetch, 0, 6)
    assert gate.entered.acquire(timeout=30)
    demand = pool.submit(bench.lease, 0, 6)
    wait_until(lambda: bench.cache.num_foreseen_late == 1)
    with caplog.at_level(logging.WARNING):
        gate.opened.set()
        assert demand.result(30) == [6.0]

    assert ahead.result(30)
    assert bench.store.reads == [(0, 6), (0, 6)]
    assert bench.loader.counts.num_failed_prefetches == 0  # it was late: one outcome each
    assert bench.loader.counts.num_failed_reads == 0
    assert bench.loader.counts.num_reads == 1
    assert not caplog.records
    bench.close()


def test_a_read_that_fails_again_is_the_demands_error(pool: ThreadPoolExecutor) -> None:
    """Twice, and no more: the next call tries anew."""
    gate, fail = Gate(), Failing(2)

    def hold_and_fail(layer: int, expert: int) -> None:
        gate(layer, expert)
        fail(layer, expert)

    bench = Bench(4, hold_and_fail)
    ahead = pool.submit(bench.loader.prefetch, 0, 6)
    assert gate.entered.acquire(timeout=30)
    demand = pool.submit(bench.lease, 0, 6)
    wait_until(lambda: bench.cache.num_foreseen_late == 1)
    gate.opened.set()
    with pytest.raises(StoreError, match="the disk is gone"):
        demand.result(30)

    assert ahead.result(30)
    assert len(bench.store.reads) == 2
    assert (bench.loader.counts.num_failed_prefetches, bench.loader.counts.num_failed_reads) == (
        0,
        1,
    )
    assert bench.lease(0, 6) == [6.0]
    bench.close()


def test_failing_alone_is_logged_once_per_cause_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With layer and expert; the slot is free again, and others are read."""
    fail = Failing(3)
    bench = Bench(4, fail)
    with caplog.at_level(logging.WARNING):
        for expert in (1, 2, 3):
            assert bench.loader.prefetch(1, expert)
        fail.times, fail.message = 1, "the disk is slow"
        assert bench.loader.prefetch(2, 7)
        assert bench.loader.prefetch(2, 7)

    assert [record.getMessage() for record in caplog.records] == [
        "loader.read_failed layer=1 expert=1 error=the disk is gone",
        "loader.read_failed layer=2 expert=7 error=the disk is slow",
    ]
    assert bench.loader.counts.num_failed_prefetches == 4
    assert [load.error is None for load in bench.done] == [False] * 4 + [True]
    assert (bench.cache.num_free, bench.cache.num_resident) == (3, 1)
    assert bench.lease(1, 1) == [9.0]
    bench.close()


def test_a_closed_loader_claims_nothing() -> None:
    """Nor does it read."""
    bench = Bench(4)
    bench.loader.close()
    assert not bench.loader.prefetch(0, 1)
    assert bench.cache.num_free == 4
    assert bench.store.reads == []
    bench.close()


def test_a_prefetch_that_ends_after_close_is_no_failure(pool: ThreadPoolExecutor) -> None:
    """Its expert is there, whether it is still asked for or not."""
    gate = Gate()
    bench = Bench(4, gate)
    ahead = pool.submit(bench.loader.prefetch, 0, 1)
    assert gate.entered.acquire(timeout=30)
    bench.loader.close()
    gate.opened.set()
    assert ahead.result(30)
    assert bench.loader.counts.num_failed_prefetches == 0
    bench.close()


def test_a_lease_waits_for_slots_that_only_prefetches_hold(pool: ThreadPoolExecutor) -> None:
    """Experts that no step asked for cause no CapacityError; no new prefetch gets in between."""
    gate = Gate()

    def hold_those_of_layer_2(layer: int, expert: int) -> None:
        if layer == 2:
            gate(layer, expert)

    bench = Bench(3, hold_those_of_layer_2)
    ahead = [pool.submit(bench.loader.prefetch, 2, expert) for expert in (0, 1)]
    for _ in ahead:
        assert gate.entered.acquire(timeout=30)
    demand = pool.submit(bench.lease, 0, 0, 1, 2)
    wait_until(lambda: bench.loader._making_room)
    assert not bench.loader.prefetch(1, 7)
    assert not demand.done()
    gate.opened.set()

    assert demand.result(30) == [0.0, 1.0, 2.0]
    assert all(future.result(30) for future in ahead)
    assert bench.cache.num_evictions == 2
    assert bench.loader.counts.num_steps == 1
    bench.make_worth_it(1, 7)
    assert bench.loader.prefetch(1, 7)
    bench.close()


def test_a_prefetch_that_ends_between_the_failure_and_the_look_is_no_error() -> None:
    """The slot that it held is free by then."""
    bench = Bench(2)
    bench.loader.prefetch(2, 0)
    held = bench.cache.claim(2, 1)
    acquire = bench.cache.acquire
    failed: list[int] = []

    class Cache:
        """The cache, but what was claimed in it is published right after a failure."""

        def __getattr__(self, name: str) -> object:
            return getattr(bench.cache, name)

        def acquire(self, *arguments: object, **options: object) -> int:
            try:
                return acquire(*arguments, **options)  # type: ignore[arg-type]
            except CapacityError:
                if not failed:
                    bench.cache.publish(held)
                failed.append(1)
                raise

    bench.loader._table.cache = Cache()  # type: ignore[assignment]
    step = Step(0, np.array([0, 1]), bench.cache.num_experts)
    bench.loader.acquire(step)
    for _ in step.loads:
        bench.loader.wait(step.arrived)
    bench.loader.release(step.slots)
    assert len(failed) == 1
    bench.close()


def test_a_read_ahead_that_is_read_once_more_arrives_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where others bring it in before the call whose read has failed goes on."""
    failed: list[bool] = []
    others: list[Callable[[], object]] = []

    def join_and_fail(layer: int, _expert: int) -> None:
        if layer == 1 and not failed:
            failed.append(True)
            bench.loader.acquire(waiting)
            guard.close()  # whoever has the lock next finds a staging slot, and says so
            others.extend([bench.loader.fill, bench.loader.fill])
            raise StoreError("once")

    bench = Bench(4, join_and_fail, staging=1)
    waiting, over = Step(1, np.array([0]), 8), Step(0, np.array([[0], [1]]), 8, share=1)
    guard = bench.loader.guard(over)
    bench.loader.acquire(over)
    assert bench.loader.stage(over)
    while over.loads:
        bench.loader.arrivals(over)
    announce = bench.loader.engine.announce

    def let_others_go_first() -> None:
        announce()
        while others:
            others.pop()()

    monkeypatch.setattr(bench.loader.engine, "announce", let_others_go_first)
    assert bench.loader.prefetch(1, 0)
    assert waiting.arrived.qsize() == 1
    bench.loader.arrivals(waiting)
    bench.loader.release(waiting.slots)
    bench.close()


def test_what_leases_hold_is_still_a_capacity_error() -> None:
    """Without and with a prefetch beside them; prefetches go on afterwards."""
    bench = Bench(2)
    with steps.lease(bench.loader, bench.cache, 0, np.array([0])):
        for _ in range(2):
            with pytest.raises(CapacityError, match="layer 1 asks for 2 experts"):
                bench.lease(1, 0, 1)
            bench.loader.prefetch(2, 0)
    assert bench.cache.slot_table[2, 0] >= 0
    bench.make_worth_it(1, 7)
    assert bench.loader.prefetch(1, 7)
    bench.close()


def test_a_step_that_is_dropped_leaves_the_prefetch_it_joined_alone(
    pool: ThreadPoolExecutor,
) -> None:
    """It arrives all the same."""
    gate = Gate()
    bench = Bench(4, gate, staging=1)
    ahead = pool.submit(bench.loader.prefetch, 0, 1)
    assert gate.entered.acquire(timeout=30)
    step = Step(0, np.array([1]), bench.cache.num_experts)
    guard = bench.loader.guard(step)
    bench.loader.acquire(step)
    guard.close()
    bench.loader.give_back()
    gate.opened.set()
    assert ahead.result(30)
    assert bench.cache.slot_table[0, 1] >= 0
    assert bench.lease(0, 1) == [1.0]
    bench.close()
