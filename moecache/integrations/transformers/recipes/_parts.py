"""Parts of recipes, read from modules: their weights where they lie."""

from collections.abc import Mapping
from operator import gt
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import nn

from moecache.decoding.recipe import FeedForward, Linear, Norm
from moecache.formats import find_format
from moecache.formats.form import TILE_ROWS
from moecache.integrations.transformers._fast import TYPES, FastLinear
from moecache.integrations.transformers._native import _KIND, FORM, NativeLinear
from moecache.integrations.transformers.recipes._watch import Watch, num_entries
from moecache.kernels._matrix import Matrix

_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}
# Names of a feed-forward's gate, up and down, which those without a gate leave out.
_FORWARDS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


# Hooks that transformers leaves on modules once hidden states or attentions were asked for; they
# note nothing else, and forwards that ask for these are no steps.
_HARMLESS = "transformers.utils.output_capturing"


class NoRecipeError(Exception):
    """Why a model has no recipe, as it is now."""


class UnknownFamilyError(NoRecipeError):
    """Why models of its kind have none."""


class Weights:
    """The weights that a recipe was read from, to see whether they are still those of the model.

    Modules may be replaced, given other weights, numbers or forwards, or followed by hooks, all of
    which a program would not see.
    """

    def __init__(self) -> None:
        self._watch = Watch()
        self._hooks: list[dict[Any, Any]] = []
        self._allowed: list[int] = []
        self._num_hooks = 0

    def tensor(self, module: nn.Module, name: str) -> torch.Tensor:
        """Return a parameter or buffer of a module, and remember it.

        Raises
        ------
        NoRecipeError
            If it is not in memory, contiguous, and of float32 or bfloat16.
        """
        held = module._parameters if name in module._parameters else module._buffers
        found: Any = held.get(name)
        if not isinstance(found, torch.Tensor) or found.device.type != "cpu":
            raise NoRecipeError(f"{name} of {type(module).__name__} is not in memory")
        if not found.is_contiguous():
            raise NoRecipeError(f"{name} of {type(module).__name__} is not contiguous")
        self._watch.holds(held, name, found)
        self._watch.lies(found)
        return found

    def watched(self, module: nn.Module, name: str) -> None:
        """Remember a parameter or buffer, and the values that it has now."""
        self._watch.stays(self.tensor(module, name))

    def number(self, owner: Any, name: str) -> Any:
        """Return a plain value of a module or a config, and remember it."""
        held = vars(owner)
        if name in held:
            self._watch.equals(held, name, held[name])
        return getattr(owner, name)

    def bias(self, module: nn.Module) -> np.ndarray | None:
        """Return a module's bias; remember that there is none, if so."""
        if getattr(module, "bias", None) is not None:
            return self.values(module, "bias")
        self._watch.holds(module._parameters, "bias", None)
        return None

    def values(self, module: nn.Module, name: str) -> np.ndarray:
        """Return a parameter or buffer as an array over the same memory."""
        return _array_of(module, name, self.tensor(module, name))

    def floats(self, module: nn.Module, name: str) -> np.ndarray:
        """Return a parameter or buffer as float32: a copy if it is of another dtype."""
        found = self.tensor(module, name)
        array = _array_of(module, name, found)
        if array.dtype == np.float32:
            return array
        self._watch.stays(found)
        return array.astype(np.float32)

    def uses(self, module: nn.Module, num_hooks: int = 0) -> None:
        """Remember that nobody follows what a module computes, but for some hooks of our own.

        Raises
        ------
        NoRecipeError
            If somebody does.
        """
        for hooks, allowed in ((module._forward_hooks, 0), (module._forward_pre_hooks, num_hooks)):
            if _count(hooks) > allowed:
                raise NoRecipeError(f"{type(module).__name__} has hooks")
            self._hooks.append(hooks)
            self._watch.touches(hooks)
            self._allowed.append(allowed)
            self._num_hooks += len(hooks)
        if "forward" in module.__dict__:
            raise NoRecipeError(f"the forward of a {type(module).__name__} was replaced")
        self._watch.lacks(module.__dict__, "forward")
        self.holds(module)

    def holds(self, module: nn.Module) -> None:
        """Remember a module's children."""
        if module._modules:
            self._watch.keeps(module._modules)

    def are_current(self) -> bool:
        """Return whether all of it is as it was."""
        if not self._watch.are_current():
            return False
        num_hooks = num_entries(self._hooks)
        if num_hooks > self._num_hooks:
            if any(map(gt, map(_count, self._hooks), self._allowed)):
                return False
            self._num_hooks = num_hooks
        return True

    def linear(self, module: nn.Module, name: str = "") -> Linear:
        """Return a linear layer of a module, or a module that is one."""
        inner: Any = getattr(module, name) if name else module
        self.uses(inner)
        forward = type(inner).forward
        if forward is NativeLinear.forward:
            kind, rows, columns, _ = inner.__dict__[_KIND]
            form = self.tensor(inner, FORM)
            matrix = Matrix(form.data_ptr(), kind, rows, columns, None, form)
        elif self.is_plain(inner):
            matrix = self.matrix(inner, "weight")
        else:
            raise NoRecipeError(f"{name} is a {type(inner).__name__}, no plain linear layer")
        return Linear(matrix, self.bias(inner))

    def is_plain(self, module: nn.Module) -> bool:
        """Return whether a module is a linear layer whose weight is numbers."""
        return type(module).forward in (FastLinear.forward, nn.Linear.forward)

    def matrix(self, module: nn.Module, name: str) -> Matrix:
        """Return a weight [outputs, inputs] of numbers."""
        weight = self.tensor(module, name)
        if weight.dtype not in TYPES or weight.dim() != 2:
            raise NoRecipeError(f"{name} of {type(module).__name__} is {weight.dtype}")
        rows, columns = weight.shape
        return Matrix(weight.data_ptr(), TYPES[weight.dtype], rows, columns, None, weight)

    def norm(self, module: Any, width: int = 0, *, adds_one: bool = False) -> Norm:
        """Return a root mean square norm, or a layer norm; some add 1 to their weights."""
        self.uses(module)
        kind = type(module).__name__
        epsilon = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
        if kind == "Llama4TextL2Norm":  # as wide as what it is given, without weights
            return Norm(np.ones(width, np.float32), self.number(module, epsilon))
        weight = self.floats(module, "weight") + 1 if adds_one else self.values(module, "weight")
        if adds_one:
            self.watched(module, "weight")
        if type(module) is nn.LayerNorm and module.bias is not None:
            return Norm(weight, self.number(module, "eps"), self.values(module, "bias"))
        if not kind.endswith(("RMSNorm", "RMSNormGated")):
            raise NoRecipeError(f"{kind} is no root mean square norm")
        return Norm(weight, self.number(module, epsilon))

    def feed_forward(self, module: Any) -> FeedForward:
        """Return a feed-forward, by whatever names its matrices go."""
        self.uses(module)
        names = ("activation_fn", "act_fn", "activation")
        given = next((getattr(module, name) for name in names if hasattr(module, name)), None)
        if isinstance(given, nn.Module):
            self.uses(given)
        # One that has none of these calls a function.
        activation = "silu" if given is None else _ACTIVATIONS.get(type(given).__name__)
        if activation is None:
            raise NoRecipeError(f"{type(module).__name__} computes {type(given).__name__}")
        if hasattr(module, "input_linear"):
            gate, up = self.halves(module, "input_linear")
            return FeedForward(gate, up, self.linear(module, "output_linear"), activation)
        found = next((names for names in _FORWARDS if hasattr(module, names[1])), None)
        if found is None:
            raise NoRecipeError(f"{type(module).__name__} is no feed-forward")
        has_gate = hasattr(module, found[0])
        return FeedForward(
            self.linear(module, found[0]) if has_gate else None,
            self.linear(module, found[1]),
            self.linear(module, found[2]),
            activation,
        )

    def halves(self, module: nn.Module, name: str) -> tuple[Linear, Linear]:
        """Return a linear layer without a bias as two, of its upper and its lower rows."""
        inner: Any = getattr(module, name)
        if type(inner).forward is NativeLinear.forward:
            kind, rows, columns, _ = inner.__dict__[_KIND]
            owner, num = self.tensor(inner, FORM), rows // 2
            if num % TILE_ROWS:
                raise NoRecipeError(f"{name} of {rows} rows in {kind} has no halves")
            size = find_format(kind).form_bytes(num, columns)
        else:
            owner = self.tensor(inner, "weight")
            num, columns = owner.shape[0] // 2, owner.shape[1]
            kind, size = TYPES.get(owner.dtype, ""), num * columns * owner.itemsize
        if self.linear(module, name).bias is not None:
            raise NoRecipeError(f"{name} has a bias")
        starts = (owner.data_ptr(), owner.data_ptr() + size)
        first, second = (Matrix(start, kind, num, columns, None, owner) for start in starts)
        return Linear(first), Linear(second)


def _array_of(module: nn.Module, name: str, found: torch.Tensor) -> np.ndarray:
    """Return an array over the memory of a tensor of float32 or bfloat16."""
    if found.dtype not in TYPES:
        raise NoRecipeError(f"{name} of {type(module).__name__} is {found.dtype}")
    plain = found.detach()
    if found.dtype == torch.bfloat16:
        array: np.ndarray = plain.view(torch.int16).numpy()
        return array.view(ml_dtypes.bfloat16)
    return plain.numpy()


def _count(hooks: Mapping[Any, Any]) -> int:
    return sum(getattr(hook, "__module__", "") != _HARMLESS for hook in hooks.values())
