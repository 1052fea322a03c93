"""Policies made for a cache: from a name, a class, a function or an object."""

import contextlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np

from moecache._slru import SlruCache
from moecache.errors import ConfigError
from moecache.policies._echo_cache import EchoCache
from moecache.policies._policy import Policy
from moecache.policies._python_policy import PythonPolicy
from moecache.policies.registry import Part, maker, policy_names
from moecache.policies.replayed._stale import LeastStaleCache

SCOPES = ("global", "layer")

Factory: TypeAlias = Callable[..., Any]


def make_policies(
    policy: str | Factory | object,
    scope: str,
    num_layers: int,
    num_experts: int,
    capacity: int,
    counts: np.ndarray,
) -> list[Policy]:
    """Return the policy over all keys, or one over each layer's experts.

    Parameters
    ----------
    policy : str, class, function or object
        A registered name; a class or function, called as ``policy(capacity, num_keys=...)`` once
        for all layers, or once for each; or one object, for scope "global". An object
        that is no `Policy` is driven as `PythonPolicy` says.
    scope : {"global", "layer"}
        With "layer" the capacity is split evenly, the remainder goes to the first layers.
    num_layers, num_experts : int
    capacity : int
        Slots of all layers together.
    counts : ndarray of uint64, shape [num_layers, num_experts]
        How often each expert was used.

    Raises
    ------
    ConfigError
        If a name is unknown, an object does not fit the cache or was given to one before, or a
        class or function cannot be called like that.
    """
    check_policy(policy, for_replays=True)
    if scope not in SCOPES:
        raise ConfigError(f"scope {scope!r} is not one of {', '.join(SCOPES)}")
    if scope == "layer" and capacity < num_layers:
        raise ConfigError(
            f"{capacity} slots cannot be split over {num_layers} layers; "
            'raise the memory or use scope="global"'
        )
    parts = _parts(scope, num_layers, num_experts, capacity, counts)
    if isinstance(policy, str):
        return [maker(policy)(part) for part in parts]
    return _make_given(policy, parts)


def check_policy(policy: object, *, for_replays: bool = False) -> None:
    """Raise ConfigError for a name that is none, or an object that cannot evict.

    Names that are for replays are known only with `for_replays`.
    """
    if isinstance(policy, str):
        known = policy_names(for_replays=for_replays)
        if policy not in known:
            aim = "; it is for replays (moecache replay)" if is_for_replays(policy) else ""
            raise ConfigError(f"policy {policy!r} is not one of {', '.join(known)}{aim}")
    elif not isinstance(policy, Policy) and not callable(policy):
        # A message names the method that an object lacks.
        _wrap(policy, 1, 1)


def is_for_replays(name: str) -> bool:
    """Return whether a name is known to replays alone."""
    return name in set(policy_names(for_replays=True)) - set(policy_names())


def policy_name(policy: str | Factory | object) -> str:
    """Return what a policy is called in results."""
    if isinstance(policy, str):
        return policy
    name = getattr(policy, "__name__", None)
    if name is None:
        # A functools.partial has the name of its function.
        name = getattr(getattr(policy, "func", None), "__name__", None)
    return str(name or type(policy).__name__)


def is_factory(policy: object) -> bool:
    """Return whether a policy is made by calling it, anew for each cache."""
    if isinstance(policy, (str, Policy)) or not callable(policy):
        return False
    return isinstance(policy, type) or not callable(getattr(policy, "victim", None))


def _parts(
    scope: str, num_layers: int, num_experts: int, capacity: int, counts: np.ndarray
) -> list[Part]:
    shared: dict[Any, Any] = {}
    if scope == "global":
        num_keys = num_layers * num_experts
        return [Part(capacity, num_keys, num_layers, num_experts, None, counts, shared)]
    each, rest = divmod(capacity, num_layers)
    return [
        Part(
            each + (layer < rest),
            num_experts,
            num_layers,
            num_experts,
            layer,
            counts[layer],
            shared,
        )
        for layer in range(num_layers)
    ]


