"""The check at load: a few tokens' rows of each kind of layer against plain products."""

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from moecache.errors import FormatError
from moecache.integrations.vllm._method import SlotMethod, ids_of
from moecache.kernels import values_in
from moecache.runtime.runtime import ExpertRuntime

_NUM_TOKENS = 3
# Kernels round activations to 15 bits or inputs to bfloat16; a wrong order of rows gives about 1.
_TOLERANCE = 0.03


def check_layers(layers: list[tuple[Any, int]], runtime: ExpertRuntime) -> int:
    """Compare one layer of each kind with float32 products of the weights as stored.

    Parameters
    ----------
    layers : list of (RoutedExperts, number of the MoE layer)
    runtime : ExpertRuntime

    Returns
    -------
    int
        Layers that were compared.

    Raises
    ------
    FormatError
        If a layer's output is another: the model would answer, and wrongly.
    """
    kinds: dict[Any, tuple[Any, int]] = {}
    for layer, number in layers:
        roles = tuple((r.name, r.shape, r.dtype, r.format) for r in runtime.layout.layers[number])
        kinds.setdefault((roles, layer.activation), (layer, number))
    for layer, number in kinds.values():
        _check(layer, number, runtime)
    return len(kinds)


def _check(layer: Any, number: int, runtime: ExpertRuntime) -> None:
    generator = torch.Generator().manual_seed(number)
    hidden = torch.randn((_NUM_TOKENS, layer.hidden_size), generator=generator)
    hidden = hidden.to(layer.quant_method.moe.in_dtype)
    ids = torch.from_numpy(ids_of(layer, _NUM_TOKENS))
    weights = torch.full(ids.shape, 1 / layer.top_k)
    found = layer.quant_method.apply(layer, hidden, weights, ids, None, None).float()
    wanted = torch.zeros_like(found)
    for token, expert in np.ndindex(*ids.shape):
        chosen = int(ids[token, expert])
        if runtime.share is None or runtime.share.held[number, chosen]:
            row = _plain(layer, number, chosen, runtime, hidden[token].float())
            wanted[token] += row * weights[token, expert]
    scale = wanted.norm()
    error = float((found - wanted).norm() / scale) if scale else float(found.norm())
    if not error <= _TOLERANCE:
        raise FormatError(
            f"{layer.layer_name}: the experts' output is {error:.3f} off that of plain products of "
            f"the same weights, and at most {_TOLERANCE} is rounding; leave --load-format moecache "
            "out, and please report the model"
        )


def _plain(
    layer: Any, number: int, expert: int, runtime: ExpertRuntime, x: torch.Tensor
) -> torch.Tensor:
    """Return one expert's output in float32, from the file and not from a slot."""
    roles = runtime.store.layout.layers[number]
    parts = {role.name: np.empty(role.array_shape, role.dtype) for role in roles}
    runtime.store.read_into(number, expert, parts)
    values = {
        role.name: torch.from_numpy(
            values_in(parts[role.name], role, stored=True, dtype=np.float32)
        )
        for role in roles
    }
    method: SlotMethod = layer.quant_method
    gate = method.gate_of(layer)
    both = values["gate_up"] @ x + values.get("gate_up_bias", torch.zeros(()))
    if gate.get("is_interleaved"):
        first, second = both[0::2], both[1::2]
    else:
        first, second = both.chunk(2)
    if gate["activation"] == "swiglu":
        first = first.clamp(max=gate["limit"])
        second = second.clamp(-gate["limit"], gate["limit"])
        middle = first * torch.sigmoid(gate["alpha"] * first) * (second + 1)
    elif gate["activation"] == "clamped_silu":
        second = second.clamp(-gate["limit"], gate["limit"])
        middle = functional.silu(first.clamp(max=gate["limit"])) * second
    elif gate["activation"] == "silu":
        middle = functional.silu(first) * second
    else:
        kind = "tanh" if gate["activation"] == "gelu_tanh" else "none"
        middle = functional.gelu(first, approximate=kind) * second
    return values["down"] @ middle + values.get("down_bias", torch.zeros(()))
