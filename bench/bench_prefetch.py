"""What each mode of prefetching saves on synthetic routing, and what simulating it costs.

On recorded routing: `python -m bench.prefetch_time`.
"""

import time

import pytest

from bench.conftest import Table
from bench.prefetch_time import BANDWIDTHS, simulate
from bench.traces import NUM_EXPERTS, routing_trace
from moecache.study import Trace
from moecache.units import format_bytes_per_s, format_ns


@pytest.mark.benchmark(group="prefetch")
def test_prefetch(small: bool, table: Table) -> None:
    """Every mode hits or waits for each access; the times are of a simulated machine."""
    trace = Trace(routing_trace(4 if small else 200), num_experts=NUM_EXPERTS)
    lines = [f"{'':10} {'mode':6} {'tokens/s':>9} {'waited':>9} {'of off':>7} {'hit rate':>9}"]
    started = time.perf_counter()
    num_simulated = 0
    for bandwidth in BANDWIDTHS:
        modes = simulate({"synthetic": trace}, bandwidth)["synthetic"]
        for mode, timing in modes.items():
            assert timing.total_ns == timing.compute_ns + timing.stall_ns
            assert timing.num_hits + timing.num_misses == trace.experts.size
            lines.append(
                f"{format_bytes_per_s(bandwidth):10} {mode:6} {timing.tokens_per_s:9.2f} "
                f"{format_ns(timing.stall_ns):>9} "
                f"{timing.stall_ns / modes['off'].stall_ns:7.3f} {timing.hit_rate:9.4f}"
            )
            num_simulated += 1
    visits = num_simulated * trace.num_tokens * trace.num_layers
    each_us = 1e6 * (time.perf_counter() - started) / visits
    lines.append(f"simulated at {each_us:.0f} us per layer and token")
    table("prefetch, simulated: 25 % of the experts, 6 MB each, 150 us of computing a layer", lines)
