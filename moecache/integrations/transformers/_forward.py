"""The routed feed-forward over slots, as transformers' `grouped_mm` computes it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from moecache.errors import MoeCacheError
from moecache.integrations.transformers import _spans
from moecache.integrations.transformers._fast import fast_experts
from moecache.integrations.transformers._on_device import DeviceKernel
from moecache.integrations.transformers._operators import number_of, numbered, operator
from moecache.integrations.transformers._slots import (
    Compute,
    SlotLayer,
    SlotWeights,
    layer_of,
    pairs_of,
)
from moecache.runtime.steps import Wave

# A multiple of the elements that torch's element-wise kernels take at once, in any dtype.
_VECTOR = 64


def routed_experts(
    module: nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute a module's experts; transformers calls this as experts implementation "moecache".

    Parameters
    ----------
    module : Module
        Experts module of a model that `load` returned or `attach` was given.
    hidden : Tensor, shape [num_tokens, hidden_size]
    ids : Tensor of int, shape [num_tokens, top_k]
    weights : Tensor, shape [num_tokens, top_k]

    Returns
    -------
    Tensor, shape [num_tokens, hidden_size]
        Equal to that of "grouped_mm", bit for bit, on the CPU, if `compute` is "torch".

    Raises
    ------
    MoeCacheError
        If the model has no runtime, or the tensors are not in the memory of its slots.
    StoreError
        If an expert cannot be read; nothing is lost: call again.
    """
    if not torch.compiler.is_compiling():
        return _routed_experts(module, hidden, ids, weights)
    if torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad):
        return _outside(module, hidden, ids, weights)
    out: torch.Tensor = torch.ops.moecache.routed_experts(hidden, ids, weights, number_of(module))
    return out


@operator(
    "routed_experts(Tensor hidden, Tensor ids, Tensor weights, int module) -> Tensor",
    lambda hidden, *_: hidden.new_empty(hidden.shape),
)
def _operator(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, module: int
) -> torch.Tensor:
    return _routed_experts(numbered(module), hidden, ids, weights)


def _routed_experts(
    module: nn.Module,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    if _spans.is_page():
        return _spans.ask(_spans.Asked(module, hidden, ids, weights))
    layer = layer_of(module, hidden)
    if torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad):
        if layer.ranks is not None:
            raise MoeCacheError(
                "experts that are spread over ranks cannot be trained through: use "
                "torch.no_grad(), or load the model without expert_parallel"
            )
        out: torch.Tensor = _Differentiable.apply(hidden, weights, ids, module, layer)
        return out
    if layer.kernel is not None and ids.numel():
        if isinstance(layer.kernel, DeviceKernel):
            layer.num_products += ids.numel()
            return layer.kernel(hidden, ids, weights)
        out, num_experts = fast_experts(
            module,
            layer.runtime,
            layer.layer,
            layer.kernel,
            hidden,
            ids,
            weights,
            layer.ranks,
            rows,
        )
        layer.num_products += num_experts
        return out
    return _forward(module, layer, hidden, ids, weights)


class SpanExperts:
    """Computes the experts of pages, each expert read once; see `Span`.

    Torch's products are made for each page by itself: their bits depend on the number of rows.
    Memory for rows is kept from layer to layer: an allocation of so much is given back to the
    system each time, which clears it anew (a tenth of a prompt's time).
    """

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None

    def __call__(self, pages: Sequence[_spans.Asked]) -> Sequence[torch.Tensor]:
        """Return the output of each page's experts."""
        if len(pages) == 1:
            return [_routed_experts(*pages[0])]
        module, counts = pages[0].module, [len(page.hidden) for page in pages]
        hidden, ids, weights = (torch.cat(parts) for parts in list(zip(*pages, strict=True))[1:])
        layer = layer_of(module, hidden)
        if layer.kernel is not None:
            wanted = ids.numel(), hidden.shape[1]
            if self._rows is None or self._rows.shape != wanted:
                self._rows = torch.empty(wanted, dtype=torch.float32)
            return _routed_experts(module, hidden, ids, weights, self._rows).split(counts)
        starts = np.cumsum([0, *counts[:-1]]) * ids.shape[1]
        parts = [_computation(module, page.hidden, page.ids) for page in pages]
        rows = layer.rows(ids, _apart(parts, starts), hidden.shape[-1])
        assert rows is not None
        split = rows.split([count * ids.shape[1] for count in counts])
        return [
            _weighted_sum(part, page.ids, page.weights, page.hidden)
            for part, page in zip(split, pages, strict=True)
        ]


