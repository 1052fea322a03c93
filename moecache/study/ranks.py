"""Simulated time on several machines: each computes the experts it has, all wait for all rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moecache.errors import ConfigError
from moecache.ranks import Placement
from moecache.study._machine import (
    DEFAULT_BANDWIDTH,
    DEFAULT_COMPUTE_NS,
    DEFAULT_EXPERT_SHARE,
    Machine,
    parse,
    shown,
)
from moecache.study._progress import Progress, Reporter
from moecache.study.device import DEFAULT_LATENCY_NS
from moecache.study.network import Network
from moecache.study.replay import step_bounds
from moecache.study.timing import Timing, timing_of
from moecache.traces.trace import Trace
from moecache.units import format_bytes, format_ns, parse_bytes

DEFAULT_NETWORK = "10GbE"
DEFAULT_ROW_BYTES = 4096
# The header of a message of rows, and of the comparison before each step.
HEADER_BYTES = 16
AGREE_BYTES = 24
MAX_ROW_BYTES = 2**30


@dataclass(frozen=True, repr=False)
class RanksTiming:
    """How long a trace would have taken on several ranks.

    Attributes
    ----------
    ranks : tuple of Timing
        Times of each rank: for computing, reading and waiting for its own experts. All have the
        same `total_ns`; the rest beside computing and stall is `network_ns` and its `waited_ns`.
    network : Network
    row_bytes : int
        Bytes of one row, the output of one expert for one token.
    network_ns : int
        While rows were sent: the same for all ranks.
    waited_ns : tuple of int
        How long each rank waited until the slowest was ready to send.
    network_bytes : int
        Bytes that all ranks sent together.
    """

    ranks: tuple[Timing, ...]
    network: Network
    row_bytes: int
    network_ns: int
    waited_ns: tuple[int, ...]
    network_bytes: int

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def total_ns(self) -> int:
        """From the first token's first layer to the last one's last."""
        return self.ranks[0].total_ns

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second; 0.0 if no time passed."""
        return self.ranks[0].tokens_per_s

    @property
    def network_share(self) -> float:
        """Share of the time in which rows were sent; 0.0 if no time passed."""
        return self.network_ns / self.total_ns if self.total_ns else 0.0

    @property
    def waited_share(self) -> float:
        """Share of the time that a rank waited for slower ones, on average."""
        return float(np.mean(self.waited_ns)) / self.total_ns if self.total_ns else 0.0

    @property
    def stall_share(self) -> float:
        """Share of the time that a rank waited for its own reads, on average."""
        return float(np.mean([one.stall_share for one in self.ranks]))

    @property
    def hit_rate(self) -> float:
        """Hits of all accesses of all ranks; 0.0 if there were none."""
        hits = sum(one.num_hits for one in self.ranks)
        accesses = hits + sum(one.num_misses for one in self.ranks)
        return hits / accesses if accesses else 0.0

    @property
    def num_bytes_read(self) -> int:
        """Bytes read by all ranks."""
        return sum(sum(one.bytes_read.values()) for one in self.ranks)

    @property
    def network_bytes_per_token(self) -> float:
        """Bytes that a rank sends per token, on average; 0.0 if there are no tokens."""
        tokens = self.ranks[0].num_tokens
        return self.network_bytes / self.num_ranks / tokens if tokens else 0.0

    def figures(self) -> dict[str, Any]:
        """Return all figures by name, for tables; `ranks` has those of each rank."""
        own = ("num_ranks", "tokens_per_s", "total_ns", "row_bytes", "network_ns")
        rates = ("network_share", "waited_share", "stall_share", "hit_rate")
        read = ("network_bytes", "network_bytes_per_token", "num_bytes_read")
        first = self.ranks[0]
        same = ("policy", "scope", "prefetch", "total_experts", "expert_bytes", "num_tokens")
        return {
            **{name: getattr(first, name) for name in same},
            "capacity": max(one.capacity for one in self.ranks),
            **{name: getattr(self, name) for name in (*own, *rates, *read)},
            "network": self.network.name,
            "network_bandwidth": self.network.bandwidth,
            "network_latency_ns": self.network.latency_ns,
            "waited_ns": list(self.waited_ns),
            "ranks": [one.figures() for one in self.ranks],
        }

    def describe(self) -> str:
        """Return the figures as text, a line each, and a line for each rank."""
        first = self.ranks[0]
        total = format_ns(self.total_ns)
        sent = format_bytes(self.network_bytes_per_token)
        facts = [
            ("policy", f"{first.policy}, scope {first.scope}, prefetch {first.prefetch}"),
            ("ranks", f"{self.num_ranks}, on {self.network.describe()}"),
            ("speed", f"{self.tokens_per_s:.4g} tokens/s: {first.num_tokens} in {total}"),
            ("network", f"{self.network_share:.1%}, a rank sends {sent} per token"),
            ("hit rate", f"{self.hit_rate:.1%} of all ranks' accesses"),
        ]
        for rank, (one, waited) in enumerate(zip(self.ranks, self.waited_ns, strict=True)):
            share = waited / self.total_ns if self.total_ns else 0.0
            waits = f"waits {one.stall_share:.1%} for reads, {share:.1%} for slower ranks"
            facts.append(
                (f"rank {rank}", f"{one.capacity} slots, {one.hit_rate:.1%} hits, {waits}")
            )
        return "\n".join(f"{name:<9} {value}" for name, value in facts)

    def __repr__(self) -> str:
        return (
            f"<RanksTiming of {self.num_ranks} ranks on {self.network.name}: "
            f"{self.tokens_per_s:.1f} tokens/s, {self.network_share:.1%} of the time on the "
            "network>"
        )


