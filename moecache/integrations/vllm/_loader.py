"""SlotLoader: vLLM's load format `moecache`, the trunk by vLLM and the experts into slots."""

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

import moecache
from moecache.errors import ConfigError
from moecache.integrations.vllm._check import check_layers
from moecache.integrations.vllm._method import SlotMethod
from moecache.integrations.vllm._options import options_of
from moecache.integrations.vllm._sequences import Sequences
from moecache.integrations.vllm._vllm import (
    DefaultModelLoader,
    GptOssRoutedExperts,
    RoutedExperts,
    get_current_vllm_config,
    plain_format,
)
from moecache.layout import ExpertLayout
from moecache.ranks import Placement, Share
from moecache.runtime.runtime import ExpertRuntime
from moecache.settings import Settings
from moecache.telemetry import PrometheusCollector

logger = logging.getLogger(__name__)

LOAD_FORMAT = "moecache"
# The requests of the step that runs: a process has one model runner.
SEQUENCES = Sequences()


class SlotExperts(RoutedExperts):
    """vLLM's routed experts; those of a model that loads as `moecache` have no weights."""

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        """Return what computes in slots, whatever the experts' format."""
        if get_current_vllm_config().load_config.load_format == LOAD_FORMAT:
            return SlotMethod(moe_config, SEQUENCES)
        return super()._get_quant_method(prefix, quant_config, moe_config)


class SlotGptOssExperts(SlotExperts, GptOssRoutedExperts):
    """The same for gpt-oss, whose class reads weights in a way of its own."""


class SlotLoader(DefaultModelLoader):
    """Reads a model's trunk as vLLM does, and opens its experts for a bounded amount of memory.

    `--model-loader-extra-config` has moecache's options as a JSON object.
    """

    def __init__(self, load_config: Any) -> None:
        self._options = options_of(load_config.model_loader_extra_config)
        self._metrics_port = self._options.pop("metrics_port", None)
        with plain_format(load_config):
            super().__init__(load_config)

    def get_all_weights(
        self,
        model_config: Any,
        model: Any,  # noqa: ARG002 - vLLM's signature
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the trunk; experts' are not even read."""
        _, files = self._find(model_config)
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    if not is_routed(name):
                        yield name, tensors.get_tensor(name)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load the trunk, open the experts, and compare a layer of each kind.

        Raises
        ------
        ConfigError
            If the model has no experts, or not those of the file.
        FormatError
            If what is computed from the slots is not what plain products give.
        """
        layers = [module for module in model.modules() if isinstance(module, SlotExperts)]
        if not layers:
            raise ConfigError(
                f"{model_config.model}: has no routed experts; leave --load-format moecache out"
            )
        super().load_weights(model, model_config)
        folder, _ = self._find(model_config)
        runtime = self._open(folder, layers)
        try:
            if self._metrics_port is not None:
                show_metrics(runtime, self._metrics_port)
            placed = _numbered(layers, runtime.layout)
            for layer, number in placed:
                layer.quant_method.bind(layer, runtime, number)
            compared = check_layers(placed, runtime)
        except BaseException:
            runtime.close()
            raise
        # The engine has no hook for its end; threads and files go with the model or the process.
        weakref.finalize(model, runtime.close)
        logger.info("vllm.opened layers=%d compared=%d", len(layers), compared)

    def _open(self, folder: str, layers: list[Any]) -> ExpertRuntime:
        options = dict(self._options)
        memory = options.pop("memory", None)
        cache_bytes = get_current_vllm_config().cache_config.kv_cache_memory_bytes
        settings = Settings.from_environ(is_told=False)
        is_bounded = settings.choose("memory", memory).value is not None or "slots" in options
        if not is_bounded and cache_bytes is None:
            raise ConfigError(
                "vLLM takes a share of all memory for its KV cache when the experts have theirs; "
                'say how much either is: --model-loader-extra-config \'{"memory": "4GiB"}\', or '
                "--kv-cache-memory-bytes"
            )
        if cache_bytes is not None:
            # Allocated after the slots.
            options.setdefault("host_bytes", cache_bytes)
        parallel = layers[0].moe_config.moe_parallel_config
        store = moecache.open_store(folder)
        try:
            share = None
            if parallel.use_ep and parallel.ep_size > 1:
                share = _share_of(layers, store.layout, parallel)
            runtime = moecache.open(store, memory, **options, share=share)
        except BaseException:
            store.close()
            raise
        logger.info(
            "vllm.slots slots=%d experts=%d", runtime.cache.capacity, runtime.layout.total_experts
        )
        return runtime

    def _find(self, model_config: Any) -> tuple[str, list[str]]:
        """Return the checkpoint's directory and its safetensors files."""
        with plain_format(self.load_config):
            folder, files, is_safetensors, *_ = self._prepare_weights(
                model_config.model, None, model_config.revision, False, None
            )
        if not is_safetensors:
            raise ConfigError(f"{folder}: experts are read from safetensors files; there are none")
        return folder, sorted(files)


def show_metrics(runtime: ExpertRuntime, port: int) -> None:
    """Serve a runtime's counters to Prometheus from this process, on a port of this machine.

    vLLM's own metrics are its front's, which is another process than the experts'. A rank adds
    its number to the port.

    Raises
    ------
    ConfigError
        If the port cannot be listened to.
    """
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    registry.register(PrometheusCollector(runtime))
    port += 0 if runtime.share is None else runtime.share.rank
    try:
        server, _ = prometheus_client.start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise ConfigError(f"metrics_port {port}: {error.strerror}; choose another") from error
    runtime.closing(server.shutdown)


def is_routed(name: str) -> bool:
    """Return whether a tensor is a routed expert's, by its name."""
    return ".experts." in f"{name}."


def _layer_index(name: str) -> int:
    """Return the decoder layer that a module's or tensor's name has."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise ConfigError(f"{name} does not name one layer; leave --load-format moecache out")
    return numbers[0]


def _numbered(layers: list[Any], layout: ExpertLayout) -> list[tuple[Any, int]]:
    """Return each of vLLM's layers with its number among the checkpoint's MoE layers."""
    known = {_layer_index(name): number for number, name in enumerate(layout.layer_names)}
    placed = []
    for layer in layers:
        index = _layer_index(layer.layer_name)
        if index not in known or layer.global_num_experts != layout.num_experts:
            raise ConfigError(
                f"{layer.layer_name} has {layer.global_num_experts} experts, and the file "
                f"{layout.num_experts} in the layers {sorted(known)}; fused shared experts and "
                "redundant ones are not supported"
            )
        placed.append((layer, known[index]))
    return placed


def _share_of(layers: list[Any], layout: ExpertLayout, parallel: Any) -> Share:
    """Return this rank's experts, as vLLM's own maps name them.

    Which of the other ranks has another expert is of no matter here, as vLLM adds the rows up.
    """
    rank, size = parallel.ep_rank, parallel.ep_size
    others = [other for other in range(size) if other != rank]
    owners = np.resize(np.array(others, np.int32), (layout.num_layers, layout.num_experts))
    for layer, number in _numbered(layers, layout):
        owners[number, (layer.expert_map >= 0).numpy()] = rank
    return Share(Placement(owners, size), rank)
