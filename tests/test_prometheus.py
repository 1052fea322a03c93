"""Prometheus: what is exposed is what was counted, and the client's own parser reads it."""

import dataclasses
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import moecache
from moecache.telemetry import PrefetchStats, PrometheusCollector, UploadStats
from tests.helpers.fake_device import FakeDevice
from tests.helpers.runtimes import drain, make_runtime

prometheus_client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")
ROOT = Path(__file__).parents[1]


@pytest.fixture
def runtime() -> Iterator[moecache.ExpertRuntime]:
    """Return a runtime after a hit, some misses, a bulk step and a known stall."""
    with make_runtime(24, staging=0) as runtime:
        for ids in ([[1, 2]], [[1, 3]], [[4, 5], [5, 6]]):
            drain(runtime, 0, np.array(ids))
        runtime.profiler.record_miss_stall(3_000_000)
        yield runtime


class Reads:
    """What reads ahead, with counts that are all different."""

    mode, active, closed, switch = "echo", True, False, None
    queue = SimpleNamespace(num_requests=1, num_dropped=2, num_stale=3)
    cache = SimpleNamespace(num_foreseen_hits=5, num_foreseen_late=6, num_foreseen_unused=7)
    counts = SimpleNamespace(
        num_prefetches=4,
        num_failed_prefetches=8,
        num_cancelled_prefetches=9,
        num_prefetches_in_flight=11,
    )
    foresight = SimpleNamespace(
        num_used=12, num_predicted_k=13, num_found_k=14, num_predicted_2k=15, num_found_2k=16
    )
    num_advised, num_predictor_errors = 10, 0

    def stop(self) -> None:
        """End with the runtime."""

    def close(self, timeout_s: float) -> None:
        """End with the runtime."""


