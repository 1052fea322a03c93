"""The products in a model's report: bytes of weights, and how fast they were read."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moecache import kernels
from moecache.integrations.transformers._native import FORM
from moecache.integrations.transformers._on_device import DeviceKernel
from moecache.kernels import SlotKernel
from moecache.profiles.bandwidth import bandwidth
from moecache.runtime.runtime import ExpertRuntime
from moecache.slots import HostSlots
from moecache.telemetry import ComputeStats


def compute_stats(
    model: Any,
    runtime: ExpertRuntime,
    layers: Sequence[int],
    compute: str,
    computed: Mapping[int, SlotKernel | DeviceKernel],
    left: Mapping[int, str],
) -> ComputeStats:
    """Return what multiplies, and what it has reached.

    Measures what the machine's memory gives if kernels have computed tokens, and nobody has yet.

    Parameters
    ----------
    model : PreTrainedModel
    runtime : ExpertRuntime
    layers : sequence of int
        Layers of the runtime that the model runs.
    compute : str
    computed : mapping of int to SlotKernel or DeviceKernel
        The kernel of each of these layers, if kernels compute them.
    left : mapping of int to str
        Why torch computes the others, if kernels were asked for.
    """
    layout = runtime.layout
    sizes, formats = {}, set()
    for layer in layers:
        # Slots on a GPU hold what the file holds; a closed runtime's hold nothing.
        is_readable = isinstance(runtime.pool, HostSlots) and not runtime.closed
        held = runtime.expert(0, layer) if is_readable else {}
        roles = [(role, held.get(role.name)) for role in layout.layers[layer]]
        sizes[layer] = sum(role.nbytes if a is None else a.nbytes for role, a in roles)
        formats |= {r.format or str(r.dtype if a is None else a.dtype) for r, a in roles}
    is_fast, on_host = compute != "torch", isinstance(runtime.pool, HostSlots)
    # The host does not time the GPU's work, as it waits for none of it.
    timed = {n: kernel for n, kernel in computed.items() if isinstance(kernel, SlotKernel)}
    busy_ns = sum(kernel.busy_ns for kernel in timed.values())
    bytes_computed = sum(sizes[layer] * kernel.num_computed for layer, kernel in timed.items())
    bytes_per_s = None
    if busy_ns:
        bytes_per_s = bandwidth(runtime.usage.path, at_least=bytes_computed / (busy_ns / 1e9))
    return ComputeStats(
        compute=compute,
        level=("" if not is_fast else kernels.level() if on_host else "cuda"),
        num_threads=(
            0 if not on_host else kernels.num_threads() if is_fast else torch.get_num_threads()
        ),
        formats=tuple(sorted(formats)),
        expert_bytes=layout.top_k * sum(sizes.values()),
        trunk_bytes=sum(map(_weight_bytes, _linears(model))),
        bytes_computed=bytes_computed,
        busy_ns=busy_ns,
        bytes_per_s=bytes_per_s,
        left_to_torch=_told(left, len(layers)),
    )


def _told(left: Mapping[int, str], num_layers: int) -> str:
    if not left:
        return ""
    reasons = ", ".join(dict.fromkeys(left.values()))
    return f"{len(left)} of {num_layers} layers by torch: {reasons}"


def _weight_bytes(linear: nn.Linear) -> int:
    # The weight of a layer that stays quantized is computed when it is asked for.
    form: torch.Tensor = getattr(linear, FORM) if hasattr(linear, FORM) else linear.weight
    return form.nbytes


def _linears(model: Any) -> set[nn.Linear]:
    """Return the linear layers that every token of text goes through."""
    decoder = model.get_decoder()
    trunk = model if decoder is None else decoder
    modules = {*trunk.modules(), model.get_output_embeddings()}
    return {module for module in modules if isinstance(module, nn.Linear)}
