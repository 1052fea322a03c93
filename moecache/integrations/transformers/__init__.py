"""Hugging Face transformers as a host loop: any MoE checkpoint, in the memory you have.

>>> from moecache.integrations.transformers import load
>>> model = load("Qwen/Qwen3-30B-A3B", memory="16GiB")  # doctest: +SKIP
>>> model.generate(**inputs)  # doctest: +SKIP
"""

from moecache.errors import MissingDependencyError

try:
    import torch
    import transformers
except ImportError as error:
    raise MissingDependencyError(
        "moecache.integrations.transformers needs torch and transformers; install them with: "
        "pip install 'moecache[transformers]'"
    ) from error
from transformers.integrations.moe import ExpertsInterface

from moecache.integrations.transformers._experts import ExpertsNotResidentError, OffloadedExperts
from moecache.integrations.transformers._forward import routed_experts
from moecache.integrations.transformers._guards import IMPLEMENTATION
from moecache.integrations.transformers._loading import load
from moecache.integrations.transformers._lookahead import RouterLookAhead
from moecache.integrations.transformers._offload import Offload, attach
from moecache.integrations.transformers._quantizer import MoeCacheConfig
from moecache.integrations.transformers._static_cache import token_cache
from moecache.integrations.transformers._token_graph import TokenGraph

ExpertsInterface.register(IMPLEMENTATION, routed_experts)

__all__ = [
    "ExpertsNotResidentError",
    "MoeCacheConfig",
    "Offload",
    "OffloadedExperts",
    "RouterLookAhead",
    "TokenGraph",
    "attach",
    "load",
    "token_cache",
]
del torch, transformers
