"""Simulated time: a recorded trace through the live code, with reads that take a set time."""

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np

from moecache.study._arguments import total_experts
from moecache.study._machine import (
    DEFAULT_BANDWIDTH,
    DEFAULT_COMPUTE_NS,
    DEFAULT_EXPERT_SHARE,
    Machine,
)
from moecache.study._progress import Progress, Reporter
from moecache.study._simulation import SimulatedHost
from moecache.study.device import DEFAULT_LATENCY_NS
from moecache.telemetry import PrefetchStats
from moecache.traces.trace import Trace
from moecache.units import format_bytes, format_bytes_per_s, format_ns

_AHEAD = ("num_issued", "num_useful", "num_late", "num_wrong", "num_cancelled")


@dataclass(frozen=True, repr=False)
class Timing:
    """How long a trace would have taken, and what it waited for.

    Times are of the simulation's clock. `total_ns` is `compute_ns` and `stall_ns`.

    Attributes
    ----------
    policy, scope, prefetch : str
    capacity, total_experts : int
        Slots, and experts of all layers.
    expert_bytes : int
    bandwidth : float
        Bytes per second of the device.
    latency_ns : int
        Latency of each read.
    num_tokens, num_steps : int
    total_ns : int
        From the first token's first layer to the last one's last.
    compute_ns, stall_ns : int
        While the host computed, and while it had nothing to compute and waited.
    num_stalls : int
        How often it waited.
    stall_p50_ns, stall_p99_ns : float
        Percentiles of the waits; 0.0 if there was none.
    num_hits, num_misses : int
        Distinct experts per step and layer that were there, or were not.
    bytes_read : mapping of str to int
        By cause: "demand", "bulk" (steps of several rows), "prefetch", and "warm_start",
        which is always 0 here.
    link_busy_ns : int
        While the device transferred.
    prefetch_stats : PrefetchStats or None
        The reads ahead and their use; None with prefetch "off".
    """

    policy: str
    scope: str
    prefetch: str
    capacity: int
    total_experts: int
    expert_bytes: int
    bandwidth: float
    latency_ns: int
    num_tokens: int
    num_steps: int
    total_ns: int
    compute_ns: int
    stall_ns: int
    num_stalls: int
    stall_p50_ns: float
    stall_p99_ns: float
    num_hits: int
    num_misses: int
    bytes_read: Mapping[str, int]
    link_busy_ns: int
    prefetch_stats: PrefetchStats | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second; 0.0 if no time passed."""
        return self.num_tokens / (self.total_ns / 1e9) if self.total_ns else 0.0

    @property
    def stall_share(self) -> float:
        """Share of the time that was waited; 0.0 if no time passed."""
        return self.stall_ns / self.total_ns if self.total_ns else 0.0

    @property
    def hit_rate(self) -> float:
        """Hits of all accesses; 0.0 if there were none."""
        accesses = self.num_hits + self.num_misses
        return self.num_hits / accesses if accesses else 0.0

    def figures(self) -> dict[str, Any]:
        """Return all figures by name, for tables: `bytes_read` as bytes_demand and so on.

        An infinite `bandwidth` is None: JSON has no such number.
        """
        row = {field.name: getattr(self, field.name) for field in fields(self)}
        if math.isinf(self.bandwidth):
            row["bandwidth"] = None
        del row["bytes_read"], row["prefetch_stats"]
        stats = self.prefetch_stats
        read = {f"bytes_{cause}": count for cause, count in self.bytes_read.items()}
        rates = ("tokens_per_s", "stall_share", "hit_rate")
        ahead = {f"prefetch_{name}": getattr(stats, name, 0) for name in _AHEAD}
        return {**row, **read, **ahead, **{name: getattr(self, name) for name in rates}}

    def describe(self) -> str:
        """Return the figures as text, a line each."""
        return "\n".join(f"{name:<9} {value}" for name, value in self._facts())

    def __repr__(self) -> str:
        return (
            f"<Timing of {self.policy}, prefetch {self.prefetch}, {self.capacity} of "
            f"{self.total_experts} experts: {self.tokens_per_s:.1f} tokens/s, "
            f"{self.stall_share:.1%} of the time waited>"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in self._facts()
        )
        return f"<table><caption>Timing</caption>{rows}</table>"

    def _facts(self) -> list[tuple[str, str]]:
        slots = f"{self.capacity} of {self.total_experts} experts"
        share = self.capacity / self.total_experts
        busy = self.link_busy_ns / self.total_ns if self.total_ns else 0.0
        size, total = format_bytes(self.expert_bytes), format_ns(self.total_ns)
        rate = format_bytes_per_s(self.bandwidth)
        read = (f"{format_bytes(count)} {cause}" for cause, count in self.bytes_read.items())
        waited = f"{format_ns(self.stall_ns)} ({self.stall_share:.1%}), {self.num_stalls} times"
        if self.num_stalls:
            half, most = format_ns(self.stall_p50_ns), format_ns(self.stall_p99_ns)
            waited += f"; half of them up to {half}, 99 % up to {most}"
        return [
            ("policy", f"{self.policy}, scope {self.scope}, prefetch {self.prefetch}"),
            ("capacity", f"{slots} ({share:.1%}), each {size}"),
            ("device", f"{rate}, latency {format_ns(self.latency_ns)}, busy {busy:.1%}"),
            ("speed", f"{self.tokens_per_s:.4g} tokens/s: {self.num_tokens} in {total}"),
            ("waited", waited),
            ("hit rate", f"{self.hit_rate:.1%}: {self.num_hits} hits, {self.num_misses} misses"),
            ("read", ", ".join(read)),
            *(
                ()
                if self.prefetch_stats is None
                else [("ahead", self.prefetch_stats.describe().replace("\n", ";"))]
            ),
        ]


def simulate_time(
    trace: Trace,
    policy: str = "echo",
    prefetch: str = "off",
    *,
    capacity: float | str = "25%",
    bandwidth: float | str = DEFAULT_BANDWIDTH,
    latency_ns: int | str = DEFAULT_LATENCY_NS,
    compute_ns: int | str = DEFAULT_COMPUTE_NS,
    expert_share: float = DEFAULT_EXPERT_SHARE,
    expert_bytes: int | str | None = None,
    scope: str = "global",
    staging_slots: int | None = None,
    progress: bool | Progress = False,
) -> Timing:
    """Return how long a trace takes on a machine of these figures.

    Runs the code that runs live (`ExpertCache`, `SlotLoader`, `steps.waves`) over
    experts without bytes, under a virtual clock. Per layer the host computes what is
    no expert's work, then the router speaks, then each wave takes its share of the
    experts' work, by pairs. With prefetch "off" it hits and misses what `replay` does.
    docs/study.md says what the model leaves out. Takes some 0.1 ms per layer and step.

    Parameters
    ----------
    trace : Trace
    policy : str, default "echo"
        A name that `ExpertCache` knows.
    prefetch : {"off", "echo", "last", "auto"}
    capacity : int, float or str, default "25%"
        Slots, or a share of all experts, as for `replay`.
    bandwidth : int, float or str, default "25GB/s"
        Bytes per second of the device, infinity for no time at all.
    latency_ns : int or str, default 10,000
        From a read's beginning to its first byte; "80us", at most 10**14. For reads that
        begin together it passes at the same time.
    compute_ns : int or str, default 150,000
        Time of one row's computation in one layer; "150us", at most 10**14. Several rows take as
        much each.
    expert_share : float, default 0.5
        How much of that is the routed experts' work; the rest passes before the router
        of the layer has spoken.
    expert_bytes : int or str, optional
        Bytes of every expert, "6MB", at most 2**50. By default what the trace's metadata says.
    scope : {"global", "layer"}, default "global"
    staging_slots : int, optional
        Slots beside the cache, at most 65,536; by default as many as `moecache.open` makes.
    progress : bool or callable (done, total), default False
        True shows a bar on standard error; told after each step.

    Raises
    ------
    CapacityError
        If there are no slots, or fewer than layers with scope "layer".
    ConfigError
        If an argument cannot be used, or an expert's size is not known.
    """
    machine = Machine.parse(
        trace,
        policy,
        prefetch,
        capacity=capacity,
        bandwidth=bandwidth,
        latency_ns=latency_ns,
        compute_ns=compute_ns,
        expert_share=expert_share,
        expert_bytes=expert_bytes,
        scope=scope,
        staging_slots=staging_slots,
    )
    host = machine.host(trace)
    with Reporter(progress, trace.num_steps, "simulating") as report:
        for done in host.run(trace, machine.compute_ns, machine.expert_share):
            report(done)
    return timing_of(host, machine, trace)


def timing_of(host: SimulatedHost, machine: Machine, trace: Trace, *, other_ns: int = 0) -> Timing:
    """Return a host's times for a trace; in `other_ns` it neither computed nor read."""
    stalls = host.stalls_ns
    profiler = host.cache.profiler
    return Timing(
        policy=machine.policy,
        scope=machine.scope,
        prefetch=machine.prefetch,
        capacity=machine.capacity,
        total_experts=total_experts(trace),
        expert_bytes=machine.expert_bytes,
        bandwidth=machine.bandwidth,
        latency_ns=machine.latency_ns,
        num_tokens=trace.num_tokens,
        num_steps=trace.num_steps,
        total_ns=host.clock.now_ns,
        compute_ns=host.clock.now_ns - sum(stalls) - other_ns,
        stall_ns=sum(stalls),
        num_stalls=len(stalls),
        stall_p50_ns=float(np.percentile(stalls, 50)) if stalls else 0.0,
        stall_p99_ns=float(np.percentile(stalls, 99)) if stalls else 0.0,
        num_hits=profiler.num_hits,
        num_misses=profiler.num_misses,
        bytes_read=MappingProxyType(
            {cause.value: num_bytes for cause, num_bytes in host.loader.counts.bytes_read.items()}
        ),
        link_busy_ns=host.device.busy_ns,
        prefetch_stats=None if host.prefetcher is None else PrefetchStats.of(host.prefetcher),
    )
