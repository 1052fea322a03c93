"""MissSplit: how many misses the CPU computes, which ones, and when none."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache import ExpertCache
from moecache.loading.split import MissSplit, averaged, cpu_share
from moecache.study import Trace, simulate_time
from tests.helpers.examples import num_examples
from tests.helpers.routing import random_trace

LAYERS, EXPERTS = 2, 16
times = st.floats(1, 1e9)


class Link:
    """A loader's counters: reads that took a set time."""

    def __init__(self) -> None:
        self.counts = SimpleNamespace(urgent_ns=0, num_urgent_reads=0)
        self.pool = SimpleNamespace(uploads=SimpleNamespace(busy_ns=0, num_uploads=0))

    def read(self, ns: int, count: int = 1, *, copied_ns: int = 0) -> None:
        """Count reads that a step waited for, and copies to the device."""
        self.counts.urgent_ns += ns * count
        self.counts.num_urgent_reads += count
        if copied_ns:
            self.pool.uploads.busy_ns += copied_ns * count
            self.pool.uploads.num_uploads += count


class Trial:
    """A switch that does what it is told."""

    def __init__(self, *, on: bool = True) -> None:
        self.on = on
        self.calls: list[str] = []

    def begin_token(self) -> None:
        """Note it."""
        self.calls.append("token")

    def skip(self) -> None:
        """Note it."""
        self.calls.append("skip")


def make_split(policy: str = "lru", **options: Any) -> tuple[MissSplit, Link, ExpertCache]:
    """Return a split, its link's counters and its cache, of which one expert is evicted."""
    link: Any = Link()
    cache = ExpertCache(LAYERS, EXPERTS, 2, policy=policy)
    for expert in (13, 15, 14, 15):
        use(cache, expert)
    return MissSplit(link, cache, **options), link, cache


def use(cache: ExpertCache, *experts: int, layer: int = 0) -> None:
    """Do a step."""
    slots, misses = np.empty(len(experts), np.int32), np.empty(len(experts), np.int32)
    count = cache.acquire(layer, np.array(experts), slots, misses)
    for position in misses[:count].tolist():
        cache.publish(int(slots[position]))
    cache.release(slots)


@settings(max_examples=num_examples(200))
@given(num=st.integers(0, 64), link_ns=times, cpu_ns=times)
def test_both_sides_end_as_nearly_together_as_whole_experts_allow(
    num: int, link_ns: float, cpu_ns: float
) -> None:
    """No other number of experts ends earlier by more than half an expert of both."""
    share = cpu_share(num, link_ns, cpu_ns)
    assert 0 <= share <= num
    assert share == round(num * link_ns / (cpu_ns + link_ns))

    def end(count: int) -> float:
        return max(count * cpu_ns, (num - count) * link_ns)

    best = min(map(end, range(num + 1)))
    assert end(share) <= best + max(link_ns, cpu_ns) / 2 * (1 + 1e-6)


@settings(max_examples=num_examples(100))
@given(
    parts=st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 40)), min_size=1, max_size=20),
)
def test_an_average_stays_between_what_it_is_made_of(parts: list[tuple[int, int]]) -> None:
    """And is the last value after 16 of it."""
    average = 0.0
    for total, count in parts:
        average = averaged(average, total, count)
    each = [total / count for total, count in parts]
    rounding = 1e-9 * max(each)
    assert min(each) - rounding <= average <= max(each) + rounding
    assert averaged(average, 16 * 7.0, 16) == pytest.approx(7.0)


def test_nothing_is_for_the_cpu_before_the_link_is_measured() -> None:
    """Then one expert, so that it is known what that takes; then the rule holds."""
    split, link, _ = make_split()
    ids = np.arange(8)
    assert split.choose(0, ids) == []
    link.read(300)
    assert len(split.choose(1, ids)) == 1
    split.note_cpu(100, 1)
    assert (split.link_ns, split.cpu_ns) == (300, 100)
    assert len(split.choose(0, ids)) == 6
    # What turned out to be there, or on its way, the CPU does not compute.
    split.note_cpu(400, 4)
    assert (split.num_cpu, split.num_link) == (5, 17)


def test_the_link_takes_what_the_slower_of_its_parts_takes() -> None:
    """Reads and copies go on beside each other."""
    split, link, _ = make_split()
    link.read(100, 4, copied_ns=250)
    split.choose(0, np.arange(4))
    assert split.link_ns == 250
    link.read(900, 16, copied_ns=250)
    split.choose(1, np.arange(4))
    assert split.link_ns == 900


