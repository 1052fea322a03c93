"""The routed feed-forward over slots, as transformers' `grouped_mm` computes it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
import torch.utils.dlpack
from torch import nn

from moecache.errors import MoeCacheError
from moecache.integrations.transformers._exchange import Exchange
from moecache.integrations.transformers._fast import fast_experts
from moecache.integrations.transformers._operators import number_of, numbered, operator
from moecache.integrations.transformers._ranks import Ranks
from moecache.kernels import SlotKernel, values_in
from moecache.layout import Role
from moecache.runtime.runtime import ExpertRuntime
from moecache.runtime.steps import Wave
from moecache.slots import CudaSlots

NUMPY_TYPES = {
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
# Attribute of an experts module that has its layer.
LAYER = "_moecache_layer"
# Roles that have rows of gate and of up.
GATE_UP = {"gate_up", "gate_up_bias"}
Regroup = Callable[[torch.Tensor], torch.Tensor]
# A multiple of what torch's element-wise kernels take at once, in any dtype.
_VECTOR = 64


class SlotWeights(NamedTuple):
    """Views of one slot, as products want them: [in, out]."""

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


# Computes a wave: its experts' weights, and the number of pairs of each.
Compute = Callable[[Wave, list[SlotWeights], list[int]], torch.Tensor]


class SlotLayer:
    """An experts module's weights, wherever they are now.

    Parameters
    ----------
    runtime : ExpertRuntime
    layer : int
        Number of the layer in the runtime's store.
    views : dict
        Views of slots seen so far; layers of the same shapes share one.
    is_transposed : bool
        Whether the model has weights as [in, out].
    is_copied : bool
        Whether a slot has no such weights, but their values in a format or another order,
        [out, in].
    regroup : callable, optional
        Makes the model's order of rows of a slot's where gate and up alternate in one of them.
    dtype : torch.dtype
        What the values of weights in a format become for torch.
    kernel : SlotKernel, optional
        What computes them; by default torch does.
    ranks : Ranks, optional
        The processes that experts are spread over, if they are.
    """

    def __init__(
        self,
        runtime: ExpertRuntime,
        layer: int,
        views: dict[int, SlotWeights],
        *,
        is_transposed: bool,
        is_copied: bool = False,
        regroup: Regroup | None = None,
        dtype: torch.dtype,
        kernel: SlotKernel | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.kernel = kernel
        self.ranks = ranks
        self._dtype = dtype
        # Values that were copied are those of the expert in the slot, not of the slot.
        self._is_copied = is_copied
        self.runtime = runtime
        self.layer = layer
        self.device = device_of(runtime)
        self.num_products = 0
        self._views = views
        self._is_transposed = is_transposed
        self._regroup = regroup

    def rows(
        self,
        ids: torch.Tensor,
        compute: Compute,
        width: int,
    ) -> torch.Tensor | None:
        """Return what `compute` returns for each (token, choice) pair, wave by wave.

        Parameters
        ----------
        ids : Tensor of int, shape [num_tokens, top_k]
        compute : callable
            Called with a wave, its experts' weights and the number of pairs of each.
        width : int
            Numbers in a row.

        Returns
        -------
        Tensor, shape [num_tokens * top_k, hidden_size]
            None if there is no pair.
        """
        if self.ranks is not None:
            return self._gathered(self.ranks, ids, compute, width)
        rows: torch.Tensor | None = None
        num_pairs = ids.numel()
        waves = self.runtime.waves(self.layer, ids.cpu().numpy())
        try:
            for wave in waves:
                slots = wave.slots.tolist()
                weights = [self._views.get(slot) or self._view(slot) for slot in slots]
                self.num_products += len(slots)
                part = compute(wave, weights, np.diff(wave.offsets).tolist())
                if len(slots) == num_pairs and (wave.pairs[:-1] < wave.pairs[1:]).all():
                    return part  # one token, all there
                if rows is None:
                    rows = part.new_empty((num_pairs, part.shape[1]))
                rows[pairs_of(wave, part.device)] = part
        finally:
            # A traceback that the caller keeps would keep the leases as well.
            waves.close()
        return rows

    def _gathered(
        self,
        ranks: Ranks,
        ids: torch.Tensor,
        compute: Compute,
        width: int,
    ) -> torch.Tensor | None:
        """Return the rows of all ranks, of which this one computes those of its experts."""
        if not ids.numel():
            return None
        chosen = ids.cpu().numpy()
        exchange = Exchange(ranks, self.layer, chosen, width, self._dtype, self.device)
        with exchange:
            waves = self.runtime.waves(self.layer, chosen)
            try:
                for wave in waves:
                    slots = wave.slots.tolist()
                    if not slots:
                        continue
                    weights = [self._views.get(slot) or self._view(slot) for slot in slots]
                    self.num_products += len(slots)
                    part = compute(wave, weights, np.diff(wave.offsets).tolist())
                    exchange.add(wave.pairs, part)
            finally:
                waves.close()
        return exchange.rows

    def clear(self) -> None:
        """Let go of the slots' memory."""
        self._views.clear()

    # Views are kept: one that was made in inference mode could not be differentiated through.
    @torch.inference_mode(mode=False)
    def _view(self, slot: int) -> SlotWeights:
        parts = weights_in(self.runtime, slot, self.layer, self._dtype)
        if self._regroup is not None:
            parts |= {name: self._regroup(parts[name]) for name in GATE_UP & parts.keys()}
        up, down = parts["gate_up"] if "gate_up" in parts else parts["up"], parts["down"]
        if not self._is_transposed or self._is_copied:
            up, down = up.t(), down.t()
        if self._is_transposed and self._is_copied:
            # In the order of the model's own, as products of another order have other bits.
            up, down = up.contiguous(), down.contiguous()
        up_bias = parts.get("gate_up_bias", parts.get("up_bias"))
        view = SlotWeights(up, down, up_bias, parts.get("down_bias"))
        if not self._is_copied:
            self._views[slot] = view
        return view


