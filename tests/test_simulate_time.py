"""Simulated time: the hits of a replay, and times that can be reckoned by hand."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache.errors import CapacityError, ConfigError
from moecache.policies.making import SCOPES
from moecache.study import Timing, Trace, replay, simulate_time
from moecache.study._arguments import POLICIES
from moecache.study._machine import PREFETCH_MODES
from tests.helpers.examples import num_examples
from tests.helpers.routing import random_trace, traces

LATENCY_NS, COMPUTE_NS = 100, 1000
NBYTES = 300  # a byte takes a nanosecond


def simulate(trace: Trace, policy: str = "echo", **options: object) -> Timing:
    """Return the timing of a trace on a device of a byte per nanosecond."""
    given: dict[str, object] = {
        "bandwidth": 10**9,
        "latency_ns": LATENCY_NS,
        "compute_ns": COMPUTE_NS,
        "expert_bytes": NBYTES,
    }
    return simulate_time(trace, policy, **{**given, **options})  # type: ignore[arg-type]


def single_misses(num_tokens: int = 7, num_layers: int = 3) -> Trace:
    """Return a trace whose every step misses one of its two experts, with `capacity` below.

    Expert 0 is used by each token; the other one is never used again.
    """
    experts = np.zeros((num_tokens, num_layers, 2), np.int16)
    experts[:, :, 1] = 1 + np.arange(num_tokens)[:, None]
    return Trace(experts, num_experts=num_tokens + 1)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=num_examples(15))
@given(trace=traces(), share=st.floats(0.05, 1))
def test_without_prefetch_it_hits_what_a_replay_hits(
    policy: str, scope: str, trace: Trace, share: float
) -> None:
    """With padding, sequences, steps of several rows, bulk or not; and no time is lost."""
    least = trace.num_layers if scope == "layer" else 1
    capacity = max(least, int(share * trace.num_layers * trace.num_experts))

    timing = simulate(trace, policy, capacity=capacity, scope=scope)

    found = replay(trace, policy, capacity, scope=scope)
    assert (timing.num_hits, timing.num_misses) == (found.num_hits, found.num_misses)
    assert timing.capacity == found.capacity
    assert sum(timing.bytes_read.values()) == found.bytes_moved(NBYTES)
    assert timing.link_busy_ns == found.bytes_moved(NBYTES)
    assert timing.total_ns == timing.compute_ns + timing.stall_ns


def test_a_step_that_misses_one_expert_waits_for_what_its_hit_does_not_hide() -> None:
    """The read passes beside the hit's half of the experts' work.

    A step is 500 ns of the rest, 250 ns of the hit, then what is left of 100 + 300 ns of the
    read, then 250 ns of the miss. The first token misses both: no hit hides anything, but the
    first one's work hides the second one's transfer, up to 250 of 300 ns.
    """
    num_tokens, num_layers = 7, 3
    trace = single_misses(num_tokens, num_layers)

    timing = simulate(trace, "lru", capacity=2 * num_layers + 1)

    first = num_layers * (LATENCY_NS + NBYTES + 50)
    others = (num_tokens - 1) * num_layers * (LATENCY_NS + NBYTES - 250)
    assert timing.stall_ns == first + others
    assert timing.compute_ns == num_tokens * num_layers * COMPUTE_NS
    assert timing.total_ns == timing.compute_ns + timing.stall_ns
    assert timing.num_stalls == 2 * num_layers + (num_tokens - 1) * num_layers
    assert timing.stall_p50_ns == 150
    assert timing.tokens_per_s == pytest.approx(num_tokens / timing.total_ns * 1e9)
    assert timing.stall_share == timing.stall_ns / timing.total_ns


def test_a_read_shorter_than_the_hits_work_costs_nothing() -> None:
    """All of it hides behind what is computed first."""
    num_layers = 3
    timing = simulate(single_misses(7, num_layers), "lru", capacity=7, expert_bytes=150)
    # Only the first token waits, for its first expert of each layer.
    assert timing.stall_ns == num_layers * (LATENCY_NS + 150)


@settings(max_examples=num_examples(30))
@given(trace=traces(), share=st.floats(0.05, 1))
def test_an_infinite_bandwidth_without_latency_never_waits(trace: Trace, share: float) -> None:
    """The time is what the host computes."""
    capacity = max(1, int(share * trace.num_layers * trace.num_experts))

    timing = simulate(trace, capacity=capacity, bandwidth=math.inf, latency_ns=0)

    assert (timing.stall_ns, timing.num_stalls, timing.link_busy_ns) == (0, 0, 0)
    visits = int((trace.experts >= 0).any(2).sum())
    assert timing.total_ns <= trace.num_tokens * trace.num_layers * COMPUTE_NS
    assert timing.total_ns >= visits * COMPUTE_NS


@settings(max_examples=num_examples(30))
@given(trace=traces(bulk=False))
def test_with_nothing_to_compute_the_time_is_the_transfers(trace: Trace) -> None:
    """And a latency for each step that misses."""
    total = trace.num_layers * trace.num_experts
    found = replay(trace, "lru", total)

    timing = simulate(trace, "lru", capacity=total, compute_ns=0)

    assert timing.compute_ns == 0
    num_waiting = np.count_nonzero(found.misses)
    assert timing.total_ns == found.num_misses * NBYTES + num_waiting * LATENCY_NS


def test_rows_of_a_step_compute_one_after_the_other() -> None:
    """Two rows take twice what one takes; a layer without experts takes the rest alone."""
    experts = [[[0, 1], [-1, -1]], [[0, 1], [-1, -1]]]
    trace = Trace(experts, num_experts=4, step=[0, 0])

    timing = simulate(trace, capacity="100%", expert_share=0.25)

    assert timing.num_steps == 1
    assert timing.compute_ns == 2 * (COMPUTE_NS + 750)
    assert timing.bytes_read == {"demand": 0, "bulk": 2 * NBYTES, "prefetch": 0, "warm_start": 0}


def test_a_slower_link_and_a_smaller_cache_take_longer() -> None:
    """And the same figures the same time."""
    trace = random_trace()
    timing = simulate(trace, capacity="25%")
    assert simulate(trace, capacity="25%", bandwidth=10**8).total_ns > timing.total_ns
    assert simulate(trace, capacity="10%").total_ns > timing.total_ns
    assert simulate(trace, capacity="25%") == timing


def test_figures_have_units() -> None:
    """As the command line has them; the trace may say how large an expert is."""
    trace = Trace(single_misses().experts, num_experts=8, expert_bytes=NBYTES)
    timing = simulate_time(
        trace, "lru", capacity=9, bandwidth="1GB/s", latency_ns="0.1us", compute_ns="1us"
    )
    assert timing == simulate(single_misses(), "lru", capacity=9)


def test_it_tells_how_far_it_is() -> None:
    """After each step."""
    told: list[tuple[int, int]] = []
    simulate(single_misses(3), capacity=9, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_an_empty_trace_takes_no_time() -> None:
    """And no rate is divided by it."""
    trace = Trace(np.zeros((0, 2, 1), np.int16), num_experts=4)
    timing = simulate(trace, capacity=4)
    assert (timing.total_ns, timing.tokens_per_s, timing.stall_share, timing.hit_rate) == (0,) * 4
    assert "0 times" in timing.describe()


def test_the_text_has_the_figures() -> None:
    """One line each, and as a table for notebooks."""
    timing = simulate(single_misses(), "lru", capacity=7, compute_ns=10**6, bandwidth=10**7)
    assert "policy    lru, scope global, prefetch off" in timing.describe()
    assert "device    10 MB/s, latency 100 ns" in timing.describe()
    assert f"hit rate  42.9%: {timing.num_hits} hits" in timing.describe()
    assert "capacity  7 of 24 experts (29.2%), each 300 B" in timing.describe()
    assert "<caption>Timing</caption>" in timing._repr_html_()
    assert repr(timing).startswith("<Timing of lru, prefetch off, 7 of 24 experts: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "belady"}, "policy 'belady' is not one of arc"),
        ({"prefetch": "psychic"}, "prefetch 'psychic' is not one of off"),
        ({"expert_share": 1.5}, r"expert_share must be in \[0, 1\], got 1.5"),
        ({"expert_share": "x"}, r"expert_share must be in \[0, 1\], got 'x'"),
        ({"expert_share": math.nan}, r"expert_share must be in \[0, 1\], got nan"),
        ({"staging_slots": 0}, "staging_slots must be an int from 1 to 65,536, got 0"),
        ({"staging_slots": 10**12}, "staging_slots must be an int from 1 to 65,536, got 1000"),
        ({"staging_slots": 1.5}, "staging_slots must be an int from 1 to 65,536, got 1.5"),
        ({"expert_bytes": None}, "does not say how large an expert is"),
        ({"expert_bytes": 10**30}, r"expert_bytes must be from 1 to 2\*\*50 \(1.00 PiB\), got 1"),
        ({"expert_bytes": "lots"}, "expert_bytes: 'lots' is not a size"),
        ({"bandwidth": "25 parsecs"}, "bandwidth: '25 parsecs' is no rate"),
        ({"bandwidth": 1, "expert_bytes": 2**50}, r"bandwidth must be at least 11.3 GB/s for exp"),
        ({"latency_ns": "soon"}, "latency_ns: 'soon' is not a time"),
        ({"latency_ns": 1.5}, "latency_ns: 1.5 is not a time"),
        ({"latency_ns": 10**40}, r"latency_ns must be from 0 to 10\*\*14 \(100,000 s\), got 1"),
        ({"compute_ns": 10**40}, r"compute_ns must be from 0 to 10\*\*14 \(100,000 s\), got 1"),
        ({"compute_ns": 10**5000}, r"compute_ns must be from 0 to .* got an endless number"),
        ({"compute_ns": -5}, "compute_ns: a time cannot be negative, got -5 ns"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, object], message: str) -> None:
    """With what they may be."""
    with pytest.raises(ConfigError, match=message):
        simulate(single_misses(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefetch", PREFETCH_MODES)
def test_the_longest_times_are_counted(prefetch: str) -> None:
    """Nothing overflows at the bounds."""
    options = {"latency_ns": 10**14, "compute_ns": 10**14, "expert_bytes": 2**50}
    timing = simulate(single_misses(), bandwidth=11_258_999_069, prefetch=prefetch, **options)
    assert timing.total_ns == timing.compute_ns + timing.stall_ns
    assert timing.stall_p99_ns >= 10**14


def test_figures_of_an_infinite_bandwidth_are_json() -> None:
    """Which has no infinity."""
    figures = simulate(single_misses(), bandwidth=math.inf).figures()
    assert json.loads(json.dumps(figures, allow_nan=False))["bandwidth"] is None


def test_too_few_slots_are_refused_as_by_a_replay() -> None:
    """One for each layer, with scope "layer"."""
    with pytest.raises(CapacityError, match="at least 3"):
        simulate(single_misses(), capacity=2, scope="layer")
