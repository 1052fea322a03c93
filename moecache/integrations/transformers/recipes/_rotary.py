"""Angles of a model's rotary positions, and which of them each kind of layer turns by."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moecache.integrations.transformers._places import STATIC_ROTARY
from moecache.integrations.transformers.recipes._parts import UnknownFamilyError, Weights

# Kinds of frequencies that stay, where layers have their own.
_STATIC = (*STATIC_ROTARY, "proportional")


@dataclass(frozen=True)
class Turns:
    """What makes angles of positions.

    Parameters
    ----------
    module : callable (like, positions)
        Returns cosines and sines, as transformers' modules do.
    width : int
        Numbers that all angles turn.
    kinds : mapping of str to (int, int)
        By the kind of a layer, by its base, or "" for all: numbers of a head that are turned, and
        which of a position's angles is the first one's.
    """

    module: Callable[..., Any]
    width: int
    kinds: Mapping[str, tuple[int, int]]

    def of(self, kind: str | None) -> tuple[int, int]:
        """Return these numbers of a layer."""
        return self.kinds.get("") or self.kinds[str(kind)]


class _Several:
    """The angles of all kinds of layers, one behind the other."""

    rope_type = "default"  # they stay

    def __init__(self, modules: Sequence[Callable[..., Any]]) -> None:
        self._modules = modules

    def __call__(self, like: Any, positions: Any) -> tuple[Any, Any]:
        """Return cosines and sines of positions, once for each angle."""
        found = [module(like, positions) for module in self._modules]
        halves = [[part[..., : part.shape[-1] // 2] for part in pair] for pair in found]
        cos, sin = (torch.cat(parts, -1) for parts in zip(*halves, strict=True))
        return cos, sin


class _Still:
    """No angles: of models whose heads know no positions."""

    rope_type = "default"

    def __call__(self, like: Any, positions: Any) -> tuple[Any, Any]:
        """Return cosines and sines of no pairs."""
        none = like.new_empty((*positions.shape, 0))
        return none, none


def turns_of(module: Any, weights: Weights, *, may_be_still: bool = False) -> Turns:
    """Return what makes a model's angles.

    Parameters
    ----------
    module : Module or None
    weights : Weights
    may_be_still : bool, default False
        Whether there may be no module.

    Raises
    ------
    UnknownFamilyError
        If its positions are no rotary ones.
    """
    if module is None and may_be_still:
        return Turns(_Still(), 0, {"": (0, 0)})
    frequencies = getattr(module, "inv_freq", None)
    if frequencies is not None:
        if getattr(module, "rope_type", None) in STATIC_ROTARY:
            # Others change theirs as texts grow, and are asked for every token.
            weights.watched(module, "inv_freq")
            weights.number(module, "attention_scaling")
        width = 2 * frequencies.numel()
        return Turns(module, width, {"": (width, 0)})
    types = getattr(module, "rope_type", None)
    if not isinstance(types, dict) or any(kind not in _STATIC for kind in types.values()):
        raise UnknownFamilyError("its positions are no rotary ones")
    first, kinds = 0, {}
    for kind in sorted(types):
        weights.watched(module, f"{kind}_inv_freq")
        weights.number(module, f"{kind}_attention_scaling")
        num = getattr(module, f"{kind}_inv_freq").numel()
        kinds[kind] = 2 * num, first
        first += num
    modules = [partial(module, layer_type=kind) for kind in kinds]
    return Turns(_Several(modules), 2 * first, kinds)


def turns_by_base(modules: Iterable[Any], weights: Weights) -> Turns:
    """Return what makes a model's angles, of a module for each base of its layers' rotations.

    Raises
    ------
    UnknownFamilyError
        If angles change as texts grow.
    """
    first, kinds, found = 0, {}, list(modules)
    for module in found:
        weights.uses(module)
        if module.rope_type not in STATIC_ROTARY:
            raise UnknownFamilyError(f"layers of several bases turn by {module.rope_type}")
        weights.watched(module, "inv_freq")
        weights.number(module, "attention_scaling")
        num = module.inv_freq.numel()
        kinds[str(float(module.config.rope_parameters["rope_theta"]))] = 2 * num, first
        first += num
    return Turns(_Several(found) if found else _Still(), 2 * first, kinds)
