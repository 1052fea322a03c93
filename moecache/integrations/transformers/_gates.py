"""The gate between an expert's two products, by the names of the kernels."""

from typing import Any

from torch import nn
from transformers.integrations import moe

from moecache.errors import ConfigError
from moecache.integrations.transformers._experts import is_llama4

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


# Gates of a family's own -> what the attributes are called that have alpha and limit.
_SWIGLU = {
    "GptOssExperts": ("alpha", "limit"),
    "OpenAIPrivacyFilterExperts": ("alpha", "limit"),
    "MiniMaxM3VLExperts": ("swiglu_alpha", "swiglu_limit"),
}
_CLAMPED = {
    "DeepseekV4Experts": "limit",
    "Glm5NextTextExperts": "swiglu_limit",
    "HYV4Experts": "swiglu_limit",
}
# These compute in float32, as the kernels do for all.
_USUAL = ("BeamExperts",)


def gate_of(module: Any) -> dict[str, Any]:
    """Return a module's "activation", and "alpha" and "limit" where it has such.

    Raises
    ------
    ConfigError
        With the reason, if no kernel is one of that kind.
    """
    own = getattr(getattr(type(module), "_apply_gate", None), "__qualname__", "")
    family = own.removesuffix("._apply_gate")
    if family in _SWIGLU:
        alpha, limit = (getattr(module, name) for name in _SWIGLU[family])
        return {"activation": "swiglu", "alpha": alpha, "limit": limit}
    is_known = (
        family in _CLAMPED or family in _USUAL or _has_default_gate(module) or is_llama4(module)
    )
    if getattr(module, "has_gate", True) and not is_known:
        raise ConfigError("their gate is one of their own")
    # Some call torch's function.
    given = getattr(module, "act_fn", nn.functional.silu if family in _CLAMPED else None)
    # A function, such as torch's silu, has a name of its own.
    named = str(getattr(given, "__name__", type(given).__name__))
    if named not in _ACTIVATIONS or (family in _CLAMPED and _ACTIVATIONS[named] != "silu"):
        raise ConfigError(f"there is no kernel for {named}")
    if family in _CLAMPED:
        return {"activation": "clamped_silu", "limit": getattr(module, _CLAMPED[family])}
    return {"activation": _ACTIVATIONS[named]}


def _has_default_gate(module: nn.Module) -> bool:
    default = getattr(moe, "_default_apply_gate", None)
    return default is not None and getattr(type(module), "_apply_gate", None) is default
