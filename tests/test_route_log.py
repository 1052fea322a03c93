"""RouteLog: what is noted, what becomes of it, and what a full log does."""

import random
import sys
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest

from moecache.cache._cache import ExpertCache
from moecache.cache._route_log import RouteLog
from moecache.errors import ConfigError


def test_a_pass_of_one_row_is_a_decoded_token() -> None:
    """One row per pass: phase 1, a step of its own, ids as they came."""
    log = RouteLog(2, 8)
    for ids in ([[3, 1]], [[0, 7]]):
        log.record(0, np.array(ids))
        log.record(1, np.array(ids)[:, ::-1])

    experts, phase, sequence, step, *_ = log.trace_parts()

    assert experts.dtype == np.int16
    assert experts.tolist() == [[[3, 1], [1, 3]], [[0, 7], [7, 0]]]
    assert phase.tolist() == [1, 1]
    assert sequence.tolist() == [0, 0]
    assert step.tolist() == [0, 1]
    assert log.num_steps == 4


def test_rows_that_went_together_share_their_step() -> None:
    """A prompt of three tokens, then one token."""
    log = RouteLog(2, 8)
    prompt = np.arange(6).reshape(3, 2)
    for layer in range(2):
        log.record(layer, prompt)
    for layer in range(2):
        log.record(layer, np.array([[6, 7]]))

    experts, phase, _, step, *_ = log.trace_parts()

    assert experts[:3, 1].tolist() == prompt.tolist()
    assert phase.tolist() == [0, 0, 0, 1]
    assert step.tolist() == [0, 0, 0, 1]


def test_what_a_pass_leaves_out_is_padding() -> None:
    """Layers without a step, ids out of range, ids that occur twice, narrower steps."""
    log = RouteLog(3, 4)
    log.record(0, np.array([[1, 1, 2]]))
    log.record(2, np.array([[4, -5, 3]], np.int32))
    log.record(1, np.array([[0]]))

    experts = log.trace_parts()[0]

    assert experts.tolist() == [
        [[1, -1, 2], [-1] * 3, [-1, -1, 3]],
        [[-1] * 3, [0, -1, -1], [-1] * 3],
    ]


def test_a_sequence_begins_a_pass_and_empty_ones_do_not_count() -> None:
    """Numbers go up only where tokens lie between two beginnings."""
    log = RouteLog(2, 4)
    log.begin_sequence()
    log.record(0, np.array([[1]]))
    log.begin_sequence()
    log.begin_sequence()
    log.record(1, np.array([[2]]))

    experts, _, sequence, step, *_ = log.trace_parts()

    assert sequence.tolist() == [0, 1]
    assert step.tolist() == [0, 1]
    assert experts[:, :, 0].tolist() == [[1, -1], [-1, 2]]


def test_ids_of_many_experts_are_kept_whole() -> None:
    """More than 32,767 experts need int32; ids of int64 are not cut."""
    log = RouteLog(1, 100_000)
    log.record(0, np.array([[99_999, 40_000, 2**32 + 5]]))

    experts = log.trace_parts()[0]

    assert experts.dtype == np.int32
    assert experts.tolist() == [[[99_999, 40_000, -1]]]


def test_a_full_log_keeps_what_it_has_and_counts_the_rest() -> None:
    """No exception on the way, and nothing after the first gap."""
    log = RouteLog(1, 8, max_bytes=100)
    for expert in range(8):
        log.record(0, np.array([[expert, (expert + 1) % 8]]))
    log.record(0, np.zeros((0, 2), np.int64))

    assert log.full
    assert log.num_bytes <= 100
    assert (log.num_steps, log.num_dropped) == (6, 2)
    assert log.trace_parts()[0][:, 0, 0].tolist() == list(range(6))
    log.clear()
    assert (log.full, log.num_bytes, log.num_steps, log.num_dropped) == (False, 0, 0, 0)
    assert log.trace_parts()[0].shape == (0, 1, 1)


def test_flat_ids_are_rows_of_top_k_where_they_divide() -> None:
    """One row of several tokens' ids becomes their rows; what does not divide stays a row."""
    log = RouteLog(2, 8, top_k=2)
    for layer in range(2):
        log.record(layer, np.arange(6))
    log.record(0, np.array([5, 5, 1]))
    log.record(1, np.array([7, 6]))

    experts, phase, _, step, bulk, left_out = log.trace_parts()

    assert experts[:3, 1].tolist() == [[0, 1, -1], [2, 3, -1], [4, 5, -1]]
    assert experts[3].tolist() == [[5, -1, 1], [7, 6, -1]]
    assert (phase.tolist(), step.tolist()) == ([0, 0, 0, 1], [0, 0, 0, 1])
    assert (bulk.tolist(), left_out) == ([0] * 4, 0)