def _apart(parts: Sequence[Compute], starts: np.ndarray) -> Compute:
    """Return what computes a wave page by page; `starts` has the first pair of each."""

    def compute(wave: Wave, experts: list[SlotWeights], counts: list[int]) -> torch.Tensor:
        page_of = _spans.page_pairs(wave.pairs, starts)
        expert_of = np.repeat(np.arange(len(counts)), counts)
        out: torch.Tensor | None = None
        for page, part in enumerate(parts):
            chosen = np.flatnonzero(page_of == page)
            if not len(chosen):
                continue
            mine, sizes = np.unique(expert_of[chosen], return_counts=True)
            offsets = np.concatenate(([0], np.cumsum(sizes)))
            cut = Wave(wave.slots[mine], wave.pairs[chosen] - starts[page], offsets, wave.top_k)
            rows = part(cut, [experts[number] for number in mine.tolist()], sizes.tolist())
            if out is None:
                out = rows.new_empty((len(wave.pairs), rows.shape[1]))
            out[torch.from_numpy(chosen)] = rows
        assert out is not None
        return out

    return compute


_outside = torch.compiler.disable(
    _routed_experts,
    reason="gradients go through experts outside of graphs; in evaluation use torch.no_grad()",
)


def _forward(
    module: Any,
    layer: SlotLayer,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    rows = layer.rows(ids, _computation(module, hidden, ids), hidden.shape[-1])
    if rows is None:
        return hidden.new_zeros(hidden.shape)
    return _weighted_sum(rows, ids, weights, hidden)


def _weighted_sum(
    rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    weighted = rows * weights.reshape(-1, 1)
    return weighted.view(*ids.shape, rows.shape[-1]).sum(dim=1).to(hidden.dtype)


def _computation(module: Any, hidden: torch.Tensor, ids: torch.Tensor) -> Compute:
    """Return what computes a module's waves, for `SlotLayer.rows`."""
    activation, num_inputs = _activation(module)
    places: np.ndarray | None = None  # the same for all waves of the step

    def compute(wave: Wave, experts: list[SlotWeights], counts: list[int]) -> torch.Tensor:
        nonlocal places
        num_pairs = len(wave.pairs)
        first = experts[0]
        if hidden.shape[0] == 1:
            inputs = hidden.to(first.up.dtype).expand(num_pairs, -1)
        else:
            tokens = torch.from_numpy(wave.pairs // wave.top_k).to(hidden.device)
            inputs = hidden[tokens].to(first.up.dtype)
        # Element-wise work is done for all of a wave at once, as grouped_mm does.
        up = _products(inputs, [expert.up for expert in experts], counts)
        if first.up_bias is not None:
            up.add_(_biases([expert.up_bias for expert in experts], counts))
        if up.shape[1] // num_inputs % _VECTOR == 0:
            acted = activation(up)
        else:
            places = _places(ids) if places is None else places
            acted = _activated(activation, up, places[wave.pairs], ids.numel())
        down = _products(acted, [expert.down for expert in experts], counts)
        if first.down_bias is not None:
            down.add_(_biases([expert.down_bias for expert in experts], counts))
        if getattr(module, "has_post_expert_norm", False):
            down = module.post_expert_norm(down)
        return down

    return compute


def _activation(module: Any) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    """Return a module's activation, and how many inputs it has for an output."""
    return (module._apply_gate, 2) if getattr(module, "has_gate", True) else (module.act_fn, 1)


def _activated(
    activation: Callable[[torch.Tensor], torch.Tensor],
    up: torch.Tensor,
    places: np.ndarray,
    num_pairs: int,
) -> torch.Tensor:
    """Return the activations of a wave's rows, each as it is at its place among all pairs.

    Elements after the last whole vector of a tensor may be rounded otherwise.
    """
    place = torch.from_numpy(places).to(up.device)
    rows = up.new_zeros((num_pairs, up.shape[1]))
    rows[place] = up
    return activation(rows)[place]


def _places(ids: torch.Tensor) -> np.ndarray:
    """Return the place of each pair when all experts are computed at once, sorted."""
    order = np.argsort(ids.reshape(-1).cpu().numpy(), kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return places


def _products(
    inputs: torch.Tensor, matrices: list[torch.Tensor], counts: list[int]
) -> torch.Tensor:
    out = inputs.new_empty((inputs.shape[0], matrices[0].shape[1]))
    for matrix, rows, results in zip(
        matrices, inputs.split(counts), out.split(counts), strict=True
    ):
        torch.mm(rows, matrix, out=results)
    return out


def _biases(biases: list[torch.Tensor | None], counts: list[int]) -> torch.Tensor:
    stacked = torch.stack([bias for bias in biases if bias is not None])
    return stacked.repeat_interleave(torch.tensor(counts, device=stacked.device), dim=0)


class _Differentiable(torch.autograd.Function):
    """The same with gradients: slots hold other experts by then, so that backward reads again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        module: nn.Module,
        layer: SlotLayer,
    ) -> torch.Tensor:
        if getattr(module, "has_post_expert_norm", False):
            raise MoeCacheError(
                f"{type(module).__name__} cannot be trained through: use torch.no_grad()"
            )
        ctx.save_for_backward(hidden, weights, ids)
        ctx.module, ctx.layer = module, layer
        return _forward(module, layer, hidden, ids, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weights, ids = ctx.saved_tensors
        module, layer = ctx.module, ctx.layer
        grad_weights = torch.zeros_like(weights).reshape(-1)

        def compute(wave: Wave, experts: list[SlotWeights], counts: list[int]) -> torch.Tensor:
            pairs = pairs_of(wave, hidden.device)
            tokens = pairs // wave.top_k
            inputs = hidden[tokens].detach().requires_grad_()
            weight = weights.reshape(-1)[pairs].detach().requires_grad_()
            with torch.enable_grad():
                outputs = [
                    _one_expert(module, rows.to(expert.up.dtype), expert)
                    for rows, expert in zip(inputs.split(counts), experts, strict=True)
                ]
                weighted = torch.cat(outputs) * weight[:, None]
                wanted = grad[tokens].to(weighted.dtype)
                of_inputs, of_weights = torch.autograd.grad(weighted, (inputs, weight), wanted)
            grad_weights[pairs] = of_weights
            return of_inputs

        # Summed when all have come: waves come in the order of arrival, and bits depend on it.
        rows = layer.rows(ids, compute, hidden.shape[-1])
        if rows is None:
            grad_hidden = torch.zeros_like(hidden)
        else:
            grad_hidden = rows.view(*ids.shape, rows.shape[-1]).sum(dim=1)
        return grad_hidden, grad_weights.reshape(weights.shape), None, None, None


def _one_expert(module: Any, rows: torch.Tensor, expert: SlotWeights) -> torch.Tensor:
    up = rows @ expert.up
    if expert.up_bias is not None:
        up = up + expert.up_bias
    activation, _ = _activation(module)
    down = activation(up) @ expert.down
    return down if expert.down_bias is None else down + expert.down_bias