def scrape(collector: PrometheusCollector) -> dict[str, float]:
    """Return what the client's parser finds in what its exposition writes: series -> value."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(collector)
    text = prometheus_client.generate_latest(registry).decode()
    found: dict[str, float] = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation
        for name, labels, value in (sample[:3] for sample in family.samples):
            series = name + "".join(f" {key}={labels[key]}" for key in sorted(labels))
            assert series not in found
            found[series] = value
    return found


def test_the_clients_parser_reads_every_counter(runtime: moecache.ExpertRuntime) -> None:
    """Values are those of the snapshot."""
    found, stats = scrape(PrometheusCollector(runtime)), runtime.stats()

    for name, value in (
        ("steps_total", stats.num_steps),
        ("resident_steps_total", stats.num_resident_steps),
        ("hits_total", stats.num_hits),
        ("misses_total", stats.num_misses),
        ("expert_reads_total", stats.num_reads),
        ("failed_expert_reads_total", 0),
        ("read_bytes_total cause=demand", stats.bytes_demand),
        ("read_bytes_total cause=bulk", stats.bytes_bulk),
        ("read_bytes_total cause=prefetch", 0),
        ("resident_experts", 6),
        ("slots", 24),
        ("experts", 24),
        ("slot_memory_bytes", stats.pool_bytes),
        ("runtime_info policy=lru scope=global", 1),
    ):
        assert found[f"moecache_{name}"] == value
    assert stats.num_hits > 0
    assert stats.bytes_bulk > 0
    assert 0 < found["moecache_uptime_seconds"] <= stats.elapsed_s


def test_stalls_are_a_histogram(runtime: moecache.ExpertRuntime) -> None:
    """Cumulative, increasing, ending in the total; the known stall is where it belongs."""
    profiler = runtime.profiler
    profiler.reset()
    for length_ns in (3_000_000, 3_000_000, 10**12):
        profiler.record_miss_stall(length_ns)
    found = scrape(PrometheusCollector(runtime))
    name = "moecache_stall_seconds_bucket le="
    buckets = {
        float(series.removeprefix(name)): value
        for series, value in found.items()
        if series.startswith(name)
    }

    assert list(buckets) == sorted(buckets)
    assert [value for bound, value in buckets.items() if bound < 0.003] == [0.0] * 12
    assert {value for bound, value in buckets.items() if 0.003 <= bound < 1000} == {2.0}
    assert buckets[float("inf")] == found["moecache_stall_seconds_count"] == 3
    assert found["moecache_stall_seconds_sum"] == pytest.approx(1000.006)


def test_layers_are_series_only_if_asked_for(runtime: moecache.ExpertRuntime) -> None:
    """Two series for each layer of the model, and their sums are the totals."""
    without = scrape(PrometheusCollector(runtime))
    found = scrape(PrometheusCollector(runtime, per_layer=True))

    assert not [series for series in without if "layer=" in series]
    hits = [found[f"moecache_layer_hits_total layer={layer}"] for layer in range(3)]
    misses = [found[f"moecache_layer_misses_total layer={layer}"] for layer in range(3)]
    assert tuple(hits) == runtime.stats().hits_by_layer
    assert sum(misses) == found["moecache_misses_total"]


def test_labels_are_on_every_series(runtime: moecache.ExpertRuntime) -> None:
    """Also on those that have labels of their own."""
    runtime._figures._prefetcher = Reads()  # type: ignore[assignment]
    collector = PrometheusCollector(runtime, per_layer=True, labels={"model": 'a "b"\nc'})

    found = scrape(collector)

    assert found
    assert all('model=a "b"\nc' in series for series in found)


def test_a_label_of_our_own_is_refused(runtime: moecache.ExpertRuntime) -> None:
    """It would stand twice on a series."""
    with pytest.raises(moecache.ConfigError, match="label 'layer' is one of moecache's own"):
        PrometheusCollector(runtime, labels={"layer": "x"})


@pytest.mark.parametrize(
    "name", ["", "1st", "__name", "a-b", "a b", "mod\u00e8le", "model\n", 3, None]
)
def test_a_name_that_no_label_has_is_refused(runtime: moecache.ExpertRuntime, name: object) -> None:
    """A scrape that Prometheus cannot read loses every metric of the process."""
    with pytest.raises(moecache.ConfigError, match="has no name that Prometheus takes"):
        PrometheusCollector(runtime, labels={name: "x"})  # type: ignore[dict-item]


@pytest.mark.parametrize("labels", ["model", ["model"], [("model", "x")], 3, True])
def test_labels_are_a_mapping(runtime: moecache.ExpertRuntime, labels: object) -> None:
    """From names to values."""
    with pytest.raises(moecache.ConfigError, match="labels must be a mapping such as"):
        PrometheusCollector(runtime, labels=labels)  # type: ignore[arg-type]


def test_values_of_labels_are_made_text(runtime: moecache.ExpertRuntime) -> None:
    """A number is one as text; a scrape does not fail for it."""
    labels = {"rank": 3, "_other": None, "path": "\udcff"}
    found = scrape(PrometheusCollector(runtime, labels=labels))  # type: ignore[arg-type]
    assert found["moecache_slots _other=None path=\\udcff rank=3"] == 24


def test_what_is_read_ahead_is_exposed(runtime: moecache.ExpertRuntime) -> None:
    """Each count under its own name."""
    runtime._figures._prefetcher = Reads()  # type: ignore[assignment]

    found = scrape(PrometheusCollector(runtime))

    for name, value in (
        ("prefetch_active mode=echo", 1),
        ("prefetch_requests_total", 1),
        ("prefetch_skipped_requests_total outcome=dropped", 2),
        ("prefetch_skipped_requests_total outcome=stale", 3),
        ("prefetch_issued_experts_total", 4),
        ("prefetch_experts_total outcome=useful", 5),
        ("prefetch_experts_total outcome=late", 6),
        ("prefetch_experts_total outcome=wrong", 7),
        ("prefetch_experts_total outcome=failed", 8),
        ("prefetch_experts_total outcome=cancelled", 9),
        ("prefetch_advised_experts_total", 10),
        ("prefetch_in_flight_experts", 11),
        ("foresight_used_experts_total", 12),
        ("foresight_predicted_experts_total among=k", 13),
        ("foresight_found_experts_total among=k", 14),
        ("foresight_predicted_experts_total among=2k", 15),
        ("foresight_found_experts_total among=2k", 16),
    ):
        assert found[f"moecache_{name}"] == value


def test_reads_of_the_files_are_exposed(tiny_moe: Path) -> None:
    """Where the runtime's reader reads, and not the store."""
    with moecache.open(tiny_moe, "25%", prefault="off") as runtime:
        for _ in runtime.waves(0, np.array([[1, 2, 3, 4]])):
            pass
        found, reading = scrape(PrometheusCollector(runtime)), runtime.stats().reading

    assert reading is not None
    assert found["moecache_disk_read_bytes_total"] == reading.bytes_read > 0
    assert found["moecache_disk_busy_seconds_total"] > 0


