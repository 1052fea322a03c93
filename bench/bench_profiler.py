"""What counting costs, and what reading the counts costs."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.conftest import Note
from bench.traces import NUM_EXPERTS, NUM_LAYERS, TOP_K, routing_trace
from moecache import AccessProfiler

Pairs = list[tuple[int, int]]


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    """(layer, expert) of every access of 16 tokens."""
    trace = routing_trace(16).tolist()
    return [
        (layer, expert)
        for token in trace
        for layer, experts in enumerate(token)
        for expert in experts
    ]


@pytest.fixture
def profiler(pairs: Pairs) -> AccessProfiler:
    """Return a profiler that has seen every pair, a third of them as misses."""
    profiler = AccessProfiler(NUM_LAYERS, NUM_EXPERTS)
    for index, (layer, expert) in enumerate(pairs):
        if index % 3:
            profiler.record_hit(layer, expert)
        else:
            profiler.record_miss(layer, expert)
    return profiler


@pytest.mark.parametrize("method", ["record_hit", "record_miss"])
def test_record(
    benchmark: BenchmarkFixture, method: str, pairs: Pairs, small: bool, note: Note
) -> None:
    """One call per access, the loop around it included."""
    profiler = AccessProfiler(NUM_LAYERS, NUM_EXPERTS)
    record = getattr(profiler, method)

    def record_all() -> None:
        for layer, expert in pairs:
            record(layer, expert)

    benchmark.group = "profiler, per access"
    benchmark.pedantic(record_all, rounds=2 if small else 100)
    note(len(pairs))
    assert int(profiler.counts.sum()) == profiler.num_hits + profiler.num_misses
    assert profiler.num_hits + profiler.num_misses >= len(pairs)


def test_counts(
    benchmark: BenchmarkFixture, profiler: AccessProfiler, small: bool, note: Note
) -> None:
    """The counts are a view: reading them copies nothing."""

    def read_often() -> object:
        for _ in range(999):
            profiler.counts  # noqa: B018 - the read is what is measured
        return profiler.counts

    benchmark.group = "profiler, per call"
    counts = benchmark.pedantic(read_often, rounds=2 if small else 100)
    note(1000)
    assert counts is profiler.counts


def test_top_experts(
    benchmark: BenchmarkFixture, profiler: AccessProfiler, small: bool, note: Note
) -> None:
    """The `top_k` busiest experts of every layer."""

    def top_of_every_layer() -> list[list[int]]:
        return [profiler.top_experts(layer, TOP_K) for layer in range(NUM_LAYERS)]

    benchmark.group = "profiler, per call"
    busiest = benchmark.pedantic(top_of_every_layer, rounds=2 if small else 100)
    note(NUM_LAYERS)
    assert [len(experts) for experts in busiest] == [TOP_K] * NUM_LAYERS


def test_report(
    benchmark: BenchmarkFixture, profiler: AccessProfiler, small: bool, note: Note
) -> None:
    """The text that an operator reads, a line per layer."""
    benchmark.group = "profiler, per call"
    text = benchmark.pedantic(profiler.report, rounds=2 if small else 50)
    note(1)
    assert f"layer {NUM_LAYERS - 1}: hit rate" in text
