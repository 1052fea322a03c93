"""The stores from which experts come."""

import os
from collections.abc import Collection

from moecache.errors import ConfigError, FormatError
from moecache.stores._paths import find_path, is_file
from moecache.stores._tensors import CheckpointStore
from moecache.stores.base import ExpertStore, FileStore
from moecache.stores.gguf import GgufStore
from moecache.stores.gguf._parts import is_gguf
from moecache.stores.memory import MemoryStore
from moecache.stores.safetensors import SafetensorsStore

__all__ = [
    "CheckpointStore",
    "ExpertStore",
    "FileStore",
    "GgufStore",
    "MemoryStore",
    "SafetensorsStore",
    "has_output_rows",
    "is_gguf",
    "open_store",
]


def has_output_rows(store: CheckpointStore, layer: int = 0) -> bool:
    """Return whether a layer's matrices are [out, in]: by the file's rule, a format, or turned."""
    layers = store.layout.layers
    return isinstance(store, GgufStore) or (
        layer < len(layers) and any(role.format or role.is_transposed for role in layers[layer])
    )


def open_store(
    path: str | os.PathLike[str],
    *,
    top_k: int | None = None,
    mapped: bool = False,
    layers: Collection[str] | None = None,
) -> CheckpointStore:
    """Open a checkpoint as a store.

    Parameters
    ----------
    path : str or Path
        A checkpoint directory, one .safetensors file, or a .gguf file (of a split one any part,
        or the directory). A directory that has both is read as safetensors.
    top_k : int, optional
        Experts per token, if config.json does not say or is not there.
    mapped : bool, default False
    layers : collection of str, optional
        See `SafetensorsStore` and `GgufStore`.

    Raises
    ------
    ConfigError
        If no file can have such a name, or a directory has several models in GGUF.
    StoreError
        If it cannot be opened; FormatError if it is damaged or of another form.
    """
    found = find_path(path)
    store = GgufStore if is_gguf(found) else SafetensorsStore
    if store is SafetensorsStore and is_file(found) and found.suffix != ".safetensors":
        raise FormatError(
            f"{path}: only .safetensors files, .gguf files and checkpoint directories are read"
        )
    if isinstance(layers, str):
        raise ConfigError(f"layers are names in a list, such as [{layers!r}]")
    return store(found, top_k=top_k, mapped=mapped, layers=layers)
