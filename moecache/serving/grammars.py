"""Grammars: texts that an answer may be, and masks that keep it one of them."""

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moecache.errors import ConfigError, MissingDependencyError
from moecache.serving.schema_numbers import check_numbers, without_numbers
from moecache.serving.vocabulary import check_llguidance, told, vocabulary_of

# A hostile text of this length compiles within 1.5 s, where a longer one may take minutes.
MOST_CHARACTERS = 64 * 1024
MOST_CHOICES = 4096
# At most one blank, or a new line and its indent: a model could write blanks for ever.
_BLANKS = r" |\n[ \t]{0,20}"
_MOST_PROPERTIES = 1000
# Text that has to come would be looked for at once, and has no end in grammars such as `/a+/ /a+/`.
_UNFORCED = '%llguidance {"no_forcing": true}'
# A state takes 1 to 2 kB; grammars that are of use have hundreds. An optional property of an
# object takes four items of a row, and five symbols.
_LIMITS: Any = {"max_lexer_states": 20_000, "max_items_in_row": 5000, "max_grammar_size": 40_000}


class GrammarError(ConfigError):
    """A grammar that cannot be followed to its end; the answer has begun."""


@dataclass(frozen=True)
class Grammar:
    """The texts that an answer may be.

    Made by one of the class methods. A grammar of several parts, such as calls of functions with
    arguments by schemas, is Lark's::

        start: "<call>" (weather | time) "</call>"
        weather: "weather " %json {"type": "object", ...}
        time: "time"

    in which `schema_part` writes what comes after `"weather "`.

    Attributes
    ----------
    source : str
        As llguidance reads it.
    name : str
        The field or option that it comes from, for messages.
    """

    source: str
    name: str

    @classmethod
    def of_schema(
        cls, schema: Mapping[str, Any] | bool, name: str, *, is_lenient: bool = False
    ) -> "Grammar":
        """Return the JSON texts of a schema.

        Parameters
        ----------
        schema : mapping or bool
        name : str
        is_lenient : bool, default False
            Whether keywords that are not supported are left out, instead of refused.

        Raises
        ------
        ConfigError
            If the schema is nested too deep, or too large, or has texts that are none, or
            numbers that llguidance cannot hold.
        MissingDependencyError
            If llguidance is not installed; likewise the other methods.
        """
        if schema is False:
            raise ConfigError(f"{name} is of no text at all")
        try:
            part = cls.schema_part({} if schema is True else schema, is_lenient=is_lenient)
        except RecursionError as error:
            raise ConfigError(f"{name} is nested too deep: {error}") from error
        grammar = cls.of_lark(f"start: {part}", name)
        _check_properties(schema, name)
        return grammar

    @staticmethod
    def schema_part(schema: Mapping[str, Any], *, is_lenient: bool = False) -> str:
        """Return a schema as a part of a rule of Lark; parameters are those of `of_schema`."""
        given = schema.get("x-guidance")
        options = {
            **(given if isinstance(given, dict) else {}),
            "whitespace_pattern": _BLANKS,
            "lenient": is_lenient,
        }
        kept = without_numbers(dict(schema)) if is_lenient else schema
        return f"%json {json.dumps({**kept, 'x-guidance': options})}"

    @classmethod
    def of_regex(cls, pattern: str, name: str) -> "Grammar":
        """Return the texts that a regular expression matches as a whole."""
        check_llguidance()
        import llguidance

        _check_length(pattern, name)
        return cls.of_lark(f"start: /{llguidance.regex_to_lark(pattern, '')}/", name)

    @classmethod
    def of_choices(cls, choices: Sequence[str], name: str) -> "Grammar":
        """Return some texts.

        Raises
        ------
        ConfigError
            If there are none, or too many.
        """
        if not 1 <= len(choices) <= MOST_CHOICES:
            raise ConfigError(f"{name} has {len(choices)} choices; send 1 to {MOST_CHOICES}")
        quoted = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        return cls.of_lark(f"start: CHOICE\nCHOICE: {quoted}", name)

    @classmethod
    def of_lark(cls, text: str, name: str) -> "Grammar":
        """Return a grammar in llguidance's dialect of Lark, whose first rule is `start`."""
        check_llguidance()
        import llguidance

        _check_length(text, name)
        check_numbers(text, name)
        # The last one counts.
        return cls(llguidance.LLMatcher.grammar_from_lark(f"{text}\n{_UNFORCED}"), name)

    @classmethod
    def of_text(cls, text: str, name: str) -> "Grammar":
        """Return a grammar in Lark, or in llama.cpp's GBNF, whose first rule is `root`.

        Raises
        ------
        ConfigError
            If it is neither.
        """
        check_llguidance()
        from llguidance import gbnf_to_lark

        _check_length(text, name)
        if _is_lark(text):
            return cls.of_lark(text, name)
        try:
            converted = gbnf_to_lark.gbnf_to_lark(text)
        except Exception as error:  # what its parser stumbles over
            raise ConfigError(
                f"{name} is neither Lark (a rule `start:`) nor GBNF (a rule `root ::=`): "
                f"{told(error)}"
            ) from error
        return cls.of_lark(converted, name)


