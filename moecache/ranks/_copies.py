"""Copies of busy experts: what a step's slowest rank has to do, and which copies lower that."""

from collections.abc import Iterator, Sequence

import numpy as np

from moecache.errors import ConfigError
from moecache.ranks._placement import Placement
from moecache.traces.trace import Trace

# Of these steps, the last of a trace: enough to tell experts apart, and quick.
MAX_STEPS = 2048
# How many of a layer's busiest experts are tried for each copy.
MAX_TRIED = 12
MIN_GAIN = 1e-3


def step_work(placement: Placement, trace: Trace) -> tuple[float, float]:
    """Return what a step's slowest rank has to do in a layer on average, and the ranks' mean.

    In experts: distinct ones that the rank computes, for an even share.

    Returns
    -------
    (float, float)
        Slowest and mean, over all layers that a step used; 0.0 if there are none.
    """
    slowest = total = 0.0
    count = 0
    for layer, used in _layers(trace):
        work = _work(used, placement, layer, _others(placement, layer))
        slowest += float(work.max(1).sum())
        total += float(used.sum()) / placement.num_ranks
        count += len(used)
    return (slowest / count, total / count) if count else (0.0, 0.0)


def add_copies(
    placement: Placement, trace: Trace, num_copies: int, room: Sequence[int] | None = None
) -> Placement:
    """Return the placement with copies that lower what a step's slowest rank has to do.

    One after the other, in each layer: of the busiest experts, the copy with which the trace's
    steps would have gained most. None is added that gains less than a thousandth.

    Parameters
    ----------
    placement : Placement
        Its own copies are dropped.
    trace : Trace
        What steps use together. The last 2,048 steps count.
    num_copies : int
        At most so many in each layer.
    room : sequence of int, optional
        Experts that each rank has room for beside its own, in all layers together. A copy that
        takes another expert's slot costs more than it gains (docs/decisions/0034). By default
        there is room for all.

    Raises
    ------
    ConfigError
        If the trace is of other experts, or the number is negative.
    """
    if num_copies < 0:
        raise ConfigError(f"copies must not be negative, got {num_copies}")
    shape = (trace.num_layers, trace.num_experts)
    if placement.owners.shape != shape:
        raise ConfigError(
            f"the trace is of {list(shape)} experts, the placement of "
            f"{list(placement.owners.shape)}; use one of the same model"
        )
    rows: list[tuple[int, int, int]] = []
    left = np.full(placement.num_ranks, trace.num_layers * num_copies)
    if room is not None:
        left = np.minimum(left, np.maximum(room, 0))
    taken = np.zeros(placement.num_ranks, np.int64)
    for layer, used in _layers(trace):
        others: dict[int, list[int]] = {}
        # Of every rank's room as much as is due by this layer.
        allowed = left * (layer + 1) // trace.num_layers
        before = _slowest(used, placement, layer, others)
        for _ in range(num_copies):
            trials = [
                (expert, rank)
                for expert, rank in _trials(used, placement, layer, others)
                if taken[rank] < allowed[rank]
            ]
            if not trials:
                break
            gained = [
                (_slowest(used, placement, layer, _with(others, *trial)), trial) for trial in trials
            ]
            after, best = min(gained)
            if after > before * (1 - MIN_GAIN):
                break
            before, others = after, _with(others, *best)
            taken[best[1]] += 1
        rows += [(layer, expert, rank) for expert, ranks in others.items() for rank in ranks]
    return placement.with_copies(rows)


def _layers(trace: Trace) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each layer and which experts its steps use: bool [steps, num_experts]."""
    starts = np.diff(trace.step, prepend=-1) != 0
    steps = np.cumsum(starts) - 1
    first = max(0, int(steps[-1]) + 1 - MAX_STEPS) if len(steps) else 0
    for layer in range(trace.num_layers):
        ids = trace.experts[steps >= first, layer]
        rows, places = np.nonzero(ids >= 0)
        used = np.zeros((min(MAX_STEPS, trace.num_steps), trace.num_experts), bool)
        used[(steps[steps >= first] - first)[rows], ids[rows, places]] = True
        yield layer, used[used.any(1)]


def _work(
    used: np.ndarray, placement: Placement, layer: int, others: dict[int, list[int]]
) -> np.ndarray:
    """Return what each rank has to do in each step, as `Placement.ranks_of` has them do it.

    Returns
    -------
    ndarray of float64, shape [steps, num_ranks]
        Experts, for the rank's share of the whole times the number of ranks.
    """
    owners, num_ranks = placement.owners[layer], placement.num_ranks
    weights = 1 / (placement.shares * num_ranks)
    owned = np.stack([used[:, owners == rank].sum(1) for rank in range(num_ranks)], axis=1)
    if not others:
        return owned * weights
    work = owned * weights
    for expert in others:
        work[:, owners[expert]] -= used[:, expert] * weights[owners[expert]]
    for expert in sorted(others):
        steps = np.flatnonzero(used[:, expert])
        holders = np.array([owners[expert], *others[expert]])
        chosen = holders[np.argmin(work[steps[:, None], holders] + weights[holders], axis=1)]
        work[steps, chosen] += weights[chosen]
    worse = work.max(1) > (owned * weights).max(1) * (1 + 1e-12)
    work[worse] = owned[worse] * weights
    return work


def _slowest(
    used: np.ndarray, placement: Placement, layer: int, others: dict[int, list[int]]
) -> float:
    return float(_work(used, placement, layer, others).max(1).sum())


def _trials(
    used: np.ndarray, placement: Placement, layer: int, others: dict[int, list[int]]
) -> Iterator[tuple[int, int]]:
    """Yield (expert, rank) that may have a copy: the busiest that some rank does not hold."""
    uses = used.sum(0)
    order = np.argsort(-uses, kind="stable")
    holders = {
        expert: {int(placement.owners[layer, expert]), *others.get(expert, ())}
        for expert in order[uses[order] > 0].tolist()
    }
    free = [expert for expert, ranks in holders.items() if len(ranks) < placement.num_ranks]
    for expert in free[:MAX_TRIED]:
        for rank in range(placement.num_ranks):
            if rank not in holders[expert]:
                yield expert, rank


def _with(others: dict[int, list[int]], expert: int, rank: int) -> dict[int, list[int]]:
    return {**others, expert: sorted([*others.get(expert, ()), rank])}


def _others(placement: Placement, layer: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for _, expert, rank in placement.copies[placement.copies[:, 0] == layer].tolist():
        found.setdefault(expert, []).append(rank)
    return found
