"""Llama 4, whose experts have no interface: scores go on the input, one expert per token."""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from moecache.errors import ConfigError, MoeCacheError
from moecache.integrations.transformers._experts import become
from moecache.integrations.transformers._fast import TYPES, fast_rows
from moecache.integrations.transformers._slots import SlotWeights, layer_of, pairs_of
from moecache.kernels import SlotKernel
from moecache.runtime.steps import Wave


def patch(model: nn.Module, path: str) -> nn.Module:
    """Have the module around the experts at `path` compute them from slots; return it."""
    block: Any = model.get_submodule(path.rpartition(".")[0])
    if block.top_k != 1:
        raise ConfigError(
            f"Llama 4 with {block.top_k} experts per token is not supported, only with one"
        )
    if not isinstance(block, _OffloadedMoe):
        become(block, _OffloadedMoe)
    return block


class _OffloadedMoe(nn.Module):
    """`Llama4TextMoe` with its experts in slots."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's output, and the router's logits, as the original does."""
        block: Any = self
        hidden = hidden_states.reshape(-1, block.hidden_dim)
        scores, logits = block.router(hidden)
        routed = _routed(block, hidden, scores, logits)
        out = block.shared_expert(hidden)
        out.add_(routed)
        return out, logits


@torch.compiler.disable
def _routed(
    block: Any, hidden: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    return without_gradients("Llama 4", partial(_forward, block), hidden, scores, logits)


def without_gradients(
    family: str, compute: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> torch.Tensor:
    """Return what `compute` makes of inputs; to go through it backwards is an error."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        out: torch.Tensor = _NotDifferentiable.apply(family, compute, *inputs)
        return out
    return compute(*inputs)


class _NotDifferentiable(torch.autograd.Function):
    """By then the slots hold other experts: an error rather than wrong gradients."""

    @staticmethod
    def forward(
        ctx: Any, family: str, compute: Callable[..., torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.family = family
        return compute(*inputs)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> NoReturn:
        raise MoeCacheError(
            f"{ctx.family} cannot be trained through with its experts in slots; give it all of "
            "them first with model.moecache.detach()"
        )


def _forward(
    block: Any, hidden: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    layer = layer_of(block.experts, hidden)
    ids = torch.topk(logits, 1, dim=1).indices
    if isinstance(layer.kernel, SlotKernel):
        given = hidden * scores.gather(1, ids)
        given = given.contiguous() if given.dtype in TYPES else given.float()
        found, num = fast_rows(layer.runtime, layer.layer, layer.kernel, given, ids, layer.ranks)
        layer.num_products += num
        return found.to(hidden.dtype)
    # The original takes every token through every expert, times a score of 0. A float32 product of
    # few rows may round otherwise than one of many.
    whole = hidden.dtype in {torch.float32, torch.float64}

    def compute(wave: Wave, experts: list[SlotWeights], counts: list[int]) -> torch.Tensor:
        outputs = []
        for expert, tokens in zip(
            experts, pairs_of(wave, hidden.device).split(counts), strict=True
        ):
            score = scores[:, ids[tokens[0]]]
            if whole:
                outputs.append(_expert(block, hidden * score, expert)[tokens])
            else:
                outputs.append(_expert(block, hidden[tokens] * score[tokens], expert))
        return torch.cat(outputs)

    rows = layer.rows(ids, compute, hidden.shape[-1])
    return hidden.new_empty(hidden.shape) if rows is None else rows


def _expert(block: Any, rows: torch.Tensor, expert: SlotWeights) -> torch.Tensor:
    gate, up = torch.mm(rows, expert.up).chunk(2, dim=-1)
    return torch.mm(up * block.experts.act_fn(gate), expert.down)
