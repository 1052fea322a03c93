"""The page's data: every expert, and the counters, at one moment."""

import base64
import dataclasses
import time
from typing import Any

import numpy as np

from moecache.serving.engine import Engine
from moecache.telemetry import RuntimeStats

_COUNTERS = (
    *("num_hits", "num_misses", "num_stalls", "stall_ns", "bytes_read", "num_evictions"),
    *("num_steps", "num_resident", "num_pinned", "num_in_flight", "capacity", "pool_bytes"),
    *("total_experts", "policy"),
)


def snapshot(engine: Engine) -> dict[str, Any]:
    """Return the state of experts and counters as JSON takes it.

    Nothing is counted or kept for it: it costs when it is asked for.

    Returns
    -------
    dict
        "states": base64 of a byte per expert, layer by layer, as
        `ExpertCache.expert_states` has them; "uses": base64 of how often each was used, uint32,
        little endian; counters since the start; "taken_s", a clock that never goes back;
        "generating": the oldest answer under way, or `None`; "num_generating": how many are;
        "prefixes": the counters of the pages of prompts, or `None`.
    """
    runtime = engine.runtime
    stats: RuntimeStats = runtime.stats()
    cache = runtime.cache
    uses = np.minimum(cache.profiler.counts, 2**32 - 1).astype("<u4")
    totals, prefixes = engine.totals, engine.prefixes
    generating, answers = None, engine.answers
    if answers:
        oldest = answers[0]
        generating = {
            "prompt_tokens": oldest.prompt_tokens,
            "tokens": len(oldest.stream.tokens),
            "elapsed_s": round(time.perf_counter() - oldest.started_s, 3),
        }
    new_tokens = sum(len(answer.stream.tokens) for answer in answers)
    return {
        "model": engine.names[0],
        "num_layers": cache.num_layers,
        "num_experts": cache.num_experts,
        "states": _packed(cache.expert_states()),
        "uses": _packed(uses),
        "taken_s": stats.taken_ns / 1e9,
        **{name: getattr(stats, name) for name in _COUNTERS},
        "num_tokens": totals.completion_tokens + new_tokens,
        "num_waiting": engine.num_waiting,
        "generating": generating,
        "num_generating": len(answers),
        "parallel": engine.parallel,
        "prefixes": None if prefixes is None else dataclasses.asdict(prefixes.stats()),
    }


def _packed(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()
