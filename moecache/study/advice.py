"""Advice: which policy, and what a given memory buys, from a recorded trace."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moecache.errors import CapacityError, ConfigError
from moecache.policies.making import policy_name
from moecache.study._arguments import (
    BELADY,
    check_factory,
    check_scope,
    cycle_slots,
    total_experts,
)
from moecache.study.curves import miss_ratio_curve
from moecache.study.replay import Replay, replay, step_bounds
from moecache.traces.trace import Trace
from moecache.units import format_bytes, parse_budget, parse_bytes

DEFAULT_POLICIES = ("echo", "haz2", "lfru", "lru", "s3-fifo", "slru")
_HOW = "(second half of the trace, warmed on the first)"


@dataclass(frozen=True)
class Recommendation:
    """Settings to choose, and their expected effect.

    Hit rates are of the trace's second half, after a cache that started empty has
    seen the first: those to expect of similar requests once it is warm. Those called
    `whole` are of the whole trace, and to be compared with each other alone.

    Attributes
    ----------
    policy, scope : str
        The best of those that were tried.
    slots, total_experts : int
    expert_bytes : int
    hit_rate : float
    bytes_per_token : float
        Read per token.
    whole_hit_rate, whole_optimum : float
        The policy's and Belady's with these slots and this scope. No policy exceeds
        Belady's where every step has one row and finds room (`top_k` slots; for each
        layer with scope "layer"); elsewhere that is unproven. In a part of the trace
        a policy can be ahead of it: Belady chooses for the whole.
    lru_below_cycle, lru_above_cycle : float
        LRU's hit rate, of the whole trace, with one layer's choices less than one token
        uses over all layers, and with as many as it uses: the cliff.
    cycle_slots : int
        Experts that one token uses over all layers.
    hit_rate_at_cycle : float or None
        The policy's with that many slots; None if it has them.
    doubled : Recommendation or None
        The same with twice the memory; None if all experts fit already.
    candidates : tuple of (policy, scope, hit rate)
        All that were tried, the best first.
    """

    policy: str
    scope: str
    slots: int
    total_experts: int
    expert_bytes: int
    hit_rate: float
    bytes_per_token: float
    whole_hit_rate: float
    whole_optimum: float
    lru_below_cycle: float
    lru_above_cycle: float
    cycle_slots: int
    hit_rate_at_cycle: float | None
    doubled: "Recommendation | None"
    candidates: tuple[tuple[str, str, float], ...]

    def describe(self) -> str:
        """Return what to do and why, as text."""
        return "\n".join(f"{name:<10} {text}" for name, text in self._facts())

    def __str__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
            for name, text in self._facts()
        )
        return f"<table><caption>Recommendation</caption>{rows}</table>"

    def _facts(self) -> list[tuple[str, str]]:
        share = self.slots / self.total_experts
        size = format_bytes(self.slots * self.expert_bytes)
        moved = format_bytes(self.bytes_per_token)
        others = [
            f"{policy} ({scope}) {rate:.1%}"
            for policy, scope, rate in self.candidates
            if (policy, scope) != (self.policy, self.scope)
        ]
        cycle = format_bytes(self.cycle_slots * self.expert_bytes)
        below, above = self.lru_below_cycle, self.lru_above_cycle
        cliff = f"LRU finds {below:.1%} with one layer's less than that, {above:.1%} with it"
        facts = {
            "use": f"policy {self.policy}, scope {self.scope}",
            "slots": f"{self.slots} of {self.total_experts} experts ({share:.1%}), {size}",
            "expect": f"{self.hit_rate:.1%} hits, {moved} read per token {_HOW}",
            "optimum": f"Belady's optimum, which knows the future, {self.whole_optimum:.1%} of the "
            f"whole trace, where this policy had {self.whole_hit_rate:.1%}",
            "next best": ", ".join(others[:3]) or "nothing else was tried",
            "cliff": f"a token uses {self.cycle_slots} experts over all layers ({cycle}); {cliff}",
        }
        if self.hit_rate_at_cycle is not None:
            facts["note"] = (
                f"this is below the cliff: with {cycle} for experts {self.policy} found "
                f"{self.hit_rate_at_cycle:.1%}, not {self.hit_rate:.1%}"
            )
        if self.doubled is None:
            facts["more"] = "would buy nothing: every expert fits"
        else:
            more = self.doubled
            size, moved = (
                format_bytes(more.slots * more.expert_bytes),
                format_bytes(more.bytes_per_token),
            )
            facts["twice that"] = (
                f"{size} ({more.slots} slots): {more.hit_rate:.1%} hits, {moved} read per token, "
                f"with {more.policy}, scope {more.scope}"
            )
        return list(facts.items())


def recommend(
    trace: Trace,
    memory: int | str,
    *,
    expert_bytes: int | str | None = None,
    policies: Sequence[Any] = DEFAULT_POLICIES,
    scopes: Sequence[str] = ("global", "layer"),
) -> Recommendation:
    """Return which policy suits requests like a trace's, and what the memory buys.

    Every policy and scope replays the trace, from an empty cache; the
    second half of the steps counts. One trace says little of other requests: take one that is
    like yours, of some hundred tokens.

    Parameters
    ----------
    trace : Trace
        A trace of at least two steps.
    memory : int or str
        For experts alone: "4GiB", or a share of all experts, "25%".
    expert_bytes : int or str, optional
        Bytes of the widest layer's expert: "3MiB". By default what the trace says in its metadata.
    policies : names, classes or functions
        Policies to choose from; the first one of equals. As for `replay`, but for single objects.
    scopes : "global" and "layer"
        Scopes to choose from, as far as there are slots enough.

    Raises
    ------
    ConfigError
        If an argument cannot be used, or an expert's size is not known.
    CapacityError
        If the memory holds no expert.
    """
    if trace.num_steps < 2:
        raise ConfigError(f"{trace!r} has {trace.num_steps} steps; advice needs at least 2")
    nbytes = expert_size(trace, expert_bytes)
    for scope in scopes:
        check_scope(scope)
    if not policies or not scopes:
        raise ConfigError("advice needs at least one policy and one scope to choose from")
    for policy in policies:
        if policy == BELADY:
            raise ConfigError("belady cannot be used live: it knows the future; leave it out")
        if not isinstance(policy, str):
            check_factory(policy, "advice")
    total = total_experts(trace)
    budget = parse_budget(memory, total * nbytes)
    slots = min(total, budget // nbytes)
    if slots < 1:
        raise CapacityError(
            f"a memory of {format_bytes(budget)} holds no expert of {format_bytes(nbytes)}; "
            f"one token uses {cycle_slots(trace)} over all layers, take more"
        )
    doubled = None
    if slots < total:
        more = min(total, 2 * budget // nbytes)
        doubled = _recommend(trace, more, nbytes, policies, scopes, None)
    return _recommend(trace, slots, nbytes, policies, scopes, doubled)


def _recommend(
    trace: Trace,
    slots: int,
    nbytes: int,
    policies: Sequence[Any],
    scopes: Sequence[str],
    doubled: Recommendation | None,
) -> Recommendation:
    usable = [scope for scope in scopes if scope == "global" or slots >= trace.num_layers]
    if not usable:
        raise CapacityError(
            f"{slots} slots are fewer than {trace.num_layers} layers; scope 'layer' cannot be "
            "used, take more memory or let it choose 'global'"
        )
    tried = [replay(trace, policy, slots, scope=scope) for policy in policies for scope in usable]
    # Stable: among equals, the one that was named first.
    order = sorted(range(len(tried)), key=lambda number: -_warm_rate(tried[number]))
    ranked = [tried[number] for number in order]
    best, chosen = ranked[0], policies[order[0] // len(usable)]
    half = len(best.hits) // 2
    rows = trace.num_tokens - int(step_bounds(trace)[half])
    curve = miss_ratio_curve(trace)
    cycle = cycle_slots(trace)
    below = cycle - cycle // trace.num_layers
    return Recommendation(
        policy=best.policy,
        scope=best.scope,
        slots=slots,
        total_experts=total_experts(trace),
        expert_bytes=nbytes,
        hit_rate=_warm_rate(best),
        bytes_per_token=int(best.misses[half:].sum(dtype=np.int64)) * nbytes / rows,
        whole_hit_rate=best.hit_rate,
        whole_optimum=replay(trace, BELADY, slots, scope=best.scope).hit_rate,
        lru_below_cycle=curve.hit_rate(below) if below else 0.0,
        lru_above_cycle=curve.hit_rate(cycle),
        cycle_slots=cycle,
        hit_rate_at_cycle=(
            _warm_rate(replay(trace, chosen, cycle, scope=best.scope)) if slots < cycle else None
        ),
        doubled=doubled,
        candidates=tuple(
            (policy_name(done.policy), done.scope, _warm_rate(done)) for done in ranked
        ),
    )


def _warm_rate(done: Replay) -> float:
    """Return the hit rate of the second half of the steps."""
    half = len(done.hits) // 2
    hits = int(done.hits[half:].sum(dtype=np.int64))
    accesses = hits + int(done.misses[half:].sum(dtype=np.int64))
    return hits / accesses if accesses else 0.0


def expert_size(trace: Trace, given: int | str | None) -> int:
    """Return the bytes of an expert: those that are given, or what the trace says.

    Raises
    ------
    ConfigError
        If the size is not known, or is no size.
    """
    said = trace.metadata.get("expert_bytes") if given is None else given
    if said is None:
        raise ConfigError(
            "the trace does not say how large an expert is; give expert_bytes, for example "
            "'3MiB' (`moecache inspect CHECKPOINT` shows it)"
        )
    if not isinstance(said, (int, str)) or isinstance(said, bool):
        raise ConfigError(f"expert_bytes {said!r} is no size; write for example '3MiB'")
    nbytes = parse_bytes(said)
    if nbytes < 1:
        raise ConfigError("expert_bytes must be at least 1 byte, got 0")
    return nbytes
