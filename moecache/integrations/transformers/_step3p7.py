"""Step 3.7, whose experts have no interface: they are added up one expert after the other."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moecache.integrations.transformers._experts import become
from moecache.integrations.transformers._llama4 import without_gradients
from moecache.integrations.transformers._slots import SlotLayer, SlotWeights, layer_of, pairs_of
from moecache.runtime.steps import Wave


def is_step3p7(module: nn.Module) -> bool:
    """Return whether a module holds Step 3.7's experts."""
    return any(cls.__name__ == "Step3p7Experts" for cls in type(module).__mro__)


def patch(model: nn.Module, path: str) -> nn.Module:
    """Have the module around the experts at `path` compute them from slots; return it."""
    block = model.get_submodule(path.rpartition(".")[0])
    if not isinstance(block, _OffloadedMoe):
        become(block, _OffloadedMoe)
    return block


class _OffloadedMoe(nn.Module):
    """`Step3p7SparseMoeBlock` with its experts in slots."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, as the original does."""
        block: Any = self
        hidden = hidden_states.view(-1, hidden_states.shape[-1])
        shared = block.shared_experts(hidden)
        _, weights, ids = block.gate(hidden)
        routed = _routed(block.experts, hidden, weights, ids) * block.routed_scaling_factor
        out: torch.Tensor = (routed + shared).reshape(hidden_states.shape)
        return out


@torch.compiler.disable
def _routed(
    experts: Any, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    compute = partial(_forward, experts, layer_of(experts, hidden))
    return without_gradients("Step 3.7", compute, hidden, weights, ids)


def _forward(
    experts: Any,
    layer: SlotLayer,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    # In ascending order of experts, as the original adds them up.
    ids, order = ids.sort(dim=1)
    weights = weights.gather(1, order)

    def compute(wave: Wave, of_wave: list[SlotWeights], counts: list[int]) -> torch.Tensor:
        tokens = pairs_of(wave, hidden.device) // wave.top_k
        return torch.cat(
            [
                functional.linear(
                    experts._apply_gate(functional.linear(hidden[these], expert.up.t())),
                    expert.down.t(),
                )
                for expert, these in zip(of_wave, tokens.split(counts), strict=True)
            ]
        )

    out = torch.zeros_like(hidden)
    rows = layer.rows(ids, compute, hidden.shape[-1])
    if rows is None:
        return out
    for row, weight in zip(rows.view(*ids.shape, -1).unbind(1), weights.unbind(1), strict=True):
        out += (row * weight[:, None]).to(hidden.dtype)
    return out
