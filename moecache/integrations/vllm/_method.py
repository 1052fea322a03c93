"""SlotMethod: vLLM's routed experts of a layer, computed in a runtime's slots."""

import itertools
import weakref
from typing import Any

import numpy as np
import torch

from moecache import kernels
from moecache.errors import ConfigError, MoeCacheError
from moecache.integrations.vllm._sequences import Sequences
from moecache.integrations.vllm._vllm import FusedMoEMethodBase
from moecache.kernels import SlotKernel
from moecache.runtime.runtime import ExpertRuntime

TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
# vLLM's activations -> the kernels' names.
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "swigluoai": "swiglu",
    "swigluoai_uninterleave": "swiglu",
}
_ALPHA, _LIMIT = 1.702, 7.0
# Graphs have numbers, no objects.
_numbers = itertools.count(1)
_methods: weakref.WeakValueDictionary[int, "SlotMethod"] = weakref.WeakValueDictionary()
_library = torch.library.Library("moecache", "FRAGMENT")


class SlotMethod(FusedMoEMethodBase):
    """Computes a layer's routed experts where they are: a vLLM layer without weights.

    Parameters
    ----------
    moe : FusedMoEConfig
    sequences : Sequences
        Told of each step's requests.
    """

    def __init__(self, moe: Any, sequences: Sequences) -> None:
        super().__init__(moe)
        self._sequences = sequences
        self._runtime: ExpertRuntime | None = None
        self._kernel: SlotKernel | None = None
        self._layer = 0
        self._number = next(_numbers)
        _methods[self._number] = self

    def create_weights(self, layer: Any, *_: Any, **__: Any) -> None:
        """Allocate nothing: experts are read into slots. Refuse what has no kernel.

        Raises
        ------
        ConfigError
            If the layer computes otherwise than the kernels do.
        """
        name = layer.layer_name
        self.gate_of(layer)
        if layer.apply_router_weight_on_input:
            raise ConfigError(
                f"{name}: weights of the router that multiply inputs have no kernel; "
                "leave --load-format moecache out"
            )
        parallel = self.moe.moe_parallel_config
        if parallel.tp_size > 1:
            raise ConfigError(
                f"{name}: experts are not cut over {parallel.tp_size} ranks; add "
                "--enable-expert-parallel, by which each rank has experts of its own"
            )
        if self.moe.in_dtype not in TYPES:
            raise ConfigError(
                f"{name}: the kernels take bfloat16 or float32, not {self.moe.in_dtype}; add "
                "--dtype bfloat16"
            )

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return `None`: vLLM's kernels compute nothing here."""

    def gate_of(self, layer: Any) -> dict[str, Any]:
        """Return what the kernels are told of the gate between the two products.

        Raises
        ------
        ConfigError
            If there is no kernel for it.
        """
        name = layer.activation.value
        if name not in _ACTIVATIONS:
            raise ConfigError(
                f"{layer.layer_name}: there is no kernel for the activation {name}; leave "
                "--load-format moecache out"
            )
        gate: dict[str, Any] = {"activation": _ACTIVATIONS[name]}
        limit = layer.swiglu_limit
        if gate["activation"] == "swiglu":
            gate["alpha"] = _ALPHA if layer.swiglu_alpha is None else layer.swiglu_alpha
            gate["limit"] = _LIMIT if limit is None else limit
            gate["is_interleaved"] = name == "swigluoai"
        elif limit is not None:
            if name != "silu":
                raise ConfigError(f"{layer.layer_name}: there is no kernel for a limited {name}")
            gate.update(activation="clamped_silu", limit=limit)
        return gate

    def bind(self, layer: Any, runtime: ExpertRuntime, number: int) -> None:
        """Compute MoE layer `number` of a runtime from now on."""
        pool = runtime.pool
        self._kernel = SlotKernel(
            lambda slot: runtime.expert(slot, number),
            pool.num_slots,
            roles=runtime.layout.layers[number],
            **self.gate_of(layer),
        )
        if self._kernel.hidden_size != layer.hidden_size:
            raise ConfigError(
                f"{layer.layer_name}: experts of {self._kernel.hidden_size} columns in the file, "
                f"and vLLM gives {layer.hidden_size}"
            )
        self._runtime, self._layer = runtime, number

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,  # noqa: ARG002 - vLLM computes these itself
        shared_experts_input: torch.Tensor | None,  # noqa: ARG002 - vLLM's signature
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts; those of other ranks count as zero.

        Raises
        ------
        StoreError
            If an expert cannot be read.
        """
        runtime, kernel = self._runtime, self._kernel
        if runtime is None or kernel is None:
            raise MoeCacheError(
                f"{layer.layer_name} has no experts: only --load-format moecache gives it some"
            )
        if torch.compiler.is_compiling():
            # On CPUs vLLM has its graphs look into the layer, and compiled code is not for that.
            out: torch.Tensor = torch.ops.moecache.vllm_experts(
                x, topk_weights, topk_ids, self._number
            )
            return out
        return self.compute(x, topk_weights, topk_ids)

    def compute(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return what `apply` does, outside of a graph."""
        runtime, kernel = self._runtime, self._kernel
        assert runtime is not None
        assert kernel is not None
        num_tokens, top_k = topk_ids.shape
        hidden, ids = x.contiguous(), topk_ids.numpy()
        kind, width = TYPES[hidden.dtype], kernel.hidden_size
        make = torch.empty if runtime.share is None else torch.zeros
        rows = make((num_tokens * top_k, width), dtype=torch.float32)
        source = kernel.inputs_at(
            hidden.data_ptr(), kind, num_tokens, width * hidden.element_size()
        )
        waves = runtime.waves(self._layer, ids, sequences=self._sequences.of(num_tokens))
        try:
            for wave in waves:
                if len(wave.slots):
                    kernel.compute_at(
                        wave.slots,
                        wave.offsets,
                        wave.pairs,
                        top_k,
                        source,
                        rows.data_ptr(),
                        "f32",
                        width * 4,
                    )
        finally:
            # A traceback that is kept would keep the leases as well.
            waves.close()
        return _weighted_sum(rows, topk_weights, hidden.dtype)


def _weighted_sum(rows: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    weights = weights.float().contiguous()
    num_tokens, top_k = weights.shape
    width = rows.shape[1]
    out = torch.empty((num_tokens, width), dtype=dtype)
    kernels.combine(
        rows.data_ptr(),
        num_tokens,
        top_k,
        width,
        weights.data_ptr(),
        "f32",
        top_k * 4,
        out.data_ptr(),
        TYPES[dtype],
        width * out.element_size(),
    )
    return out


def ids_of(layer: Any, num_tokens: int) -> np.ndarray:
    """Return ids for a few tokens that between them use the layer's first experts."""
    held = np.arange(layer.global_num_experts)
    rolled = [np.roll(held, -token * layer.top_k)[: layer.top_k] for token in range(num_tokens)]
    return np.stack(rolled).astype(np.int32)


def _operator(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, number: int
) -> torch.Tensor:
    return _methods[number].compute(x, weights, ids)


_library.define(
    "vllm_experts(Tensor x, Tensor weights, Tensor ids, int number) -> Tensor",
    # Neither left out, nor made one with another: it counts and reads.
    tags=[torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded],
)
_library.impl("vllm_experts", _operator, "CompositeExplicitAutograd")
torch.library.register_fake(
    "moecache::vllm_experts", lambda x, *_: torch.empty_like(x), lib=_library
)