@pytest.mark.parametrize("top_k", [None, 4, 5])
def test_steps_too_wide_for_the_trace_are_left_out(top_k: int | None) -> None:
    """Padding every row to eight odd steps would take 100 times what the log may."""
    log = RouteLog(4, 1024, top_k=top_k, max_bytes=2**20)
    for _ in range(8):
        log.record(0, np.arange(1023))
    for token in range(6000):
        for layer in range(4):
            log.record(layer, np.arange(4) + token % 1000)

    tracemalloc.start()
    experts, _, _, step, _, left_out = log.trace_parts()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 2.5 * 2**20
    assert left_out == 8
    assert experts.shape == (6000, 4, 4)
    assert experts[:, 3, 0].tolist() == [token % 1000 for token in range(6000)]
    assert step.tolist() == list(range(6000))


def test_passes_too_many_for_the_trace_are_left_out() -> None:
    """Of 1,000 layers one is used: padding takes a hundred times what is noted."""
    log = RouteLog(1000, 8, max_bytes=100_000)
    for token in range(1000):
        log.record(0, np.array([[token % 8]]))

    experts, *_, left_out = log.trace_parts()

    assert experts[:, 0, 0].tolist() == [token % 8 for token in range(50)]
    assert left_out == 1000 - 50


def test_a_full_log_of_whole_passes_is_a_whole_trace() -> None:
    """What else a row has does not count: a prompt's rows are cheap in the log."""
    log = RouteLog(2, 8, max_bytes=100_000)
    while not log.full:
        for layer in range(2):
            log.record(layer, np.zeros((1000, 1), np.int32))

    experts, *_, left_out = log.trace_parts()

    assert log.num_bytes > 97_000
    assert (len(experts), left_out) == (25_000, 0)


def test_a_row_is_no_wider_than_there_are_experts() -> None:
    """Ids that occur again leave no gaps there."""
    log = RouteLog(1, 4)
    log.record(0, np.array([[3, 3, 9, 0, 3, 1, 0, -7, 1]]))

    assert log.trace_parts()[0].tolist() == [[[3, 0, 1, -1]]]


def test_a_step_of_a_million_choices_costs_a_look_at_each() -> None:
    """Whether an id occurred before is not found by going through all before it."""
    log = RouteLog(1, 2**20)
    log.record(0, np.arange(2**20, dtype=np.int32)[None])

    assert np.array_equal(log.trace_parts()[0][0, 0], np.arange(2**20))


def test_the_log_agrees_with_plain_python() -> None:
    """Random steps of any shape, against the rules written with lists."""
    rng = random.Random(5)
    log = RouteLog(4, 50)
    rows: list[list[list[int]]] = []
    steps, phases, sequences, shared = [], [], [], []
    step, last, kind, sequence, fresh = -1, -1, (0, False), 0, True
    for _ in range(400):
        if rng.random() < 0.1:
            log.begin_sequence()
            sequence += not fresh
            fresh, last, kind = True, -1, (0, False)
        layer, count = rng.randrange(4), rng.choice([1, 1, 1, 2, 5])
        ids = [rng.sample(range(50), 3) for _ in range(count)]
        said = rng.choice([None, None, None, False, True])
        log.record(layer, np.array(ids, rng.choice([np.int32, np.int64])), bulk=said)
        bulk = count > 1 if said is None else said
        if layer <= last or (count, bulk) != kind:
            step, kind = step + 1, (count, bulk)
            rows += [[[-1] * 3 for _ in range(4)] for _ in range(count)]
            steps += [step] * count
            phases += [int(count == 1)] * count
            sequences += [sequence] * count
            shared += [bulk] * count
        for row, chosen in zip(rows[-count:], ids, strict=True):
            row[layer] = chosen
        last, fresh = layer, False

    experts, phase, seq, numbers, bulks, left_out = log.trace_parts()

    assert experts.tolist() == rows
    assert (phase.tolist(), seq.tolist(), numbers.tolist()) == (phases, sequences, steps)
    assert bulks.tolist() == shared
    assert left_out == 0


