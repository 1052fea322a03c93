"""Experts of a layer dealt to ranks, so that all have as much to do as they can take."""

import heapq
from collections.abc import Iterator

import numpy as np

MAX_SWAPS = 256


def quotas(shares: np.ndarray, num_layers: int, num_experts: int) -> Iterator[np.ndarray]:
    """Yield how many experts each rank owns of each layer.

    Later layers give back to a rank the part that rounding takes in one layer.

    Parameters
    ----------
    shares : ndarray of float64, shape [num_ranks]
        With a sum of 1.

    Yields
    ------
    ndarray of int64, shape [num_ranks], with a sum of num_experts
    """
    # Not 0.9999 of an expert where thirds of three are meant.
    whole = np.floor(shares * num_experts + 1e-9).astype(np.int64)
    rest = num_experts - int(whole.sum())
    part = np.maximum(shares * num_experts - whole, 0.0)
    owed = np.zeros(len(shares))
    for _ in range(num_layers):
        owed += part
        quota = whole.copy()
        # Only ranks that are owed part of an expert: no layer is more than one expert off.
        most = np.argsort(np.where(part > 1e-9, -owed, np.inf), kind="stable")[:rest]
        quota[most] += 1
        owed[most] -= 1
        yield quota


def deal(counts: np.ndarray, quota: np.ndarray, shares: np.ndarray, *, first: int) -> np.ndarray:
    """Return the rank of each expert of one layer.

    The best of several ways (in turn; the busiest first, to the rank with the least to do; in
    rounds of one expert per rank), in which experts then change places as long as that helps
    the rank with the most to do.

    Parameters
    ----------
    counts : ndarray of float64, shape [num_experts]
        Uses of each expert.
    quota : ndarray of int64, shape [num_ranks]
        How many experts each rank gets.
    shares : ndarray of float64, shape [num_ranks]
    first : int
        Rank (modulo their number) that begins when experts are dealt in turn.

    Returns
    -------
    ndarray of int64, shape [num_experts]
    """
    # The busiest first: longest processing time, Graham 1969 (SIAM J. Appl. Math. 17).
    order = np.argsort(-counts, kind="stable")
    ways = [
        _in_turn(len(counts), quota, first),
        _least_first(counts, order, quota, shares),
        _in_rounds(counts, order, quota, shares),
    ]
    # The first of equals: where nothing is known of use, in turn.
    best = min(ways, key=lambda ranks: _slowest(counts, ranks, shares))
    return _swapped(counts, best, shares)


def _slowest(counts: np.ndarray, ranks: np.ndarray, shares: np.ndarray) -> float:
    return float((np.bincount(ranks, counts, len(shares)) / shares).max())


def _in_turn(num_experts: int, quota: np.ndarray, first: int) -> np.ndarray:
    """Return ranks in turn, each as often as its quota, spread over the layer."""
    left, num_ranks = quota.copy(), len(quota)
    turn = (np.arange(num_ranks) + first) % num_ranks
    turn = turn[np.argsort(-quota[turn], kind="stable")]
    ranks: list[np.ndarray] = []
    done = 0
    while done < num_experts:
        having = turn[left[turn] > 0]
        left[having] -= 1
        ranks.append(having)
        done += len(having)
    return np.concatenate(ranks)


def _least_first(
    counts: np.ndarray, order: np.ndarray, quota: np.ndarray, shares: np.ndarray
) -> np.ndarray:
    """Return ranks where the busiest expert left goes to the rank with the least to do."""
    ranks = np.empty(len(counts), np.int64)
    left, parts = quota.tolist(), shares.tolist()
    # Among ranks with as little to do, the one with the most room comes first.
    heap = [(0.0, -left[rank], rank) for rank in range(len(parts)) if left[rank]]
    heapq.heapify(heap)
    for expert, count in zip(order.tolist(), counts[order].tolist(), strict=True):
        load, _, rank = heap[0]
        ranks[expert] = rank
        left[rank] -= 1
        if left[rank]:
            heapq.heapreplace(heap, (load + count / parts[rank], -left[rank], rank))
        else:
            heapq.heappop(heap)
    return ranks


def _in_rounds(
    counts: np.ndarray, order: np.ndarray, quota: np.ndarray, shares: np.ndarray
) -> np.ndarray:
    """Return ranks where each gets one expert a round, the busiest the one with the least to do.

    A round never makes the ranks' uses differ by more than they did, or by more than the
    round's own experts do.
    """
    ranks = np.empty(len(counts), np.int64)
    left, loads = quota.copy(), np.zeros(len(shares))
    done = 0
    while done < len(counts):
        having = np.flatnonzero(left)
        having = having[np.argsort(loads[having] / shares[having], kind="stable")]
        dealt = order[done : done + len(having)]
        ranks[dealt] = having
        loads[having] += counts[dealt]
        left[having] -= 1
        done += len(having)
    return ranks


def _swapped(counts: np.ndarray, ranks: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Let experts of the rank with the most to do change places with lesser ones of others."""
    loads = np.bincount(ranks, counts, len(shares))
    for _ in range(MAX_SWAPS):
        times = loads / shares
        most = int(np.argmax(times))
        for least in np.argsort(times, kind="stable")[:-1].tolist():
            pair = _best_swap(counts, ranks, loads, shares, most, least)
            if pair is not None:
                break
        else:
            return ranks
        mine, other = pair
        ranks[mine], ranks[other] = least, most
        loads = np.bincount(ranks, counts, len(shares))
    return ranks


def _best_swap(
    counts: np.ndarray,
    ranks: np.ndarray,
    loads: np.ndarray,
    shares: np.ndarray,
    most: int,
    least: int,
) -> tuple[int, int] | None:
    """Return experts of two ranks whose exchange lowers the larger time of both the most."""
    mine, others = np.flatnonzero(ranks == most), np.flatnonzero(ranks == least)
    if not len(others):
        return None
    before = loads[most] / shares[most]
    # The load that must move for both to have the same time.
    wanted = (loads[most] * shares[least] - loads[least] * shares[most]) / (
        shares[most] + shares[least]
    )
    others = others[np.argsort(counts[others], kind="stable")]
    place = np.searchsorted(counts[others], counts[mine] - wanted)
    best: tuple[float, int, int] | None = None
    for near in (np.maximum(place - 1, 0), np.minimum(place, len(others) - 1)):
        moved = counts[mine] - counts[others[near]]
        times = np.maximum(
            (loads[most] - moved) / shares[most], (loads[least] + moved) / shares[least]
        )
        found = int(np.argmin(np.where(moved > 0, times, np.inf)))
        if moved[found] > 0 and times[found] < before * (1 - 1e-12):
            candidate = (float(times[found]), int(mine[found]), int(others[near[found]]))
            best = candidate if best is None else min(best, candidate)
    return None if best is None else best[1:]
