"""The tokenizer of a GGUF file as transformers has tokenizers."""

from collections.abc import Mapping
from typing import Any

import transformers

from moecache.decoding.gguf.tokenizer import read_tokenizer
from moecache.integrations.transformers._tokenizer import tokenizer_of


def find_tokenizer(metadata: Mapping[str, Any]) -> transformers.PreTrainedTokenizerFast:
    """Return the tokenizer of a GGUF file, whose ids are those of llama.cpp.

    Parameters
    ----------
    metadata : mapping
        The file's values by key, with all that begin with "tokenizer.".

    Raises
    ------
    ConfigError
        As `read_tokenizer`.
    """
    return tokenizer_of(read_tokenizer(metadata))
