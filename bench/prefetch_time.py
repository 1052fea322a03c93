"""What each mode of prefetching saves of the time that is waited, by simulation.

Puts the traces of a folder, by default ../shared/traces beside the checkout, through
`moecache.study.simulate_time`: a quarter of all experts in memory, 6 MB each, 25 GB/s,
150 us of computing per layer; then a tenth of that bandwidth. Tables show the time that is waited,
beside that of "off". "auto" may nowhere wait more than 2 % longer than "off", nor take more than
1 % longer in all.

    python -m bench.prefetch_time [--traces DIR] [--policy NAME] [--json OUT]
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.hit_rates import NAMES, TRACES, load
from bench.machine import describe_machine
from moecache.study import Timing, Trace, simulate_time
from moecache.study._machine import PREFETCH_MODES
from moecache.units import format_bytes_per_s, format_ns

EXPERT_BYTES = "6MB"
CAPACITY = "25%"
BANDWIDTHS = (25 * 10**9, 2_500_000_000)
LATENCY_NS = 10_000
COMPUTE_NS = 150_000
# What "auto" may take more than "off": of the time waited, and of all time.
TOLERANCES = {"stall_ns": 0.02, "total_ns": 0.01}

Timings = dict[str, dict[str, Timing]]  # by trace and mode


def simulate(traces: Mapping[str, Trace], bandwidth: float, policy: str = "echo") -> Timings:
    """Return the timing of each trace with each mode."""
    return {
        name: {
            mode: simulate_time(
                trace,
                policy,
                mode,
                capacity=CAPACITY,
                bandwidth=bandwidth,
                latency_ns=LATENCY_NS,
                compute_ns=COMPUTE_NS,
                expert_bytes=EXPERT_BYTES,
            )
            for mode in PREFETCH_MODES
        }
        for name, trace in traces.items()
    }


def compare(times: Mapping[str, Mapping[str, int]], what: str, where: str) -> list[str]:
    """Return where "auto" costs more than it may, from nanoseconds by trace and mode."""
    return [
        f"auto at {where} on {name}: {modes['auto'] / modes['off']:.3f} of off's {what}"
        for name, modes in times.items()
        if modes.get("auto", 0) > (1 + TOLERANCES[what]) * modes["off"]
    ]


def table_of(timings: Timings, where: str) -> Table:
    """Return stalls by trace and mode: seconds for "off", shares of it for the others."""
    table = Table("trace", "hit rate", "tokens/s", title=f"time waited at {where}")
    for mode in PREFETCH_MODES:
        table.add_column(mode, justify="right")
    for name, modes in timings.items():
        off = modes["off"]
        cells = [
            f"{modes[mode].stall_ns / off.stall_ns:.3f}" for mode in PREFETCH_MODES if mode != "off"
        ]
        waited = f"{format_ns(off.stall_ns)} of {format_ns(off.total_ns)}"
        table.add_row(name, f"{off.hit_rate:.3f}", f"{off.tokens_per_s:.1f}", waited, *cells)
    return table


def main(argv: list[str] | None = None) -> int:
    """Print the tables; return 1 if "auto" costs more than it may."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR")
    parser.add_argument("--policy", default="echo", metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures there")
    arguments = parser.parse_args(argv)
    console = Console(width=140, highlight=False)
    console.print(describe_machine())
    if not all((arguments.traces / f"{name}.npz").is_file() for name in NAMES):
        console.print(f"skipped: the traces are not in {arguments.traces}; --traces says where")
        return 0
    traces = {name: load(arguments.traces, name) for name in NAMES}
    results: dict[str, object] = {"machine": describe_machine()}
    missed = []
    for bandwidth in BANDWIDTHS:
        where = format_bytes_per_s(bandwidth)
        timings = simulate(traces, bandwidth, arguments.policy)
        console.print(table_of(timings, where))
        results[where] = {
            name: {mode: timing.figures() for mode, timing in modes.items()}
            for name, modes in timings.items()
        }
        for what in TOLERANCES:
            times = {
                name: {mode: getattr(timing, what) for mode, timing in modes.items()}
                for name, modes in timings.items()
            }
            missed += compare(times, what, where)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    for line in missed:
        console.print(f"[red]missed[/] {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
