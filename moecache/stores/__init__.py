"""Where experts come from."""

import os
from collections.abc import Collection

from moecache.errors import FormatError
from moecache.stores._paths import find_path
from moecache.stores.base import ExpertStore, FileStore
from moecache.stores.memory import MemoryStore
from moecache.stores.safetensors import SafetensorsStore

__all__ = ["ExpertStore", "FileStore", "MemoryStore", "SafetensorsStore", "open_store"]


def open_store(
    path: str | os.PathLike[str],
    *,
    top_k: int | None = None,
    mapped: bool = False,
    layers: Collection[str] | None = None,
) -> SafetensorsStore:
    """Open a checkpoint as a store.

    Parameters
    ----------
    path : str or Path
        A checkpoint directory, or one .safetensors file.
    top_k : int, optional
        Experts per token, if config.json does not say or is not there.
    mapped : bool, default False
    layers : collection of str, optional
        See `SafetensorsStore`.

    Raises
    ------
    ConfigError
        If no file can have such a name.
    StoreError
        If it cannot be opened; FormatError if it is damaged or of another form.
    """
    found = find_path(path)
    if found.is_file() and found.suffix != ".safetensors":
        raise FormatError(f"{path}: only .safetensors files and checkpoint directories are read")
    return SafetensorsStore(found, top_k=top_k, mapped=mapped, layers=layers)
