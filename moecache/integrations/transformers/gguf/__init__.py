"""Models of GGUF files as transformers builds them: configuration, names, tokenizer."""

from moecache.decoding.gguf._architecture import Source
from moecache.integrations.transformers.gguf._architectures import ARCHITECTURES
from moecache.integrations.transformers.gguf._config import find_config
from moecache.integrations.transformers.gguf._sources import (
    find_layers,
    find_sources,
    is_interleaved,
)
from moecache.integrations.transformers.gguf._tokenizer import find_tokenizer

__all__ = [
    "ARCHITECTURES",
    "Source",
    "find_config",
    "find_layers",
    "find_sources",
    "find_tokenizer",
    "is_interleaved",
]
