"""Vocabulary: a model's tokens as llguidance has them."""

import copy
import importlib.util
from collections.abc import Sequence
from typing import Any

from moecache.errors import ConfigError, MissingDependencyError

_MOST_MESSAGE = 300


def check_llguidance() -> None:
    """Raise a MissingDependencyError unless llguidance is installed."""
    if importlib.util.find_spec("llguidance") is None:
        raise MissingDependencyError(
            "grammars and schemas need llguidance; install it with: pip install 'moecache[serve]'"
        )


def vocabulary_of(tokenizer: Any, num_tokens: int, ends: Sequence[int]) -> Any:
    """Return a tokenizer's vocabulary as llguidance has it. Blocks, for a second at most.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase or FileTokenizer
    num_tokens : int
        Tokens that the model knows.
    ends : sequence of int
        Tokens with which the model ends its texts.

    Raises
    ------
    ConfigError
        If there is no such token, or the tokenizer is of a kind whose tokens are not known.
    MissingDependencyError
        If llguidance is not installed.
    """
    check_llguidance()
    import llguidance

    known = [end for end in ends if 0 <= end < min(num_tokens, len(tokenizer))]
    if not known:
        raise ConfigError(
            "the model has no token that ends a text, which a grammar needs; name one as "
            "eos_token_id in generation_config.json, or take a GGUF file that has one"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend = copy.copy(backend)
        backend.no_padding()
        backend.no_truncation()
        try:
            return llguidance.LLTokenizer(backend.to_str(), eos_token=known)
        except ValueError as error:
            raise _unknown_kind(tokenizer, told(error)) from error
    tokens = [_bytes_of(tokenizer, token) for token in range(len(tokenizer))]
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Tokens(tokens, set(tokenizer.added_tokens_decoder), known)),
        eos_token=known,
    )


def told(error: object) -> str:
    """Return an error of llguidance in one line, without the trace of its program."""
    line = str(error).partition("<backtrace>")[0].replace("<non-verbose/>", "")
    line = " ".join(line.split()).removesuffix("|").strip()
    return line if len(line) <= _MOST_MESSAGE else f"{line[:_MOST_MESSAGE]}…"


def _bytes_of(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of a token where each is one byte; of one that is special, its name's."""
    name: str = tokenizer.convert_ids_to_tokens(token)
    if token in tokenizer.added_tokens_decoder:
        return name.encode()
    # ByT5's, of which each token is named by the character with its byte's number.
    if tokenizer.vocab_size != 256 or len(name) != 1 or ord(name) > 255:
        raise _unknown_kind(tokenizer, "it is none of the tokenizers library, and not of bytes")
    return bytes([ord(name)])


def _unknown_kind(tokenizer: Any, why: str) -> ConfigError:
    return ConfigError(
        f"a grammar cannot be followed with the model's {type(tokenizer).__name__}: {why}; "
        "leave the grammar out"
    )


class _Tokens:
    """A vocabulary of single bytes, as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: set[int], ends: Sequence[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = ends[0]
        self.special_token_ids = sorted(special)
        self._ids = {name: token for token, name in enumerate(tokens) if token not in special}

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[bytes([byte])] for byte in text]
