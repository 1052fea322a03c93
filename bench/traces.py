"""Synthetic routing traces with the skew and the stickiness of real ones, and their forms."""

from collections import OrderedDict
from pathlib import Path

import numpy as np

NUM_LAYERS = 48
NUM_EXPERTS = 128
TOP_K = 8


def routing_trace(
    num_tokens: int,
    *,
    num_layers: int = NUM_LAYERS,
    num_experts: int = NUM_EXPERTS,
    top_k: int = TOP_K,
    zipf_exponent: float = 1.0,
    stickiness: float = 0.4,
    seed: int = 20250601,
) -> np.ndarray:
    """Draw which experts a model routes each token to.

    In every layer the expert of popularity rank r (from 1) has the weight
    ``r ** -zipf_exponent``; which expert has which rank is the layer's own
    permutation. Each expert of the previous token is kept with probability
    `stickiness`; the others are drawn by weight, without replacement, from
    all experts that were not kept. The same arguments give the same trace.

    Parameters
    ----------
    num_tokens : int
        Length of the trace.
    num_layers, num_experts, top_k : int, default 48, 128, 8
        Shape of the model: that of Qwen3-30B-A3B.
    zipf_exponent : float, default 1.0
        Skew of the popularity; 0 draws all experts alike.
    stickiness : float, default 0.4
        Probability that an expert serves the next token, too.
    seed : int, default 20250601
        Seed of the generator.

    Returns
    -------
    ndarray of int32, shape (num_tokens, num_layers, top_k)
        Distinct expert ids per token and layer: those that were kept first,
        then the fresh ones in the order they were drawn.
    """
    rng = np.random.default_rng(seed)
    ranks = rng.permuted(np.tile(np.arange(1, num_experts + 1), (num_layers, 1)), axis=1)
    log_weights = -zipf_exponent * np.log(ranks)
    trace = np.empty((num_tokens, num_layers, top_k), np.int32)
    layers = np.arange(num_layers)[:, None]
    for token in range(num_tokens):
        # The k largest of log weight + Gumbel noise are a weighted sample
        # without replacement (Efraimidis and Spirakis, 2006).
        scores = log_weights + rng.gumbel(size=(num_layers, num_experts))
        if token:
            kept = rng.random((num_layers, top_k)) < stickiness
            # Above every score: a kept expert is always among the k largest.
            scores[layers, trace[token - 1]] += 1e6 * kept
        chosen = np.argpartition(scores, -top_k, axis=1)[:, -top_k:]
        order = np.argsort(-scores[layers, chosen], axis=1, kind="stable")
        trace[token] = chosen[layers, order]
    return trace


def lru_order(trace: np.ndarray, num_experts: int, capacity: int) -> tuple[list[int], int]:
    """Flatten a trace into keys, in each request the hits of an LRU before its misses.

    That is the order in which `ExpertCache.acquire` looks at a request. As a
    flat list of keys it can drive any cache access by access.

    Parameters
    ----------
    trace : ndarray of int, shape (num_tokens, num_layers, top_k)
        What `routing_trace` returned.
    num_experts : int
        The key is ``layer * num_experts + expert``.
    capacity : int
        Keys that the LRU holds.

    Returns
    -------
    keys : list of int, trace.size elements
        The accesses.
    num_hits : int
        How many of them an LRU of that capacity answers.
    """
    bases = np.arange(trace.shape[1])[:, None] * num_experts
    requests = (trace + bases).reshape(-1, trace.shape[2]).tolist()
    recent: OrderedDict[int, None] = OrderedDict()
    keys: list[int] = []
    num_hits = 0
    for request in requests:
        hits = [key for key in request if key in recent]
        misses = [key for key in request if key not in recent]
        for key in hits:
            recent.move_to_end(key)
        for key in misses:
            if len(recent) == capacity:
                recent.popitem(last=False)
            recent[key] = None
        keys += hits + misses
        num_hits += len(hits)
    return keys, num_hits


def write_oracle_general(path: Path, keys: np.ndarray) -> None:
    """Write accesses as libCacheSim's oracleGeneral: time, object, size, next access."""
    order = np.argsort(keys, kind="stable")
    following = np.full(len(keys), -1, np.int64)
    same = keys[order[:-1]] == keys[order[1:]]
    following[order[:-1][same]] = order[1:][same]
    rows = np.zeros(len(keys), [("time", "<u4"), ("key", "<u8"), ("size", "<u4"), ("next", "<i8")])
    rows["time"] = np.arange(len(keys))
    # Its object 0 is special.
    rows["key"], rows["size"], rows["next"] = keys + 1, 1, following
    rows.tofile(path)
