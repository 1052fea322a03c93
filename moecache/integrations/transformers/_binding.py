"""Which layer of a store holds the weights of which experts module."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from moecache.errors import ConfigError, FormatError
from moecache.integrations.transformers import gguf
from moecache.integrations.transformers._experts import (
    ROLES,
    described,
    find_experts,
    is_llama4,
    is_transposed,
)
from moecache.integrations.transformers._longcat import is_longcat
from moecache.integrations.transformers._slots import Regroup, interleaved, separated, weights_in
from moecache.integrations.transformers._step3p7 import is_step3p7
from moecache.integrations.transformers._targets import Targets
from moecache.kernels import default_compute
from moecache.layout import ExpertLayout
from moecache.runtime.runtime import ExpertRuntime
from moecache.slots import CudaSlots
from moecache.stores import CheckpointStore, GgufStore, has_output_rows


@dataclass(frozen=True)
class Binding:
    """An experts module and where its weights are.

    Parameters
    ----------
    path : str
        Name of the module, such as "model.layers.3.mlp.experts".
    module : Module
    layer : int
        Number of the layer in the store.
    name : str
        The store's own name of that layer.
    dtype : torch.dtype
        Type in which the model computes with the weights.
    has_output_rows : bool
        Whether the store's matrices are [out, in]; the module's may differ.
    regroup : callable or None
        Makes the module's order of rows of the store's where gate and up alternate in one of them:
        `interleaved` or `separated`.
    transposed : tuple of str
        Roles that the store has as [in, out] and the module as [out, in].
    """

    path: str
    module: nn.Module
    layer: int
    name: str
    dtype: torch.dtype
    has_output_rows: bool
    regroup: Regroup | None
    transposed: tuple[str, ...] = ()


def bind(model: transformers.PreTrainedModel, store: CheckpointStore) -> list[Binding]:
    """Return each experts module of a model with its layer, in the order of the model.

    Every weight is looked for under the names that transformers itself would read it from,
    and compared in shape: a layer that does not fit is an error.

    Raises
    ------
    ConfigError
        If the model's family is not supported, or the checkpoint is not of this model.
    """
    family, modules = type(model).__name__, check_family(model)
    by_path: dict[str, int] = {}
    transposed: dict[str, tuple[str, ...]] = {}
    regroup: dict[str, Regroup] = {}
    if isinstance(store, GgufStore):
        regroup = {p: interleaved for p, module in modules.items() if gguf.is_interleaved(module)}
    for layer, found in enumerate(_layer_paths(model, store, regroup)):
        if found is None:
            continue
        if found in by_path:
            raise FormatError(f"{store.path}: two layers are {found}")
        transposed[found] = _check_weights(store, layer, found, modules[found])
        by_path[found] = layer
    for path in modules:
        if path not in by_path:
            tied = getattr(model, "all_tied_weights_keys", None) or {}
            if f"{path}.down_proj" in tied:
                other = tied[f"{path}.down_proj"].rpartition(".")[0]
                raise ConfigError(
                    f"{family} is not supported: {path} shares its experts with {other}"
                )
            first = ", ".join(store.layout.layer_names[:3]) or "none"
            raise ConfigError(
                f"{store.path}: has no experts for {path} of {family}; it has {first}, ...: "
                "it is of another model, or stores them in a form that is not supported"
            )
    names = store.layout.layer_names
    return [
        Binding(
            path,
            module,
            by_path[path],
            names[by_path[path]],
            _dtype(model, path, module),
            has_output_rows=has_output_rows(store, by_path[path]),
            regroup=regroup.get(path),
            transposed=transposed[path],
        )
        for path, module in modules.items()
    ]


def bind_to(model: transformers.PreTrainedModel, runtime: ExpertRuntime) -> list[Binding]:
    """Return each experts module of a model with its layer in a runtime; see `bind`.

    Raises
    ------
    ConfigError
        Also if slots do not hold what the model computes in.
    """
    store = runtime.store
    if not isinstance(store, CheckpointStore):
        raise ConfigError(
            f"experts of a {type(store).__name__} cannot be matched with a model; open the "
            "checkpoint with moecache.open"
        )
    bindings = bind(model, store)
    _check_order(bindings, str(store.path))
    for binding in bindings:
        if any(role.format for role in store.layout.layers[binding.layer]):
            continue
        weights = weights_in(runtime, 0, binding.layer, binding.dtype)
        held = {weight.dtype for weight in weights.values()}
        if held != {binding.dtype}:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in held)
            wanted = str(binding.dtype).removeprefix("torch.")
            remedy = f"open the runtime with dtype={wanted!r} (of NumPy or ml_dtypes)"
            if isinstance(runtime.pool, CudaSlots):
                remedy = f"load the model with dtype={names!r}, as slots on a GPU hold the file's"
            raise ConfigError(f"the slots hold {names}, the model computes in {wanted}; {remedy}")
    return bindings


def _check_order(bindings: Sequence[Binding], path: str) -> None:
    """Raise ConfigError if slots have matrices in another order than the model."""
    for binding in bindings:
        if binding.transposed:
            names = sorted(binding.transposed)
            raise ConfigError(
                f"{path}: {' and '.join(names)} of {binding.path} are stored transposed, as "
                "[in, out]; open the runtime with a store of moecache.open_store, after its "
                f"transpose_roles({names})"
            )


def _layer_paths(
    model: transformers.PreTrainedModel, store: CheckpointStore, regroup: dict[str, Regroup]
) -> list[str | None]:
    """Return the experts module of each layer of a store; `None`: it is not run.

    Notes in `regroup` those whose rows transformers puts in another order.
    """
    names = store.layout.layer_names
    if isinstance(store, GgufStore):
        found = gguf.find_layers(model, store.tensor_shapes)
        return [found.get(int(name.removeprefix("blk."))) for name in names]
    targets = Targets(model)
    paths = [targets.path_of(store, layer) for layer in range(len(names))]
    regroup |= dict.fromkeys(targets.separated, separated)
    return paths


def usual_compute(bindings: Sequence[Binding], layout: ExpertLayout) -> str:
    """Return what multiplies if nobody says: torch, too, for experts that have no kernel."""
    without = any(
        _is_without_interface(one.module) and not (is_llama4(one.module) and one.has_output_rows)
        for one in bindings
    )
    return "torch" if without else default_compute(layout)


def check_family(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's experts modules, if moecache can compute them.

    Raises
    ------
    ConfigError
        If it cannot, or there are none.
    """
    family = type(model).__name__
    modules = find_experts(model)
    for path, module in modules.items():
        _check_interface(family, path, module)
    if modules:
        return modules
    for path, module in model.named_modules():
        if "experts" in type(module).__name__.lower():
            raise ConfigError(
                f"{family} is not supported: {type(module).__name__} ({path}) has its experts "
                "in another form than two stacks of matrices, gate_up_proj and down_proj"
            )
    raise ConfigError(
        f"{family} has no experts module that moecache knows; is it a mixture-of-experts model?"
    )


