"""ExpertRuntime: what waves and leases hand out."""

import numpy as np
import pytest

import moecache
from moecache.runtime.batch import Batch
from moecache.slots import HostSlots
from tests.helpers.runtimes import drain, expected, make_runtime
from tests.helpers.stores import Gate, WrappedStore, numbered_store


@pytest.mark.parametrize("loader_threads", [0, 1, 4])
@pytest.mark.parametrize("capacity", [1, 2, 5, 24])
def test_waves_cover_every_pair_once_with_the_right_expert(
    capacity: int, loader_threads: int
) -> None:
    """Single tokens, batches and bulk steps of all experts, at any capacity."""
    rng = np.random.default_rng(0)
    with make_runtime(capacity, loader_threads=loader_threads) as runtime:
        for num_tokens in [1, 1, 1, 2, 5, 40, 1, 1, 64, 1] * 3:
            layer = int(rng.integers(3))
            ids = np.argsort(rng.random((num_tokens, 8)), axis=1)[:, :2]
            assert drain(runtime, layer, ids) == expected(layer, ids)
            runtime.cache.check()
            assert runtime.stats().num_resident <= capacity


def test_hits_come_in_the_first_wave_while_misses_are_read() -> None:
    """The first wave does not wait for the disk."""
    gate = Gate()
    gate.opened.set()
    with make_runtime(6, store=WrappedStore(numbered_store(), gate)) as runtime:
        drain(runtime, 0, np.array([[1, 2]]))
        gate.opened.clear()
        waves = runtime.waves(0, np.array([[2, 5]]))

        first = next(waves)
        assert first.pairs.tolist() == [0]
        gate.opened.set()

        assert [wave.pairs.tolist() for wave in waves] == [[1]]


def test_a_bulk_step_admits_its_fair_share_the_most_used_first() -> None:
    """A long prompt leaves the other layers' experts where they are."""
    with make_runtime(6) as runtime:
        for layer in range(3):
            drain(runtime, layer, np.array([[0, 1]]))
        prompt = np.array([[7, 6], [7, 5], [7, 6], [4, 3], [0, 1], [2, 7]])
        drain(runtime, 0, prompt)
        drain(runtime, 1, prompt)
        resident = [np.flatnonzero(row >= 0).tolist() for row in runtime.cache.slot_table]
        assert resident == [[0, 1], [0, 1], [0, 1]]

    with make_runtime(6) as runtime:
        drain(runtime, 0, prompt)
        assert np.flatnonzero(runtime.cache.slot_table[0] >= 0).tolist() == [6, 7]


def test_batches_follow_when_the_routing_changes() -> None:
    """A batch whose experts fit its layer's share finds them the second time."""
    with make_runtime(12) as runtime:
        for chosen in ([0, 1, 2, 3], [4, 5, 6, 7]):
            for _ in range(3):
                for layer in range(3):
                    drain(runtime, layer, np.array(chosen).reshape(2, 2))
        assert runtime.stats().num_misses == 24
        assert np.flatnonzero(runtime.cache.slot_table[0] >= 0).tolist() == [4, 5, 6, 7]


def test_a_batch_that_names_its_rows_waits_for_no_fair_share() -> None:
    """What is worth more than what would leave comes, however many its layer has already."""
    ids = np.array([[0, 1], [2, 3], [4, 5]])
    resident = {}
    for sequences in (None, [3, 1, 2]):
        with make_runtime(6, policy="echo") as runtime:
            for layer in range(3):
                drain(runtime, layer, np.array([[6, 7]]))
            for _ in range(20):
                for _wave in runtime.waves(0, ids, sequences=sequences):
                    pass
            runtime.cache.check()
            resident[sequences is None] = int((runtime.cache.slot_table[0] >= 0).sum())
    assert resident == {True: 2, False: 4}


@pytest.mark.parametrize("way", ["waves", "lease"])
def test_sequences_that_do_not_fit_hold_nothing(way: str) -> None:
    """The error says how many there are, and the step may be asked for again."""
    ids = np.array([[0, 1], [2, 3]])
    with make_runtime(6) as runtime:
        with pytest.raises(ValueError, match=r"a number for each of 2 rows, got \[3\]"):
            list(getattr(runtime, way)(0, ids, sequences=[1, 2, 3]))
        assert runtime.stats().num_steps == 0
        assert drain(runtime, 0, ids) == expected(0, ids)


def test_a_batch_has_a_sequence_at_least() -> None:
    """The batch before goes on then."""
    with make_runtime(6) as runtime:
        with pytest.raises(moecache.ConfigError, match="at least 1 sequence, got 0"):
            runtime.begin_sequence(batch=0)
        assert runtime.stats().num_sequences == 0


@pytest.mark.parametrize(
    ("size", "rows", "found"),
    [
        (1, 3, None),
        (3, 3, [0, 1, 2]),
        (2, 4, [0, 0, 1, 1]),
        (3, 4, None),
        (4, 2, None),
        (65, 65, None),
    ],
)
def test_rows_are_those_of_a_batch_that_keeps_its_places(
    size: int, rows: int, found: list[int] | None
) -> None:
    """Each sequence's rows side by side; other numbers of rows, and more than 64, have no names."""
    batch = Batch().following(size)
    numbers = batch.of(np.zeros((rows, 2), int))
    assert (None if numbers is None else (numbers - numbers[0]).tolist()) == found
    if numbers is not None:
        after = batch.following(size).of(np.zeros((rows, 2), int))
        assert after is not None
        assert not set(after.tolist()) & set(numbers.tolist())