def _make_given(policy: Factory | object, parts: list[Part]) -> list[Policy]:
    """Return the caller's policy for all layers, or one made for each of them."""
    if parts[0].layer is not None and not is_factory(policy):
        raise ConfigError(
            f"scope 'layer' needs a policy per layer, and {policy_name(policy)} is one object; "
            "give a class or function instead, called as factory(capacity, num_keys=...)"
        )
    given = [
        _call(cast("Factory", policy), part) if is_factory(policy) else policy for part in parts
    ]
    made = [
        _wrap(one, part.capacity, part.num_keys) for one, part in zip(given, parts, strict=True)
    ]
    for one, part in zip(made, parts, strict=True):
        _check_fit(one, part)
    # A compiled loop drives them: all of one kind, and each layer its own.
    if len({id(one) for one in given}) < len(given) or len({type(one) for one in made}) > 1:
        raise ConfigError(
            f"{policy_name(policy)} must give each of {len(made)} layers a new policy, "
            "all of one class"
        )
    scripts = [one for one in given if not isinstance(one, Policy)]
    for script in scripts:
        if id(script) in _used:
            raise ConfigError(
                f"this object of {type(script).__name__} was in a cache before and has keys that "
                "the next cache has not; give a new one, or a class or function that makes it"
            )
    for script in scripts:
        _remember(script)
    return made


def _call(make: Factory, part: Part) -> object:
    try:
        inspect.signature(make).bind(part.capacity, num_keys=part.num_keys)
    except TypeError as error:
        raise _wrong_call(make, error) from error
    except ValueError:
        # Compiled: its call tells.
        try:
            return make(part.capacity, num_keys=part.num_keys)
        except TypeError as error:
            raise _wrong_call(make, error) from error
    return make(part.capacity, num_keys=part.num_keys)


def _wrong_call(make: Factory, error: TypeError) -> ConfigError:
    name = policy_name(make)
    return ConfigError(
        f"{name} is called as {name}(capacity, num_keys=...): {error}; give a function that "
        f"makes one of these, such as lambda capacity, num_keys: {name}(..., num_keys=num_keys)"
    )


def _wrap(given: object, capacity: int, num_keys: int) -> Policy:
    if isinstance(given, Policy):
        return given
    try:
        return PythonPolicy(capacity, num_keys=num_keys, script=given)
    except TypeError as error:
        raise ConfigError(str(error)) from error


# Policies written in Python that a cache has or had, by id: they need not be hashable.
_used: dict[int, "weakref.ref[object]"] = {}


def _remember(script: object) -> None:
    number = id(script)
    # An object that has __slots__ without __weakref__ cannot be tracked.
    with contextlib.suppress(TypeError):
        # Bound, for at the interpreter's end the global may be gone before the object is.
        _used[number] = weakref.ref(
            script,
            lambda _, known=_used: known.pop(number, None),  # type: ignore[misc]
        )


def _check_fit(policy: Policy, part: Part) -> None:
    """Raise a ConfigError for a compiled policy that the cache would lead astray."""
    name = type(policy).__name__
    if policy.num_keys != part.num_keys or policy.capacity != part.capacity:
        raise ConfigError(
            f"{name} holds {policy.capacity} of {policy.num_keys} keys, the cache {part.capacity} "
            f"of {part.num_keys}; make it with that capacity and num_keys"
        )
    if policy.num_pinned:
        raise ConfigError(f"{name} has {policy.num_pinned} pinned keys; unpin them first")
    if len(policy):
        raise ConfigError(
            f"this {name} has keys, or is in another cache; give a new one, or a class or function "
            "that makes it"
        )
    if isinstance(policy, SlruCache) and policy.strict:
        raise ConfigError("a cache fills both segments of SLRU; use strict=False")
    if isinstance(policy, LeastStaleCache) and policy.num_experts != part.num_experts:
        raise ConfigError(
            f"{name} has {policy.num_experts} keys per layer, the cache {part.num_experts}; "
            f"make it with num_experts={part.num_experts}, such as by "
            f"functools.partial({name}, num_experts={part.num_experts})"
        )
    if isinstance(policy, EchoCache):
        shape = (policy.echo.num_layers, policy.echo.num_experts)
        if shape != (part.num_layers, part.num_experts):
            raise ConfigError(
                f"{name} is for {shape[0]} x {shape[1]} experts, the cache for "
                f"{part.num_layers} x {part.num_experts}"
            )
