"""Arguments of replays: policies by name or made by the caller, capacities, scopes."""

import math
import re
from fractions import Fraction
from typing import cast

import numpy as np

from moecache.errors import CapacityError, ConfigError
from moecache.policies._policy import Policy
from moecache.policies.making import SCOPES, Factory, is_factory, make_policies, policy_name
from moecache.policies.registry import policy_names
from moecache.traces.trace import Trace

BELADY = "belady"
# Every policy that has a name, those for replays alone among them.
POLICIES = policy_names(for_replays=True)


def check_scope(scope: str) -> str:
    """Return the scope, or raise a ConfigError."""
    if scope not in SCOPES:
        raise ConfigError(f"scope {scope!r} is not one of {', '.join(SCOPES)}")
    return scope


def total_experts(trace: Trace) -> int:
    """Return the experts of all layers."""
    if not isinstance(trace, Trace):
        raise ConfigError(f"{trace!r:.80} is no Trace; read a file's with moecache.study.load_any")
    return trace.num_layers * trace.num_experts


def cycle_slots(trace: Trace) -> int:
    """Return the experts that one token uses over all layers.

    Padding that widens a row (from a batch, or a step that was merged) does not count.
    """
    top_k = trace.metadata.get("top_k")
    known = isinstance(top_k, int) and 0 < top_k < trace.top_k
    return trace.num_layers * (cast("int", top_k) if known else trace.top_k)


def parse_capacity(capacity: float | str, total: int, *, scope: str = "global") -> int:
    """Return a number of slots, which may exceed `total`, from slots or a share of all.

    Raises
    ------
    CapacityError
        If that is less than one slot.
    ConfigError
        If it cannot be read as one or the other.
    """
    check_scope(scope)
    wrong = f"capacity {capacity!r} is neither a number of slots nor a share such as '25%' or 0.25"
    share: Fraction | None = None
    slots = 0
    if isinstance(capacity, str):
        text = capacity.strip()
        if re.fullmatch(r"[0-9]{1,12}", text):
            slots = int(text)
        elif match := re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,20})?)\s*%", text, re.ASCII):
            share = Fraction(match[1]) / 100
        elif re.fullmatch(r"[0-9]{0,3}\.[0-9]{1,20}", text):
            share = Fraction(text)
        else:
            raise ConfigError(wrong)
    elif isinstance(capacity, (bool, np.bool_)):
        raise ConfigError(wrong)
    elif isinstance(capacity, (int, np.integer)):
        slots = int(capacity)
    elif isinstance(capacity, (float, np.floating)) and math.isfinite(capacity):
        # 0.29 of 100 experts are 29: as it is written, not as it is stored.
        share = Fraction(repr(float(capacity)))
    else:
        raise ConfigError(wrong)
    if share is not None:
        if not 0 < share <= 1:
            raise ConfigError(f"capacity {capacity!r} is a share that is not in (0, 1]")
        slots = int(total * share)
    if slots < 1:
        raise CapacityError(
            f"capacity {capacity!r} of {total} experts is {slots} slots; at least 1 is needed, "
            f"a share of at least {100 / total:.3g}%"
        )
    return slots


def clip_capacity(capacity: float | str, trace: Trace, scope: str) -> int:
    """Return the slots of a replay: at most all experts, one per layer at least.

    Raises
    ------
    CapacityError
        If there are fewer slots than a replay of that scope needs.
    ConfigError
        If capacity or scope cannot be used.
    """
    total = total_experts(trace)
    slots = min(total, parse_capacity(capacity, total, scope=scope))
    if scope == "layer" and slots < trace.num_layers:
        raise CapacityError(
            f"capacity {capacity!r} is {slots} slots, but scope 'layer' gives each layer its own; "
            f"take at least {trace.num_layers}, or scope='global'"
        )
    return slots


def check_name(policy: str) -> str:
    """Return a policy's name, or raise a ConfigError."""
    if policy not in POLICIES and policy != BELADY:
        known = ", ".join((*POLICIES, BELADY))
        raise ConfigError(f"policy {policy!r} is not one of {known}, a class, or an object")
    return policy


def check_factory(policy: object, who: str) -> None:
    """Raise a ConfigError for one object, where `who` replays with a policy several times."""
    if not is_factory(policy):
        raise ConfigError(
            f"{who} makes a policy anew for each replay, and {policy_name(policy)} is one "
            "object; give a class or function, called as factory(capacity, num_keys=...)"
        )


def make_partitions(
    policy: Factory | object, trace: Trace, capacity: int, scope: str
) -> list[Policy]:
    """Return the caller's policy for all layers, or one made for each of them.

    Raises
    ------
    ConfigError
        If it does not fit the trace, the capacity or the scope, or is an object
        written in Python that was replayed before.
    """
    counts = np.zeros((trace.num_layers, trace.num_experts), np.uint64)
    return make_policies(policy, scope, trace.num_layers, trace.num_experts, capacity, counts)
