"""Small checkpoints of every known form, with the arrays that a store must serve."""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from moecache.stores import ExpertStore

NUM_EXPERTS = 12
NUM_LAYERS = 11
TOP_K = 3
HIDDEN = 8
WIDTH = 4

Parts = dict[str, np.ndarray]
# The tensors that only make sense together: one expert's, or one layer's stacks.
Group = dict[str, np.ndarray]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk and what is in it.

    Parameters
    ----------
    path : Path
        Its directory.
    experts : list of list of dict
        Role to array, per MoE layer and expert.
    tensors : dict
        Every tensor by its name, those of the trunk too.
    layer_names : list of str
        The MoE layers in the order they run.
    """

    path: Path
    experts: list[list[Parts]]
    tensors: dict[str, np.ndarray]
    layer_names: list[str]


@dataclass(frozen=True)
class _Form:
    """How a family names its tensors; `pieces` are gate, up and down in this order."""

    layer: str
    tensor: str
    pieces: tuple[str, ...]
    dtype: npt.DTypeLike = ml_dtypes.bfloat16
    stacked: bool = False
    biased: bool = False
    scaled: bool = False


_FORMS = {
    "qwen": _Form(
        "model.layers.{}.mlp",
        "{layer}.experts.{expert}.{piece}.weight",
        ("gate_proj", "up_proj", "down_proj"),
    ),
    "mixtral": _Form(
        "model.layers.{}.block_sparse_moe",
        "{layer}.experts.{expert}.{piece}.weight",
        ("w1", "w3", "w2"),
    ),
    "fused": _Form(
        "model.layers.{}.mlp",
        "{layer}.experts.{piece}",
        ("gate_up_proj", "down_proj"),
        stacked=True,
        biased=True,
    ),
    "stacked": _Form(
        "model.layers.{}.mlp",
        "{layer}.experts.{piece}.weight",
        ("gate_proj", "up_proj", "down_proj"),
        dtype=np.float32,
        stacked=True,
    ),
    "nemotron": _Form(
        "backbone.layers.{}.mixer",
        "{layer}.experts.{expert}.{piece}.weight",
        ("up_proj", "down_proj"),
        dtype=np.float16,
    ),
    "granite": _Form(
        "model.layers.{}.block_sparse_moe",
        "{layer}.{piece}.weight",
        ("input_linear", "output_linear"),
        stacked=True,
    ),
    "fp8": _Form(
        "model.layers.{}.mlp",
        "{layer}.experts.{expert}.{piece}.weight",
        ("gate_proj", "up_proj", "down_proj"),
        dtype=ml_dtypes.float8_e4m3fn,
        scaled=True,
    ),
}
FAMILIES = tuple(_FORMS)


def write_checkpoint(
    directory: Path,
    family: str = "qwen",
    *,
    num_layers: int = NUM_LAYERS,
    num_experts: int = NUM_EXPERTS,
    num_shards: int = 1,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Checkpoint:
    """Write a checkpoint of a family, its layer 0 dense, and return what is in it.

    With several shards every border splits an expert (or the stacks of a layer).

    Parameters
    ----------
    directory : Path
        Made if it is not there.
    family : str
        One of `FAMILIES`.
    num_layers, num_experts : int
        MoE layers, after the dense one, and experts of each.
    num_shards : int
        Files; more than one come with model.safetensors.index.json.
    config : mapping, optional
        Contents of config.json; by default it says top-`TOP_K`.
    seed : int
        Of the random weights.
    """
    form, rng = _FORMS[family], np.random.default_rng(seed)
    dense = form.layer.format(0)
    trunk: Group = {
        "model.embed_tokens.weight": random_bits(rng, (16, HIDDEN), ml_dtypes.bfloat16),
        f"{dense}.up_proj.weight": random_bits(rng, (WIDTH, HIDDEN), ml_dtypes.bfloat16),
        f"{dense}.down_proj.weight": random_bits(rng, (HIDDEN, WIDTH), ml_dtypes.bfloat16),
    }
    groups: list[Group] = [trunk]
    experts: list[list[Parts]] = []
    names = [form.layer.format(number) for number in range(1, num_layers + 1)]
    for name in names:
        make = _stacked_layer if form.stacked else _per_expert_layer
        layer_groups, layer_experts = make(form, name, num_experts, rng)
        groups += layer_groups
        groups.append({f"{name}.gate.weight": random_bits(rng, (num_experts, HIDDEN), np.float32)})
        experts.append(layer_experts)
    directory.mkdir(parents=True, exist_ok=True)
    _write_files(directory, groups, num_shards)
    default = {"num_experts_per_tok": TOP_K}
    (directory / "config.json").write_text(json.dumps(default if config is None else config))
    tensors = {name: array for group in groups for name, array in group.items()}
    return Checkpoint(directory, experts, tensors, names)


def write_raw(
    path: Path,
    header: Mapping[str, Any] | bytes,
    data: bytes = b"",
    *,
    header_bytes: int | None = None,
) -> Path:
    """Write a safetensors file from any header, true or not.

    Parameters
    ----------
    path : Path
    header : mapping or bytes
        Mappings are written as JSON, bytes as they are.
    data : bytes
        What follows the header.
    header_bytes : int, optional
        Length to claim; the true one by default.
    """
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if header_bytes is None else header_bytes
    path.write_bytes(struct.pack("<Q", length) + text + data)
    return path


def random_bits(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: npt.DTypeLike
) -> np.ndarray:
    """Return an array of random bytes: every pattern, NaNs too, must survive."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return rng.integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays have the same dtype, shape and bytes."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and (
        one.tobytes() == other.tobytes()
    )