class GrammarMask:
    """Says which tokens keep an answer within a grammar; a `Mask` of one text.

    Once nothing may follow, only tokens that end a text are allowed.

    Parameters
    ----------
    matcher : llguidance.LLMatcher
        Used by nobody else.
    name : str
        As `Grammar.name`.
    num_tokens : int
        Width of the model's logits: those beyond the tokenizer's vocabulary never come.
    """

    def __init__(self, matcher: Any, name: str, num_tokens: int) -> None:
        self._matcher = matcher
        self._name = name
        self._num_tokens = num_tokens

    def allowed(self) -> np.ndarray:
        """Return the tokens that may come next.

        Returns
        -------
        ndarray of bool, shape [vocabulary]

        Raises
        ------
        GrammarError
            If the grammar has become too complex for its bounds.
        """
        known = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)[: self._num_tokens]
        self._check()
        found = np.zeros(self._num_tokens, bool)
        np.not_equal(known, 0, out=found[: len(known)])
        return found

    def take(self, token: int) -> None:
        """Take the token that came.

        Raises
        ------
        GrammarError
            If it is none of those that may come.
        """
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(
                f"{self._name} cannot be followed on: {told(self._matcher.get_error())}; make "
                "it simpler"
            )


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar in the tokens of a model.

    Attributes
    ----------
    matcher : llguidance.LLMatcher
        At its start; copied for each text.
    name : str
    num_tokens : int
        As those of `GrammarMask`.
    """

    matcher: Any
    name: str
    num_tokens: int

    def new_mask(self) -> GrammarMask:
        """Return the mask of a new text."""
        return GrammarMask(self.matcher.deep_copy(), self.name, self.num_tokens)


class Grammars:
    """Compiles grammars for a model. Its vocabulary is prepared with the first one, within 1 s.

    Parameters
    ----------
    num_tokens : int
        Width of the model's logits.
    ends : iterable of int
        Tokens with which the model ends its texts.
    """

    def __init__(self, num_tokens: int, ends: Iterable[int]) -> None:
        self._num_tokens = num_tokens
        self._ends = sorted(ends)
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def compile(self, grammar: Grammar, tokenizer: Any) -> CompiledGrammar:
        """Return a grammar that is ready for masks. Blocks, for some ms in general.

        Parameters
        ----------
        grammar : Grammar
        tokenizer : PreTrainedTokenizerBase or FileTokenizer
            The model's; the caller's thread alone uses it meanwhile.

        Raises
        ------
        ConfigError
            If the grammar is none, or too complex, or no text is of it, or the tokenizer is of a
            kind whose tokens are not known.
        """
        vocabulary = self._ready(tokenizer)
        import llguidance

        limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)
        matcher = llguidance.LLMatcher(vocabulary, grammar.source, log_level=0, limits=limits)
        if not matcher.is_error():
            # Some are found to be empty only by the first mask.
            trial = matcher.deep_copy()
            if any(trial.compute_logit_bias()) and not trial.is_error():
                return CompiledGrammar(matcher, grammar.name, self._num_tokens)
            matcher = trial
        found = told(matcher.get_error())
        if found.startswith("NoExtension") or not found:
            raise ConfigError(f"{grammar.name} is of no text at all, or refers to itself alone")
        raise ConfigError(f"{grammar.name} cannot be used: {found}")

    def piece(self, token: int, tokenizer: Any) -> bytes:
        """Return the bytes that a token stands for.

        Where they are not known, those of its text, in which a part of a character is U+FFFD.

        Parameters
        ----------
        token : int
            One that the tokenizer has.
        tokenizer : PreTrainedTokenizerBase or FileTokenizer
            As that of `compile`.
        """
        try:
            found = bytes(self._ready(tokenizer).decode_bytes([token]))
        except (ConfigError, MissingDependencyError):
            found = b""
        text: str = "" if found else tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return found or text.encode()

    def _ready(self, tokenizer: Any) -> Any:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = vocabulary_of(tokenizer, self._num_tokens, self._ends)
            return self._vocabulary


def _check_length(text: str, name: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"{name} has {len(text)} characters; send a shorter one, of {MOST_CHARACTERS} at most"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} has a lone surrogate at {error.start}") from error


def _check_properties(schema: Any, name: str) -> None:
    """Refuse objects of many fields, the square of whose number a compiler takes."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if len(value) > _MOST_PROPERTIES:
                raise ConfigError(
                    f"{name} has an object of {len(value)} properties; send one of "
                    f"{_MOST_PROPERTIES} at most"
                )
            left += value.values()
        elif isinstance(value, list):
            left += value


def _is_lark(text: str) -> bool:
    """Return whether a line says so."""
    for line in text.splitlines():
        head, colon, rest = line.strip().partition(":")
        if head.startswith("%llguidance"):
            return True
        if colon and head.partition("[")[0].strip() == "start" and not rest.startswith(":="):
            return True
    return False
