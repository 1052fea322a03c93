"""Replay: a recorded trace through a cache, as it would have gone live, at full speed."""

import html
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moecache.errors import ConfigError
from moecache.policies._policy import Policy
from moecache.policies.making import policy_name
from moecache.study._accesses import Accesses
from moecache.study._arguments import (
    BELADY,
    check_name,
    clip_capacity,
    make_partitions,
    total_experts,
)
from moecache.study._optimum import belady
from moecache.study._replay import replay_policy
from moecache.traces.trace import DECODE, PREFILL, Trace
from moecache.units import parse_bytes

PHASES = {"prefill": PREFILL, "decode": DECODE}
MIXED = 2
# Sequences that ECHO tells apart, and the optimum's mode in which a batch admits by worth.
MAX_SEQUENCES, CHOOSING = 64, 2


@dataclass(frozen=True, eq=False, repr=False)
class Replay:
    """The hits and misses that a cache would have had with a trace.

    An access is an expert that a step asks of a layer, once however many of the
    step's rows ask for it. Every access that is no hit moved an expert.

    Attributes
    ----------
    policy, scope : str
    capacity : int
        Slots.
    total_experts : int
        Experts of all layers.
    hits, misses : ndarray of int32, shape [num_steps, num_layers]
    phase : ndarray of uint8, shape [num_steps]
        0 if all rows of the step are prefill, 1 if all are decode, 2 if it has both.
    seconds : float
        Duration of the replay.
    """

    policy: str
    scope: str
    capacity: int
    total_experts: int
    hits: np.ndarray
    misses: np.ndarray
    phase: np.ndarray
    seconds: float

    @property
    def num_hits(self) -> int:
        """Accesses that were found."""
        return int(self.hits.sum(dtype=np.int64))

    @property
    def num_misses(self) -> int:
        """Accesses that were not: experts that had to be moved."""
        return int(self.misses.sum(dtype=np.int64))

    @property
    def num_accesses(self) -> int:
        """Hits and misses."""
        return self.num_hits + self.num_misses

    @property
    def hit_rate(self) -> float:
        """Hits of all accesses; 0.0 if there were none."""
        return self.num_hits / self.num_accesses if self.num_accesses else 0.0

    @property
    def per_layer(self) -> np.ndarray:
        """Hit rate of each layer, shape [num_layers]; 0.0 for one without accesses."""
        return _rates(self.hits.sum(0, dtype=np.int64), self.misses.sum(0, dtype=np.int64))

    @property
    def per_phase(self) -> dict[str, float]:
        """Hit rate in "prefill" and in "decode", as far as there were accesses.

        A step with rows of both counts in neither: it is not known which phase an access is of.
        """
        rates = {}
        for name, number in PHASES.items():
            rows = self.phase == number
            hits = int(self.hits[rows].sum(dtype=np.int64))
            accesses = hits + int(self.misses[rows].sum(dtype=np.int64))
            if accesses:
                rates[name] = hits / accesses
        return rates

    def bytes_moved(self, expert_bytes: int | str | npt.ArrayLike) -> int:
        """Return the bytes of all misses.

        Parameters
        ----------
        expert_bytes : int, str or array of integers, shape [num_layers]
            Bytes of an expert: 3145728, "3MiB", or those of each layer.

        Raises
        ------
        ConfigError
            If it is no size, or not one for each layer.
        """
        if isinstance(expert_bytes, (int, str)):
            return self.num_misses * parse_bytes(expert_bytes)
        sizes = np.asarray(expert_bytes)
        if sizes.ndim == 0 and sizes.dtype.kind in "iu":
            return self.num_misses * parse_bytes(int(sizes))
        num_layers = self.misses.shape[1]
        if sizes.shape != (num_layers,) or sizes.dtype.kind not in "iu" or (sizes < 0).any():
            raise ConfigError(
                f"expert_bytes must be one size or {num_layers} whole numbers, one per layer, got "
                f"{sizes.dtype} of shape {list(sizes.shape)}"
            )
        return sum(
            int(count) * int(size)
            for count, size in zip(self.misses.sum(0, dtype=np.int64), sizes, strict=True)
        )

    def hit_rate_over_time(self, window: int = 32) -> np.ndarray:
        """Return the hit rate of the last `window` steps after each step.

        Returns
        -------
        ndarray of float64, shape [num_steps]
            Over what there is at the beginning; 0.0 where a window has no access.
        """
        if window < 1:
            raise ConfigError(f"window must be at least 1 step, got {window}")
        hits = _window_sums(self.hits.sum(1, dtype=np.int64), window)
        return _rates(hits, _window_sums(self.misses.sum(1, dtype=np.int64), window))

    def describe(self) -> str:
        """Return the figures as text, a line each."""
        return "\n".join(f"{name:<9} {value}" for name, value in self._facts())

    def __repr__(self) -> str:
        return (
            f"<Replay of {self.policy}, scope {self.scope}, {self.capacity} of "
            f"{self.total_experts} experts: hit rate {self.hit_rate:.3f}>"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in self._facts()
        )
        return f"<table><caption>Replay</caption>{rows}</table>"

    def _facts(self) -> list[tuple[str, str]]:
        share = self.capacity / self.total_experts
        facts = [
            ("policy", f"{self.policy}, scope {self.scope}"),
            ("capacity", f"{self.capacity} of {self.total_experts} experts ({share:.1%})"),
            ("accesses", f"{self.num_accesses} in {len(self.hits)} steps"),
            ("hit rate", f"{self.hit_rate:.1%}: {self.num_hits} hits, {self.num_misses} misses"),
        ]
        facts += [(name, f"{rate:.1%}") for name, rate in self.per_phase.items()]
        if self.num_accesses:
            rates = self.per_layer
            worst, best = int(rates.argmin()), int(rates.argmax())
            text = f"{rates[worst]:.1%} (layer {worst}) to {rates[best]:.1%} (layer {best})"
            facts.append(("layers", text))
        return [*facts, ("took", f"{self.seconds:.3g} s")]


