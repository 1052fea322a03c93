"""DeviceKernel: `compute="fast"` where slots are on a GPU, by `moecache.compute.CudaExperts`.

The hidden states, ids and weights stay on the device. Where every expert is resident the host sees
none of them, so that `torch.cuda.graph` can hold a step.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from moecache.compute import CudaExperts, on_device
from moecache.cuda import ACTIVATIONS
from moecache.errors import ConfigError
from moecache.integrations.transformers._experts import is_llama4
from moecache.integrations.transformers._gates import gate_of
from moecache.runtime.runtime import ExpertRuntime
from moecache.slots import CudaSlots

_INTEGERS = (torch.int32, torch.int64)


class DeviceKernel:
    """Computes the experts of one layer on the GPU that has their slots.

    Parameters
    ----------
    experts : CudaExperts
        Also an attribute.
    layer : int
        Number of the layer in the runtime.
    size : int
        Width of hidden states.
    dtype : torch.dtype
        Type of the weights in the slots, or of the operands of their products.
    """

    def __init__(self, experts: CudaExperts, layer: int, size: int, dtype: torch.dtype) -> None:
        self.experts = experts
        self._layer = layer
        self._size = size
        self._dtype = dtype
        # The place for results; None: memory of the call.
        self.place: torch.Tensor | None = None
        # Called before the kernel, with the layer and what the kernel reads.
        self.before: Callable[[int, Sequence[torch.Tensor]], None] | None = None

    def new_place(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """Return memory for the results of a step; it holds finite numbers before."""
        # A step that did not run leaves it to others, whose keys and values are masked by zeros.
        return torch.zeros((num_tokens, self._size), dtype=self._dtype, device=device)

    def __call__(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the output of the routed experts, of hidden's dtype.

        Parameters
        ----------
        hidden : Tensor, shape [num_tokens, hidden_size]
        ids : Tensor of int, shape [num_tokens, top_k]
        weights : Tensor, shape [num_tokens, top_k]

        Raises
        ------
        ConfigError
            If shapes do not fit.
        MoeCacheError
            If the runtime is closed, or a graph is captured that would depend on what happens to
            be resident.
        """
        given = hidden.to(self._dtype).contiguous()
        chosen = ids if ids.dtype in _INTEGERS else ids.long()
        shares = weights if weights.dtype in (torch.float32, self._dtype) else weights.float()
        # torch's own memory: in a graph it is the graph's.
        place = self.place
        out = torch.empty_like(given) if place is None else place
        chosen, shares = chosen.contiguous(), shares.contiguous()
        if self.before is not None:
            self.before(self._layer, (given, chosen, shares))
        self.experts(self._layer, given, chosen, shares, out=out)
        # Models may add to the tensor that they get.
        return (out if place is None else out.clone()).to(hidden.dtype)


def device_kernel_of(
    module: nn.Module,
    runtime: ExpertRuntime,
    layer: int,
    dtype: torch.dtype,
    *,
    is_interleaved: bool,
) -> DeviceKernel:
    """Return what computes the experts of a module in the slots of a GPU.

    Raises
    ------
    ConfigError
        With the reason, if the GPU's kernels do not compute them.
    """
    if is_llama4(module):
        raise ConfigError("a score multiplies an expert's input")
    gate = gate_of(module)
    if getattr(module, "has_post_expert_norm", False):
        raise ConfigError("each expert has a norm of its own")
    activation = gate.pop("activation")
    if activation not in ACTIVATIONS:
        raise ConfigError(f"there is no kernel for {activation} on a GPU")
    name = str(dtype).removeprefix("torch.")
    experts = on_device(runtime, activation, is_interleaved=is_interleaved, dtype=name, **gate)
    down = next(role for role in runtime.layout.layers[layer] if role.name == "down")
    return DeviceKernel(experts, layer, down.shape[0], dtype)


def join_torch(runtime: ExpertRuntime) -> None:
    """Have slots on a GPU work in torch's streams, and torch give back memory that they lack."""
    if not isinstance(runtime.pool, CudaSlots):
        return
    device = torch.device(runtime.pool.device.name)
    if device.type == "cuda":
        runtime.pool.device.stream_source = lambda: torch.cuda.current_stream(device).cuda_stream
        runtime.pool.device.on_out_of_memory = torch.cuda.empty_cache


def is_captured(runtime: ExpertRuntime) -> bool:
    """Return whether a CUDA graph captures what the calling thread issues."""
    if runtime.closed or not isinstance(runtime.pool, CudaSlots):
        return False
    device = runtime.pool.device
    return device.is_capturing(device.current_stream())