def test_what_is_resident_or_no_expert_is_no_miss() -> None:
    """Repeated ids are one miss."""
    split, link, _ = make_split()
    link.read(100)
    split.choose(0, np.arange(2))
    split.note_cpu(1, 1)
    assert split.choose(1, np.array([[3, 3], [-1, EXPERTS]])) == [3]
    assert split.choose(0, np.array([15, 14])) == []


def test_experts_that_are_used_more_take_the_link() -> None:
    """By counts, where the policy has no values of its own."""
    split, link, cache = make_split()
    for expert in (1, 1, 1, 2, 2, 3):
        use(cache, expert)
    use(cache, 14, 15)
    link.read(100)
    split.choose(0, np.array([9]))
    split.note_cpu(100, 1)
    assert split.choose(0, np.array([1, 2, 3, 4])) == [4, 3]


def test_with_echo_what_will_be_used_again_soon_takes_the_link_in_any_case() -> None:
    """Whatever is faster now: else it would miss for ever."""
    split, link, cache = make_split("echo")
    for token in range(40):
        use(cache, 1, 2 + token % 8, layer=0)
        use(cache, 14, 15, layer=1)
    assert cache.echo is not None
    values = cache.echo.reuse_of(0)
    assert np.array_equal(values, cache.echo.reuse[0])
    assert values[1] > 0.5 > values[2:10].max()
    link.read(10**6)
    split.choose(0, np.array([9]))
    split.note_cpu(1, 1)
    chosen = split.choose(0, np.array([1, 2, 3, 4]))
    assert 1 not in chosen
    assert chosen == sorted([2, 3, 4], key=lambda expert: values[expert])


def test_a_slow_cpu_is_tried_again_after_many_misses() -> None:
    """What it took may have been the first page fault."""
    split, link, _ = make_split()
    link.read(100)
    split.choose(0, np.arange(4))
    split.note_cpu(10**9, 1)
    found = [len(split.choose(0, np.arange(8))) for _ in range(130)]
    assert found.count(1) == 2
    assert sum(found) == 2


def test_a_trial_counts_tokens_and_skips_prompts() -> None:
    """And what is measured while something else is tried, or slots are filled."""
    busy = False
    trial = Trial()
    split, link, _ = make_split(trial=trial, is_busy=lambda: busy)
    link.read(100)
    for layer in (0, 1, 0):
        split.choose(layer, np.arange(2))
    assert trial.calls == ["token", "token"]
    busy = True
    split.choose(0, np.arange(2))
    split.skip()
    assert trial.calls[2:] == ["skip", "skip"]
    trial.on = False
    assert split.choose(1, np.arange(8)) == []
    assert "; off: always on" in split.describe()

    fresh = Trial()
    empty: Any = Link()
    MissSplit(empty, ExpertCache(LAYERS, EXPERTS, 4), fresh).choose(0, np.arange(2))
    assert fresh.calls == ["skip"]


def simulate(trace: Trace, capacity: str, **options: Any) -> Any:
    """Return the timing of a trace whose experts take a millisecond of the link."""
    return simulate_time(
        trace,
        capacity=capacity,
        bandwidth="1GB/s",
        latency_ns=0,
        compute_ns="20us",
        expert_bytes=10**6,
        **options,
    )


def test_where_caches_are_small_the_cpu_takes_its_part() -> None:
    """Of a trace that misses most of the time, as fast a CPU as the link saves a third."""
    trace = random_trace(0, (200, 3, 8), 32)
    off, on = (simulate(trace, "25%", cpu_misses=rate) for rate in (None, "1GB/s"))
    assert off.num_cpu_misses == 0
    assert on.num_cpu_misses > on.num_misses / 4
    assert on.tokens_per_s > 1.3 * off.tokens_per_s
    assert "; on: with it a token takes" in on.cpu_reason
    assert on.num_hits + on.num_misses == off.num_hits + off.num_misses
    assert on.total_ns == on.compute_ns + on.stall_ns


def test_where_it_does_not_pay_it_is_switched_off() -> None:
    """An endlessly slow CPU costs next to nothing in the end."""
    trace = random_trace(0, (200, 3, 8), 32)
    off, on = (simulate(trace, "25%", cpu_misses=rate) for rate in (None, "20MB/s"))
    assert "; off: " in on.cpu_reason
    assert on.num_cpu_misses < on.num_misses / 50
    assert on.tokens_per_s > 0.7 * off.tokens_per_s
