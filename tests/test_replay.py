"""Replays: what they count, what they say, and how they behave beside other threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from moecache.errors import CapacityError, ConfigError
from moecache.prefetch.predict import LastSelection
from moecache.study import (
    Replay,
    Trace,
    interleave,
    load_any,
    miss_ratio_curve,
    recall,
    replay,
    sweep,
)
from moecache.study._arguments import POLICIES
from moecache.study.replay import sequence_begins, step_bounds
from tests.helpers.routing import ScriptedLru, random_trace

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces are not here")
NAMES = ("nvmoe-olmoe", "bigmoe-gemma", "bigmoe-qwen", "sparsify-qwen3-30b")

# Three tokens of two layers: the second has what the first had, the third half of it.
SMALL = Trace(
    [[[0, 1], [2, 3]], [[1, 0], [3, 2]], [[0, 2], [3, -1]]],
    num_experts=4,
    phase=[0, 1, 1],
    expert_bytes=100,
)


def last_selections(trace: Trace) -> LastSelection:
    """Return what foresees a token's experts, and then those of the token before."""
    return LastSelection(trace.num_layers, history=2)


def test_a_replay_counts_by_step_layer_and_phase() -> None:
    """Everything is held: only first uses miss."""
    done = replay(SMALL, "lru", 8)

    assert done.hits.tolist() == [[0, 0], [2, 2], [1, 1]]
    assert done.misses.tolist() == [[2, 2], [0, 0], [1, 0]]
    assert done.phase.tolist() == [0, 1, 1]
    assert (done.num_hits, done.num_misses, done.num_accesses) == (6, 5, 11)
    assert done.hit_rate == 6 / 11
    assert done.per_layer.tolist() == [0.5, 0.6]
    assert done.per_phase == {"prefill": 0, "decode": 6 / 7}
    assert done.hit_rate_over_time(1).tolist() == [0, 1, pytest.approx(2 / 3)]
    assert done.hit_rate_over_time(2).tolist() == [0, 0.5, pytest.approx(6 / 7)]
    assert (done.capacity, done.total_experts, done.scope) == (8, 8, "global")
    assert not done.hits.flags.writeable


def test_a_step_of_both_phases_counts_in_neither() -> None:
    """Requests that are batched prefill and decode in one step."""
    trace = Trace(
        [[[0]], [[1]], [[0]], [[0]], [[1]]],
        num_experts=2,
        step=[0, 0, 1, 1, 2],
        phase=[0, 0, 1, 0, 1],
    )

    done = replay(trace, "lru", 2)

    assert done.phase.tolist() == [0, 2, 1]
    assert done.hits.sum(1).tolist() == [0, 1, 1]
    assert done.per_phase == {"prefill": 0, "decode": 1}
    assert replay(trace[2:4], "lru", 2).per_phase == {}
    row = sweep(trace[:4], "lru", 2)[0]
    assert (row["prefill_hit_rate"], row["decode_hit_rate"]) == (0, None)


def test_bytes_moved_are_those_of_the_misses() -> None:
    """One size, a size as people write it, or one per layer."""
    done = replay(SMALL, "lru", 8)

    assert done.bytes_moved(100) == 500
    assert done.bytes_moved("2KiB") == 5 * 2048
    assert done.bytes_moved(np.array([100, 1000])) == 2300
    assert done.bytes_moved([10, 1]) == 32
    for wrong in ([1, 2, 3], [-1, 2], [0.5, 1], "much"):
        with pytest.raises(ConfigError):
            done.bytes_moved(wrong)


def test_an_empty_trace_has_a_hit_rate_of_zero() -> None:
    """No tokens, or nothing but padding: no NaN anywhere."""
    for experts in (np.empty((0, 2, 2), int), np.full((3, 2, 2), -1)):
        for policy in ("lru", "belady", ScriptedLru):
            done = replay(Trace(experts, num_experts=4), policy, 2)
            assert (done.hit_rate, done.num_accesses, done.per_phase) == (0, 0, {})
            assert done.per_layer.tolist() == [0, 0]
            assert not np.isnan(done.hit_rate_over_time()).any()
            assert "hit rate" in done.describe()
    curve = miss_ratio_curve(Trace(np.empty((0, 2, 2), int), num_experts=4))
    assert curve.miss_ratios.tolist() == [1] * 8


@pytest.mark.parametrize(
    ("capacity", "slots"),
    [
        (3, 3),
        ("5", 5),
        (np.int64(5), 5),
        (np.uint8(5), 5),
        ("25%", 24),
        (0.25, 24),
        (np.float32(0.25), 24),
        (1.0, 96),
        (1, 1),
        (500, 96),
        ("12.5 %", 12),
    ],
)
def test_a_capacity_is_slots_or_a_share(capacity: float | str, slots: int) -> None:
    """Integers are slots, decimals and percentages shares; more than all are all."""
    assert replay(random_trace(), "lru", capacity).capacity == slots


