"""Prefetcher: what it asks for, what it drops, what it leaves alone, and how it ends."""

import gc
import logging
import sys
import threading
import time

import numpy as np
import pytest

from moecache.errors import StoreError
from moecache.prefetch.prefetcher import Prefetcher
from moecache.prefetch.queue import DEPTH
from moecache.telemetry import PrefetchStats
from tests.helpers.pages import wait_until
from tests.helpers.prefetchers import Oracle, is_resident, make_runtime, prefetcher_of, step
from tests.helpers.stores import Gate, WrappedStore, nothing, numbered_store


@pytest.fixture
def no_restraint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every guess be read that the policy prefers, however often others were wrong."""
    monkeypatch.setattr("moecache.prefetch.break_even._MAX_LIKELIHOOD", 0.0)


def test_the_next_layers_experts_are_there_when_it_asks() -> None:
    """Read by the prefetcher's thread, counted as hits that were foreseen."""
    with make_runtime(Oracle({1: [4, 5]})) as runtime:
        step(runtime, 0, 0, 1)
        wait_until(lambda: is_resident(runtime, 1, 4) and is_resident(runtime, 1, 5))
        step(runtime, 1, 4, 5)

        assert runtime.cache.num_foreseen_hits == 2
        assert runtime.profiler.num_misses == 2
        assert prefetcher_of(runtime).num_issued == 2


def test_what_is_there_is_not_asked_for() -> None:
    """Nor is there a request without experts."""
    with make_runtime(Oracle({1: [4, 5], 2: [6]})) as runtime:
        for _ in range(3):
            step(runtime, 1, 4, 5)
            step(runtime, 2, 6, 7)
            step(runtime, 0, 0, 1)
            wait_until(lambda: is_resident(runtime, 1, 4) and is_resident(runtime, 1, 5))
        prefetcher = prefetcher_of(runtime)
        wait_until(lambda: not prefetcher.queue)

        assert prefetcher.queue.num_requests <= 2
        assert prefetcher.num_issued <= 2


def test_the_current_layer_is_looked_up_first() -> None:
    """Its slots are leased before the next layer's are claimed: capacity for one step only."""
    with make_runtime(Oracle({1: [4, 5]}), capacity=2) as runtime:
        waves = runtime.waves(0, np.array([[0, 1]]))
        next(waves)
        prefetcher = prefetcher_of(runtime)
        wait_until(lambda: prefetcher.queue.num_requests == 1 and not prefetcher.queue)

        assert prefetcher.num_issued == 0
        waves.close()


def test_the_queue_is_short_newest_first_and_the_oldest_goes() -> None:
    """Nine requests while the thread is in a read: the first of the nine is dropped."""
    gate = Gate()
    store = WrappedStore(numbered_store(3, 64), nothing)
    with make_runtime("hints", capacity=32, store=store) as runtime:
        store.before_read = gate
        runtime.hint(0, [63])
        assert gate.entered.acquire(timeout=30)
        for expert in range(DEPTH + 1):
            runtime.hint(1 + expert % 2, [expert])
        prefetcher = prefetcher_of(runtime)
        assert prefetcher.queue.num_dropped == 1
        gate.opened.set()
        wait_until(lambda: prefetcher.num_issued == 1 + DEPTH)
        wait_until(lambda: runtime.cache.num_resident == 1 + DEPTH)

        order = [expert for _, expert in store.reads]
        assert order == [63, *range(DEPTH, 0, -1)]


def test_a_request_is_worth_nothing_once_its_layer_came() -> None:
    """It is dropped, and counted as stale."""
    gate = Gate()
    store = WrappedStore(numbered_store(), nothing)
    with make_runtime("hints", store=store) as runtime:
        step(runtime, 1, 0, 1)
        store.before_read = lambda layer, expert: gate(layer, expert) if layer == 2 else None
        runtime.hint(2, [7])
        assert gate.entered.acquire(timeout=30)
        runtime.hint(1, [5, 6])
        step(runtime, 1, 0, 1)
        gate.opened.set()
        prefetcher = prefetcher_of(runtime)
        wait_until(lambda: prefetcher.queue.num_stale == 1)

        assert not is_resident(runtime, 1, 5)