def test_repeated_ids_of_one_token_are_computed_together() -> None:
    """Hits and misses group alike: rounding depends on the rows of a product."""
    with make_runtime(24, staging=0) as runtime:
        for _ in range(2):
            waves = list(runtime.waves(0, np.array([[3, 5, 3]])))
            groups = [tuple(pairs.tolist()) for wave in waves for _, pairs in wave]
            assert sorted(groups) == [(0, 2), (1,)]


def test_a_wave_groups_pairs_by_expert() -> None:
    """Pairs of one expert stand together, in the order of the tokens."""
    ids = np.array([[3, 1], [1, 3], [3, 0]])
    with make_runtime(24, staging=0) as runtime:
        drain(runtime, 0, ids)
        (wave,) = list(runtime.waves(0, ids))
        groups = {tuple(pairs.tolist()) for _, pairs in wave}
        assert groups == {(0, 3, 4), (1, 2), (5,)}
        assert len(wave) == 3
        assert wave.top_k == 2
        assert wave.offsets[-1] == 6


def test_dropped_ids_are_in_no_wave() -> None:
    """Foreign experts of an expert-parallel caller, with and without misses."""
    ids = np.array([[3, 8], [8, 8], [-1, 3]])
    with make_runtime(24, staging=0) as runtime:
        for _ in range(2):
            waves = runtime.waves(1, ids, ignore_out_of_range=True)
            assert sorted(pair for wave in waves for pair in wave.pairs.tolist()) == [0, 5]
        only_foreign = runtime.waves(1, np.array([[8, 9]]), ignore_out_of_range=True)
        assert [len(wave) for wave in only_foreign] == [0]
        with pytest.raises(ValueError, match=r"expert 8 is not in \[0, 8\)"):
            next(runtime.waves(1, ids))
        runtime.cache.check()


def test_no_ids_are_no_waves() -> None:
    """An empty step is a step."""
    with make_runtime(4) as runtime:
        assert list(runtime.waves(0, np.empty((0, 2), np.int64))) == []


def test_lease_gives_slots_in_the_shape_of_the_ids() -> None:
    """Everything is there at once, duplicates share a slot."""
    ids = np.array([[3, 1], [1, 5]], np.int32)
    with make_runtime(6) as runtime, runtime.lease(2, ids) as lease:
        assert lease.slots.shape == ids.shape
        found = np.vectorize(lambda slot: int(runtime.slab("down")[slot].flat[0]))(lease.slots)
        assert found.tolist() == (16 + ids).tolist()


def test_lease_of_too_many_experts_is_a_capacity_error_with_figures() -> None:
    """The message says what was asked for and what there is; nothing changes."""
    with make_runtime(4) as runtime:
        drain(runtime, 0, np.array([[1, 2]]))
        before = runtime.cache.slot_table.copy()

        with pytest.raises(moecache.CapacityError, match=r"5 experts .* of 4 slots only 3"):
            runtime.lease(0, np.array([1, 3, 4, 5, 6, 7]))

        assert (runtime.cache.slot_table == before).all()
        runtime.cache.check()
        assert drain(runtime, 0, np.array([[1, 3, 4, 5, 6, 7]])).keys() == set(range(6))


def test_a_leased_expert_stays_while_others_come() -> None:
    """A lease outlives any number of steps."""
    with make_runtime(3) as runtime:
        lease = runtime.lease(0, np.array([1]))
        for layer in range(3):
            for expert in range(8):
                drain(runtime, layer, np.array([[expert]]))
        assert runtime.cache.slot_table[0, 1] == lease.slots[0]
        assert runtime.slab("down")[lease.slots[0]].flat[0] == 1
        lease.close()
        lease.close()
        runtime.cache.check()


def test_parts_that_do_not_fit_are_refused() -> None:
    """Cache, pool and store must agree; the message has both figures."""
    store = numbered_store()
    pool = HostSlots(store.layout, 4)
    with pytest.raises(moecache.ConfigError, match="2 x 8 experts, the store has 3 x 8"):
        moecache.ExpertRuntime(store, pool, moecache.ExpertCache(2, 8, 3))
    with pytest.raises(moecache.ConfigError, match="4 slots, the cache needs 5"):
        moecache.ExpertRuntime(store, pool, moecache.ExpertCache(3, 8, 5))
    with pytest.raises(moecache.ConfigError, match="at least 5 slots"):
        moecache.ExpertRuntime(store, pool, moecache.ExpertCache(3, 8, 4))
    with pytest.raises(moecache.ConfigError, match="loader_threads"):
        moecache.ExpertRuntime(store, pool, moecache.ExpertCache(3, 8, 3), loader_threads=-1)


def test_stalls_are_counted_when_nothing_is_left_to_compute() -> None:
    """A step of hits alone never stalls, one of misses alone does."""
    # Without threads nothing can arrive before it is waited for.
    with make_runtime(6, loader_threads=0) as runtime:
        drain(runtime, 0, np.array([[1, 2]]))
        stalls = runtime.stats().num_stalls
        assert stalls >= 1
        assert runtime.stats().stall_ns > 0
        drain(runtime, 0, np.array([[1, 2]]))
        assert runtime.stats().num_stalls == stalls
