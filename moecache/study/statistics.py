"""Statistics of a trace for caching, before any cache is simulated.

Every figure is per layer: layers differ more than models do. Padding is left out.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from moecache.errors import ConfigError
from moecache.traces.trace import Trace

SHARES = (0.10, 0.25, 0.50)
WINDOWS = (1, 4, 16, 64, 256)

_CHUNK_PAIRS = 1 << 22
_MAX_MATRIX = 1 << 24
_MAX_EXPONENT = 20.0


@dataclass(frozen=True)
class TraceStatistics:
    """Figures of a trace, an entry per layer; NaN where there is nothing to count.

    Attributes
    ----------
    num_tokens, num_layers, num_experts, top_k : int
    layers : ndarray of int32, shape [L]
        The model's own layer numbers.
    counts : ndarray of int64, shape [L, E]
        How often each expert was chosen.
    top_shares : ndarray, shape [L, 3]
        Share of accesses that go to the most used 10, 25 and 50 % of the experts.
    gini : ndarray, shape [L]
        Gini coefficient of `counts`: 0 if all are used alike.
    zipf_exponent : ndarray, shape [L]
        s of the Zipf law count ~ rank ** -s that fits best.
    entropy_bits, relative_entropy : ndarray, shape [L]
        Entropy of the experts' frequencies; relative to log2 E, 1 if all are used alike.
    overlap : ndarray, shape [L]
        Mean share of a token's experts that the sequence's token before also used.
    reuse : ndarray of int64, shape [L, B + 1]
        Accesses by the tokens until their expert is used again: bin b counts
        distances in [2**b, 2**(b+1)), the last one those never used again.
    windows : tuple of int
    working_set : ndarray, shape [L, W]
        Mean number of distinct experts in that many tokens in a row.
    predictability : ndarray, shape [L - 1]
        How often the next layer uses the expert that follows most often.
    mutual_information_bits : ndarray, shape [L - 1]
        Between an expert of a layer and one of the next, of the same token.
    """

    num_tokens: int
    num_layers: int
    num_experts: int
    top_k: int
    layers: np.ndarray
    counts: np.ndarray
    top_shares: np.ndarray
    gini: np.ndarray
    zipf_exponent: np.ndarray
    entropy_bits: np.ndarray
    relative_entropy: np.ndarray
    overlap: np.ndarray
    reuse: np.ndarray
    windows: tuple[int, ...]
    working_set: np.ndarray
    predictability: np.ndarray
    mutual_information_bits: np.ndarray

    def describe(self) -> str:
        """Return the layers' means as text, a line per figure."""
        accesses = int(self.reuse.sum())
        if accesses == 0:
            return "no accesses"
        shares = ", ".join(
            f"top {share:.0%}: {mean(self.top_shares[:, i]):.1%}" for i, share in enumerate(SHARES)
        )
        sets = ", ".join(
            f"{mean(self.working_set[:, i]):.1f} in {window}"
            for i, window in enumerate(self.windows)
            if window <= self.num_tokens
        )
        never = int(self.reuse[:, -1].sum()) / accesses
        gini, zipf = mean(self.gini), mean(self.zipf_exponent)
        bits, relative = mean(self.entropy_bits), mean(self.relative_entropy)
        facts = {
            "popularity": f"{shares} of accesses; Gini {gini:.3f}, Zipf {zipf:.2f}",
            "entropy": f"{bits:.2f} bits, {relative:.1%} of log2 {self.num_experts}",
            "overlap": f"{mean(self.overlap):.1%} of a token's experts, with the token before",
            "reuse": f"{_median(self.reuse.sum(0))}; {never:.1%} never",
            "working set": f"{sets} tokens",
        }
        if self.num_layers > 1:
            likeliest, shared = mean(self.predictability), mean(self.mutual_information_bits)
            facts["next layer"] = f"{likeliest:.1%} use the likeliest follower; {shared:.3f} bits"
        return "\n".join(f"{name:<12} {text}" for name, text in facts.items())

    def to_dict(self) -> dict[str, Any]:
        """Return all of it in lists and numbers for JSON, None for NaN."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    def to_json(self) -> str:
        """Return all of it as JSON text."""
        return json.dumps(self.to_dict(), allow_nan=False)


def statistics(trace: Trace) -> TraceStatistics:
    """Return the figures of a trace.

    Takes time in proportion to tokens x layers x (top_k squared).

    Notes
    -----
    With counts sorted upwards, x_1 <= ... <= x_E, the Gini coefficient is
    2 sum(i x_i) / (E sum(x)) - (E + 1) / E. The Zipf exponent is the maximum
    likelihood estimate over ranks 1 to E (Clauset, Shalizi and Newman 2009, SIAM
    Review 51, section 3 and its appendix on discrete laws, here with finite support):
    the s at which the law's mean of ln(rank) is the observed one. Ranks come from the
    counts themselves, which puts it a little too high for short traces. The working
    set is that of Denning (1968), averaged over all windows: an access is its expert's
    last in so many windows as its next use lies beyond. Mutual information is the
    plug-in estimate, which is too high where there are fewer tokens than pairs of
    experts (Miller 1955).
    """
    cells = _Cells(trace)
    counts = expert_counts(trace)
    # Only experts that were used: there may be a million that were not.
    used = [np.sort(layer[layer > 0])[::-1] for layer in counts]
    totals = np.array([layer.sum() for layer in used])
    entropy = np.array([_entropy(layer) for layer in used])
    pairs = [_pair_figures(trace, layer) for layer in range(trace.num_layers - 1)]
    bits = np.log2(trace.num_experts)
    return TraceStatistics(
        num_tokens=trace.num_tokens,
        num_layers=trace.num_layers,
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        layers=trace.layers,
        counts=counts,
        top_shares=np.array([_top_shares(layer, trace.num_experts) for layer in used]),
        gini=np.array([_gini(layer, trace.num_experts) for layer in used]),
        zipf_exponent=_zipf(used, trace.num_experts),
        entropy_bits=entropy,
        relative_entropy=entropy / bits if bits else np.where(totals > 0, 1.0, np.nan),
        overlap=_overlap(trace),
        reuse=cells.reuse(),
        windows=WINDOWS,
        working_set=np.stack([cells.working_set(window) for window in WINDOWS], axis=1),
        predictability=np.array([pair[0] for pair in pairs]),
        mutual_information_bits=np.array([pair[1] for pair in pairs]),
    )


def coactivation(trace: Trace, layer: int) -> np.ndarray:
    """Return how often two experts of neighbouring layers served the same token.

    Parameters
    ----------
    trace : Trace
    layer : int
        The first of the two, counted from 0; not the model's own number.

    Returns
    -------
    ndarray of int64, shape [num_experts, num_experts]
        [e, f]: tokens that used e in `layer` and f in the next one.

    Raises
    ------
    ConfigError
        If there is no next layer, or there are more than 4,096 experts.
    """
    num_experts = trace.num_experts
    if not 0 <= layer < trace.num_layers - 1:
        raise ConfigError(f"layer {layer} is not in [0, {trace.num_layers - 1})")
    if num_experts**2 > _MAX_MATRIX:
        raise ConfigError(f"a matrix of {num_experts} x {num_experts} experts is too large")
    matrix = np.zeros(num_experts**2, np.int64)
    for keys in _pair_keys(trace, layer):
        matrix += np.bincount(keys, minlength=len(matrix))
    return matrix.reshape(num_experts, num_experts)


def mean(values: np.ndarray) -> float:
    """Return the mean of what is not NaN; NaN if nothing is left."""
    found = values[~np.isnan(values)]
    return float(found.mean()) if found.size else float("nan")


def expert_counts(trace: Trace) -> np.ndarray:
    """Return how often each expert was chosen: int64 [num_layers, num_experts]."""
    counts = np.zeros((trace.num_layers, trace.num_experts), np.int64)
    for layer in range(trace.num_layers):
        chosen = trace.experts[:, layer]
        experts, number = np.unique(chosen[chosen >= 0], return_counts=True)
        counts[layer, experts] = number
    return counts


class _Cells:
    """All accesses, by layer and expert, in the order of the tokens."""

    def __init__(self, trace: Trace) -> None:
        tokens, layers, _ = np.nonzero(trace.experts >= 0)
        experts = trace.experts[trace.experts >= 0].astype(np.int64)
        keys = layers * trace.num_experts + experts
        self.num_tokens = trace.num_tokens
        self.num_layers = trace.num_layers
        order = np.argsort(keys, kind="stable")
        self.layers, self.tokens = layers[order], tokens[order]
        # Tokens until the same expert's next use; 0: never.
        self.distances = np.zeros(len(keys), np.int64)
        same = np.diff(keys[order]) == 0
        self.distances[:-1][same] = np.diff(self.tokens)[same]

    def reuse(self) -> np.ndarray:
        num_bins = max(1, (self.num_tokens - 1).bit_length())
        # frexp gives the exponent exactly: 2 ** (e - 1) <= d < 2 ** e.
        bins = np.frexp(self.distances.astype(np.float64))[1] - 1
        bins[self.distances == 0] = num_bins
        found = np.bincount(
            self.layers * (num_bins + 1) + bins, minlength=self.num_layers * (num_bins + 1)
        )
        return found.reshape(self.num_layers, num_bins + 1)

    def working_set(self, window: int) -> np.ndarray:
        """Return the mean number of distinct experts over all windows, per layer."""
        num_windows = self.num_tokens - window + 1
        if num_windows < 1:
            return np.full(self.num_layers, np.nan)
        # An access is its expert's last in the windows that start in first..last.
        first = np.maximum(0, self.tokens - window + 1)
        last = np.minimum(self.tokens, num_windows - 1)
        again = self.distances > 0
        last[again] = np.minimum(last, self.tokens + self.distances - window)[again]
        found = np.bincount(
            self.layers, weights=np.maximum(0, last - first + 1), minlength=self.num_layers
        )
        return found / num_windows


def _overlap(trace: Trace) -> np.ndarray:
    order = np.argsort(trace.sequence, kind="stable")
    before, after = order[:-1], order[1:]
    same = trace.sequence[before] == trace.sequence[after]
    before, after = before[same], after[same]
    total = np.zeros(trace.num_layers)
    number = np.zeros(trace.num_layers, np.int64)
    rows = max(1, _CHUNK_PAIRS // (trace.num_layers * trace.top_k**2))
    for start in range(0, len(after), rows):
        new = trace.experts[after[start : start + rows]]
        old = trace.experts[before[start : start + rows]]
        shared = (new[..., :, None] == old[..., None, :]).any(-1) & (new >= 0)
        size = (new >= 0).sum(-1)
        known = (size > 0) & (old >= 0).any(-1)
        total += (shared.sum(-1) / np.maximum(size, 1) * known).sum(0)
        number += known.sum(0)
    return _ratio(total, number)


def _pair_keys(trace: Trace, layer: int) -> Iterator[np.ndarray]:
    """Yield e * E + f of all pairs of experts of a token, at a layer and the next."""
    rows = max(1, _CHUNK_PAIRS // trace.top_k**2)
    for start in range(0, trace.num_tokens, rows):
        here = trace.experts[start : start + rows, layer, :, None].astype(np.int64)
        there = trace.experts[start : start + rows, layer + 1, None, :]
        yield (here * trace.num_experts + there)[(here >= 0) & (there >= 0)]


def _pair_figures(trace: Trace, layer: int) -> tuple[float, float]:
    num_experts = trace.num_experts
    if num_experts**2 <= _MAX_MATRIX:
        matrix = coactivation(trace, layer).reshape(-1)
        keys = np.flatnonzero(matrix)
        joint = matrix[keys]
    else:
        parts = [np.unique(part, return_counts=True) for part in _pair_keys(trace, layer)]
        every = np.concatenate([part[0] for part in parts] or [np.zeros(0, np.int64)])
        keys, places = np.unique(every, return_inverse=True)
        joint = np.zeros(len(keys), np.int64)
        np.add.at(joint, places, np.concatenate([part[1] for part in parts] or [joint]))
    if len(keys) == 0:
        return float("nan"), float("nan")
    here, there = np.divmod(keys, num_experts)
    # Tokens that use e here and anything in the next layer.
    chosen = trace.experts[:, layer][(trace.experts[:, layer + 1] >= 0).any(-1)]
    uses = np.bincount(chosen[chosen >= 0], minlength=num_experts)
    best = np.zeros(num_experts, np.int64)
    np.maximum.at(best, here, joint)
    total = int(joint.sum())
    p_here = np.bincount(here, weights=joint, minlength=num_experts)[here] / total
    p_there = np.bincount(there, weights=joint, minlength=num_experts)[there] / total
    p = joint / total
    information = float((p * np.log2(p / (p_here * p_there))).sum())
    return float(best.sum() / uses.sum()), max(0.0, information)


def _top_shares(used: np.ndarray, num_experts: int) -> list[float]:
    """Return the shares of the busiest experts; `used` has the counts above 0, downwards."""
    if not len(used):
        return [np.nan] * len(SHARES)
    numbers = [max(1, int(np.ceil(share * num_experts - 1e-9))) for share in SHARES]
    return [used[:number].sum() / used.sum() for number in numbers]


def _gini(used: np.ndarray, num_experts: int) -> float:
    if not len(used):
        return np.nan
    # Ranks upwards; those never used come first, and count nothing.
    ranks = num_experts - np.arange(len(used))
    return 2 * (used * ranks).sum() / (num_experts * used.sum()) - (num_experts + 1) / num_experts


def _zipf(used: Sequence[np.ndarray], num_experts: int) -> np.ndarray:
    """Return s per layer by bisection: the law's mean of ln(rank) falls with s."""
    logs = np.log(np.arange(1, num_experts + 1))
    found = np.full(len(used), np.nan)
    for layer, counts in enumerate(used):
        if not len(counts) or num_experts == 1:
            continue
        observed = (counts * logs[: len(counts)]).sum() / counts.sum()
        low, high = 0.0, _MAX_EXPONENT
        for _ in range(60):
            middle = (low + high) / 2
            weights = np.exp(-middle * logs)
            if (weights * logs).sum() / weights.sum() > observed:
                low = middle
            else:
                high = middle
        found[layer] = (low + high) / 2
    return found


def _entropy(used: np.ndarray) -> float:
    if not len(used):
        return np.nan
    frequencies = used / used.sum()
    # No -0.0.
    return abs(float((frequencies * np.log2(frequencies)).sum()))


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    out = np.full(np.broadcast_shapes(part.shape, whole.shape), np.nan)
    return np.divide(part, whole, out=out, where=whole > 0)


def _median(bins: np.ndarray) -> str:
    number = int(np.searchsorted(np.cumsum(bins), bins.sum() / 2))
    if number == len(bins) - 1:
        return "less than half of the accesses"
    return f"half of the accesses within {2 ** (number + 1) - 1} tokens"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and np.isnan(value) else value
