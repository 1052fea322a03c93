"""Figures of the live view: those of a runtime here, or of one that serves its metrics."""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, TypeVar

from moecache.cache._profiler import stall_bucket_ns
from moecache.commands.paths import printable
from moecache.telemetry import RuntimeStats

Key = TypeVar("Key", int, str)


class Metric(Protocol):
    """A sample as prometheus_client's parser yields it."""

    @property
    def samples(self) -> Iterable[Any]:
        """Named values, with labels."""
        ...


@dataclass(frozen=True)
class Sample:
    """Counts at one moment, or between two.

    Attributes
    ----------
    taken_s, elapsed_s : float
        When it was taken, on the reader's own clock; the time in which its counts grew.
    counts : mapping of str to float
        Everything that only grows, by name.
    layer_hits, layer_misses : mapping of int to float
        Empty if layers are not told apart.
    stalls_below : tuple of (float, float)
        (seconds, stalls shorter than that), increasing.
    gauges : mapping of str to float
    policy, prefetch : str
        In words; `prefetch` is "" if nothing is read ahead.
    """

    taken_s: float
    elapsed_s: float
    counts: Mapping[str, float]
    layer_hits: Mapping[int, float]
    layer_misses: Mapping[int, float]
    stalls_below: tuple[tuple[float, float], ...]
    gauges: Mapping[str, float]
    policy: str
    prefetch: str

    @property
    def hit_rate(self) -> float | None:
        """Share of accesses that were hits, None before the first."""
        return _share(self.counts["hits"], self.counts["hits"] + self.counts["misses"])

    @property
    def hit_rates(self) -> list[float | None]:
        """The same by layer, as far as layers are told apart."""
        return [
            _share(self.layer_hits[layer], self.layer_hits[layer] + self.layer_misses.get(layer, 0))
            for layer in sorted(self.layer_hits)
        ]

    @property
    def precision(self) -> float | None:
        """Share of experts read ahead that were asked for, of those whose fate is known."""
        asked_for = self.counts["useful"] + self.counts["late"]
        return _share(asked_for, asked_for + self.counts["wrong"] + self.counts["cancelled"])

    def per_s(self, name: str) -> float:
        """Return a count per second."""
        return self.counts[name] / max(self.elapsed_s, _LEAST) if self.elapsed_s > 0 else 0.0

    def stall_percentile_s(self, percent: float) -> float:
        """Return the length that `percent` of stalls do not exceed, interpolated; 0.0 if none."""
        rank = self.counts["stalls"] * percent / 100
        bound, below = 0.0, 0.0
        for next_bound, next_below in self.stalls_below:
            if next_below > below and next_below >= rank:
                return bound + (next_bound - bound) * (rank - below) / (next_below - below)
            bound, below = next_bound, next_below
        return bound if rank else 0.0

    def since(self, earlier: "Sample") -> "Sample":
        """Return what was counted since; all of it, if a count fell: the counting began anew."""
        if any(self.counts[name] < earlier.counts[name] for name in earlier.counts):
            return self
        below = dict(earlier.stalls_below)
        return dataclasses.replace(
            self,
            elapsed_s=self.taken_s - earlier.taken_s,
            counts=_less(self.counts, earlier.counts),
            layer_hits=_less(self.layer_hits, earlier.layer_hits),
            layer_misses=_less(self.layer_misses, earlier.layer_misses),
            stalls_below=tuple(
                (bound, number - below.get(bound, 0)) for bound, number in self.stalls_below
            ),
        )


def sample_stats(stats: RuntimeStats) -> Sample:
    """Return a snapshot's figures."""
    prefetch = stats.prefetch
    below = accumulate(stats.stall_histogram)
    return Sample(
        taken_s=stats.taken_ns / 1e9,
        elapsed_s=stats.elapsed_s,
        counts=defaultdict(
            float,
            {
                "steps": stats.num_steps,
                "resident_steps": stats.num_resident_steps,
                "hits": stats.num_hits,
                "misses": stats.num_misses,
                "evictions": stats.num_evictions,
                "failed": stats.num_failed_reads,
                "demand": stats.bytes_demand,
                "bulk": stats.bytes_bulk,
                "prefetch": stats.bytes_prefetch,
                "warm_start": stats.bytes_warm_start,
                "stalls": stats.num_stalls,
                "stall_s": stats.stall_ns / 1e9,
                **(
                    {
                        "useful": prefetch.num_useful,
                        "late": prefetch.num_late,
                        "wrong": prefetch.num_wrong,
                        "cancelled": prefetch.num_cancelled,
                        "dropped": prefetch.num_dropped,
                    }
                    if prefetch is not None
                    else {}
                ),
            },
        ),
        layer_hits=dict(enumerate(stats.hits_by_layer)),
        layer_misses=dict(enumerate(stats.misses_by_layer)),
        stalls_below=tuple(
            ((stall_bucket_ns(bucket) + 1) / 1e9, number) for bucket, number in enumerate(below)
        ),
        gauges={
            "resident": stats.num_resident,
            "pinned": stats.num_pinned,
            "in_flight": stats.num_in_flight,
            "slots": stats.capacity,
            "experts": stats.total_experts,
        },
        policy=f"{stats.policy}, scope {stats.scope}",
        prefetch="" if prefetch is None else _prefetch_words(prefetch.mode, prefetch.active),
    )


