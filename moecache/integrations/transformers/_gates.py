"""What stands between an expert's two products, by the names of the kernels."""

from typing import Any

from torch import nn
from transformers.integrations import moe

from moecache.errors import ConfigError

# Class of an activation module -> its kernel.
_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "silu": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}


def gate_of(module: Any) -> dict[str, Any]:
    """Return a module's "activation", and "alpha" and "limit" where it is "swiglu".

    Raises
    ------
    ConfigError
        With the reason, if no kernel is one of that kind.
    """
    if getattr(getattr(type(module), "_apply_gate", None), "__qualname__", "") == (
        "GptOssExperts._apply_gate"
    ):
        return {"activation": "swiglu", "alpha": module.alpha, "limit": module.limit}
    if getattr(module, "has_gate", True) and not _has_default_gate(module):
        raise ConfigError("their gate is one of their own")
    given = getattr(module, "act_fn", None)
    # A function, such as torch's silu, has a name of its own.
    named = str(getattr(given, "__name__", type(given).__name__))
    if named not in _ACTIVATIONS:
        raise ConfigError(f"there is no kernel for {named}")
    return {"activation": _ACTIVATIONS[named]}


def _has_default_gate(module: nn.Module) -> bool:
    default = getattr(moe, "_default_apply_gate", None)
    return default is not None and getattr(type(module), "_apply_gate", None) is default
