"""`moecache simulate`: how long recorded routing would take on a machine of given figures."""

import argparse
import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, product
from typing import Any

from rich.console import Console
from rich.table import Table

from moecache.commands.arguments import (
    TRACES_HELP,
    add_force,
    add_option,
    check_outputs,
    choose,
    load_traces,
    naming,
    split,
)
from moecache.commands.paths import printable
from moecache.commands.simulate_ranks import add_options, cells, check_options, print_table
from moecache.errors import ConfigError
from moecache.files import Kind, write_whole
from moecache.settings import DEFAULT_POLICY, DEFAULT_SCOPE
from moecache.study._arguments import POLICIES, clip_capacity
from moecache.study._machine import (
    DEFAULT_BANDWIDTH,
    DEFAULT_COMPUTE_NS,
    DEFAULT_EXPERT_SHARE,
    PREFETCH_MODES,
)
from moecache.study.advice import expert_size
from moecache.study.device import DEFAULT_LATENCY_NS
from moecache.study.ranks import RanksTiming
from moecache.study.timing import Timing, simulate_time
from moecache.traces.trace import Trace
from moecache.units import format_bytes, format_bytes_per_s, format_ns, parse_bytes_per_s, parse_ns

_DEFAULT_CAPACITY = "25%"
_CSV_FILE = Kind(
    "a table of simulations",
    lambda data: data.startswith(b"trace,") and b"tokens_per_s" in data.partition(b"\n")[0],
)


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "simulate",
        help="estimate tokens per second on recorded routing",
        description="Put routing traces through the cache and the loader with reads that take a "
        "set time, and show tokens per second and what was waited for. Nothing is read and nothing "
        "waits: the clock is simulated. With --ranks, on several machines and the network between "
        "them. docs/study.md and docs/scale.md say what the model leaves out.",
        epilog="examples: moecache simulate examples/traces/tiny_moe.npz --compute 5us | "
        "moecache simulate run.npz --expert-bytes 6MB --bandwidth 25GB/s,2.5GB/s | "
        "moecache simulate run.npz --policy lru,echo --capacity 10%,25% --csv times.csv | "
        "moecache simulate run.npz --ranks 1,2,4 --network 1GbE,10GbE --prefetch off",
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help=TRACES_HELP)
    add_option(parser, "prefetch", names=PREFETCH_MODES, instead="all")
    add_option(parser, "policy", names=POLICIES)
    add_option(parser, "scope", default=DEFAULT_SCOPE)
    parser.add_argument(
        "--capacity",
        metavar="LIST",
        default=_DEFAULT_CAPACITY,
        help="slots, or shares of all experts: 64,25%%,0.25 (default: 25%%)",
    )
    parser.add_argument(
        "--expert-bytes",
        metavar="SIZE",
        help="bytes of an expert, 6MB (default: what the trace says)",
    )
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--bandwidth",
        metavar="LIST",
        default=DEFAULT_BANDWIDTH,
        help=f"of the device that experts are read from (default: {DEFAULT_BANDWIDTH})",
    )
    machine.add_argument(
        "--latency",
        metavar="TIME",
        default=f"{DEFAULT_LATENCY_NS // 1000}us",
        help="from a read's beginning to its first byte (default: %(default)s)",
    )
    machine.add_argument(
        "--compute",
        metavar="TIME",
        default=f"{DEFAULT_COMPUTE_NS // 1000}us",
        help="what a layer computes for a token (default: %(default)s)",
    )
    machine.add_argument(
        "--expert-share",
        type=float,
        metavar="SHARE",
        default=DEFAULT_EXPERT_SHARE,
        help="how much of that is the routed experts' (default: %(default)s)",
    )
    add_options(parser)
    shown = parser.add_argument_group("output")
    shown.add_argument("--json", action="store_true", help="all figures, instead of the table")
    shown.add_argument("--csv", metavar="FILE", help="write all figures there, too")
    add_force(shown)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Simulate, show, write; return the exit code."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    check_outputs(arguments, dict.fromkeys(arguments.traces, "the trace"), csv=_CSV_FILE)
    check_options(arguments)
    todo = list(_cells(arguments))
    progress = Console(stderr=True).is_terminal
    found = [(name, simulate(progress)) for name, simulate in todo]
    rows = [{"trace": name, **timing.figures()} for name, timing in found]
    if arguments.json:
        console.print(json.dumps(rows, indent=1, allow_nan=False))
    else:
        for (name, *_), group in groupby(found, key=_place):
            timings = [timing for _, timing in group]
            alone = [timing for timing in timings if isinstance(timing, Timing)]
            several = [timing for timing in timings if isinstance(timing, RanksTiming)]
            if alone:
                _print_table(console, name, alone)
            if several:
                print_table(console, name, several)
    if arguments.csv:
        # A line has no room for each rank's figures.
        lists = {key for key, value in rows[0].items() if isinstance(value, list)}
        rows = [{key: row[key] for key in row if key not in lists} for row in rows]
        _write_csv(arguments.csv, rows, force=arguments.force)
    return 0


