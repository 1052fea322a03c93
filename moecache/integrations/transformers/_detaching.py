"""What `detach` gives a model back: its experts, as they are in the checkpoint."""

import numpy as np
import torch
from torch import nn

from moecache.integrations.transformers._binding import Binding
from moecache.integrations.transformers._experts import ROLES, described, is_transposed
from moecache.integrations.transformers._slots import GATE_UP, device_of, values_of
from moecache.runtime.runtime import ExpertRuntime


# Weights that are given back in inference mode can be trained all the same.
@torch.inference_mode(mode=False)
def read_experts(runtime: ExpertRuntime, binding: Binding) -> dict[str, nn.Parameter]:
    """Return the parameters of a module whose experts are in slots, read from the checkpoint."""
    store, layer = runtime.store, binding.layer
    weights = {
        name: torch.empty(shape, dtype=dtype, device=device_of(runtime))
        for name, (shape, dtype, _) in described(binding.module).items()
    }
    roles = {role.name: role for role in runtime.layout.layers[layer]}
    parts = {name: np.empty(role.array_shape, role.dtype) for name, role in roles.items()}
    for expert in range(store.layout.num_experts):
        store.read_into(layer, expert, parts)
        for name, tensor in weights.items():
            role = roles[ROLES[name]]
            dtype = tensor.dtype if role.format else None
            values = values_of(parts[role.name], role, dtype, stored=True)
            if binding.regroup is not None and role.name in GATE_UP:
                values = binding.regroup(values)
            is_turned = binding.has_output_rows and is_transposed(binding.module)
            is_turned &= values.ndim == 2
            tensor[expert].copy_(values.t() if is_turned else values)
    for tensor in weights.values():
        tensor[store.layout.num_experts :].zero_()  # of LongCat's experts that do nothing
    return {
        name: nn.Parameter(tensor, requires_grad=described(binding.module)[name][2])
        for name, tensor in weights.items()
    }
