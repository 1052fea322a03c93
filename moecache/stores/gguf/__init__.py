"""GGUF: the files of llama.cpp, with their metadata and split into parts or not."""

from moecache.stores.gguf._store import GgufStore

__all__ = ["GgufStore"]