def simulate_ranks(
    trace: Trace,
    num_ranks: int,
    policy: str = "echo",
    prefetch: str = "off",
    *,
    network: str | Network = DEFAULT_NETWORK,
    row_bytes: int | str = DEFAULT_ROW_BYTES,
    placement: Placement | None = None,
    capacity: float | str | Sequence[float | str] = "25%",
    bandwidth: float | str | Sequence[float | str] = DEFAULT_BANDWIDTH,
    latency_ns: int | str | Sequence[int | str] = DEFAULT_LATENCY_NS,
    compute_ns: int | str | Sequence[int | str] = DEFAULT_COMPUTE_NS,
    expert_share: float = DEFAULT_EXPERT_SHARE,
    expert_bytes: int | str | None = None,
    scope: str = "global",
    staging_slots: int | None = None,
    progress: bool | Progress = False,
) -> RanksTiming:
    """Return how long a trace takes on several machines, each with a share of the experts.

    Each rank is a machine as `simulate_time` has it, with a cache, a loader and a clock of its
    own. In a layer each computes what is no expert's work (for all rows, as each rank does), and
    its own pairs. When the slowest is done, each sends its rows to all others (`Network`), and
    the next layer begins. Before each step the ranks compare their tokens. With one rank nothing
    is sent, and its timing is that of `simulate_time`. Takes some 0.1 ms per rank, layer and step.

    Parameters
    ----------
    trace : Trace
    num_ranks : int
    policy, prefetch : str
        As for `simulate_time`.
    network : str or Network, default "10GbE"
        As `Network.parse` takes it.
    row_bytes : int or str, default 4,096
        Bytes of one expert's output for one token: the hidden size, times the bytes of a
        number.
    placement : Placement, optional
        By default `Placement.even`.
    capacity, bandwidth, latency_ns, compute_ns : as for `simulate_time`, or a list for each rank
        Figures of one machine. Shares of the capacity are of all experts. A rank has no more
        slots than experts.
    expert_share, expert_bytes, scope, staging_slots, progress
        As for `simulate_time`.

    Raises
    ------
    CapacityError
        If a rank has no slots, or fewer than layers with scope "layer".
    ConfigError
        If an argument cannot be used, or an expert's size is not known.
    """
    if placement is None:
        placement = Placement.even(trace.num_layers, trace.num_experts, num_ranks)
    check_placement(placement, trace, num_ranks)
    link = Network.parse(network)
    row = parse("row_bytes", parse_bytes, row_bytes)
    if not 1 <= row <= MAX_ROW_BYTES:
        raise ConfigError(f"row_bytes must be from 1 to {MAX_ROW_BYTES:,}, got {shown(row_bytes)}")
    slots = _for_ranks("capacity", capacity, num_ranks)
    rates = _for_ranks("bandwidth", bandwidth, num_ranks)
    latencies = _for_ranks("latency_ns", latency_ns, num_ranks)
    times = _for_ranks("compute_ns", compute_ns, num_ranks)
    held = placement.num_held().sum(1).tolist()
    machines = [
        Machine.parse(
            trace,
            policy,
            prefetch,
            capacity=slots[rank],
            bandwidth=rates[rank],
            latency_ns=latencies[rank],
            compute_ns=times[rank],
            expert_share=expert_share,
            expert_bytes=expert_bytes,
            scope=scope,
            staging_slots=staging_slots,
            max_slots=max(held[rank], trace.num_layers),
        )
        for rank in range(num_ranks)
    ]
    run = _Run(trace, machines, placement, link, row)
    with Reporter(progress, trace.num_steps, "simulating") as report:
        run.all(report)
    return run.timing()


