"""What replays are asked for: policies by name or made by the caller, capacities, scopes."""

import contextlib
import math
import re
import weakref
from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

import numpy as np

from moecache._slru import SlruCache
from moecache.errors import CapacityError, ConfigError
from moecache.policies._echo_cache import EchoCache
from moecache.policies._policy import Policy
from moecache.policies._python_policy import PythonPolicy
from moecache.policies._stale import LeastStaleCache
from moecache.settings import POLICIES, SCOPES
from moecache.traces.trace import Trace

BELADY = "belady"

Factory = Callable[..., Any]


def check_scope(scope: str) -> str:
    """Return the scope, or raise a ConfigError."""
    if scope not in SCOPES:
        raise ConfigError(f"scope {scope!r} is not one of {', '.join(SCOPES)}")
    return scope


def total_experts(trace: Trace) -> int:
    """Return the experts of all layers."""
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


def policy_name(policy: str | Factory | object) -> str:
    """Return what a policy is called in results."""
    if isinstance(policy, str):
        return policy
    name = getattr(policy, "__name__", None)
    if name is None:
        # What functools.partial calls.
        name = getattr(getattr(policy, "func", None), "__name__", None)
    return str(name or type(policy).__name__)


def check_name(policy: str) -> str:
    """Return a policy's name, or raise a ConfigError."""
    if policy not in POLICIES and policy != BELADY:
        known = ", ".join((*POLICIES, BELADY))
        raise ConfigError(f"policy {policy!r} is not one of {known}, a class, or an object")
    return policy


def is_factory(policy: object) -> bool:
    """Return whether a policy is made by calling it, anew for each replay."""
    if isinstance(policy, (str, Policy)) or not callable(policy):
        return False
    return isinstance(policy, type) or not callable(getattr(policy, "victim", None))


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
    if scope == "layer":
        if not is_factory(policy):
            raise ConfigError(
                f"scope 'layer' needs a policy per layer, and {policy_name(policy)} is one object; "
                "give a class or function instead, called as factory(capacity, num_keys=...)"
            )
        each, rest = divmod(capacity, trace.num_layers)
        sizes = [each + (layer < rest) for layer in range(trace.num_layers)]
        num_keys = trace.num_experts
    else:
        sizes = [capacity]
        num_keys = total_experts(trace)
    given = [
        cast("Factory", policy)(size, num_keys=num_keys) if is_factory(policy) else policy
        for size in sizes
    ]
    made = [_wrap(one, size, num_keys) for one, size in zip(given, sizes, strict=True)]
    for part, size in zip(made, sizes, strict=True):
        _check_fit(part, trace, size, num_keys)
    # A compiled loop drives them: all of one kind, and each layer its own.
    if len({id(one) for one in given}) < len(given) or len({type(part) for part in made}) > 1:
        raise ConfigError(
            f"{policy_name(policy)} must give each of {len(made)} layers a new policy, "
            "all of one class"
        )
    scripts = [one for one in given if not isinstance(one, Policy)]
    for script in scripts:
        if id(script) in _replayed:
            raise ConfigError(
                f"this object of {type(script).__name__} was replayed before and has keys that the "
                "next replay's cache has not; give a new one, or a class or function that makes it"
            )
    for script in scripts:
        _remember(script)
    return made


def _wrap(given: object, size: int, num_keys: int) -> Policy:
    if isinstance(given, Policy):
        return given
    try:
        return PythonPolicy(size, num_keys=num_keys, script=given)
    except TypeError as error:
        raise ConfigError(str(error)) from error


# Policies written in Python that were replayed, by id: they need not be hashable.
_replayed: dict[int, "weakref.ref[object]"] = {}


def _remember(script: object) -> None:
    number = id(script)
    # Nothing can be told of what has __slots__ without __weakref__.
    with contextlib.suppress(TypeError):
        # Bound, for at the interpreter's end the global may be gone before the object is.
        _replayed[number] = weakref.ref(
            script,
            lambda _, known=_replayed: known.pop(number, None),  # type: ignore[misc]
        )


def _check_fit(part: Policy, trace: Trace, size: int, num_keys: int) -> None:
    """Raise a ConfigError for a compiled policy that the trace would lead astray."""
    name = type(part).__name__
    if part.num_keys != num_keys or part.capacity != size:
        raise ConfigError(
            f"{name} holds {part.capacity} of {part.num_keys} keys, the replay needs {size} of "
            f"{num_keys}; make it with that capacity and num_keys"
        )
    if part.num_pinned:
        raise ConfigError(f"{name} has {part.num_pinned} pinned keys; unpin them first")
    if isinstance(part, SlruCache) and part.strict:
        raise ConfigError("a replay fills both segments as ExpertCache does; use strict=False")
    if isinstance(part, LeastStaleCache) and part.num_experts != trace.num_experts:
        raise ConfigError(
            f"{name} has {part.num_experts} keys per layer, the trace {trace.num_experts}; "
            f"make it with num_experts={trace.num_experts}"
        )
    if isinstance(part, EchoCache):
        shape = (part.echo.num_layers, part.echo.num_experts)
        if shape != (trace.num_layers, trace.num_experts):
            raise ConfigError(
                f"{name} is for {shape[0]} x {shape[1]} experts, the trace has "
                f"{trace.num_layers} x {trace.num_experts}"
            )
