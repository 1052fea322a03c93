"""The tokenizer of files as transformers has tokenizers."""

from typing import Any

import transformers
from tokenizers import Tokenizer

from moecache.decoding.files.tokenizer import FileTokenizer


def tokenizer_of(said: FileTokenizer) -> transformers.PreTrainedTokenizerFast:
    """Return what files say of their tokens as a tokenizer of transformers."""
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