def replay(
    trace: Trace,
    policy: str | Callable[..., Any] | object = "echo",
    capacity: float | str = "25%",
    *,
    scope: str = "global",
) -> Replay:
    """Put a trace through a cache and count what is found.

    Decides as `ExpertCache` does, miss for miss: rows of one `step` come together,
    and a step that is `bulk` admits no more than its layer's fair share; if its rows are
    of several sequences, ECHO and the optimum admit what is worth more than what
    would leave. Every cache starts empty, and nothing is prefetched. Blocks; other threads run
    meanwhile, unless the policy is written in Python.

    Parameters
    ----------
    trace : Trace
    policy : str, class, function or object, default "echo"
        A name that `ExpertCache` knows; "belady", the optimum, which knows the future
        (proven for steps of one row and room for each, at least top_k slots);
        a class or function, called as ``factory(capacity, num_keys=...)`` once for all
        layers, or once for each; or one object, for scope "global". Anything but a
        compiled policy is driven as `moecache.policies._python_policy.PythonPolicy` says:
        access(key), insert(key), remove(key), victim(held). An object can be replayed
        once, for the cache around it starts empty.
    capacity : int, float or str, default "25%"
        Slots, or a share of all experts: 128, 0.25, "0.25", "25%". More than all are all.
    scope : {"global", "layer"}, default "global"
        Whether layers compete for slots, or each has its share.

    Raises
    ------
    CapacityError
        If there are no slots, or fewer than layers with scope "layer".
    ConfigError
        If an argument cannot be used.
    Exception
        An error of a policy written in Python ends the replay.
    """
    slots = clip_capacity(capacity, trace, scope)
    bounds = step_bounds(trace)
    bulk = trace.bulk[bounds[:-1]]
    experts = np.ascontiguousarray(trace.experts, np.int32)
    shape = (len(bounds) - 1, trace.num_layers)
    hits, misses = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    chosen: str | list[Policy]
    if isinstance(policy, str):
        chosen = check_name(policy)
    else:
        chosen = make_partitions(policy, trace, slots, scope)
    started = time.perf_counter()
    if chosen == BELADY:
        chosen_from = np.where(of_several(trace, bounds) & (bulk == 1), CHOOSING, bulk)
        accesses = Accesses(experts, bounds, trace.num_experts, chosen_from.astype(np.uint8))
        belady(accesses, slots, scope, hits, misses)
    else:
        begins = sequence_begins(trace, bounds)
        replay_policy(
            experts,
            bounds,
            begins,
            bulk,
            trace.num_experts,
            slots,
            chosen,
            scope,
            hits,
            misses,
            trace.sequence,
        )
    seconds = time.perf_counter() - started
    phase = step_phases(trace, bounds)
    for array in (hits, misses, phase):
        array.flags.writeable = False
    return Replay(
        policy_name(policy), scope, slots, total_experts(trace), hits, misses, phase, seconds
    )


def step_bounds(trace: Trace) -> np.ndarray:
    """Return the row at which each step begins, and the end: int64 [num_steps + 1]."""
    if not trace.num_tokens:
        return np.zeros(1, np.int64)
    changes = np.flatnonzero(np.diff(trace.step)) + 1
    return np.concatenate(([0], changes, [trace.num_tokens])).astype(np.int64)


def row_sequences(trace: Trace, start: int, stop: int) -> np.ndarray | None:
    """Return which sequence each row of a step is of, or `None` for more than are told apart."""
    found: np.ndarray = trace.sequence[start:stop]
    return found if len(set(found.tolist())) <= MAX_SEQUENCES else None


def of_several(trace: Trace, bounds: np.ndarray) -> np.ndarray:
    """Return whether each step has rows of several sequences that are told apart: bool."""
    several = np.zeros(len(bounds) - 1, bool)
    for step in np.flatnonzero(np.diff(bounds) > 1).tolist():
        found = row_sequences(trace, bounds[step], bounds[step + 1])
        several[step] = found is not None and (found != found[0]).any()
    return several


def step_phases(trace: Trace, bounds: np.ndarray) -> np.ndarray:
    """Return each step's phase, `MIXED` for one whose rows have several: uint8 [num_steps]."""
    if len(bounds) == 1:
        return np.zeros(0, np.uint8)
    low = np.minimum.reduceat(trace.phase, bounds[:-1])
    high = np.maximum.reduceat(trace.phase, bounds[:-1])
    return np.where(low == high, low, MIXED).astype(np.uint8)


def sequence_begins(trace: Trace, bounds: np.ndarray) -> np.ndarray:
    """Return 1 for each step that does not continue the last one: uint8 [num_steps].

    A step goes on if its first row's sequence was among the last step's: in a
    batch, several are under way.
    """
    begins = np.zeros(len(bounds) - 1, np.uint8)
    if len(begins) > 1:
        first = np.repeat(trace.sequence[bounds[1:-1]], np.diff(bounds[:-1]))
        same = first == trace.sequence[: bounds[-2]]
        begins[1:] = ~np.logical_or.reduceat(same, bounds[:-2])
    return begins


def _rates(hits: np.ndarray, misses: np.ndarray) -> np.ndarray:
    accesses = hits + misses
    return np.divide(hits, accesses, out=np.zeros(hits.shape), where=accesses > 0)


def _window_sums(values: np.ndarray, window: int) -> np.ndarray:
    sums = np.concatenate(([0], np.cumsum(values)))
    last = np.arange(1, len(sums))
    return sums[last] - sums[np.maximum(0, last - window)]
