"""Checks: what a request says of a model's tokens, which only the model knows."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from moecache.errors import ConfigError, MissingDependencyError
from moecache.integrations.answer_parts import (
    AnswerParser,
    format_of,
    tail_of,
    template_of,
)
from moecache.serving.errors import RequestError
from moecache.serving.grammars import Grammars
from moecache.serving.model import ServedModel
from moecache.serving.requests import Asked


class Checks:
    """Checks what requests say of tokens, and makes their grammars ready.

    Parameters
    ----------
    model : ServedModel

    Attributes
    ----------
    num_tokens : int
        Tokens that the model knows.
    grammars : Grammars
    """

    def __init__(self, model: ServedModel) -> None:
        self.num_tokens = model.num_tokens
        self.grammars = Grammars(self.num_tokens, model.ends)
        self._model = model

    def with_tools(self, asked: Asked, tokenizer: Any) -> Asked:
        """Return a request whose chat template is told of its tools, if it has any.

        Raises
        ------
        RequestError
            If the model cannot be told, or its calls not be recognised or enforced.
        """
        tools = asked.tools
        if not tools.functions:
            return asked
        known = format_of(tokenizer)
        if known is None or not known.has_calls or "tools" not in template_of(tokenizer):
            raise RequestError(
                400,
                "tools: the model's chat template has no functions, or writes their calls in a way "
                "that is not known; leave tools out",
                param="tools",
                code="unsupported",
            )
        template = {**asked.template, "tools": list(tools.functions)}
        if not tools.are_required:
            return dataclasses.replace(asked, template=template)
        if asked.grammar is not None:
            raise RequestError(
                400,
                f"{asked.grammar.name} and tool_choice {tools.choice!r} say different things; "
                "leave one out",
                param="tool_choice",
            )
        try:
            special = dict.fromkeys(tokenizer.all_special_tokens)
            grammar = tools.grammar(known, special)
        except (ConfigError, MissingDependencyError) as error:
            raise RequestError(400, str(error), param="tool_choice") from error
        return dataclasses.replace(asked, template=template, grammar=grammar)

    def with_parser(self, asked: Asked, tokenizer: Any, prompt: Sequence[int]) -> Asked:
        """Return a request that knows its prompt, with `new_parser` if its answers have parts."""
        asked = dataclasses.replace(asked, prompt_tokens=len(prompt))
        known = format_of(tokenizer) if asked.is_chat else None
        # A text of a grammar is content as a whole, whatever stands in it.
        if known is None or (asked.grammar is not None and not asked.tools.functions):
            return asked
        tail, tools = tail_of(known, tokenizer, prompt), asked.tools
        return dataclasses.replace(
            asked,
            new_parser=lambda: AnswerParser(known, tail, tools.functions, are_many=tools.are_many),
            shows_special=known.has_special(tokenizer),
        )

    def checked(self, asked: Asked, tokenizer: Any) -> Asked:
        """Return a request whose `new_mask` is set if it has a grammar. Blocks, for some ms.

        Parameters
        ----------
        asked : Asked
        tokenizer : FileTokenizer or PreTrainedTokenizerBase
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
            if self._model.is_spread:
                raise ConfigError(
                    f"{asked.grammar.name} is for one process, and the model's experts are spread "
                    "over several; leave it out, or serve the model without torchrun"
                )
            compiled = self.grammars.compile(asked.grammar, tokenizer)
        except ConfigError as error:
            raise RequestError(400, str(error), param=asked.grammar.name) from error
        return dataclasses.replace(asked, new_mask=compiled.new_mask)