class _Run:
    """All ranks in step: the work of each, and their waits for each other."""

    def __init__(
        self,
        trace: Trace,
        machines: Sequence[Machine],
        placement: Placement,
        network: Network,
        row_bytes: int,
    ) -> None:
        self._trace = trace
        self._machines = machines
        self._network = network
        self._row_bytes = row_bytes
        self._hosts = [machine.host(trace) for machine in machines]
        self._ranks = pair_ranks(trace, placement)
        self._network_ns = self._network_bytes = 0
        self._waited_ns = [0] * len(machines)

    def all(self, report: Reporter) -> None:
        """Compute all steps."""
        trace, hosts = self._trace, self._hosts
        sent = self._num_sent()
        generators = [
            host.layers(trace, machine.compute_ns, machine.expert_share, self._ranks == rank)
            for rank, (host, machine) in enumerate(zip(hosts, self._machines, strict=True))
        ]
        before = -1
        for done in zip(*generators, strict=True):
            step, layer = done[0]
            if len(hosts) > 1 and step > before:
                # Ranks compare their tokens once a step; it may as well be at its first layer.
                self._gather([AGREE_BYTES] * len(hosts))
                before = step
            if len(hosts) > 1 and sent[step, layer].any():
                self._gather((sent[step, layer] * self._row_bytes + HEADER_BYTES).tolist())
            if layer == trace.num_layers - 1:
                report(step + 1)

    def timing(self) -> RanksTiming:
        """Return what it took."""
        ranks = tuple(
            timing_of(host, machine, self._trace, other_ns=self._network_ns + waited)
            for host, machine, waited in zip(
                self._hosts, self._machines, self._waited_ns, strict=True
            )
        )
        return RanksTiming(
            ranks=ranks,
            network=self._network,
            row_bytes=self._row_bytes,
            network_ns=self._network_ns,
            waited_ns=tuple(self._waited_ns),
            network_bytes=self._network_bytes,
        )

    def _gather(self, parts: list[int]) -> None:
        ready_ns = max(host.clock.now_ns for host in self._hosts)
        taken_ns = self._network.gather_ns(parts)
        for rank, host in enumerate(self._hosts):
            self._waited_ns[rank] += ready_ns - host.clock.now_ns
            # Reads under way go on meanwhile.
            host.clock.advance(ready_ns + taken_ns - host.clock.now_ns)
        self._network_ns += taken_ns
        self._network_bytes += (len(parts) - 1) * sum(parts)

    def _num_sent(self) -> np.ndarray:
        """Return the rows that each rank computes: int64 [steps, layers, ranks]."""
        starts = step_bounds(self._trace)[:-1]
        pairs = np.stack(
            [np.count_nonzero(self._ranks == rank, axis=2) for rank in range(len(self._hosts))],
            axis=2,
        )
        return np.add.reduceat(pairs, starts, axis=0) if len(starts) else pairs


def pair_ranks(trace: Trace, placement: Placement) -> np.ndarray:
    """Return which rank computes each pair of a trace; -1 for padding.

    Returns
    -------
    ndarray of int32, shape [num_tokens, num_layers, top_k]
    """
    layers = np.arange(trace.num_layers)[None, :, None]
    ranks = np.where(trace.experts >= 0, placement.owners[layers, trace.experts], -1)
    return ranks.astype(np.int32, copy=False)


def _for_ranks(name: str, value: Any, num_ranks: int) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * num_ranks
    if len(value) != num_ranks:
        raise ConfigError(f"{name} has {len(value)} entries, for {num_ranks} ranks; give one each")
    return list(value)


def check_placement(placement: Placement, trace: Trace, num_ranks: int) -> None:
    """Raise a ConfigError for a placement that is not of the trace's model, or other ranks."""
    wanted = (num_ranks, trace.num_layers, trace.num_experts)
    found = (placement.num_ranks, placement.num_layers, placement.num_experts)
    if wanted != found:
        raise ConfigError(
            f"the placement is of {found[1]} x {found[2]} experts on {found[0]} ranks, and the "
            f"trace of {wanted[1]} x {wanted[2]} experts is simulated on {wanted[0]}; make one for "
            "it with moecache plan-ranks"
        )
