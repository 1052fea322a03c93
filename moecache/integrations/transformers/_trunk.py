"""The quantized weights of a trunk: read by moecache's own formats, as the model's dtype."""

import re
from dataclasses import dataclass

import torch
import transformers
from torch import nn

from moecache.errors import ConfigError
from moecache.integrations.transformers._binding import Targets, kept_dtype
from moecache.integrations.transformers._forward import NUMPY_TYPES, as_tensor
from moecache.integrations.transformers._native import can_keep, keep
from moecache.stores import CheckpointStore

_DIGITS = re.compile(r"\d+")
# What stands beside a weight, or for one, and is not called so; in regular expressions.
OTHER_TENSORS = r"qweight|qzeros|scales?|g_idx|qscale_weight|\w+_scale"
_BESIDE = rf"\.(weight_\w+|{OTHER_TENSORS})$"


@dataclass(frozen=True)
class QuantizedWeight:
    """A parameter that was taken from a module, to be read by its format.

    Parameters
    ----------
    module : Module
    leaf : str
        Name of the parameter in it.
    name : str
        Name of the weight in the store.
    dtype : torch.dtype
        Of the parameter.
    """

    module: nn.Module
    leaf: str
    name: str
    dtype: torch.dtype

    def read(self, store: CheckpointStore, *, is_native: bool) -> None:
        """Give the module its weight: the values of the format, rounded once.

        Or the format's own bytes, if that is wanted and can be.
        """
        self.module.__dict__.pop(self.leaf, None)
        matrix, _ = store.trunk_matrices[self.name]
        if is_native and can_keep(self.module, matrix.format):
            shape = matrix.rows, matrix.columns
            keep(self.module, store.read_parts(self.name), matrix.format, shape, self.dtype)
            return
        values = as_tensor(store.read_matrix(self.name, NUMPY_TYPES[self.dtype]))
        self.module.register_parameter(self.leaf, nn.Parameter(values))


def strip_quantized(
    model: transformers.PreTrainedModel, store: CheckpointStore
) -> list[QuantizedWeight]:
    """Take the weights from a model that are quantized in a checkpoint; it reads the others.

    Raises
    ------
    ConfigError
        If one is put together from several, or has another shape in the model.
    """
    targets = Targets(model)
    taken, patterns = [], set()
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, (matrix, _) in store.trunk_matrices.items():
        target = targets.parameter_of(name)
        if target is None or target in tied:
            continue  # of a part that is not run, or what another weight is, too
        if target in tied.values():
            raise ConfigError(
                f"{store.path}: {name} is quantized, and tied to another weight; that is not "
                "supported"
            )
        path, _, leaf = target.rpartition(".")
        module = model.get_submodule(path)
        parameter = getattr(module, leaf)
        if parameter.shape != (matrix.rows, matrix.columns):
            raise ConfigError(
                f"{store.path}: {name} is {[matrix.rows, matrix.columns]} in "
                f"{matrix.format.name}, but the model wants {list(parameter.shape)}: the "
                "checkpoint is of another model"
            )
        dtype = kept_dtype(model, target, take(module, leaf))
        taken.append(QuantizedWeight(module, leaf, name, dtype))
        patterns |= {f"^{_DIGITS.sub('[0-9]+', re.escape(key))}$" for key in (name, target)}
    if taken:
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, *patterns, _BESIDE}
    return taken


def take(module: nn.Module, leaf: str) -> torch.dtype:
    """Take a parameter or buffer from a module, as if it had been read; return its dtype."""
    dtype: torch.dtype = getattr(module, leaf).dtype
    delattr(module, leaf)
    # Some models initialize what they find, whatever was read.
    module.__dict__[leaf] = torch.empty(0, dtype=dtype)
    if not module._non_persistent_buffers_set:
        # There is nothing to be initialized.
        module.__dict__["_is_hf_initialized"] = True
    return dtype