def interleaved(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of gate and of up in turns, of all of gate's above up's."""
    return rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def separated(rows: torch.Tensor) -> torch.Tensor:
    """Return all rows of gate above up's, of rows in turns."""
    return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


def pairs_of(wave: Wave, device: torch.device) -> torch.Tensor:
    """Return a wave's pairs; torch takes no read-only arrays, and one token's are read-only."""
    pairs = wave.pairs
    return torch.from_numpy(pairs if pairs.flags.writeable else pairs.copy()).to(device)


def device_of(runtime: ExpertRuntime) -> torch.device:
    """Return where a runtime's slots are, as torch names it."""
    pool = runtime.pool
    return torch.device(pool.device.name if isinstance(pool, CudaSlots) else "cpu")


def values_of(
    array: np.ndarray, role: Role, dtype: torch.dtype, *, stored: bool = False
) -> torch.Tensor:
    """Return the values of a matrix in a format, from a slot or, `stored`, from a file."""
    return as_tensor(values_in(array, role, stored=stored, dtype=NUMPY_TYPES[dtype]))


def weights_in(
    runtime: ExpertRuntime, slot: int, layer: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return tensors over the weights in a slot, by role; of a format, values as `dtype`."""
    pool = runtime.pool
    if not isinstance(pool, CudaSlots):
        roles = {role.name: role for role in runtime.layout.layers[layer]}
        return {
            name: values_of(array, roles[name], dtype) if roles[name].format else as_tensor(array)
            for name, array in runtime.expert(slot, layer).items()
        }
    parts = pool.raw_expert(slot, layer)
    return {
        role.name: torch.utils.dlpack.from_dlpack(parts[role.name]).view(
            getattr(torch, role.dtype.name)
        )
        for role in runtime.layout.layers[layer]
    }


def layer_of(module: nn.Module | None, hidden: torch.Tensor) -> SlotLayer:
    """Return where an experts module's weights are.

    Raises
    ------
    MoeCacheError
        If the model has no runtime, or hidden states are not on the device of its slots.
    """
    layer: SlotLayer | None = None if module is None else module.__dict__.get(LAYER)
    if layer is None:
        raise MoeCacheError(
            "experts implementation 'moecache' needs a cache, and this model has none, or one "
            "that is closed: load the model with moecache.integrations.transformers.load, or "
            "give it one with attach"
        )
    if hidden.device != layer.device:
        raise MoeCacheError(
            f"the experts' slots are on {layer.device}, but hidden states on {hidden.device}; "
            f"keep the model where its slots are: model.to({str(layer.device)!r})"
        )
    return layer


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor over the memory of an array, which may be of ml_dtypes' bfloat16."""
    if array.dtype.kind == "V":
        # torch knows nothing of ml_dtypes.
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


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
    module: nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
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
        out, num_experts = fast_experts(
            module, layer.runtime, layer.layer, layer.kernel, hidden, ids, weights, layer.ranks
        )
        layer.num_products += num_experts
        return out
    return _forward(module, layer, hidden, ids, weights)


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

    rows = layer.rows(ids, compute, hidden.shape[-1])
    if rows is None:
        return hidden.new_zeros(hidden.shape)
    weighted = rows * weights.reshape(-1, 1)
    return weighted.view(*ids.shape, rows.shape[-1]).sum(dim=1).to(hidden.dtype)


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

    What is left of whole vectors at the end of a tensor may be rounded otherwise.
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
        grad_hidden = torch.zeros_like(hidden)
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
            grad_hidden.index_add_(0, tokens, of_inputs)
            grad_weights[pairs] = of_weights
            return of_inputs

        layer.rows(ids, compute, hidden.shape[-1])
        return grad_hidden, grad_weights.reshape(weights.shape), None, None, None


def _one_expert(module: Any, rows: torch.Tensor, expert: SlotWeights) -> torch.Tensor:
    up = rows @ expert.up
    if expert.up_bias is not None:
        up = up + expert.up_bias
    activation, _ = _activation(module)
    down = activation(up) @ expert.down
    return down if expert.down_bias is None else down + expert.down_bias
