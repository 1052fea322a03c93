"""The sources of facts about tensors: a checkpoint's files, index, headers, configuration."""

import json
import os
from pathlib import Path
from typing import Any

from moecache.errors import FormatError, StoreError
from moecache.stores._file import ReadOnlyFile
from moecache.stores._header import FORMAT_KEY, TensorEntry, check_layers, read_header, shown
from moecache.stores._paths import is_directory, is_file, status_of

INDEX_NAME = "model.safetensors.index.json"
# The families' names for the number of experts per token.
TOP_K_NAMES = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "num_selected_experts",
    "moe_top_k",
)
_MOST_BYTES = 2**28
# Larger numbers are impossible all the same, and may have thousands of digits.
_MOST_EXPERTS = 2**31


def find_files(path: Path, weight_map: dict[str, str] | None) -> list[Path]:
    """Return the files that have the tensors."""
    if not is_directory(path):
        return [path]
    if weight_map is not None:
        files = [path / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not is_file(file):
                raise FormatError(f"{path / INDEX_NAME}: shard {shown(file.name)} is missing")
        return files
    if is_file(path / "model.safetensors"):
        return [path / "model.safetensors"]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise StoreError(f"{path}: there is no .safetensors file; is it a checkpoint directory?")
    return files


def read_weight_map(path: Path) -> dict[str, str] | None:
    """Return which file has which tensor; None if there is no index."""
    index = path / INDEX_NAME
    if not is_directory(path) or status_of(index, follow=False) is None:
        return None
    document = _read_json(index)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index}: has no weight_map")
    for name, shard in weight_map.items():
        # A name with a path in it could point anywhere.
        if not isinstance(shard, str) or shard != os.path.basename(shard) or shard in {"", ".."}:
            raise FormatError(
                f"{index}: tensor {shown(name)} is in {shown(shard)}, not a file of this directory"
            )
    return weight_map


def merge_headers(
    files: list[ReadOnlyFile], weight_map: dict[str, str] | None
) -> tuple[dict[str, tuple[int, TensorEntry]], list[str]]:
    """Return all tensors, and the format that each file says its experts are in, or ""."""
    formats = []
    tensors: dict[str, tuple[int, TensorEntry]] = {}
    for number, file in enumerate(files):
        # Only the headers: the kernel should not read the experts ahead.
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        entries = read_header(file.path, file)
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_NORMAL)
        formats.append(entries.metadata.get(FORMAT_KEY, ""))
        for name, entry in entries.items():
            if weight_map is not None and weight_map.get(name) != file.path.name:
                continue
            if name in tensors:
                other = files[tensors[name][0]].path.name
                raise FormatError(f"{file.path}: tensor {shown(name)} is also in {other}")
            tensors[name] = (number, entry)
    for name in weight_map or ():
        if name not in tensors:
            raise FormatError(
                f"{files[0].path.parent / INDEX_NAME}: tensor {shown(name)} is not in its shard; "
                "download the checkpoint again"
            )
    return tensors, formats


def read_config(path: Path) -> dict[str, Any]:
    """Return what a config.json has, nothing if there is none."""
    return {} if status_of(path, follow=False) is None else _read_json(path)


def read_small(path: Path) -> bytearray:
    """Return the bytes of a file that lies beside the weights."""
    file = ReadOnlyFile(path)
    size = file.nbytes
    if size > _MOST_BYTES:
        raise FormatError(f"{path}: has {size} bytes, too many for a file beside the weights")
    found = bytearray(size)
    if size:
        file.read(0, [memoryview(found)], "it")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    text = read_small(path)
    check_layers(path, text)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is not JSON: {str(error)[:200]}") from error
    if not isinstance(document, dict):
        raise FormatError(f"{path}: is a JSON {type(document).__name__}, not an object")
    return document


def find_top_k(config: dict[str, Any]) -> int:
    """Return the experts per token that a configuration says, 0 if it does not."""
    # Models with several modalities keep the decoder's figures one level down.
    for level in (config, config.get("text_config"), config.get("ffn_config")):
        for name in TOP_K_NAMES:
            value = level.get(name) if isinstance(level, dict) else None
            # A list has a number for each layer.
            values = value if isinstance(value, list) else [value]
            if values and all(type(number) is int and number > 0 for number in values):
                return min(max(values), _MOST_EXPERTS)
    return 0


def find_num_zero(config: dict[str, Any]) -> int:
    """Return how many experts of a layer compute nothing, such as LongCat's; 0 if not said."""
    said = config.get("zero_expert_num")
    return said if type(said) is int and said > 0 else 0


def find_group_size(config: dict[str, Any]) -> int:
    """Return the experts of a group where they are of two widths, as ERNIE's; 0 if not so."""
    for level in (config, config.get("text_config")):
        if not isinstance(level, dict):
            continue
        widths = level.get("moe_intermediate_size")
        if "vision_config" in config and isinstance(widths, list) and len(widths) == 2:
            said = level.get("moe_num_experts")
            said = said[0] if isinstance(said, list) and said else said
            return said if type(said) is int and said > 0 else 0
    return 0
