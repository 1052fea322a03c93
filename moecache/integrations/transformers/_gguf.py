"""Models of GGUF files: built by transformers, their weights read by moecache's own formats."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import transformers
from torch import nn

from moecache.integrations.transformers._binding import kept_dtype
from moecache.integrations.transformers._forward import NUMPY_TYPES, as_tensor
from moecache.integrations.transformers._native import can_keep, keep
from moecache.integrations.transformers._trunk import take
from moecache.integrations.transformers.gguf import Source, find_config, find_sources
from moecache.kernels import values_in
from moecache.layout import Role
from moecache.stores import CheckpointStore, GgufStore


@dataclass(frozen=True)
class GgufWeight:
    """A parameter or buffer that was taken from a module, to be read from a GGUF file.

    Parameters
    ----------
    module : Module
    leaf : str
        Name of the parameter in it.
    source : Source
    dtype : torch.dtype
        Of the parameter.
    is_buffer : bool
    """

    module: nn.Module
    leaf: str
    source: Source
    dtype: torch.dtype
    is_buffer: bool

    def read(self, store: CheckpointStore, *, is_native: bool) -> None:
        """Give the module its values, rounded once, or the file's own bytes where that can be."""
        self.module.__dict__.pop(self.leaf, None)
        names, rows = self.source.tensors, self.source.rows
        matrices = [store.trunk_matrices[name][0] for name in names if name in store.trunk_matrices]
        first = matrices[0] if 0 < len(matrices) == len(names) else None
        if first is not None and self.source.undo is None and len({*matrices}) == 1:
            raw = np.concatenate([store.read_parts(name) for name in names])
            num_rows = len(matrices) * first.rows
            if rows is not None:
                num_rows, raw = len(rows), raw.reshape(num_rows, -1)[rows].reshape(-1)
            shape = num_rows, first.columns
            if is_native and can_keep(self.module, first.format):
                keep(self.module, raw, first.format, shape, self.dtype)
                return
            role = Role(names[0], shape, format=first.format.name)
            values = values_in(raw, role, stored=True, dtype=NUMPY_TYPES[self.dtype])
        else:
            arrays = [store.read_tensor(name).astype(np.float32) for name in names]
            values = self.source.undo(arrays) if self.source.undo else np.concatenate(arrays)
            values = values if rows is None else values[rows]
        tensor = as_tensor(np.ascontiguousarray(values)).to(self.dtype)
        if self.is_buffer:
            self.module.register_buffer(self.leaf, tensor)
        else:
            self.module.register_parameter(self.leaf, nn.Parameter(tensor))


def find_model_config(store: GgufStore) -> transformers.PretrainedConfig:
    """Return the configuration of a file's model, in bfloat16 unless the file has float32 alone.

    Embedding and head are said to be two matrices, whatever the file has: one that stays quantized
    has another order in either.
    """
    found = find_config(store.metadata, store.tensor_shapes)
    found.dtype = torch.float32 if store.tensor_types <= {"F32"} else torch.bfloat16
    found.tie_word_embeddings = False
    return found


def strip_gguf(model: transformers.PreTrainedModel, store: GgufStore) -> list[GgufWeight]:
    """Take all weights but the experts' from a model; they are read from the file later."""
    sources = find_sources(model, model.config, store.metadata, store.tensor_shapes)
    taken = []
    for name, source in sources.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        is_buffer = leaf in module._buffers
        dtype = kept_dtype(model, name, take(module, leaf))
        taken.append(GgufWeight(module, leaf, source, dtype, is_buffer))
    return taken


def share_embedding(model: transformers.PreTrainedModel, weights: Sequence[GgufWeight]) -> None:
    """Let the head be the embedding, if both were read from one tensor as torch's own."""
    read = {weight.module: weight.source.tensors for weight in weights if weight.leaf == "weight"}
    one, other = model.get_input_embeddings(), model.get_output_embeddings()
    both = [module._parameters.get("weight") for module in (one, other) if module is not None]
    is_same = one in read and read[one] == read.get(other)
    if is_same and len(both) == 2 and None not in both:
        # What is saved later has one of them, and says so.
        model.config.get_text_config().tie_word_embeddings = True
        model.config.tie_word_embeddings = True
        other.weight = one.weight
