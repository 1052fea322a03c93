"""StepSource.compute_token: a token's experts, those that are resident first."""

import itertools
import threading
import time

import numpy as np
import pytest

import moecache
from moecache.errors import MoeCacheError, StoreError
from moecache.runtime.steps import _group
from tests.helpers.runtimes import close_beside, make_runtime
from tests.helpers.stores import FailEachOnce, WrappedStore, numbered_store

TOP_K = 3


def _token(
    runtime: moecache.ExpertRuntime, layer: int, ids: np.ndarray
) -> tuple[dict[int, int], list[list[int]]]:
    """Return place -> the key found in its slot, and the places of each call."""
    found, calls = {}, []

    def compute(slots: np.ndarray, places: list[int]) -> None:
        calls.append(places)
        for place in places:
            assert place not in found
            found[place] = int(runtime.expert(int(slots[place]), layer)["down"].flat[0])

    runtime.steps.compute_token(layer, ids, compute)
    return found, calls


def _tokens(num: int) -> list[tuple[int, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(i % 3, rng.choice(8, (1, TOP_K), replace=False).astype(np.int32)) for i in range(num)]


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 9, 24])
@pytest.mark.parametrize("loader_threads", [0, 2])
def test_each_expert_is_computed_once_in_its_slot(capacity: int, loader_threads: int) -> None:
    """At any number of slots, also where experts go through staging; counted as waves are."""
    counted = []
    for by_token in (True, False):
        with make_runtime(capacity, loader_threads=loader_threads) as runtime:
            for layer, ids in _tokens(60):
                if by_token:
                    found, _ = _token(runtime, layer, ids)
                    expected = {i: layer * 8 + one for i, one in enumerate(ids[0].tolist())}
                    assert found == expected
                else:
                    for _ in runtime.waves(layer, ids):
                        pass
            stats = runtime.stats()
            counted.append((stats.num_steps, stats.num_hits, stats.num_misses, stats.num_reads))
            # Nothing stays leased: every expert can be evicted.
            for layer, ids in _tokens(6):
                assert sum(map(len, runtime.waves(layer, ids))) == TOP_K
    if capacity >= TOP_K:
        assert counted[0] == counted[1]


def test_what_is_resident_is_computed_while_others_are_read() -> None:
    """All reads have begun by then."""
    may_read = threading.Event()

    def read(layer: int, expert: int) -> None:
        if expert > 1:
            assert may_read.wait(30)

    store = WrappedStore(numbered_store(), read)
    with make_runtime(24, store=store, loader_threads=2) as runtime:
        _token(runtime, 0, np.array([[0, 1]]))
        calls = []

        def compute(slots: np.ndarray, places: list[int]) -> None:
            calls.append(places)
            if len(calls) == 1:
                deadline = time.monotonic() + 30
                while len(store.reads) < 4 and time.monotonic() < deadline:
                    time.sleep(0.001)
                assert len(store.reads) == 4
                may_read.set()

        runtime.steps.compute_token(0, np.array([[5, 0, 6, 1]]), compute)
    assert calls[0] == [1, 3]
    assert sorted(place for places in calls[1:] for place in places) == [0, 2]


def test_an_expert_that_comes_twice_is_computed_for_both_places() -> None:
    """Resident or not, and read once."""
    ids = np.array([[4, 2, 4]])
    with make_runtime(9) as runtime:
        for _ in range(2):
            assert _token(runtime, 0, ids)[0] == {0: 4, 1: 2, 2: 4}
        assert runtime.stats().num_reads == 2


def test_a_failed_read_is_the_steps_error_and_nothing_stays_leased() -> None:
    """The next call reads again."""
    fail = FailEachOnce()
    store = WrappedStore(numbered_store(), lambda layer, expert: layer or fail(layer, expert))
    ids = np.array([[4, 2, 1]])
    with make_runtime(3, store=store) as runtime:
        with pytest.raises(StoreError):
            for _ in range(4):
                _token(runtime, 0, ids)
        for _ in range(4):
            try:
                found, _ = _token(runtime, 0, ids)
            except StoreError:
                continue
        assert found == {0: 4, 1: 2, 2: 1}
        with pytest.raises(ZeroDivisionError):
            runtime.steps.compute_token(1, ids, lambda *_: 1 // 0)
        # All three slots can be had.
        assert sum(map(len, runtime.waves(2, ids))) == TOP_K


def test_threads_join_each_others_loads() -> None:
    """Every token of every thread finds its experts."""
    errors: list[BaseException] = []
    with make_runtime(6, loader_threads=2) as runtime:

        def work() -> None:
            try:
                for layer, ids in _tokens(200):
                    found, _ = _token(runtime, layer, ids)
                    assert found == {i: layer * 8 + e for i, e in enumerate(ids[0].tolist())}
            except BaseException as error:  # noqa: BLE001 - the test shows it
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not errors, errors[0]


def test_close_in_the_middle_ends_a_token() -> None:
    """With an error that says so; after it no token begins."""
    runtime = make_runtime(3, loader_threads=2)
    tokens = _tokens(30)
    close_beside(runtime, lambda turn: _token(runtime, *tokens[turn % 30]), 0.02)
    with pytest.raises(MoeCacheError, match="closed"):
        _token(runtime, *tokens[0])


@pytest.mark.parametrize("size", [1, 64, 65, 512, 513, 2000])
@pytest.mark.parametrize("most", [3, 127, 40_000, 2**40])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_pairs_are_grouped_whatever_their_ids_are(size: int, most: int, dtype: type) -> None:
    """In the order of the ids, and among equal ones in their own."""
    most = min(most, np.iinfo(dtype).max)
    ids = np.random.default_rng(size).integers(-most, most, size).astype(dtype)
    order, starts = _group(ids)
    if len(set(ids.tolist())) < size or size > 64:
        assert order.tolist() == sorted(range(size), key=lambda pair: ids[pair])
    assert sorted(order.tolist()) == list(range(size))
    groups = [ids[order[a:b]].tolist() for a, b in itertools.pairwise(starts.tolist())]
    assert all(len(set(group)) == 1 for group in groups)
    assert len(groups) == len(set(ids.tolist()))
