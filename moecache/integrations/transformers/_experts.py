"""Experts modules of a model, with and without their weights."""

import math
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from moecache.errors import MoeCacheError
from moecache.integrations.transformers._operators import NUMBER, number

# Weight of an experts module -> role in the store.
ROLES = {
    f"{weight}{suffix}": f"{role}{suffix}"
    for suffix in ("", "_bias")
    for weight, role in (("gate_up_proj", "gate_up"), ("up_proj", "up"), ("down_proj", "down"))
}
_MATRICES = ("gate_up_proj", "up_proj", "down_proj")
# Attribute that describes a module's weights after they are gone.
_WEIGHTS = "_moecache_weights"
# Attribute that names the implementation that computed them before.
_BEFORE = "_moecache_before"
_DEFAULT = "grouped_mm"

Described = tuple[torch.Size, torch.dtype, bool]


class ExpertsNotResidentError(MoeCacheError, AttributeError):
    """A weight that is in no module was asked for: it is in the slots, or in the file."""


class NotCopied:
    """Part of a model whose experts are in a cache; it cannot be part of two."""

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse: a copy would have no experts, and threads and files cannot be copied."""
        raise MoeCacheError(
            "a model whose experts are in a cache cannot be copied; load it again, or give it "
            "all its experts first with model.moecache.detach()"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: threads and files cannot be pickled either."""
        raise MoeCacheError(
            "a model whose experts are in a cache cannot be pickled: its experts are in the "
            "checkpoint it was loaded from; give it all of them first with "
            "model.moecache.detach()"
        )


class OffloadedExperts(NotCopied, nn.Module):
    """An experts module whose weights are in slots: the same module without them."""

    def __getattr__(self, name: str) -> Any:
        """Say where a weight is if it is not here."""
        if name in self.__dict__.get(_WEIGHTS, ()):
            raise ExpertsNotResidentError(
                f"{name} of {type(self).__name__} is not in memory as a whole: moecache reads "
                "single experts from the checkpoint into its slots; for other code than "
                "experts implementation 'moecache', get them back with model.moecache.detach()"
            )
        return super().__getattr__(name)


def is_llama4(module: nn.Module) -> bool:
    """Return whether a module holds Llama 4's experts."""
    return any(cls.__name__ == "Llama4TextExperts" for cls in type(module).__mro__)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module's weights are stored [in, out]; Llama 4's are, without a flag."""
    return bool(getattr(module, "is_transposed", is_llama4(module)))


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's experts modules by their paths, in the order of its layers."""
    return {path: module for path, module in model.named_modules() if described(module)}


def described(module: nn.Module) -> dict[str, Described]:
    """Return (shape, dtype, requires_grad) of each expert weight; nothing for other modules."""
    gone: dict[str, Described] | None = module.__dict__.get(_WEIGHTS)
    if gone is not None:
        return gone
    found = {
        name: (parameter.shape, parameter.dtype, parameter.requires_grad)
        for name, parameter in module.named_parameters(recurse=False)
        if name in ROLES
    }
    matrices = [shape for name, (shape, _, _) in found.items() if name in _MATRICES]
    stacked = len(matrices) == 2 and all(len(shape) == 3 for shape in matrices)
    # Shared experts may be stacks too, of three projections: they belong to the trunk.
    stacked &= "gate_proj" not in module._parameters
    return found if stacked else {}


def strip(module: nn.Module, *, is_initialized: bool = True) -> None:
    """Take its expert weights from a module; does nothing a second time.

    With `is_initialized=False`, a weight is empty until `forget_empty`: the model's own code will
    initialize what it finds.
    """
    if isinstance(module, OffloadedExperts):
        return
    weights = described(module)
    for name, (_, dtype, _) in weights.items():
        del module._parameters[name]
        if not is_initialized:
            module.__dict__[name] = torch.empty(0, dtype=dtype)
    module.__dict__[_WEIGHTS] = weights
    number(module)
    # As if it had been read from the checkpoint: there is nothing to be initialized.
    module.__dict__["_is_hf_initialized"] = True
    become(module, OffloadedExperts)


def forget_empty(model: nn.Module) -> None:
    """Have weights that `strip` left empty be an error to ask for."""
    for module in find_experts(model).values():
        for name in described(module):
            module.__dict__.pop(name, None)


def dispatch(modules: Iterable[nn.Module], implementation: str) -> None:
    """Have modules computed by an implementation; `restore` goes back to the one before."""
    # Several modules share a configuration: all are asked before one is changed.
    configs = {module: getattr(module, "config", None) for module in modules}
    for module, config in configs.items():
        if config is not None:
            before = config._experts_implementation_internal
            before = _DEFAULT if before == implementation else before
            module.__dict__.setdefault(_BEFORE, before)
    for config in configs.values():
        if config is not None:
            config._experts_implementation_internal = implementation


def restore(module: nn.Module, weights: dict[str, nn.Parameter]) -> None:
    """Give a module its weights back, and have it computed as before."""
    if _BEFORE in module.__dict__:
        config: Any = module.config
        config._experts_implementation_internal = module.__dict__.pop(_BEFORE)
    become_again(module)
    del module.__dict__[_WEIGHTS], module.__dict__[NUMBER]
    for name, parameter in weights.items():
        module.register_parameter(name, parameter)


def num_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's expert weights."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype, _ in described(module).values())


def become(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Let the methods of `mixin` come before those of a module's own class."""
    cls = type(module)
    if (mixin, cls) not in _mixed:
        # The module stays an instance of the class that hooks and plans look for, by name, too.
        _mixed[mixin, cls] = type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})
    module.__class__ = _mixed[mixin, cls]


def become_again(module: nn.Module) -> None:
    """Give a module the class back that it had before `become`."""
    module.__class__ = type(module).__bases__[1]


_mixed: dict[Any, Any] = {}