def _is_without_interface(module: nn.Module) -> bool:
    """Return whether the module around these experts is patched instead."""
    return is_llama4(module) or is_longcat(module) or is_step3p7(module)


def _check_interface(family: str, path: str, module: nn.Module) -> None:
    if _is_without_interface(module):
        return
    if not hasattr(module, "_apply_gate") or not hasattr(module, "config"):
        raise ConfigError(
            f"{family} is not supported: {type(module).__name__} ({path}) has no experts "
            "interface, which moecache plugs into"
        )
    if getattr(module, "_is_expert_parallel", False):
        raise ConfigError("experts in a cache cannot be spread over processes (expert parallel)")


def _check_weights(
    store: CheckpointStore, layer: int, path: str, module: nn.Module
) -> tuple[str, ...]:
    """Return the roles that are stored transposed; raise an error if weights do not fit."""
    transposed = []
    roles = {role.name: role for role in store.layout.layers[layer]}
    weights = described(module)
    expected = {ROLES[name] for name in weights}
    if roles.keys() != expected:
        raise ConfigError(
            f"{store.path}: the experts of {path} are {', '.join(sorted(roles))}, but the model "
            f"wants {', '.join(sorted(expected))}: the checkpoint is of another model, or "
            "quantized in a form that config.json does not tell"
        )
    # LongCat has room for experts that do nothing, which no checkpoint has whole.
    num_experts = min(shape[0] for shape, _, _ in weights.values())
    for name, (given, _, _) in weights.items():
        shape = (num_experts, *given[1:])
        role = roles[ROLES[name]]
        stored = (store.layout.num_experts, *role.shape)
        is_matrix = role.format or len(role.shape) == 2
        if is_matrix and has_output_rows(store, layer) and is_transposed(module):
            stored = (stored[0], *reversed(role.shape))
        if stored != shape:
            is_turned = stored == (shape[0], *reversed(shape[1:]))
            if is_matrix and is_turned and not (role.format or is_transposed(module)):
                transposed.append(role.name)
            else:
                raise ConfigError(
                    f"{store.path}: {name} of {path} is {list(stored)}, but the model wants "
                    f"{list(shape)}: the checkpoint is of another model"
                )
        if role.format:
            continue
        if role.dtype.kind not in "fV" or role.dtype.itemsize < 2:
            raise ConfigError(
                f"{store.path}: {name} of {path} is {role.dtype}, but config.json has no "
                "quantization_config, which says what that means"
            )
    return tuple(transposed)


def _dtype(model: Any, path: str, module: nn.Module) -> torch.dtype:
    weights = described(module)
    dtypes = {dtype for _, dtype, _ in weights.values()}
    for name, (_, dtype, _) in weights.items():
        if kept_dtype(model, f"{path}.{name}", dtype) != dtype:
            raise ConfigError(f"{path} is not supported: {name} stays in float32 beside others")
    if len(dtypes) != 1:
        raise ConfigError(f"{path} is not supported: its weights are of {len(dtypes)} dtypes")
    return dtypes.pop()


def kept_dtype(model: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that transformers gives a parameter of a model in `dtype`."""
    kept: Sequence[str] = [
        *(model._keep_in_fp32_modules_strict or ()),
        *((model._keep_in_fp32_modules or ()) if dtype == torch.float16 else ()),
    ]
    stays = any(re.search(rf"(^|\.){pattern}($|\.)", name) for pattern in kept)
    return torch.float32 if stays else dtype
