"""A runtime's figures: snapshots, their difference, text, HTML, JSON and Prometheus.

The runtime counts, and nothing else: a snapshot is made when the caller asks for one.
"""

from moecache.telemetry._compute import ComputeStats
from moecache.telemetry._prefetch import PrefetchStats
from moecache.telemetry._prometheus import PrometheusCollector, check_prometheus
from moecache.telemetry._reading import ReadingStats
from moecache.telemetry._snapshots import RuntimeStats
from moecache.telemetry._stalls import stall_percentile_ns
from moecache.telemetry._uploads import UploadStats

__all__ = [
    "ComputeStats",
    "PrefetchStats",
    "PrometheusCollector",
    "ReadingStats",
    "RuntimeStats",
    "UploadStats",
    "check_prometheus",
    "stall_percentile_ns",
]