def same_parts(one: Parts, other: Parts) -> bool:
    """Return whether two experts have the same roles with the same bits."""
    return set(one) == set(other) and all(same_bits(one[name], other[name]) for name in one)


def empty_parts(store: ExpertStore, layer: int) -> Parts:
    """Return new arrays for an expert of a layer."""
    return {role.name: np.empty(role.shape, role.dtype) for role in store.layout.layers[layer]}


def read_expert(store: ExpertStore, layer: int, expert: int) -> Parts:
    """Return one expert read into new arrays."""
    out = empty_parts(store, layer)
    store.read_into(layer, expert, out)
    return out


def _per_expert_layer(
    form: _Form, layer: str, num_experts: int, rng: np.random.Generator
) -> tuple[list[Group], list[Parts]]:
    groups, experts = [], []
    for expert in range(num_experts):
        group: Group = {}
        parts: dict[str, list[np.ndarray]] = {}
        for role, piece in _pieces(form):
            name = form.tensor.format(layer=layer, expert=expert, piece=piece)
            shape = (HIDDEN, WIDTH) if role == "down" else (WIDTH, HIDDEN)
            group[name] = random_bits(rng, shape, form.dtype)
            parts.setdefault(role, []).append(group[name])
            if form.scaled:
                scale = f"{name}_scale_inv"
                group[scale] = random_bits(rng, (1, 2), np.float32)
                parts.setdefault(f"{role}_scale_inv", []).append(group[scale])
        groups.append(group)
        experts.append({role: np.concatenate(arrays) for role, arrays in parts.items()})
    return groups, experts


def _stacked_layer(
    form: _Form, layer: str, num_experts: int, rng: np.random.Generator
) -> tuple[list[Group], list[Parts]]:
    group: Group = {}
    parts: dict[str, list[np.ndarray]] = {}
    for role, piece in _pieces(form):
        name = form.tensor.format(layer=layer, piece=piece)
        rows = HIDDEN if role == "down" else WIDTH * (1 + (len(form.pieces) == 2))
        columns = WIDTH if role == "down" else HIDDEN
        group[name] = random_bits(rng, (num_experts, rows, columns), form.dtype)
        parts.setdefault(role, []).append(group[name])
        if form.biased:
            bias = f"{name}_bias"
            group[bias] = random_bits(rng, (num_experts, rows), form.dtype)
            parts.setdefault(f"{role}_bias", []).append(group[bias])
    stacks = {role: np.concatenate(arrays, axis=1) for role, arrays in parts.items()}
    experts = [{role: stack[e] for role, stack in stacks.items()} for e in range(num_experts)]
    return [group], experts


def _pieces(form: _Form) -> Iterator[tuple[str, str]]:
    # Of two pieces the first is gate and up in one, or an up without a gate.
    first = "up" if form.pieces[0] == "up_proj" else "gate_up"
    for piece in form.pieces[:-1]:
        yield first, piece
    yield "down", form.pieces[-1]


def _write_files(directory: Path, groups: list[Group], num_shards: int) -> None:
    if num_shards == 1:
        tensors = {name: array for group in groups for name, array in group.items()}
        save_file(tensors, directory / "model.safetensors")
        return
    whole = [i for i, group in enumerate(groups) if len(group) > 1][1:]
    last_of_shard = {whole[len(whole) * (i + 1) // num_shards] for i in range(num_shards - 1)}
    shards: list[Group] = [{}]
    for number, group in enumerate(groups):
        for position, (name, array) in enumerate(group.items()):
            shards[-1][name] = array
            if position == 0 and number in last_of_shard:
                shards.append({})
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
