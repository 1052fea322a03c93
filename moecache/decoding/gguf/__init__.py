"""Models of GGUF files that run without torch: `open_text_model`; `tokenizer` has their tokens."""

from moecache.decoding.gguf.model import TextModel
from moecache.decoding.gguf.opening import open_text_model
from moecache.decoding.gguf.recipes import NoTextModelError

__all__ = ["NoTextModelError", "TextModel", "open_text_model"]