def test_steps_noted_while_the_arrays_are_made_are_not_in_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More rows, more choices, a log that was cleared: the arrays have what was there before."""
    log = RouteLog(2, 64)
    for layer in range(2):
        log.record(layer, np.array([[1, 2]]))
    full = np.full

    def interrupted(*arguments: Any) -> np.ndarray:
        made: np.ndarray = full(*arguments)
        log.clear()
        for _ in range(100):
            log.record(0, np.zeros((50, 40), np.int32))
        return made

    monkeypatch.setattr(np, "full", interrupted)
    experts, phase, _, step, *_ = log.trace_parts()

    assert experts.tolist() == [[[1, 2], [1, 2]]]
    assert (phase.tolist(), step.tolist()) == ([1], [0])
    assert log.num_steps == 100


def test_a_log_is_read_while_another_thread_records() -> None:
    """Ever wider steps, from a thread that runs between any two calls: each pass is whole."""
    log = RouteLog(1, 4096)
    stop = threading.Event()

    def record() -> None:
        width = 1
        while not stop.is_set():
            log.record(0, np.tile(np.arange(width, dtype=np.int32), (2, 1)))
            width = width % 512 + 1
            if width == 1:
                log.clear()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=record)
    thread.start()
    try:
        for _ in range(300):
            experts, phase, _, step, *_ = log.trace_parts()
            widths = (experts >= 0).sum(2)[:, 0]
            assert widths.tolist() == (np.arange(len(widths)) // 2 + 1).tolist()
            assert step.tolist() == (np.arange(len(widths)) // 2).tolist()
            assert not phase.any()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


def test_a_cache_notes_what_is_acquired() -> None:
    """Every id in its order, hits and misses; nothing once the log is taken away."""
    cache = ExpertCache(2, 8, 16)
    log = RouteLog(2, 8)
    cache.route_log = log
    slots, misses = np.empty(4, np.int32), np.empty(4, np.int32)
    ids = np.array([[5, 2], [2, 7]], np.int32)
    for layer in range(2):
        cache.acquire(layer, ids, slots, misses)
    cache.begin_sequence()
    cache.acquire(0, np.array([[1, 0]]), slots[:2].copy(), misses)
    cache.route_log = None
    cache.acquire(1, np.array([[1, 0]]), slots[:2].copy(), misses)

    experts, phase, sequence, *_ = log.trace_parts()

    assert experts[:2].tolist() == [[[5, 2]] * 2, [[2, 7]] * 2]
    assert experts[2].tolist() == [[1, 0], [-1, -1]]
    assert phase.tolist() == [0, 0, 1]
    assert sequence.tolist() == [0, 0, 1]


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_a_cache_notes_which_steps_kept_to_their_share(scope: str) -> None:
    """Leases admit everything, several rows in waves their fair share, whatever that is."""
    for capacity in (4, 15, 16):
        cache = ExpertCache(2, 8, capacity, scope=scope)
        cache.route_log = RouteLog(2, 8)
        slots, misses = np.empty(2, np.int32), np.empty(2, np.int32)
        for rows, share in ((2, "fair"), (2, "all"), (1, "fair"), (1, "all"), (1, "most")):
            for layer in range(2):
                ids = np.arange(2).reshape(rows, -1)
                shares = {"fair": cache.fair_share(layer) if rows == 2 else 1, "all": -1}
                found = cache.acquire(layer, ids, slots, misses, share=shares.get(share, 8))
                for index in misses[:found]:
                    if slots[index] >= 0:
                        cache.publish(slots[index])
                cache.release(slots)

        *_, step, bulk, _ = cache.route_log.trace_parts()

        assert step.tolist() == [0, 0, 1, 1, 2, 3, 4]
        assert bulk.tolist() == [1, 1, 0, 0, 1, 0, 0]


def test_a_refused_step_is_not_noted() -> None:
    """An acquire that raises changes nothing, the log included."""
    cache = ExpertCache(1, 8, 2)
    cache.route_log = RouteLog(1, 8)
    out = np.empty(3, np.int32)
    for ids in (np.array([[0, 1, 2]]), np.array([[0, 9]])):
        with pytest.raises(ValueError):
            cache.acquire(0, ids, out, out.copy())

    assert cache.route_log.num_steps == 0


def test_a_log_of_another_model_is_not_written_past_its_end() -> None:
    """Steps of layers that it does not have are dropped."""
    cache = ExpertCache(4, 8, 8)
    cache.route_log = RouteLog(2, 8)
    out = np.empty(2, np.int32)
    for layer in range(4):
        cache.acquire(layer, np.array([[0, 1]]), out, out.copy())

    assert (cache.route_log.num_steps, cache.route_log.num_dropped) == (2, 2)
    assert cache.route_log.trace_parts()[0].shape == (1, 2, 2)


def test_wrong_arguments_are_errors() -> None:
    """Shapes, layers, dtypes, and anything that is no log."""
    log = RouteLog(2, 8)
    for arguments in ((0, 8), (2, 0)):
        with pytest.raises(ConfigError):
            RouteLog(*arguments)
    for wrong in ({"max_bytes": 0}, {"top_k": 0}, {"top_k": -1}):
        with pytest.raises(ConfigError, match="at least 1"):
            RouteLog(2, 8, **wrong)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match="is not in"):
            log.record(layer, np.array([[1]]))
    with pytest.raises(TypeError):
        log.record(0, np.array([[1.0]]))
    with pytest.raises(TypeError):
        ExpertCache(2, 8, 4).route_log = object()  # type: ignore[assignment]
