"""Eviction policies by name: a module registers its own where it is imported."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np


@dataclass(frozen=True)
class Part:
    """The keys that one policy is made for: those of all layers, or of one of them.

    Attributes
    ----------
    capacity : int
        Most keys in the cache.
    num_keys : int
        Keys are in [0, num_keys): layer * num_experts + expert, or the expert alone.
    num_layers, num_experts : int
        Shape of the model.
    layer : int or None
        The only layer; `None` for all.
    counts : ndarray of uint64, num_keys elements
        How often each key was used, kept by the cache: a key's use is counted before the policy
        is told of it.
    shared : dict
        Objects that the policies of one cache share, by any key; empty at first.
    """

    capacity: int
    num_keys: int
    num_layers: int
    num_experts: int
    layer: int | None
    counts: np.ndarray
    shared: dict[Any, Any]


Maker: TypeAlias = Callable[[Part], Any]

_makers: dict[str, Maker] = {}
_for_replays: set[str] = set()


def register(name: str, make: Any, *, for_replays: bool = False) -> None:
    """Give a policy a name.

    Parameters
    ----------
    name : str
    make : class or callable
        A class is called as ``make(capacity, num_keys=num_keys)``, a function with a `Part`.
    for_replays : bool, default False
        Whether `moecache.open` and the commands that run a model leave the name out: a policy
        that is there to be compared with.
    """
    _makers[name] = _of_class(make) if isinstance(make, type) else make
    if for_replays:
        _for_replays.add(name)


def maker(name: str) -> Maker:
    """Return what makes the policy of a name that is registered."""
    return _makers[name]


def policy_names(*, for_replays: bool = False) -> tuple[str, ...]:
    """Return the names in their order; with `for_replays` also those for replays alone."""
    return tuple(sorted(name for name in _makers if for_replays or name not in _for_replays))


def _of_class(made: type) -> Maker:
    return lambda part: made(part.capacity, num_keys=part.num_keys)
