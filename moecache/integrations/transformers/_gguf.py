"""Models of GGUF files: built by transformers, their weights read by moecache's own formats."""

from collections.abc import Sequence

import torch
import transformers

from moecache.integrations.transformers._binding import kept_dtype
from moecache.integrations.transformers._trunk import TrunkWeight, take
from moecache.integrations.transformers.gguf import find_config, find_sources
from moecache.stores import GgufStore


def find_model_config(store: GgufStore) -> transformers.PretrainedConfig:
    """Return the configuration of a file's model, in bfloat16 unless the file has float32 alone.

    Embedding and head count as two matrices, even if the file has one: one that stays quantized
    has another order in either.
    """
    found = find_config(store.metadata, store.tensor_shapes, store.read_tensor)
    found.dtype = torch.float32 if store.is_f32 else torch.bfloat16
    found.tie_word_embeddings = False
    return found


def strip_gguf(model: transformers.PreTrainedModel, store: GgufStore) -> list[TrunkWeight]:
    """Take all weights but the experts' from a model; they are read from the file later."""
    sources = find_sources(model, model.config, store.metadata, store.tensor_shapes)
    taken = []
    for name, source in sources.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        is_buffer = leaf in module._buffers
        dtype = kept_dtype(model, name, take(module, leaf))
        taken.append(TrunkWeight(module, leaf, source, dtype, is_buffer))
    return taken


def share_embedding(model: transformers.PreTrainedModel, weights: Sequence[TrunkWeight]) -> None:
    """Let the head be the embedding, if both were read from one tensor as torch's own."""
    read = {weight.module: weight.source.tensors for weight in weights if weight.leaf == "weight"}
    one, other = model.get_input_embeddings(), model.get_output_embeddings()
    both = [module._parameters.get("weight") for module in (one, other) if module is not None]
    is_same = one in read and read[one] == read.get(other)
    if is_same and len(both) == 2 and None not in both:
        # A model saved later has one of them, and says so.
        model.config.get_text_config().tie_word_embeddings = True
        model.config.tie_word_embeddings = True
        other.weight = one.weight