def test_a_sequence_forgets_requests_and_tells_the_predictor() -> None:
    """What was foreseen of the last token is no guess of the first: it is not read."""
    gate, oracle = Gate(), Oracle({})
    store = WrappedStore(numbered_store(), gate)
    with make_runtime(oracle, store=store) as runtime:
        runtime.hint(2, [7])
        assert gate.entered.acquire(timeout=30)
        runtime.hint(1, [5, 6])
        prefetcher = prefetcher_of(runtime)
        assert len(prefetcher.queue) == 1

        runtime.begin_sequence()

        assert (len(prefetcher.queue), prefetcher.queue.num_stale) == (0, 1)
        gate.opened.set()
        wait_until(lambda: is_resident(runtime, 2, 7) and prefetcher._idle)
        assert store.reads == [(2, 7)]
        assert oracle.num_sequences == 1


@pytest.mark.usefixtures("no_restraint")
def test_pins_and_leases_stay() -> None:
    """A storm of guesses, whatever their worth, evicts all other experts, but neither of these."""
    with make_runtime("hints", capacity=4, policy="lfu") as runtime:
        prefetcher = prefetcher_of(runtime)
        step(runtime, 0, 0, 1)
        assert runtime.cache.pin(0, 0)
        with runtime.lease(0, np.array([1])):
            # In the two other slots: those that are used least come last, and are there.
            for layer in (1, 2):
                for expert in (6, 4, 2, 0):
                    for _ in range(expert + layer):
                        step(runtime, layer, expert, expert + 1)
            before = runtime.cache.num_evictions
            for _ in range(20):
                for layer in (1, 2):
                    runtime.hint(layer, range(8))
                    wait_until(lambda: prefetcher._idle)
            runtime.cache.check()
            assert runtime.cache.num_evictions - before == prefetcher.num_issued >= 6
            assert is_resident(runtime, 0, 0)
            assert is_resident(runtime, 0, 1)


def test_a_demand_joins_a_read_under_way() -> None:
    """One read, counted as late; and the demand gets it."""
    gate = Gate()
    store = WrappedStore(numbered_store(), gate)
    with make_runtime("hints", store=store) as runtime:
        runtime.hint(1, [4])
        assert gate.entered.acquire(timeout=30)
        waves = runtime.waves(1, np.array([[4]]))
        threading.Timer(0.05, gate.opened.set).start()
        assert sum(len(wave) for wave in waves) == 1

        assert store.reads == [(1, 4)]
        assert runtime.cache.num_foreseen_late == 1


def test_a_failing_expert_is_logged_once_and_never_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others go on; a demand may still read it."""

    def fail(layer: int, expert: int) -> None:
        if expert == 4:
            raise StoreError("expert 4 is broken")

    store = WrappedStore(numbered_store(), fail)
    with make_runtime("hints", store=store) as runtime, caplog.at_level(logging.WARNING):
        for _ in range(3):
            runtime.hint(1, [4, 5])
            wait_until(lambda: is_resident(runtime, 1, 5))
            wait_until(lambda: not prefetcher_of(runtime).queue)
        assert [message for message in caplog.messages if "expert=4" in message] == [
            "loader.read_failed layer=1 expert=4 error=expert 4 is broken"
        ]
        assert store.reads.count((1, 4)) == 1
        assert runtime._loader.counts.num_failed_prefetches == 1
        store.before_read = nothing
        step(runtime, 1, 4, 5)


def test_closing_is_bounded_while_a_read_hangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is left behind with a warning, and ends with its read."""
    monkeypatch.setattr("moecache.runtime._closing.CLOSE_TIMEOUT_S", 0.1)
    gate = Gate()
    runtime = make_runtime("hints", store=WrappedStore(numbered_store(), gate))
    runtime.hint(0, [0])
    assert gate.entered.acquire(timeout=30)
    runtime.close()
    runtime.close()
    assert "prefetch.stuck a read does not return" in caplog.messages
    gate.opened.set()
    wait_until(lambda: "moecache-prefetch" not in {one.name for one in threading.enumerate()})


