"""Recorded routing: read it, record it, study it.

`import moecache` imports this too: what needs more than NumPy is imported where it is used.
"""

from moecache.study.importers import from_routed_experts, from_router_logits, load_any
from moecache.study.statistics import TraceStatistics, coactivation, statistics
from moecache.study.traces import Trace, concatenate, from_log, interleave

__all__ = [
    "Trace",
    "TraceStatistics",
    "coactivation",
    "concatenate",
    "from_log",
    "from_routed_experts",
    "from_router_logits",
    "interleave",
    "load_any",
    "statistics",
]
