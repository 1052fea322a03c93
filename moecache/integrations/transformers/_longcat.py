"""LongCat-Flash, whose experts have no interface: some numbers are of experts that do nothing."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moecache.integrations.transformers._experts import become
from moecache.integrations.transformers._llama4 import without_gradients
from moecache.integrations.transformers._slots import SlotLayer, SlotWeights, layer_of
from moecache.runtime.steps import Wave


def is_longcat(module: nn.Module) -> bool:
    """Return whether a module holds LongCat-Flash's experts."""
    return any(cls.__name__ == "LongcatFlashExperts" for cls in type(module).__mro__)


def patch(model: nn.Module, path: str) -> nn.Module:
    """Have the module around the experts at `path` compute them from slots; return it."""
    block = model.get_submodule(path.rpartition(".")[0])
    if not isinstance(block, _OffloadedMoe):
        become(block, _OffloadedMoe)
    return block


class _OffloadedMoe(nn.Module):
    """`LongcatFlashMoE` with its experts in slots."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, as the original does."""
        block: Any = self
        _, weights, ids = block.router(hidden_states)
        hidden = hidden_states.view(-1, hidden_states.shape[-1])
        return _routed(block.experts, hidden, weights, ids).view(hidden_states.shape)


@torch.compiler.disable
def _routed(
    experts: Any, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    compute = partial(_forward, experts, layer_of(experts, hidden))
    return without_gradients("LongCat-Flash", compute, hidden, weights, ids)


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
    is_real = ids < experts.num_routed_experts
    tokens = is_real.any(dim=1).nonzero()[:, 0]
    # A copy of the token's first expert, which is a real one, stands for those without weights.
    asked = torch.where(is_real, ids, ids[:, :1])[tokens]

    def compute(wave: Wave, of_wave: list[SlotWeights], counts: list[int]) -> torch.Tensor:
        pairs = torch.from_numpy(wave.pairs.copy()).to(hidden.device)
        places = tokens[pairs // wave.top_k], pairs % wave.top_k
        wanted = is_real[places]
        # Another one's stand-in has no row of its own, and nobody looks at it.
        part = hidden.new_zeros((len(pairs), hidden.shape[-1]))
        for expert, these, token, out in zip(
            of_wave, *(one.split(counts) for one in (wanted, places[0], part)), strict=True
        ):
            token = token[these]
            gate, up = functional.linear(hidden[token], expert.up.t()).chunk(2, dim=-1)
            out[these] = functional.linear(experts.act_fn(gate) * up, expert.down.t())
        return part

    computed = layer.rows(asked, compute, hidden.shape[-1])
    # An expert that does nothing returns what it is given.
    rows = hidden[:, None].repeat(1, ids.shape[1], 1)
    if computed is not None:
        real = is_real[tokens]
        rows[tokens] = torch.where(real[..., None], computed.view(*real.shape, -1), rows[tokens])
    out = torch.zeros_like(hidden)
    for row, weight in zip(rows.unbind(1), weights.unbind(1), strict=True):
        out += (row * weight[:, None]).to(hidden.dtype)
    return out
