"""SlotLayer: the weights of an experts module, as tensors over slots."""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np
import torch
import torch.utils.dlpack
from torch import nn

from moecache.errors import MoeCacheError
from moecache.integrations.transformers._exchange import Exchange
from moecache.integrations.transformers._on_device import DeviceKernel
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
        The type in which torch gets the values of weights in a format.
    kernel : SlotKernel or DeviceKernel, optional
        The kernel that computes them; by default torch does.
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
        kernel: SlotKernel | DeviceKernel | None = None,
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

    def rows(self, ids: torch.Tensor, compute: Compute, width: int) -> torch.Tensor | None:
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
        self, ranks: Ranks, ids: torch.Tensor, compute: Compute, width: int
    ) -> torch.Tensor | None:
        """Return the rows of all ranks; this one computes those of its experts."""
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
    array: np.ndarray, role: Role, dtype: torch.dtype | None, *, stored: bool = False
) -> torch.Tensor:
    """Return the values of a matrix, from a slot or, `stored`, from a file; None: in its dtype."""
    wanted = None if dtype is None else NUMPY_TYPES[dtype]
    return as_tensor(values_in(array, role, stored=stored, dtype=wanted))


def weights_in(
    runtime: ExpertRuntime, slot: int, layer: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return tensors over the weights in a slot, by role; a format's values as `dtype`."""
    pool = runtime.pool
    if not isinstance(pool, CudaSlots):
        roles = {role.name: role for role in runtime.layout.layers[layer]}
        return {
            name: values_of(array, roles[name], dtype) if roles[name].format else as_tensor(array)
            for name, array in runtime.expert(slot, layer).items()
        }
    formats = {role.format for role in runtime.layout.layers[layer]} - {""}
    if formats:
        raise MoeCacheError(
            f"experts in {', '.join(sorted(formats))} are computed on a GPU by kernels, through "
            'which no gradients go: use torch.no_grad(), or load the model with device="cpu"'
        )
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
