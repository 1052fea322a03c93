"""Checks: what a request says of a model's tokens, which only the model knows."""

import dataclasses
from typing import Any

from moecache.errors import ConfigError
from moecache.integrations.transformers import _following
from moecache.integrations.transformers.continuing import ends_of
from moecache.serving.errors import RequestError
from moecache.serving.grammars import Grammars
from moecache.serving.requests import Asked


class Checks:
    """Checks what requests say of tokens, and makes their grammars ready.

    Parameters
    ----------
    model : PreTrainedModel

    Attributes
    ----------
    num_tokens : int
        Tokens that the model knows.
    grammars : Grammars
    """

    def __init__(self, model: Any) -> None:
        self.num_tokens: int = model.config.get_text_config().vocab_size
        self.grammars = Grammars(self.num_tokens, ends_of(model))
        self._model = model

    def checked(self, asked: Asked, tokenizer: Any) -> Asked:
        """Return a request whose `new_mask` is set if it has a grammar. Blocks, for some ms.

        Parameters
        ----------
        asked : Asked
        tokenizer : PreTrainedTokenizerBase
            The caller's thread alone uses it meanwhile.

        Raises
        ------
        RequestError
            If a bias is of a token that the model does not have, or the grammar cannot be used.
        """
        beyond = max(asked.logit_bias, default=0)
        if beyond >= self.num_tokens:
            raise RequestError(
                400,
                f"logit_bias has token {beyond}, but the model knows {self.num_tokens} tokens, "
                f"0 to {self.num_tokens - 1}",
                param="logit_bias",
            )
        if asked.grammar is None:
            return asked
        try:
            if _following.ranks_of(self._model) is not None:
                raise ConfigError(
                    f"{asked.grammar.name} is for one process, and the model's experts are spread "
                    "over several; leave it out, or serve the model without torchrun"
                )
            compiled = self.grammars.compile(asked.grammar, tokenizer)
        except ConfigError as error:
            raise RequestError(400, str(error), param=asked.grammar.name) from error
        return dataclasses.replace(asked, new_mask=compiled.new_mask)
