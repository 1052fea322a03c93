"""Packed directories, as bytes and as the tensors that other readers see in them."""

import hashlib
import json
from pathlib import Path

import safetensors

from moecache.packing._source import PADDING_PREFIX
from moecache.stores import SafetensorsStore
from moecache.stores._header import TensorEntry, read_header

# dtype, shape and bytes, as the safetensors library reads them.
Tensor = tuple[str, tuple[int, ...], bytes]


def tree(directory: Path) -> dict[str, str]:
    """Return the checksum of every file below a directory by its name."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def library_tensors(directory: Path) -> dict[str, Tensor]:
    """Return every tensor of a directory's files but padding, read by `safetensors`."""
    return {
        name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in safetensors.deserialize(file.read_bytes())
        if not name.startswith(PADDING_PREFIX)
    }


def weight_map(directory: Path) -> dict[str, str]:
    """Return the index's weight_map."""
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


def tensor_entries(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a file but padding."""
    return {
        name: entry
        for name, entry in read_header(file).items()
        if not name.startswith(PADDING_PREFIX)
    }


def expert_ranges(store: SafetensorsStore) -> list[list[tuple[int, int]]]:
    """Return (offset, nbytes) of each run of each expert, experts in the order they run."""
    layout = store.layout
    return [
        [
            (offset, sum(stop - start for _, start, stop in spans))
            for _, offset, spans in store.runs(layer, expert)
        ]
        for layer in range(layout.num_layers)
        for expert in range(layout.num_experts)
    ]
