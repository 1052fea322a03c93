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
from moecache.kernels import default_compute
from moecache.layout import ExpertLayout
from moecache.runtime.runtime import ExpertRuntime
from moecache.slots import CudaSlots
from moecache.stores import CheckpointStore, GgufStore, has_output_rows
from moecache.stores._index import is_expert

# Conversions that leave experts as stores serve them: one after another, gate above up.
_STACKING = ("MergeModulelist", "Concatenate", "ErnieFuseAndSplitTextVisionExperts")
# A stack that was split: `...experts.7.gate_up_proj`.
_SPLIT = re.compile(r"\.experts\.\d+\.")
_NUMBER = re.compile(r"\.experts\.(\d+)\.", re.ASCII)


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


def check_shapes(model: transformers.PreTrainedModel, store: CheckpointStore) -> None:
    """Raise FormatError if a weight of the trunk has another shape in a checkpoint.

    transformers would give memory to the model's before it says so, however much that is.
    """
    targets = Targets(model)
    weights = (*model.named_parameters(), *model.named_buffers())
    wanted = {name: tuple(weight.shape) for name, weight in weights}
    for name in store.tensor_names:
        if name in store.trunk_matrices or is_expert(name):
            continue
        target, pattern = targets.rename(name)
        stored = store.tensor_entry(name).shape
        if pattern is None and target in wanted and wanted[target] != stored:
            raise FormatError(
                f"{store.path}: {name} is {list(stored)}, but the model of config.json wants "
                f"{list(wanted[target])}; one of them is damaged, or of another model"
            )


class Targets:
    """The places to which transformers brings the tensors of a checkpoint."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        modules = find_experts(model)
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import (
                WeightConverter,
                WeightRenaming,
                rename_source_key,
            )
        except ImportError as error:
            raise ConfigError(
                f"transformers {transformers.__version__} does not tell how it names the tensors "
                "of a checkpoint; install 5.8 or later"
            ) from error
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._rename = rename_source_key
        self._prefix = model.base_model_prefix
        self._known: dict[str, bool] = {
            **{name: True for name, _ in model.named_parameters()},
            **{f"{path}.{name}": True for path, of in modules.items() for name in described(of)},
        }
        self._modules = modules
        self._family = type(model).__name__
        # Modules of layers that `path_of` was asked for whose rows alternate in the checkpoint.
        self.separated: set[str] = set()

    def rename(self, tensor: str) -> tuple[str, str | None]:
        """Return the weight that a tensor is read into, and the pattern by which if in parts."""
        target, pattern = self._rename(
            tensor, self._renamings, self._converters, self._prefix, self._known
        )
        return target, pattern

    def parameter_of(self, weight: str) -> str | None:
        """Return the parameter that a weight of the trunk is read into; None if there is none."""
        target, pattern = self.rename(weight)
        if target in self._known and pattern is not None:
            raise ConfigError(
                f"{self._family} is not supported: {target} is put together from quantized "
                f"weights such as {weight!r}"
            )
        return target if target in self._known else None

    def path_of(self, store: CheckpointStore, layer: int) -> str | None:
        """Return the module that a layer's experts belong to; `None` if it is not run."""
        places: dict[str, list[int]] = {}
        path = None
        for (role, _), source in sorted(store.sources(layer).items()):
            target, pattern = self.rename(source)
            whole = _SPLIT.sub(".", source)
            if target not in self._known and whole != source:
                # One of a stack whose own name has no "experts" in it.
                renamed = self.rename(whole)
                target, pattern = renamed if renamed[0] in self._known else (target, pattern)
            if pattern is not None:
                target = self._of_group(source, target, pattern, store.layout.num_experts)
            if target not in self._known:
                target = _SPLIT.sub(".experts.", target)
            found, _, weight = target.rpartition(".")
            if found not in self._modules:
                return None
            if ROLES.get(weight) != role or (path is not None and found != path):
                raise ConfigError(
                    f"{self._family} is not supported: tensor {source!r} is {target}, "
                    f"not {role} of one module"
                )
            path = found
            if pattern is not None:
                places.setdefault(role, []).append(self._place(source, pattern, path))
        for role, order in places.items():
            if order != sorted(order):
                raise ConfigError(f"{self._family} is not supported: {role} is put together anew")
        return path

    def _of_group(self, source: str, target: str, pattern: str, num_experts: int) -> str:
        """Return the target of a tensor of an expert whose numbers go through several modules."""
        targets = self._converter(pattern).target_patterns
        number = _NUMBER.search(source)
        group = int(number[1]) // num_experts if number and len(targets) > 1 else 0
        return target.replace(targets[0], targets[min(group, len(targets) - 1)])

    def _converter(self, pattern: str) -> Any:
        return next(entry for entry in self._converters if pattern in entry.source_patterns)

    def _place(self, source: str, pattern: str, path: str) -> int:
        """Return the place of a tensor among those that become one weight."""
        converter = self._converter(pattern)
        operation: Any
        for operation in converter.operations:
            name = type(operation).__name__
            if name == "Interleave" and operation.dim == 1 and not operation.inverse:
                self.separated.add(path)
                continue
            # An operation that compares shapes does nothing where they fit; they are compared here.
            if name not in _STACKING and not (
                name == "Transpose" and getattr(operation, "check_dims", False)
            ):
                raise ConfigError(
                    f"{self._family} is not supported: its experts need {name} when they are "
                    f"read from {source!r}"
                )
        return int(converter.source_patterns.index(pattern))


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
