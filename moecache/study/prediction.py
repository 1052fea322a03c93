"""Recall: how many of the experts that a token uses were foreseen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moecache.errors import ConfigError
from moecache.policies._echo import Echo
from moecache.prefetch.predict import Predictor
from moecache.traces.trace import Trace

_WARM_UP = 64


@dataclass(frozen=True, eq=False)
class Recall:
    """Share of the used experts that were among the first predicted ones.

    Attributes
    ----------
    at_k, at_2k : float
        Among as many as the token uses, and twice as many; 0.0 if nothing was scored.
    n : int or None
    at_n : float or None
        Among n, if that was asked for.
    per_layer : ndarray of float64, shape [num_layers]
        `at_k` of each layer; 0.0 where nothing was scored.
    ahead : str
    num_scored : int
        Experts used by the tokens that were scored.
    """

    at_k: float
    at_2k: float
    n: int | None
    at_n: float | None
    per_layer: np.ndarray
    ahead: str
    num_scored: int


def recall(
    trace: Trace,
    predictor: Predictor | None = None,
    *,
    ahead: str = "layer",
    n: int | None = None,
) -> Recall:
    """Return how many of a trace's accesses a predictor foresees.

    Rows are tokens, one after the other. The first min(64, T // 3) are learned
    from and not scored. The predictor is asked in Python, row by row and layer by layer:
    some 10 us each.

    Parameters
    ----------
    trace : Trace
    predictor : Predictor, optional
        By default `Echo`, what ECHO evicts by. One that returns ids alone will do, too.
    ahead : {"layer", "token"}, default "layer"
        When it is asked: just before a layer is visited, knowing the token's earlier
        layers (the first one: the last token), or as soon as the token before
        has left the layer.
    n : int, optional
        One more length to score.

    Raises
    ------
    ConfigError
        If an argument cannot be used, or a predictor gives no ids.
    """
    if ahead not in {"layer", "token"}:
        raise ConfigError(f"ahead {ahead!r} is not one of layer, token")
    if n is not None and n < 1:
        raise ConfigError(f"n must be at least 1, got {n}")
    if predictor is None:
        predictor = Echo(trace.num_layers, trace.num_experts)
    num_layers = trace.num_layers
    skipped = min(_WARM_UP, trace.num_tokens // 3)
    found = np.zeros((num_layers, 3), np.int64)
    scored = np.zeros(num_layers, np.int64)
    guesses: list[list[int]] = [[] for _ in range(num_layers)]
    longest = max(2 * trace.top_k, n or 0)
    rows = trace.experts.astype(np.int32)
    for token in range(trace.num_tokens):
        if token and trace.sequence[token] != trace.sequence[token - 1]:
            predictor.begin_sequence()
            guesses = [[] for _ in range(num_layers)]
        for layer in range(num_layers):
            ids = rows[token, layer]
            if ids.min() < 0:
                ids = ids[ids >= 0]
            if not len(ids):
                continue
            if ahead == "layer":
                guesses[layer] = _ids(predictor.predict(layer, longest))
            if token >= skipped:
                used = set(ids.tolist())
                for place, length in enumerate((len(ids), 2 * len(ids), n or 0)):
                    found[layer, place] += len(used.intersection(guesses[layer][:length]))
                scored[layer] += len(ids)
            predictor.observe(layer, ids)
            if ahead == "token":
                guesses[layer] = _ids(predictor.predict(layer, longest))
    total = int(scored.sum())
    at_k, at_2k, at_n = (float(part / total) if total else 0.0 for part in found.sum(0))
    per_layer = np.divide(found[:, 0], scored, out=np.zeros(num_layers), where=scored > 0)
    return Recall(at_k, at_2k, n, at_n if n else None, per_layer, ahead, total)


def _ids(answer: Any) -> list[int]:
    ids = answer[0] if isinstance(answer, tuple) and len(answer) == 2 else answer
    if isinstance(ids, np.ndarray):
        return [int(expert) for expert in ids.tolist()]
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        raise ConfigError(f"a predictor must return ids, or (ids, scores), got {answer!r}")
    return [int(expert) for expert in ids]