@pytest.mark.parametrize(
    ("text", "slots"), [("0.25", 24), (" .25", 24), ("1.0", 96), ("1", 1), ("25", 25)]
)
def test_a_capacity_in_text_is_what_the_number_is(text: str, slots: int) -> None:
    """A decimal point makes a share of it, as a shell's argument has to be."""
    assert replay(random_trace(), "lru", text).capacity == slots


def test_a_share_is_taken_as_it_is_written() -> None:
    """0.29 of 100 experts are 29, though the float is a little less."""
    trace = Trace(np.zeros((1, 1, 1), int), num_experts=100)
    for share in (0.29, "29%", "0.29"):
        assert replay(trace, "lru", share).capacity == 29


@pytest.mark.parametrize(
    ("capacity", "scope", "error", "message"),
    [
        (0, "global", CapacityError, "is 0 slots; at least 1 is needed, a share of at least 1.04%"),
        (0.001, "global", CapacityError, "0.001 of 96 experts is 0 slots"),
        (-3, "global", CapacityError, "capacity -3"),
        (3, "layer", CapacityError, "3 slots, but scope 'layer' .* take at least 4"),
        (1.5, "global", ConfigError, "not in"),
        ("120%", "global", ConfigError, "not in"),
        ("1.25", "global", ConfigError, "not in"),
        ("0.0", "global", ConfigError, "not in"),
        ("0.001", "global", CapacityError, "is 0 slots"),
        ("much", "global", ConfigError, "neither a number of slots nor a share"),
        (True, "global", ConfigError, "neither"),
        (float("nan"), "global", ConfigError, "neither"),
        (8, "expert", ConfigError, "scope 'expert' is not one of global, layer"),
    ],
)
def test_wrong_capacities_and_scopes_are_refused(
    capacity: float | str, scope: str, error: type[Exception], message: str
) -> None:
    """The message has the figures and the remedy."""
    with pytest.raises(error, match=message):
        replay(random_trace(), "lru", capacity, scope=scope)


def test_sequences_begin_where_they_change() -> None:
    """Not at the first row; in a batch, not where others go on."""
    trace = Trace(np.zeros((6, 1, 1), int), num_experts=2, sequence=[0, 0, 1, 1, 0, 2])
    assert sequence_begins(trace, step_bounds(trace)).tolist() == [0, 0, 1, 0, 1, 1]
    parts = [Trace(np.zeros((n, 1, 1), int), num_experts=2) for n in (2, 4, 3)]
    batch = interleave(parts)
    assert np.diff(step_bounds(batch)).tolist() == [3, 3, 2, 1]
    assert sequence_begins(batch, step_bounds(batch)).tolist() == [0, 0, 0, 0]


def test_a_script_hears_of_sequences_and_steps() -> None:
    """`begin_sequence` and `begin_step` are called if they are there."""
    heard: list[object] = []

    class Listens(ScriptedLru):
        def begin_sequence(self) -> None:
            heard.append("sequence")

        def begin_step(self, layer: int, ids: np.ndarray) -> None:
            heard.append((layer, ids.tolist()))

    trace = Trace([[[0, 1]], [[1, -1]], [[1, 0]]], num_experts=2, sequence=[0, 0, 1])
    replay(trace, Listens, 2)
    assert heard == [(0, [[0, 1]]), (0, [[1, -1]]), "sequence", (0, [[1, 0]])]


def test_a_replay_describes_itself() -> None:
    """As text, in a notebook, and in one line."""
    done = replay(SMALL, "lru", "50%")
    text = done.describe()
    assert "lru, scope global" in text
    assert "4 of 8 experts (50.0%)" in text
    assert "decode" in text
    assert "<table><caption>Replay" in done._repr_html_()
    assert repr(done).startswith("<Replay of lru, scope global, 4 of 8")


def test_a_curve_agrees_with_replays() -> None:
    """LRU at every capacity from one cycle on, or nearly, falling all the way."""
    trace = random_trace(shape=(600, 4, 3))
    for scope in ("global", "layer"):
        curve = miss_ratio_curve(trace, scope=scope)
        assert curve.cycle_slots == 12
        assert (np.diff(curve.miss_ratios) <= 0).all()
        for slots in (24, 48, 72, 96):
            done = replay(trace, "lru", slots, scope=scope)
            assert curve.hit_rate(slots) == pytest.approx(done.hit_rate, abs=0.006)
    assert curve.hit_rate("100%") == curve.hit_rate(96)


def as_lists(done: Replay) -> list[object]:
    """Return what has to be the same on every run."""
    return [done.hits.tolist(), done.misses.tolist()]


@pytest.mark.parametrize("policy", [*POLICIES, "belady"])
def test_every_run_is_the_same_also_side_by_side(policy: str) -> None:
    """Twice one after the other, and in four threads at once."""
    trace = random_trace(shape=(120, 4, 3))
    first = as_lists(replay(trace, policy, 30))

    assert as_lists(replay(trace, policy, 30)) == first
    with ThreadPoolExecutor(4) as pool:
        assert all(
            as_lists(done) == first
            for done in pool.map(lambda _: replay(trace, policy, 30), range(8))
        )