def _cells(
    arguments: argparse.Namespace,
) -> Iterator[tuple[str, Callable[[bool], Timing | RanksTiming]]]:
    """Yield a trace's name and the function that simulates it, once all options are checked."""
    policies = choose("policy", arguments.policy, POLICIES, (DEFAULT_POLICY,))
    modes = choose("prefetch", arguments.prefetch, PREFETCH_MODES, PREFETCH_MODES)
    bandwidths = split("--bandwidth", arguments.bandwidth)
    with naming("--bandwidth"):
        rates = [parse_bytes_per_s(text) for text in bandwidths]
    with naming("--latency"):
        latency_ns = parse_ns(arguments.latency)
    with naming("--compute"):
        compute_ns = parse_ns(arguments.compute)
    if not 0 <= arguments.expert_share <= 1:
        raise ConfigError(f"--expert-share must be in [0, 1], got {arguments.expert_share}")
    capacities = split("--capacity", arguments.capacity)

    def simulation(
        trace: Trace, capacity: int, rate: float, policy: str, mode: str, nbytes: int
    ) -> Callable[[bool], Timing]:
        return lambda progress: simulate_time(
            trace,
            policy,
            mode,
            capacity=capacity,
            bandwidth=rate,
            latency_ns=latency_ns,
            compute_ns=compute_ns,
            expert_share=arguments.expert_share,
            expert_bytes=nbytes,
            scope=arguments.scope,
            progress=progress,
        )

    for name, trace in load_traces(arguments.traces).items():
        with naming("--expert-bytes"):
            nbytes = expert_size(trace, arguments.expert_bytes)
        with naming("--capacity"):
            slots = [clip_capacity(text, trace, arguments.scope) for text in capacities]
        if arguments.ranks is not None:
            for one in cells(
                arguments,
                trace,
                rates,
                policies,
                modes,
                latency_ns=latency_ns,
                compute_ns=compute_ns,
                expert_share=arguments.expert_share,
                expert_bytes=nbytes,
                scope=arguments.scope,
            ):
                yield name, one
            continue
        for capacity, rate, policy, mode in product(slots, rates, policies, modes):
            yield name, simulation(trace, capacity, rate, policy, mode, nbytes)


def _place(cell: tuple[str, Timing | RanksTiming]) -> tuple[str, int, float]:
    """Return what the rows of a table have in common."""
    name, timing = cell
    if isinstance(timing, RanksTiming):
        # Ranks with less than they have room for differ in slots: those are in the rows.
        return name, 0, timing.ranks[0].bandwidth
    return name, timing.capacity, timing.bandwidth


def _print_table(console: Console, name: str, timings: Sequence[Timing]) -> None:
    first = timings[0]
    console.print(
        f"{printable(name)}, scope {first.scope}: {first.capacity} slots "
        f"({first.capacity / first.total_experts:.1%}) of {format_bytes(first.expert_bytes)} "
        f"at {format_bytes_per_s(first.bandwidth)}, latency {format_ns(first.latency_ns)}, "
        f"{format_ns(first.compute_ns)} of computing for {first.num_tokens} tokens; "
        "bytes per token",
        style="bold",
    )
    shown = Table()
    for column in ("policy", "ahead"):
        shown.add_column(column, no_wrap=True)
    for column in ("tokens\nper s", "waited", "of off", "hits"):
        shown.add_column(column, justify="right", no_wrap=True)
    causes = [cause for cause in first.bytes_read if any(one.bytes_read[cause] for one in timings)]
    for cause in causes:
        short = "ahead" if cause == "prefetch" else cause
        shown.add_column(f"{short}\nMiB", justify="right", no_wrap=True)
    without = {timing.policy: timing.stall_ns for timing in timings if timing.prefetch == "off"}
    for timing in timings:
        off_ns = without.get(timing.policy)
        shown.add_row(
            timing.policy,
            timing.prefetch,
            _short(timing.tokens_per_s),
            f"{timing.stall_share:.1%}",
            f"{timing.stall_ns / off_ns:.1%}" if off_ns else "-",
            f"{timing.hit_rate:.1%}",
            *(
                _short(timing.bytes_read[cause] / 2**20 / max(1, timing.num_tokens))
                for cause in causes
            ),
        )
    unlimited = console.options.update(width=1000)
    if console.measure(shown, options=unlimited).maximum > console.width:
        shown.padding = (0, 1, 0, 0)
    console.print(shown)


def _short(figure: float) -> str:
    """Return three digits of a figure, without an exponent or more than four decimals."""
    if figure >= 100:
        return f"{figure:.0f}"
    return f"{figure:.{4 if figure < 0.1 else 3 if figure < 1 else 2 if figure < 10 else 1}f}"


def _write_csv(path: str, rows: Sequence[dict[str, Any]], *, force: bool) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    data = text.getvalue().encode(errors="backslashreplace")
    write_whole(path, data, _CSV_FILE, force=force)