def test_a_dropped_runtime_takes_its_thread_with_it() -> None:
    """Without `close`: nothing refers to it but itself."""
    runtime = make_runtime("hints", loader_threads=0)
    runtime.hint(0, [0])
    del runtime
    gc.collect()
    wait_until(lambda: "moecache-prefetch" not in {one.name for one in threading.enumerate()})


def test_a_thread_that_finds_its_prefetcher_in_its_last_moment_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A weak reference gives an object while it is finalized: the thread saves it by that."""
    finalize = Prefetcher.__del__

    def finalize_slowly(prefetcher: Prefetcher) -> None:
        finalize(prefetcher)
        time.sleep(0.05)  # the thread runs meanwhile

    monkeypatch.setattr(Prefetcher, "__del__", finalize_slowly)
    runtime = make_runtime("hints", loader_threads=0)
    runtime.hint(0, [0])
    kept = [prefetcher_of(runtime)]
    wait_until(lambda: kept[0]._idle)
    del runtime
    gc.collect()
    kept.clear()
    wait_until(lambda: "moecache-prefetch" not in {one.name for one in threading.enumerate()})


def test_no_thread_where_nothing_is_missing() -> None:
    """It starts with the first request."""
    with make_runtime("echo", capacity=24) as runtime:
        for layer in range(3):
            list(runtime.waves(layer, np.arange(8)[:, None]))
        for _ in range(5):
            for layer in range(3):
                step(runtime, layer, 0, 1)
        assert prefetcher_of(runtime)._thread is None


@pytest.mark.usefixtures("no_restraint")
def test_one_slot_does_not_deadlock() -> None:
    """The prefetcher may hold it when a step comes: it waits, or goes through staging."""
    with make_runtime("hints", capacity=1, policy="lfu") as runtime:
        prefetcher = prefetcher_of(runtime)
        for layer in range(3):
            for _ in range(100):
                step(runtime, layer, 7)
        before = runtime.cache.num_evictions
        for number in range(200):
            step(runtime, number % 3, number % 7, (number + 3) % 7)
            with runtime.lease(number % 3, np.array([number % 7])):
                pass
            # Worth more than any other expert: it takes the only slot.
            runtime.hint((number + 1) % 3, [7])
            if number % 4 == 0:
                wait_until(lambda: prefetcher._idle)
        runtime.cache.check()
        assert prefetcher.num_issued > 20
        assert runtime.cache.num_evictions - before > 2 * 20


def test_threads_meet_in_auto_without_harm() -> None:
    """Their tokens are mixed: nothing can be learned of them, and nothing raised."""
    runtime = make_runtime("auto", capacity=6, policy="echo")
    failures: list[BaseException] = []

    def decode(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(150):
                for layer in range(3):
                    step(runtime, layer, *rng.permutation(8)[:2].tolist())
        except BaseException as error:
            failures.append(error)
            raise

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with runtime:
            threads = [threading.Thread(target=decode, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            runtime.cache.check()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


def test_each_read_ahead_has_one_outcome() -> None:
    """Useful, late, wrong, cancelled or failed; or resident and not asked for yet."""
    rng = np.random.default_rng(0)

    def fail(layer: int, expert: int) -> None:
        if rng.random() < 0.1:
            raise StoreError(f"expert {expert} of layer {layer} cannot be read now")

    store = WrappedStore(numbered_store(), fail)
    with make_runtime("hints", capacity=8, store=store, policy="lfu") as runtime:
        prefetcher = prefetcher_of(runtime)
        for number in range(600):
            runtime.hint((number + 1) % 3, rng.permutation(8)[:3])
            if number % 2:
                wait_until(lambda: prefetcher._idle)
            try:
                step(runtime, number % 3, *rng.permutation(8)[:2].tolist())
            except StoreError:
                continue
        prefetcher.close()
        stats = PrefetchStats.of(prefetcher)
        outcomes = stats.num_useful + stats.num_late + stats.num_wrong
        outcomes += stats.num_cancelled + stats.num_failed
        assert stats.num_issued > 20
        assert stats.in_flight == 0
        assert 0 <= stats.num_issued - outcomes <= runtime.cache.num_resident