@pytest.mark.parametrize("policy", ["echo", "belady", "lru"])
def test_other_threads_run_during_a_replay(policy: str) -> None:
    """The longest silence of this thread stays well below the replay's duration."""
    once = random_trace(shape=(200, 24, 8), n=128)
    times = {"echo": 12, "belady": 60, "lru": 160}[policy]
    trace = Trace(np.tile(once.experts, (times, 1, 1)), num_experts=128)
    ratios = []
    # A loaded machine may stop this thread for a while; a held GIL does so every time.
    while len(ratios) < 5 and min(ratios, default=1) >= 0.5:
        done: list[Replay] = []
        thread = threading.Thread(target=lambda done=done: done.append(replay(trace, policy, 0.25)))
        silence, last = 0.0, time.perf_counter()
        thread.start()
        while thread.is_alive():
            now = time.perf_counter()
            silence, last = max(silence, now - last), now
            time.sleep(0.001)
        thread.join()
        ratios.append(silence / done[0].seconds)
    assert min(ratios) < 0.5


# Belady and ECHO, as ECHO.md has them, at 12.5, 25 and 50 % of all experts.
REAL = {
    "nvmoe-olmoe": ((0.590, 0.774, 0.928), (0.473, 0.658, 0.862), (0.73, 0.87)),
    "bigmoe-gemma": ((0.765, 0.876, 0.916), (0.645, 0.799, 0.911), (0.62, 0.80)),
    "bigmoe-qwen": ((0.782, 0.893, 0.917), (0.653, 0.834, 0.917), (0.65, 0.82)),
    "sparsify-qwen3-30b": ((0.790, 0.885, 0.907), (0.665, 0.831, 0.906), (0.65, 0.83)),
}


@needs_traces
@pytest.mark.parametrize("name", NAMES)
def test_published_hit_rates_and_recall_are_reached(name: str) -> None:
    """Belady to the digit, ECHO within 0.003, its recall one layer ahead within 0.01."""
    trace = load_any(TRACES / f"{name}.npz").whole_tokens()
    optimum, echo, recalled = REAL[name]
    for place, share in enumerate((0.125, 0.25, 0.5)):
        assert replay(trace, "belady", share).hit_rate == pytest.approx(optimum[place], abs=0.0011)
        assert replay(trace, "echo", share).hit_rate == pytest.approx(echo[place], abs=0.003)
    found = recall(trace)
    assert (found.at_k, found.at_2k) == pytest.approx(recalled, abs=0.01)


@needs_traces
def test_the_last_token_foresees_what_is_published() -> None:
    """The previous token's set recalls 0.42, 0.36, 0.37 and 0.47 of the next."""
    for name, expected in zip(NAMES, (0.42, 0.36, 0.37, 0.47), strict=True):
        trace = load_any(TRACES / f"{name}.npz").whole_tokens()
        assert recall(trace, last_selections(trace)).at_k == pytest.approx(expected, abs=0.01)


def test_recall_counts_what_was_foreseen() -> None:
    """Of a routing that repeats everything is, of one that never does nothing."""
    same = Trace(np.tile([[[0, 1], [2, 3]]], (30, 1, 1)), num_experts=8)
    turning = Trace((np.arange(30)[:, None, None] + [[[0], [4]]]) % 8, num_experts=8)

    for ahead in ("layer", "token"):
        found = recall(same, last_selections(same), ahead=ahead, n=1)
        assert (found.at_k, found.at_2k, found.at_n) == (1, 1, 0.5)
        assert found.num_scored == 20 * 4
        assert found.per_layer.tolist() == [1, 1]
        assert recall(turning, last_selections(turning), ahead=ahead).at_k == 0
    assert recall(same).at_k == 1


def test_recall_starts_anew_with_each_sequence() -> None:
    """Nothing is foreseen of a sequence's first token."""
    trace = Trace(np.zeros((30, 1, 1), int), num_experts=2, sequence=np.arange(30))
    assert recall(trace, last_selections(trace)).at_k == 0
    with pytest.raises(ConfigError, match="ahead 'week' is not one of layer, token"):
        recall(trace, ahead="week")
    with pytest.raises(ConfigError, match="n must be at least 1"):
        recall(trace, n=0)


@pytest.mark.parametrize("policy", ["lru", "belady"])
def test_more_keys_than_can_be_numbered_are_refused(policy: str) -> None:
    """Before anything is allocated for them."""
    huge = Trace(np.zeros((1, 2048, 1), np.int32), num_experts=2**20)
    with pytest.raises(ValueError, match="2048 layers of 1048576 experts are more than"):
        replay(huge, policy, 5)


def test_a_path_is_no_trace() -> None:
    """The message says what reads one."""
    with pytest.raises(ConfigError, match=r"'run.npz' is no Trace; read a file.s with .*load_any"):
        replay("run.npz", "lru", 4)  # type: ignore[arg-type]