# Names of the samples as they are exposed -> names of counts and gauges here.
_COUNTS = {
    "moecache_steps_total": "steps",
    "moecache_resident_steps_total": "resident_steps",
    "moecache_hits_total": "hits",
    "moecache_misses_total": "misses",
    "moecache_evictions_total": "evictions",
    "moecache_failed_expert_reads_total": "failed",
    "moecache_stall_seconds_count": "stalls",
    "moecache_stall_seconds_sum": "stall_s",
}
# Those whose name here is the value of a label.
_LABELLED = {
    "moecache_read_bytes_total": "cause",
    "moecache_prefetch_experts_total": "outcome",
    "moecache_prefetch_skipped_requests_total": "outcome",
}
_GAUGES = {
    "moecache_resident_experts": "resident",
    "moecache_pinned_experts": "pinned",
    "moecache_in_flight_experts": "in_flight",
    "moecache_slots": "slots",
    "moecache_experts": "experts",
}
_MAX_LAYERS = 4096
# Bounds that a served number is clamped to, so that sums and quotients stay finite.
_LEAST, _MOST = 1e-9, 1e18


def sample_metrics(metrics: Iterable[Metric], taken_s: float) -> Sample | None:
    """Return the figures that a server exposes, or `None` if it exposes none of a runtime.

    The figures of several runtimes are added up.
    """
    counts: defaultdict[str, float] = defaultdict(float)
    gauges: defaultdict[str, float] = defaultdict(float)
    hits: defaultdict[int, float] = defaultdict(float)
    misses: defaultdict[int, float] = defaultdict(float)
    below: defaultdict[float, float] = defaultdict(float)
    uptimes: list[float] = []
    words = {"policy": "", "prefetch": ""}
    for metric in metrics:
        for name, labels, value in (sample[:3] for sample in metric.samples):
            # A server is not to be trusted with more than a wrong number.
            if not math.isfinite(value) or value < 0:
                continue
            value = _clamped(value)
            if name in _COUNTS:
                counts[_COUNTS[name]] += value
            elif name in _LABELLED:
                counts[labels.get(_LABELLED[name], "")] += value
            elif name in _GAUGES:
                gauges[_GAUGES[name]] += value
            elif name in {"moecache_layer_hits_total", "moecache_layer_misses_total"}:
                layer = labels.get("layer", "")
                if re.fullmatch(r"[0-9]{1,4}", layer) and int(layer) < _MAX_LAYERS:
                    (hits if "hits" in name else misses)[int(layer)] += value
            elif name == "moecache_stall_seconds_bucket" and _is_bound(labels.get("le", "")):
                below[_clamped(float(labels["le"]))] += value
            elif name == "moecache_uptime_seconds":
                uptimes.append(value)
            elif name == "moecache_runtime_info":
                words["policy"] = printable(
                    f"{labels.get('policy', '')}, scope {labels.get('scope', '')}"
                )
            elif name == "moecache_prefetch_active":
                words["prefetch"] = _prefetch_words(printable(labels.get("mode", "")), value > 0)
    if not uptimes:
        return None
    return Sample(
        taken_s,
        max(uptimes),
        counts,
        hits,
        misses,
        tuple(sorted(below.items())),
        gauges,
        **words,
    )


def _clamped(value: float) -> float:
    return 0.0 if value < _LEAST else min(value, _MOST)


def _is_bound(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and float(text) >= 0
    except ValueError:
        return False


def _prefetch_words(mode: str, active: bool) -> str:
    return f"{mode}, {'on' if active else 'off'} now"


def _less(later: Mapping[Key, float], earlier: Mapping[Key, float]) -> defaultdict[Key, float]:
    less: defaultdict[Key, float] = defaultdict(float)
    for key, value in later.items():
        less[key] = value - earlier.get(key, 0)
    return less


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
