"""`moecache simulate --ranks`: recorded routing on several machines and a network."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from rich.console import Console
from rich.table import Table

from moecache.commands.arguments import naming, split
from moecache.commands.paths import printable
from moecache.errors import ConfigError
from moecache.ranks import Placement
from moecache.study._arguments import clip_capacity
from moecache.study.network import NETWORKS, Network
from moecache.study.ranks import (
    DEFAULT_NETWORK,
    DEFAULT_ROW_BYTES,
    MAX_ROW_BYTES,
    RanksTiming,
    check_placement,
    simulate_ranks,
)
from moecache.traces.trace import Trace
from moecache.units import format_bytes, format_bytes_per_s, format_ns, parse_bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of several machines."""
    group = parser.add_argument_group(
        "several machines",
        "Each is a machine as above, with its own memory and disk and a share of the experts. The "
        "capacity is each machine's.",
    )
    group.add_argument(
        "--ranks", metavar="LIST", help="how many machines share the experts: 1,2,4 (default: one)"
    )
    group.add_argument(
        "--network",
        metavar="LIST",
        help=f"between them: {', '.join(NETWORKS)}, or a rate and a latency, 40Gbit/s:5us "
        f"or 1.18GB/s:500us (default: {DEFAULT_NETWORK})",
    )
    group.add_argument(
        "--row-bytes",
        metavar="SIZE",
        help="of one expert's output for one token: hidden size x bytes of a number "
        f"(default: {DEFAULT_ROW_BYTES}, for 2048 x bf16)",
    )
    group.add_argument(
        "--placement",
        metavar="FILE",
        help="which rank owns which expert, from moecache plan-ranks; capacities go by its shares "
        "(default: in turn)",
    )


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse options of several machines where there is one."""
    if arguments.ranks is None:
        for name in ("network", "row_bytes", "placement"):
            if getattr(arguments, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is of several machines; say how many with --ranks"
                )


def cells(
    arguments: argparse.Namespace,
    trace: Trace,
    bandwidths: Sequence[float],
    policies: Sequence[str],
    modes: Sequence[str],
    **figures: Any,
) -> Iterator[Callable[[bool], RanksTiming]]:
    """Yield a function that simulates each combination, once all options are checked.

    Parameters
    ----------
    bandwidths, policies, modes : sequences
    **figures
        Other arguments of `simulate_ranks`.
    """
    placement = None
    if arguments.placement is not None:
        placement = Placement.load(arguments.placement)
    counts = [_count(text) for text in split("--ranks", arguments.ranks)]
    if placement is not None:
        with naming("--placement"):
            for count in counts:
                check_placement(placement, trace, count)
    with naming("--network"):
        named = split("--network", arguments.network or DEFAULT_NETWORK)
        networks = [Network.parse(name) for name in named]
    with naming("--row-bytes"):
        row_bytes = parse_bytes(arguments.row_bytes or DEFAULT_ROW_BYTES)
        if not 1 <= row_bytes <= MAX_ROW_BYTES:
            raise ConfigError(f"must be from 1 to {format_bytes(MAX_ROW_BYTES)}, got {row_bytes}")
    with naming("--ranks"):
        placements = {
            count: placement or Placement.even(trace.num_layers, trace.num_experts, count)
            for count in counts
        }

    def simulation(
        capacity: str, rate: float, policy: str, mode: str, network: Network, count: int
    ) -> Callable[[bool], RanksTiming]:
        with naming("--capacity"):
            slots = clip_capacity(capacity, trace, arguments.scope)
        shares = placements[count].shares * count
        each = [max(1, int(slots * share + 1e-9)) for share in shares]
        return lambda progress: simulate_ranks(
            trace,
            count,
            policy,
            mode,
            network=network,
            row_bytes=row_bytes,
            placement=placements[count],
            capacity=each,
            bandwidth=rate,
            progress=progress,
            **figures,
        )

    capacities = split("--capacity", arguments.capacity)
    for capacity, rate, policy, mode, network, count in product(
        capacities, bandwidths, policies, modes, networks, counts
    ):
        # With one rank there is nothing to send: once is enough.
        if count > 1 or network is networks[0]:
            yield simulation(capacity, rate, policy, mode, network, count)


def print_table(console: Console, name: str, timings: Sequence[RanksTiming]) -> None:
    """Print what several numbers of machines would do, a line each."""
    first, one = timings[0], timings[0].ranks[0]
    console.print(
        f"{printable(name)}, scope {one.scope}: machines with slots of "
        f"{format_bytes(one.expert_bytes)} for some of {one.total_experts} experts, "
        f"at {format_bytes_per_s(one.bandwidth)}, latency {format_ns(one.latency_ns)}; "
        f"rows of {format_bytes(first.row_bytes)}; {one.num_tokens} tokens",
        style="bold",
    )
    for network in dict.fromkeys(timing.network for timing in timings if timing.num_ranks > 1):
        console.print(network.describe())
    rows = [_row(timing) for timing in timings]
    # Values common to all rows stand above: a terminal of 80 columns has no room for them.
    for column in ("policy", "ahead"):
        if len({row[column] for row in rows}) == 1:
            console.print(f"{column} {rows[0][column]}")
            for row in rows:
                del row[column]
    shown = Table()
    for column in rows[0]:
        left = column in {"ranks", "network", "policy", "ahead"}
        shown.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*row.values())
    unlimited = console.options.update(width=1000)
    if console.measure(shown, options=unlimited).maximum > console.width:
        shown.padding = (0, 1, 0, 0)
    console.print(shown)
    console.print(
        "reads, slower ranks, send: shares of the time that a rank waits for its own reads, for "
        "others, for rows on the network; KiB sent: by a rank, per token"
    )


def _row(timing: RanksTiming) -> dict[str, str]:
    first = timing.ranks[0]
    return {
        "ranks": str(timing.num_ranks),
        "network": timing.network.name if timing.num_ranks > 1 else "-",
        "policy": first.policy,
        "ahead": first.prefetch,
        "slots\neach": _range([machine.capacity for machine in timing.ranks]),
        "tokens\nper s": f"{timing.tokens_per_s:.4g}",
        "reads": f"{timing.stall_share:.1%}",
        "slower\nranks": f"{timing.waited_share:.1%}",
        "send": f"{timing.network_share:.1%}",
        "hits": f"{timing.hit_rate:.1%}",
        "KiB\nsent": f"{timing.network_bytes_per_token / 1024:.4g}",
    }


def _range(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least}-{most}"


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        raise ConfigError(f"--ranks: {text!r} is no number of machines; give such as 1,2,4")
    return int(text)
