"""All architectures, by the name that GGUF files have for them."""

from collections.abc import Callable, Mapping

from moecache.decoding.gguf import _sigmoid
from moecache.decoding.gguf._architecture import Architecture
from moecache.decoding.gguf._known import KNOWN
from moecache.decoding.gguf._metadata import Metadata
from moecache.errors import ConfigError
from moecache.integrations.transformers.gguf import (
    _blocks,
    _compressed,
    _connections,
    _delta,
    _factored,
    _layers,
    _linear_sources,
    _mamba,
    _windows,
)

ARCHITECTURES: Mapping[str, Architecture | Callable[[Metadata], Architecture]] = {
    **{name: known.architecture for name, known in KNOWN.items()},
    "bailingmoe3": _delta.BAILING3,
    "cohere2moe": _layers.COHERE2MOE,
    "deepseek32": _sigmoid.DEEPSEEK_V32,
    "deepseek4": _compressed.DEEPSEEK_V4,
    "glm-dsa": _sigmoid.GLM_DSA,
    "granitehybrid": _mamba.GRANITE_HYBRID,
    "hy_v4": _connections.HY_V4,
    "jamba": _mamba.JAMBA,
    "kimi-linear": _delta.KIMI_LINEAR,
    "lfm2moe": _layers.LFM2MOE,
    "llama4": _factored.LLAMA4,
    "mimo2": _windows.MIMO2,
    "minimax-m3": _blocks.MINIMAX_M3,
    "mistral4": _sigmoid.MISTRAL4,
    "nemotron_h_moe": _mamba.NEMOTRON_H_MOE,
    "phimoe": _factored.PHIMOE,
    "qwen35moe": _linear_sources.QWEN35MOE,
    "qwen3next": _linear_sources.QWEN3NEXT,
    "qwen4exp": _connections.QWEN4,
}

_NO_MODEL = "transformers has no model of it"
_IMAGES = "transformers has no model of its texts alone, and images are another file's"
# What cannot be built, and why.
_REFUSED: Mapping[str, str] = {
    "bailingmoe2": _NO_MODEL,
    "glm5-next": _IMAGES,
    "grok": _NO_MODEL,
    "kimi-k3": _NO_MODEL,
    "step35": _IMAGES,
}


def find_architecture(said: Metadata) -> Architecture:
    """Return the architecture of a file.

    Raises
    ------
    ConfigError
        If it is not supported.
    """
    found = ARCHITECTURES.get(said.architecture)
    if said.architecture in _REFUSED:
        raise ConfigError(
            f"architecture {said.architecture!r} is not supported: "
            f"{_REFUSED[said.architecture]}; run the file with llama.cpp"
        )
    if found is None:
        raise ConfigError(
            f"architecture {said.architecture!r} is not supported; supported are "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    return found if isinstance(found, Architecture) else found(said)
