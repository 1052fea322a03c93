"""Which tensors of a GGUF file the parameters of a model come from."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import transformers
from torch import nn

from moecache.decoding.gguf._architecture import Architecture, Source
from moecache.decoding.gguf._common import key_heads
from moecache.decoding.gguf._metadata import Metadata
from moecache.errors import ConfigError, MissingDependencyError
from moecache.integrations.transformers._experts import (
    ROLES,
    described,
    find_experts,
    is_transposed,
)
from moecache.integrations.transformers.gguf._architectures import find_architecture

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_BLOCK = re.compile(r"^blk\.(\d+)\.")
_EXPERTS = re.compile(r"^blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)$")
# Names of q, k and v, which may be one tensor.
_FUSED = re.compile(r"^blk\.\d+\.attn_([qkv])\.(weight|bias)$")


def find_sources(
    model: nn.Module,
    config: transformers.PretrainedConfig,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
) -> dict[str, Source]:
    """Return where the values of a model's parameters are in a GGUF file.

    Parameters
    ----------
    model : Module
        A model that transformers built by `config`; its weights are not looked at.
    config : PretrainedConfig
        From `find_config`.
    metadata, tensors : mapping
        As for `find_config`.

    Returns
    -------
    dict
        By the parameters' names, and those of buffers that belong to the model's state. Not
        there: the experts' weights, and a head that is the embedding, too.

    Raises
    ------
    ConfigError
        If no tensor has the values of a parameter, one has another shape, or there is one that
        nothing asks for.
    MissingDependencyError
        If the `gguf` package is not installed.
    """
    said = Metadata(metadata, tensors)
    architecture = find_architecture(said)
    names = _tensor_names(said, architecture)
    found: dict[str, Source] = {}
    missing = []
    for name, parameter in _wanted(model, config):
        source = _find_source(name, architecture, said, names)
        if source is None or any(tensor not in tensors for tensor in source.tensors):
            missing.append(f"{name} ({', '.join(source.tensors)})" if source else name)
            continue
        _check_shape(name, tuple(parameter.shape), source, tensors)
        found[name] = source
    if missing:
        rest = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
        raise ConfigError(
            f"the GGUF file of architecture {said.architecture!r} has no tensor for "
            f"{', '.join(missing[:3])}{rest}; if it is one of several parts, give the first"
        )
    used = {tensor for source in found.values() for tensor in source.tensors}
    _check_used(used, architecture, said)
    return found


def find_layers(model: nn.Module, tensors: Mapping[str, tuple[int, ...]]) -> dict[int, str]:
    """Return the path of the experts module of each block that has experts, by its number.

    Raises
    ------
    ConfigError
        If the model and the file have experts in different layers, or of other shapes.
    """
    paths = find_experts(model)
    found = {int(layer.group(1)): path for path in paths if (layer := _LAYER.match(path))}
    blocks = {int(stack.group(1)) for name in tensors if (stack := _EXPERTS.match(name))}
    for block, path in found.items():
        if block not in blocks:
            raise ConfigError(
                f"the GGUF file has no experts for {path}: there is no tensor "
                f"blk.{block}.ffn_down_exps.weight; if it is one of several parts, give the first"
            )
        _check_experts(path, model.get_submodule(path), f"blk.{block}.ffn_", tensors)
    # Layers beyond those of the model guess further tokens, and are not run.
    last = max(found, default=-1)
    for block in sorted(blocks - found.keys()):
        if block <= last:
            raise ConfigError(
                f"the GGUF file has experts in block {block}, but the model has none in its layer"
            )
    return dict(sorted(found.items()))


def is_interleaved(module: nn.Module) -> bool:
    """Return whether the rows of gate and up alternate in an experts module, as in gpt-oss.

    In a GGUF file they never do: all rows of gate come before, or apart from, those of up. So
    kernels take the file's matrices as not interleaved, and only weights that are given to the
    module itself have to be put into its order.
    """
    return not getattr(module, "is_concatenated", True)


def _check_experts(
    path: str, module: nn.Module, prefix: str, tensors: Mapping[str, tuple[int, ...]]
) -> None:
    for name, (shape, _, _) in described(module).items():
        kind = "bias" if name.endswith("_bias") else "weight"
        wanted = tuple(shape)
        if kind == "weight" and is_transposed(module):
            wanted = (wanted[0], wanted[2], wanted[1])
        part = name.partition("_proj")[0]
        found = tensors.get(f"{prefix}{part}_exps.{kind}")
        if found is None and part == "gate_up":
            gate, up = (tensors.get(f"{prefix}{half}_exps.{kind}") for half in ("gate", "up"))
            if gate is not None and gate == up and len(gate) > 1:
                found = (gate[0], 2 * gate[1], *gate[2:])
        if found != wanted:
            raise ConfigError(
                f"{prefix}*_exps of the GGUF file are not the {list(wanted)} of {path}.{name}: "
                f"found {'none of one shape' if found is None else list(found)}; metadata and "
                "tensors of the file contradict each other"
            )


def _wanted(model: nn.Module, config: transformers.PretrainedConfig) -> list[tuple[str, Any]]:
    experts = tuple(f"{path}." for path in find_experts(model))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    if not config.tie_word_embeddings:
        tied = {}
    return [
        (name, tensor)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in tied and not (name.startswith(experts) and name.rpartition(".")[2] in ROLES)
    ]


def _find_source(
    name: str, architecture: Architecture, said: Metadata, names: Any
) -> Source | None:
    layer = _LAYER.match(name)
    number = int(layer.group(1)) if layer else -1
    leaf, prefix = (name[layer.end() :], f"blk.{number}.") if layer else (name, "")
    source = architecture.source(leaf, number, said) if architecture.source else None
    if source is not None:
        return _unfused(source, said)
    if leaf in architecture.names:
        return Source((f"{prefix}{architecture.names[leaf]}",))
    tensor = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if name == "lm_head.weight":
        # The package's map has none for models that are published with one matrix for both.
        has_own = "output.weight" in said.tensors
        tensor = "output.weight" if has_own else "token_embd.weight"
    return None if tensor is None else _unfused(Source((tensor,)), said)


def _unfused(source: Source, said: Metadata) -> Source:
    """Return the same, of the tensor that is q, k and v in one if there are none of their own."""
    tensor = source.tensors[0] if source.tensors else ""
    part = _FUSED.match(tensor)
    if part is None or tensor in said.tensors:
        return source
    fused = tensor.replace(f"attn_{part.group(1)}.", "attn_qkv.")
    shape = said.tensors.get(fused)
    if shape is None:
        return source
    # Heads are of one width: rows are divided as the heads are.
    heads = said.size("attention.head_count", least=1)
    keys = key_heads(said)
    start, count = {"q": (0, heads), "k": (heads, keys), "v": (heads + keys, keys)}[part.group(1)]
    width = shape[0] // (heads + 2 * keys)
    rows = np.arange(count * width) if source.rows is None else source.rows
    return Source((fused,), rows=rows + start * width)


def _check_shape(
    name: str, wanted: tuple[int, ...], source: Source, tensors: Mapping[str, tuple[int, ...]]
) -> None:
    if not source.tensors:
        return
    found = tensors[source.tensors[0]]
    if source.undo is not None and len(source.tensors) == 1:
        # At most dimensions of one are put in.
        found, plain = (tuple(n for n in shape if n != 1) for shape in (found, wanted))
        wanted = wanted if found != plain else plain
        if len(plain) == 1 and math.prod(found) == plain[0]:
            found = wanted = plain  # rows, one behind the other
    elif source.undo is not None:
        shapes = [tensors[tensor] for tensor in source.tensors]
        same = sum(map(math.prod, shapes)) == math.prod(wanted)
        found = wanted if same else found
    if source.rows is not None:
        count = sum(tensors[tensor][0] for tensor in source.tensors)
        inside = not source.rows.size or source.rows.max() < count
        found = (len(source.rows) if inside else -1, *found[1:])
    if found != wanted:
        raise ConfigError(
            f"{source.tensors[0]} is of shape {list(tensors[source.tensors[0]])}, but {name} "
            f"is {list(wanted)}: metadata and tensors of the file contradict each other"
        )


def _check_used(used: set[str], architecture: Architecture, said: Metadata) -> None:
    # Blocks after the model's layers guess further tokens, and are not run.
    unused = range(said.num_layers, said.num_blocks)
    for number in unused:
        if not any(name.startswith(f"blk.{number}.nextn.") for name in said.tensors):
            raise ConfigError(
                f"{said.architecture}.nextn_predict_layers says that block {number} guesses "
                "further tokens, but it has no tensors for that: the metadata are another file's"
            )
    for name in said.tensors:
        block = _BLOCK.match(name)
        known = block is None or int(block.group(1)) < said.num_blocks
        if name in used or (known and _EXPERTS.match(name)):
            continue
        if block is not None and int(block.group(1)) in unused:
            continue
        if any(re.fullmatch(pattern, name) for pattern in architecture.ignored):
            continue
        raise ConfigError(
            f"tensor {name} of the GGUF file is none that a model of architecture "
            f"{said.architecture!r} has in transformers; run the file with llama.cpp"
        )


def _tensor_names(said: Metadata, architecture: Architecture) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingDependencyError(
            "models in GGUF files need the gguf package; install it with: "
            "pip install 'moecache[gguf]'"
        ) from error
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    found = known.get(said.architecture, known.get(architecture.like))
    if found is None:
        raise MissingDependencyError(
            f"gguf {getattr(gguf, '__version__', '')} does not know architecture "
            f"{said.architecture!r}; install a later one with: pip install -U gguf"
        )
    return gguf.get_tensor_name_map(found, said.num_blocks)
