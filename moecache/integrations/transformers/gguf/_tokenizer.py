"""The tokenizer of a GGUF file as transformers has tokenizers."""

from collections.abc import Mapping
from typing import Any

import transformers
from tokenizers import Tokenizer

from moecache.decoding.gguf.tokenizer import read_tokenizer


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
    said = read_tokenizer(metadata)
    make: Any = transformers.PreTrainedTokenizerFast
    made = make(
        tokenizer_object=_Given(said.backend_tokenizer),
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in said.special.items()},
    )
    if said.chat_template is not None:
        made.chat_template = said.chat_template
    return made


class _Given:
    """A tokenizer that nobody else has: a copy, by way of JSON, takes as long as all the rest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: object) -> Tokenizer:
        """Return it instead of a copy."""
        return self._tokenizer
