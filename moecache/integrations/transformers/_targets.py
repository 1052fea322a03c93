"""The places to which transformers brings the tensors of a checkpoint."""

import re
from typing import Any

import transformers

from moecache.errors import ConfigError, FormatError
from moecache.integrations.transformers._experts import ROLES, described, find_experts
from moecache.stores import CheckpointStore
from moecache.stores._index import is_expert

# Conversions that leave experts as stores serve them: one after another, gate above up.
_STACKING = ("MergeModulelist", "Concatenate", "ErnieFuseAndSplitTextVisionExperts")
# A stack that was split: `...experts.7.gate_up_proj`.
_SPLIT = re.compile(r"\.experts\.\d+\.")
_NUMBER = re.compile(r"\.experts\.(\d+)\.", re.ASCII)


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
