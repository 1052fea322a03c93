"""Recorded routing: read it, record it, study it, replay it.

`import moecache` leaves it for its first use. Modules that need more than NumPy are imported
where they are used.
"""

from moecache.study import plots
from moecache.study.advice import Recommendation, recommend
from moecache.study.curves import MissRatioCurve, miss_ratio_curve
from moecache.study.importers import (
    example_trace,
    from_routed_experts,
    from_router_logits,
    load_any,
)
from moecache.study.network import Network
from moecache.study.prediction import Recall, recall
from moecache.study.ranks import RanksTiming, simulate_ranks
from moecache.study.replay import Replay, replay
from moecache.study.statistics import TraceStatistics, coactivation, statistics
from moecache.study.sweeps import sweep
from moecache.study.table import Table
from moecache.study.timing import Timing, simulate_time
from moecache.traces.joining import concatenate, interleave
from moecache.traces.recording import from_log
from moecache.traces.trace import Trace

__all__ = [
    "MissRatioCurve",
    "Network",
    "RanksTiming",
    "Recall",
    "Recommendation",
    "Replay",
    "Table",
    "Timing",
    "Trace",
    "TraceStatistics",
    "coactivation",
    "concatenate",
    "example_trace",
    "from_log",
    "from_routed_experts",
    "from_router_logits",
    "interleave",
    "load_any",
    "miss_ratio_curve",
    "plots",
    "recall",
    "recommend",
    "replay",
    "simulate_ranks",
    "simulate_time",
    "statistics",
    "sweep",
]
