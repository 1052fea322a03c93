"""Random traces, and what plain Python makes of them."""

from collections import OrderedDict
from collections.abc import Iterator
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from moecache.cache._cache import ExpertCache
from moecache.study import Trace
from moecache.study.replay import row_sequences, sequence_begins, step_bounds


@st.composite
def traces(
    draw: st.DrawFn, *, max_tokens: int = 24, max_layers: int = 3, bulk: bool = True
) -> Trace:
    """Draw a small trace: padding, sequences and (if `bulk`) steps of several rows.

    Some of which keep to their layer's fair share, some do not.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_tokens = draw(st.integers(1, max_tokens))
    num_layers = draw(st.integers(1, max_layers))
    num_experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, min(3, num_experts)))
    # A few experts are used more than others.
    weights = rng.random(num_experts) ** 2 + 0.01
    experts = np.empty((num_tokens, num_layers, top_k), np.int32)
    for token in range(num_tokens):
        for layer in range(num_layers):
            experts[token, layer] = rng.choice(
                num_experts, top_k, replace=False, p=weights / weights.sum()
            )
    experts[rng.random(experts.shape) < draw(st.sampled_from([0, 0.1, 0.6]))] = -1
    kept = rng.random(num_tokens) < draw(st.sampled_from([0.2, 0.8]))
    rises = rng.random(num_tokens) < (draw(st.sampled_from([0.3, 0.7, 1])) if bulk else 1)
    said = bulk and draw(st.booleans())
    return Trace(
        experts,
        num_experts=num_experts,
        step=np.cumsum(rises) if bulk else None,
        bulk=kept[np.cumsum(rises) - rises[0]].astype(np.uint8) if said else None,
        sequence=np.cumsum(rng.random(num_tokens) < 0.1),
        phase=rng.integers(0, 2, num_tokens),
    )


def random_trace(seed: int = 0, shape: tuple[int, int, int] = (200, 4, 3), n: int = 24) -> Trace:
    """Return a skewed trace of single rows, the same for the same arguments."""
    rng = np.random.default_rng(seed)
    scores = rng.gumbel(size=(*shape[:2], n)) - 1.2 * np.log(1 + np.arange(n))
    return Trace(
        np.argsort(-scores, axis=2)[:, :, : shape[2]], num_experts=n, model=f"random {seed}"
    )


def steps(trace: Trace) -> Iterator[np.ndarray]:
    """Yield the experts of each step, [rows, num_layers, top_k]."""
    bounds = step_bounds(trace)
    for start, stop in pairwise(bounds):
        yield trace.experts[start:stop].astype(np.int32)


def through_the_cache(
    trace: Trace, policy: str, capacity: int, scope: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return hits and misses of each step and layer, from ExpertCache itself."""
    cache = ExpertCache(trace.num_layers, trace.num_experts, capacity, policy=policy, scope=scope)
    bounds = step_bounds(trace)
    begins, bulk = sequence_begins(trace, bounds), trace.bulk[bounds[:-1]]
    hits = np.zeros((trace.num_steps, trace.num_layers), np.int32)
    misses = np.zeros_like(hits)
    for number, rows in enumerate(steps(trace)):
        if begins[number]:
            cache.begin_sequence()
        for layer in range(trace.num_layers):
            ids = np.ascontiguousarray(rows[:, layer])
            slots = np.full(ids.size, -1, np.int32)
            missing = np.empty(min(ids.size, trace.num_experts), np.int32)
            share = cache.fair_share(layer) if bulk[number] else trace.num_experts
            num_missing = cache.acquire(
                layer,
                ids,
                slots,
                missing,
                share=share,
                ignore_out_of_range=True,
                sequences=row_sequences(trace, int(bounds[number]), int(bounds[number + 1])),
            )
            for index in missing[:num_missing]:
                if slots[index] >= 0:
                    cache.publish(slots[index])
            cache.release(slots)
            misses[number, layer] = num_missing
            hits[number, layer] = len(set(ids[ids >= 0].tolist())) - num_missing
    cache.check()
    return hits, misses


def requests(trace: Trace, layers: range) -> list[tuple[int, ...]]:
    """Return the keys of each visit of some layers, as routed; for traces of single rows."""
    found = []
    for row in trace.experts:
        for layer in layers:
            ids = row[layer][row[layer] >= 0].tolist()
            found.append(tuple(layer * trace.num_experts + expert for expert in ids))
    return found


def most_hits(asked: list[tuple[int, ...]], capacity: int) -> int:
    """Return the hits of the best possible choice of victims, by trying all of them.

    Every miss is admitted as far as there is room beside the request's own experts.
    """

    @cache
    def best(place: int, resident: frozenset[int]) -> int:
        if place == len(asked):
            return 0
        wanted = frozenset(asked[place])
        kept, others = wanted & resident, resident - wanted
        missing = wanted - resident
        admitted = min(len(missing), capacity - len(kept))
        stay = min(len(others), capacity - len(kept) - admitted)
        outcomes = [
            best(place + 1, kept | frozenset(new) | frozenset(old))
            for new in combinations(sorted(missing), admitted)
            for old in combinations(sorted(others), stay)
        ]
        return len(kept) + max(outcomes)

    return best(0, frozenset())


def stack_hits(asked: list[tuple[int, ...]], capacity: int) -> int:
    """Return the hits of an LRU that looks a request's keys up, then moves them up in order."""
    recent: list[int] = []
    hits = 0
    for wanted in asked:
        hits += len(set(wanted) & set(recent[-capacity:]))
        for key in wanted:
            if key in recent:
                recent.remove(key)
            recent.append(key)
    return hits


class ScriptedLru:
    """LRU as a user would write it for a replay."""

    def __init__(self, capacity: int, *, num_keys: int) -> None:
        self.recent: OrderedDict[int, None] = OrderedDict()
        self.seen: list[Any] = []

    def access(self, key: int) -> None:
        """Move a key up."""
        self.recent.move_to_end(key)

    def insert(self, key: int) -> None:
        """Put a key on top."""
        self.recent[key] = None

    def remove(self, key: int) -> None:
        """Forget a key."""
        del self.recent[key]

    def victim(self, held: Any) -> int:
        """Return the oldest key that may leave."""
        return next(key for key in self.recent if key not in held)
