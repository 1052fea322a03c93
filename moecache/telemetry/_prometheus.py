"""PrometheusCollector: a runtime's counters for prometheus_client's registry."""

import re
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

from moecache.errors import ConfigError, MissingDependencyError
from moecache.telemetry._prefetch import PrefetchStats
from moecache.telemetry._reading import ReadingStats
from moecache.telemetry._snapshots import RuntimeStats
from moecache.telemetry._stalls import count_by_doublings
from moecache.telemetry._uploads import UploadStats

if TYPE_CHECKING:
    from prometheus_client import Metric

# Labels that some series have of their own.
_OWN_LABELS = frozenset({"layer", "cause", "outcome", "among", "le", "policy", "scope", "mode"})
# Prometheus keeps names that begin with "__" to itself.
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)


class Source(Protocol):
    """The source of the figures: an `ExpertRuntime`."""

    @property
    def closed(self) -> bool:
        """Whether there is nothing to collect any more."""
        ...

    def stats(self) -> RuntimeStats:
        """Return the counters as they are now."""
        ...


class PrometheusCollector:
    """Yield a runtime's counters whenever Prometheus asks.

    Registers nothing by itself::

        prometheus_client.REGISTRY.register(PrometheusCollector(runtime))

    The runtime is not kept alive. Once it is closed or gone, a scrape finds nothing of it.
    A registry takes one collector, and refuses a second until the first is unregistered.
    docs/telemetry.md lists the metrics.

    Parameters
    ----------
    runtime : ExpertRuntime
    per_layer : bool, default False
        Also hits and misses of each layer: two series per layer.
    labels : mapping of str to str, optional
        Added to every series, for example ``{"model": "olmoe"}``; values that are no text
        are made text.

    Raises
    ------
    MissingDependencyError
        If prometheus_client is not installed.
    ConfigError
        If labels are no mapping, or one has a name that Prometheus does not take or that
        some series have already.
    """

    def __init__(
        self,
        runtime: Source,
        *,
        per_layer: bool = False,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        check_prometheus()
        self._runtime = weakref.ref(runtime)
        self._per_layer = per_layer
        self._labels = _checked({} if labels is None else labels)

    def collect(self) -> Iterator["Metric"]:
        """Yield the metrics as they are now; nothing if the runtime is closed or gone."""
        runtime = self._runtime()
        if runtime is None or runtime.closed:
            return
        yield from self._metrics(runtime.stats())

    def describe(self) -> Iterator["Metric"]:
        """Yield every metric there can be, without a series: a registry goes by their names."""
        for metric in self._metrics(_nothing()):
            metric.samples.clear()
            yield metric

    def _metrics(self, stats: RuntimeStats) -> Iterator["Metric"]:
        family = _Families(self._labels)
        yield from _runtime_metrics(stats, family)
        if self._per_layer:
            yield family.counter(
                "layer_hits", "Accesses that found their expert.", stats.hits_by_layer, "layer"
            )
            yield family.counter(
                "layer_misses", "Accesses that did not.", stats.misses_by_layer, "layer"
            )
        if stats.reading is not None:
            yield from _reading_metrics(stats.reading, family)
        if stats.uploads is not None:
            yield from _upload_metrics(stats.uploads, family)
        if stats.prefetch is not None:
            yield from _prefetch_metrics(stats.prefetch, family)


def check_prometheus() -> None:
    """Raise a MissingDependencyError if prometheus_client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "Prometheus metrics need prometheus_client; install it with: "
            "pip install 'moecache[prometheus]'"
        ) from error


def _checked(labels: object) -> dict[str, str]:
    if not isinstance(labels, Mapping):
        raise ConfigError(f"labels must be a mapping such as {{'model': 'olmoe'}}, got {labels!r}")
    for name in labels:
        if not isinstance(name, str) or not _LABEL.fullmatch(name):
            raise ConfigError(
                f"label {name!r} has no name that Prometheus takes: letters, digits and _, "
                "no digit first, and not __ first"
            )
        if name in _OWN_LABELS:
            raise ConfigError(f"label {name!r} is one of moecache's own; choose another name")
    # Text that is no Unicode would fail in the middle of a scrape.
    return {
        name: str(value).encode(errors="backslashreplace").decode()
        for name, value in labels.items()
    }


def _nothing() -> RuntimeStats:
    """Return what has every part there can be, and counted nothing."""
    zeros: dict[str, Any] = dict.fromkeys((field.name for field in fields(RuntimeStats)), 0)
    return RuntimeStats(
        **{
            **zeros,
            **dict.fromkeys(("policy", "scope"), ""),
            **dict.fromkeys(("hits_by_layer", "misses_by_layer"), ()),
            # Long enough for the longest stall that has a bucket of its own.
            "stall_histogram": (0,) * 512,
            "reading": ReadingStats("", "", 0, 0, 0, 0, 0, 0, 0, 0, None),
            "prefetch": PrefetchStats("", active=False, reason=""),
            "uploads": UploadStats("", 0, 0, 0, 0, 0),
        }
    )


class _Families:
    """Makes metrics whose series all have the same labels."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._names = list(labels)
        self._values = list(labels.values())

    def counter(
        self,
        name: str,
        text: str,
        value: float | tuple[int, ...] | Mapping[str, float],
        label: str = "",
    ) -> "Metric":
        from prometheus_client.metrics_core import CounterMetricFamily

        metric = CounterMetricFamily(
            f"moecache_{name}", text, labels=[*self._names, *([label] if label else [])]
        )
        if isinstance(value, tuple):
            value = {str(number): one for number, one in enumerate(value)}
        if isinstance(value, Mapping):
            for key, one in value.items():
                metric.add_metric([*self._values, key], one)
        else:
            metric.add_metric(self._values, value)
        return metric

    def gauge(self, name: str, text: str, value: float, **labels: str) -> "Metric":
        from prometheus_client.metrics_core import GaugeMetricFamily

        metric = GaugeMetricFamily(f"moecache_{name}", text, labels=[*self._names, *labels])
        metric.add_metric([*self._values, *labels.values()], value)
        return metric

    def histogram(
        self, name: str, text: str, counts: list[tuple[float, int]], total: int, total_s: float
    ) -> "Metric":
        from prometheus_client.metrics_core import HistogramMetricFamily

        metric = HistogramMetricFamily(f"moecache_{name}", text, labels=self._names)
        buckets = [(repr(bound), float(number)) for bound, number in counts]
        metric.add_metric(self._values, [*buckets, ("+Inf", float(total))], total_s)
        return metric


def _runtime_metrics(stats: RuntimeStats, family: _Families) -> Iterator["Metric"]:
    yield family.counter("steps", "Layers of forward calls.", stats.num_steps)
    yield family.counter(
        "resident_steps", "Steps that found every expert resident.", stats.num_resident_steps
    )
    yield family.counter("sequences", "Sequences that were begun.", stats.num_sequences)
    yield family.counter("hits", "Accesses that found their expert.", stats.num_hits)
    yield family.counter("misses", "Accesses that did not.", stats.num_misses)
    yield family.counter("evictions", "Experts evicted.", stats.num_evictions)
    yield family.counter("expert_reads", "Experts read from the store.", stats.num_reads)
    yield family.counter("failed_expert_reads", "Experts not read.", stats.num_failed_reads)
    yield family.counter(
        "read_bytes",
        "Bytes of experts read into slots, by cause.",
        {
            "demand": stats.bytes_demand,
            "bulk": stats.bytes_bulk,
            "prefetch": stats.bytes_prefetch,
            "warm_start": stats.bytes_warm_start,
        },
        "cause",
    )
    yield family.histogram(
        "stall_seconds",
        "Waits of steps that had nothing to compute.",
        count_by_doublings(stats.stall_histogram),
        stats.num_stalls,
        stats.stall_ns / 1e9,
    )
    yield family.gauge("in_flight_experts", "Experts being read.", stats.num_in_flight)
    yield family.gauge("resident_experts", "Experts in the cache.", stats.num_resident)
    yield family.gauge("pinned_experts", "Experts that are never evicted.", stats.num_pinned)
    yield family.gauge("slots", "Slots of the cache.", stats.capacity)
    yield family.gauge("staging_slots", "Slots beside the cache.", stats.staging_slots)
    yield family.gauge("experts", "Experts of the model.", stats.total_experts)
    yield family.gauge("slot_memory_bytes", "Memory of all slots.", stats.pool_bytes)
    yield family.gauge("uptime_seconds", "Since the runtime was made.", stats.elapsed_s)
    yield family.gauge(
        "runtime_info", "How the cache evicts; always 1.", 1, policy=stats.policy, scope=stats.scope
    )


def _reading_metrics(reading: ReadingStats, family: _Families) -> Iterator["Metric"]:
    yield family.counter("disk_reads", "Reads the kernel was asked for.", reading.num_reads)
    yield family.counter("disk_retries", "Reads asked for again.", reading.num_retries)
    yield family.counter(
        "disk_read_bytes", "Bytes read from files, whole blocks.", reading.bytes_read
    )
    yield family.counter(
        "disk_busy_seconds", "Time with a read outstanding.", reading.busy_ns / 1e9
    )


def _upload_metrics(uploads: UploadStats, family: _Families) -> Iterator["Metric"]:
    yield family.counter("uploads", "Experts copied to the GPU.", uploads.num_uploads)
    yield family.counter("upload_bytes", "Bytes copied to the GPU.", uploads.bytes_uploaded)
    yield family.counter(
        "upload_busy_seconds", "Time in which the GPU copied.", uploads.busy_ns / 1e9
    )
    yield family.gauge(
        "upload_in_flight_bytes", "Bytes being copied to the GPU.", uploads.in_flight_bytes
    )
    yield family.gauge(
        "pinned_memory_bytes", "Memory of the host locked for copies.", uploads.pinned_bytes
    )


def _prefetch_metrics(prefetch: PrefetchStats, family: _Families) -> Iterator["Metric"]:
    yield family.gauge(
        "prefetch_active", "Whether experts are read ahead.", prefetch.active, mode=prefetch.mode
    )
    yield family.gauge(
        "prefetch_in_flight_experts", "Experts being read ahead.", prefetch.in_flight
    )
    yield family.counter("prefetch_requests", "Calls that named experts.", prefetch.num_requests)
    yield family.counter(
        "prefetch_skipped_requests",
        "Requests dropped from a full queue, and those whose layer came first.",
        {"dropped": prefetch.num_dropped, "stale": prefetch.num_stale},
        "outcome",
    )
    yield family.counter("prefetch_issued_experts", "Experts read ahead.", prefetch.num_issued)
    yield family.counter(
        "prefetch_experts",
        "Experts read ahead, by what became of them.",
        {
            "useful": prefetch.num_useful,
            "late": prefetch.num_late,
            "wrong": prefetch.num_wrong,
            "cancelled": prefetch.num_cancelled,
            "failed": prefetch.num_failed,
        },
        "outcome",
    )
    yield family.counter(
        "prefetch_advised_experts",
        "Experts whose pages the kernel was advised to read.",
        prefetch.num_advised,
    )
    yield family.counter("foresight_used_experts", "Experts that steps used.", prefetch.num_used)
    yield family.counter(
        "foresight_predicted_experts",
        "Experts predicted, among as many as a step uses (k) and twice that.",
        {"k": prefetch.num_predicted_k, "2k": prefetch.num_predicted_2k},
        "among",
    )
    yield family.counter(
        "foresight_found_experts",
        "Of those, experts that were used.",
        {"k": prefetch.num_found_k, "2k": prefetch.num_found_2k},
        "among",
    )
