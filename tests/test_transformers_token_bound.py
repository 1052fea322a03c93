"""TokenBound: no text has fewer tokens than it says, whatever is folded or dropped on the way."""

import sys
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from moecache.decoding.token_bound import TokenBound
from moecache.integrations.transformers import generation
from moecache.integrations.transformers.served import Served

transformers = pytest.importorskip("transformers")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u0120", "hello"), ("=", "=")]
ACCENTS = [("\u00c3", "\u00a9"), ("\u00c3\u00a9", "\u00c3\u00a9")]  # "é" and "éé"
TEXTS = st.lists(
    st.sampled_from(
        [
            *("hello", "e\u0301", "a\u0308", "\u00e9", "\u212b", "\ufdfa", "\u0327", "\u0120"),
            *("<|end|>", "<both>", "\u4e16", "\U0001f600", "   ", "\t", "\u00a0", "\x00"),
            *"ehlo=5 \n\u2581",
        ]
    )
    | st.characters(exclude_categories=["Cs"]),
    max_size=60,
).map("".join)


def bound_of(tokenizer: Any) -> TokenBound:
    """Return a tokenizer's bound, as a server makes it."""
    return TokenBound(tokenizer, is_plain=Served.splits_plainly(tokenizer))


def wrapped(backend: Tokenizer, cls: Any = transformers.PreTrainedTokenizerFast) -> Any:
    """Return a tokenizer of transformers with tokens that take the space around them, too."""
    backend.add_tokens([AddedToken("<both>", lstrip=True, rstrip=True, normalized=False)])
    backend.add_tokens([AddedToken("e\u0301a\u0308", normalized=True)])
    return cls(tokenizer_object=backend, eos_token="<|end|>")


def merged(alphabet: list[str], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    """Return a BPE."""
    tokens = dict.fromkeys([*alphabet, *(left + right for left, right in merges)])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))


def byte_level(*parts: Any) -> Any:
    """Return a tokenizer as GPT-2's, with these normalizers."""
    backend = merged(ALPHABET, MERGES + ACCENTS)
    if parts:
        backend.normalizer = normalizers.Sequence(list(parts))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend)


def byte_fallback() -> Any:
    """Return a tokenizer as Llama's."""
    alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"ehlo \u2581"]
    merges = [*MERGES[:4], ("\u2581", "hello"), ("\u2581", "\u2581")]
    backend = merged(alphabet, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return wrapped(backend)


PROVEN: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level,
    "NFC": lambda: byte_level(normalizers.NFC()),
    "NFKC": lambda: byte_level(normalizers.NFKC(), normalizers.Lowercase()),
    "accents": lambda: byte_level(normalizers.NFD(), normalizers.StripAccents()),
    "bytes": byte_fallback,
}
TOKENIZERS = {name: make() for name, make in PROVEN.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS, repeats=st.integers(1, 20))
def test_no_text_has_fewer_tokens(name: str, text: str, repeats: int) -> None:
    """Accents are composed, spaces swallowed, tokens of any kind written out."""
    tokenizer, text = TOKENIZERS[name], text * repeats + "."
    bound = bound_of(tokenizer)
    assert bound.least(text) <= generation.encode(tokenizer, text).shape[1]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_text_has_many(name: str) -> None:
    """A share of its letters; spaces and signs alone are none."""
    bound = bound_of(TOKENIZERS[name])
    assert bound.most_letters is not None
    assert bound.least("hello " * 1000) >= 5000 // bound.most_letters - 1 > 100
    assert bound.least("= \u4e16\n" * 1000) == bound.least("") == 0


def test_no_character_holds_two_letters() -> None:
    """What the proof takes from Unicode: composed characters have one ASCII letter at most."""
    for code in range(sys.maxunicode + 1):
        parts = unicodedata.normalize("NFD", chr(code))
        assert sum(one.isascii() and one.isalnum() for one in parts) <= 1, hex(code)


class Overridden(transformers.PreTrainedTokenizerFast):
    """A tokenizer with a way of its own."""

    def _encode_plus(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def words() -> Any:
    """Return a tokenizer to which most words are unknown: each is a token, however long."""
    return Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1}, unk_token="<unk>"))


def dropping() -> Any:
    """Return a tokenizer that drops what it splits at."""
    backend = merged(ALPHABET, MERGES)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("l", "removed"), pre_tokenizers.ByteLevel()]
    )
    return backend


def replacing() -> Any:
    """Return a tokenizer that folds letters."""
    backend = merged(ALPHABET, MERGES)
    backend.normalizer = normalizers.Replace("hello", "o")
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    return backend


def incomplete() -> Any:
    """Return a tokenizer that lacks a byte."""
    backend = merged([one for one in ALPHABET if one != "z"], MERGES)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    return backend


@pytest.mark.parametrize("make", [words, dropping, replacing, incomplete])
def test_nothing_is_said_of_tokenizers_that_may_drop_or_fold_letters(
    make: Callable[[], Any],
) -> None:
    """Any text may fit."""
    bound = bound_of(wrapped(make()))
    assert bound.most_letters is None
    assert bound.least("hello " * 1000) == 0


def test_nothing_is_said_of_code_that_is_not_known() -> None:
    """Tokenizers written in Python, and such as change the library's own."""
    backend = merged(ALPHABET, MERGES)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert bound_of(wrapped(backend)).most_letters is not None
    for other in (wrapped(backend, Overridden), None, object()):
        assert bound_of(other).most_letters is None