def test_names_follow_the_conventions(runtime: moecache.ExpertRuntime) -> None:
    """Counters end in _total, sizes and times in their unit; promtool asks for no more."""
    runtime._figures._prefetcher = Reads()  # type: ignore[assignment]
    for metric in PrometheusCollector(runtime, per_layer=True).collect():
        assert metric.name.startswith("moecache_")
        assert metric.documentation.endswith(".")
        if metric.type == "counter":
            assert all(sample.name.endswith("_total") for sample in metric.samples)
        else:
            assert not metric.name.endswith("_total")


def test_every_metric_is_documented(tiny_moe: Path, fake_cuda: FakeDevice) -> None:
    """docs/telemetry.md names each as it is exposed, and none that is not."""
    text = (ROOT / "docs" / "telemetry.md").read_text()
    with moecache.open(tiny_moe, "25%", "cuda", prefault="off") as runtime:
        runtime._figures._prefetcher = Reads()  # type: ignore[assignment]
        metrics = list(PrometheusCollector(runtime, per_layer=True).collect())
    exposed = {metric.name + ("_total" if metric.type == "counter" else "") for metric in metrics}
    table = [line for line in text.splitlines() if line.startswith("| `moecache_")]

    assert set(re.findall(r"`(moecache_\w+)`", "".join(table))) == exposed


def test_every_figure_is_documented() -> None:
    """Fields and properties of both kinds of snapshots."""
    text = (ROOT / "docs" / "telemetry.md").read_text()
    for kind in (moecache.RuntimeStats, PrefetchStats, UploadStats):
        names = {field.name for field in dataclasses.fields(kind)}
        names |= {name for name, value in vars(kind).items() if isinstance(value, property)}
        assert not {name for name in names - {"num_layers"} if f"`{name}`" not in text}


def test_a_closed_runtime_does_not_break_a_scrape(runtime: moecache.ExpertRuntime) -> None:
    """Nothing of it is exposed any more."""
    collector = PrometheusCollector(runtime)
    assert scrape(collector)

    runtime.close()

    assert scrape(collector) == {}


def test_a_collector_does_not_keep_its_runtime() -> None:
    """Nor does a registry: a runtime that is gone is gone."""
    runtime = make_runtime(4)
    collector = PrometheusCollector(runtime)
    runtime.close()
    gc.collect()
    kept = sys.getrefcount(runtime)
    del runtime
    gc.collect()

    assert kept == 2
    assert scrape(collector) == {}


@pytest.mark.parametrize("auto_describe", [False, True])
@pytest.mark.parametrize("labels", [None, {"model": "other"}])
def test_two_runtimes_of_one_registry_are_told(
    runtime: moecache.ExpertRuntime, auto_describe: bool, labels: dict[str, str] | None
) -> None:
    """The client refuses what would stand twice; unregistered, a name may be taken again."""
    registry = prometheus_client.CollectorRegistry(auto_describe=auto_describe)
    first, second = PrometheusCollector(runtime), PrometheusCollector(runtime, labels=labels)
    registry.register(first)

    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(second)

    registry.unregister(first)
    registry.register(second)


@pytest.mark.parametrize("per_layer", [False, True])
def test_what_is_described_is_what_is_collected(
    runtime: moecache.ExpertRuntime, tiny_moe: Path, fake_cuda: FakeDevice, per_layer: bool
) -> None:
    """By name and kind, and without a series; the same once the runtime is closed."""
    described = {}
    with moecache.open(tiny_moe, "25%", "cuda", prefault="off") as other:
        other._prefetcher = Reads()  # type: ignore[assignment]
        collector = PrometheusCollector(other, per_layer=per_layer)
        collected = {metric.name: metric.type for metric in collector.collect()}
    for metric in collector.describe():
        described[metric.name] = metric.type
        assert metric.samples == []

    assert described == collected
    assert {metric.name for metric in PrometheusCollector(runtime).collect()} <= described.keys()


def test_without_the_client_the_error_names_the_extra() -> None:
    """The package is imported without it; only a collector needs it."""
    code = (
        "import sys\n"
        "sys.modules['prometheus_client'] = None\n"
        "import moecache\n"
        "from tests.helpers.runtimes import make_runtime\n"
        "try:\n"
        "    moecache.telemetry.PrometheusCollector(make_runtime(4))\n"
        "except moecache.MissingDependencyError as error:\n"
        "    assert \"pip install 'moecache[prometheus]'\" in str(error)\n"
        "else:\n"
        "    sys.exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
