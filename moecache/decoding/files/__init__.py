"""Models of files that run without torch: `open_text_model`, and `read_tokenizer`."""

from moecache.decoding.files.model import TextModel
from moecache.decoding.files.opening import open_text_model, read_tokenizer
from moecache.decoding.files.recipes import NoTextModelError

__all__ = ["NoTextModelError", "TextModel", "open_text_model", "read_tokenizer"]
