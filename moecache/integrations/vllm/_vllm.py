"""vLLM's private names: the one module that imports vLLM, and what it needs to find there."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import vllm.config as vllm_config
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from moecache.errors import MissingDependencyError
from moecache.integrations.vllm._version import VERSION, check_version

# What is overridden or called -> the parameters it has to have.
_NEEDED: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (RoutedExperts, "_get_quant_method", ("prefix", "quant_config", "moe_config")),
    (RoutedExperts, "load_weights", ("weights",)),
    (FusedMoEMethodBase, "create_weights", ("layer",)),
    (FusedMoEMethodBase, "apply", ("layer", "x", "topk_weights", "topk_ids")),
    (FusedMoEMethodBase, "get_fused_moe_quant_config", ("layer",)),
    (DefaultModelLoader, "_prepare_weights", ("model_name_or_path", "subfolder", "revision")),
    (DefaultModelLoader, "load_weights", ("model", "model_config")),
    (DefaultModelLoader, "get_all_weights", ("model_config", "model")),
    (GPUModelRunner, "_model_forward", ()),
    (PluggableLayer, "register_oot", ("name",)),
)

__all__ = [
    "DefaultModelLoader",
    "FusedMoEMethodBase",
    "GptOssRoutedExperts",
    "PluggableLayer",
    "RoutedExperts",
    "check_names",
    "get_current_vllm_config",
    "plain_format",
    "register_model_loader",
    "replaced",
    "watch_steps",
]


def check_names() -> None:
    """Refuse a vLLM that lacks a private name which the plug-in needs.

    Raises
    ------
    MissingDependencyError
        With the version that is installed and the one that is needed.
    """
    found = check_version()
    for owner, name, parameters in _NEEDED:
        method = getattr(owner, name, None)
        known = set(inspect.signature(method).parameters) if callable(method) else set()
        if not callable(method) or not known.issuperset(parameters):
            raise MissingDependencyError(
                f"vLLM {found} has no {owner.__name__}.{name}({', '.join(parameters)}), which "
                f"moecache's plug-in for vLLM {VERSION} needs; install vLLM {VERSION}"
            )


@contextmanager
def plain_format(load_config: "vllm_config.LoadConfig") -> Iterator[None]:
    """Have vLLM find files as it does for safetensors; its loader knows its own formats alone."""
    before, extra = load_config.load_format, load_config.model_loader_extra_config
    load_config.load_format, load_config.model_loader_extra_config = "safetensors", {}
    try:
        yield
    finally:
        load_config.load_format, load_config.model_loader_extra_config = before, extra


def watch_steps(begin: Callable[[list[tuple[str, int]]], None]) -> None:
    """Call `begin` before each step of any model runner with (request, its tokens) in row order.

    vLLM's forward context does not name requests; its runner does.
    """
    own = GPUModelRunner._model_forward
    if getattr(own, "is_watched", False):
        return

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        positions = self.query_start_loc.np
        names = self.input_batch.req_ids
        begin([(name, int(positions[i + 1] - positions[i])) for i, name in enumerate(names)])
        return own(self, *given, **named)

    forward.is_watched = True  # type: ignore[attr-defined]
    GPUModelRunner._model_forward = forward


def replaced() -> set[str]:
    """Return the names of vLLM's layers that a plug-in has replaced."""
    return set(op_registry_oot)
