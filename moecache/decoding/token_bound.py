"""TokenBound: how many tokens a text has at least, without its being tokenised."""

import json
import string
import unicodedata
from collections.abc import Mapping
from typing import Any

_LETTERS = (string.ascii_letters + string.digits).encode()
_NO_LETTERS = bytes(byte for byte in range(256) if byte not in _LETTERS)
# "▁" stands for a space, and so do "Ġ" and its neighbours for bytes of spaces and line ends.
_SIGNS = "".join(chr(one) for one in range(128) if chr(one) not in _LETTERS.decode()) + "\u2581"
_BYTE_SIGNS = "\u0120\u010a\u0109\u010d"
# They neither drop an ASCII letter or digit, nor make one character of two.
_NORMALIZERS = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Prepend", "ByteLevel")
)
_PRE_TOKENIZERS = frozenset(
    ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Whitespace", "WhitespaceSplit")
)


class TokenBound:
    """A lower bound on the tokens of texts, far cheaper than the tokens.

    An ASCII letter or digit is never dropped by a byte-level BPE, nor by one that falls back to
    bytes: it is one character of what is split into tokens, alone or with accents. So a text
    has at least as many tokens as its letters and digits, divided by those of the longest token.
    Spaces, signs and other scripts count nothing: normalization may fold them.

    Parameters
    ----------
    tokenizer : FileTokenizer or PreTrainedTokenizerBase
    is_plain : bool
        Whether nothing but its `backend_tokenizer` splits texts.

    Attributes
    ----------
    most_letters : int or None
        Letters and digits of the longest token; `None` where nothing is proven of this tokenizer.
    """

    def __init__(self, tokenizer: Any, *, is_plain: bool) -> None:
        self.most_letters: int | None = None
        if not is_plain:
            return
        backend = tokenizer.backend_tokenizer
        vocabulary = backend.get_vocab(with_added_tokens=False)
        is_byte_level = _is_byte_level(backend)
        if _keeps_letters(backend) and _has_all_bytes(backend.model, vocabulary, is_byte_level):
            # A character with accents may have taken a letter in: all but signs count.
            signs = str.maketrans("", "", _SIGNS + (_BYTE_SIGNS if is_byte_level else ""))
            lengths = [len(token.translate(signs)) for token in vocabulary]
            lengths += [
                len(unicodedata.normalize("NFKD", token.content))
                for token in backend.get_added_tokens_decoder().values()
            ]
            self.most_letters = max(lengths)

    def least(self, text: str) -> int:
        """Return a number of tokens that no prompt with this text goes below."""
        if self.most_letters is None:
            return 0
        num_letters = len(text.encode().translate(None, _NO_LETTERS))
        # `encode` takes a token away that closes the text.
        return max(0, -(-num_letters // self.most_letters) - 1)


def _is_byte_level(backend: Any) -> bool:
    steps = _steps(backend.normalizer, "normalizers")
    steps += _steps(backend.pre_tokenizer, "pretokenizers")
    return any(step["type"] == "ByteLevel" for step in steps)


def _keeps_letters(backend: Any) -> bool:
    for step in _steps(backend.normalizer, "normalizers"):
        kept = step["type"] in _NORMALIZERS
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            kept = bool(pattern) and set(pattern) <= set(_SIGNS)
        if not kept:
            return False
    return all(
        step["type"] in _PRE_TOKENIZERS
        or (step["type"] == "Split" and step["behavior"] != "Removed")
        for step in _steps(backend.pre_tokenizer, "pretokenizers")
    )


def _has_all_bytes(model: Any, vocabulary: Mapping[str, int], is_byte_level: bool) -> bool:
    """Return whether a model is a BPE to which no character is unknown, and so none dropped."""
    if type(model).__name__ != "BPE":
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if is_byte_level:
        return all(one in vocabulary for one in _byte_letters())
    return model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _byte_letters() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """Return what a normalizer or pre-tokenizer is made of, as its JSON has it."""
    if part is None:
        return []
    pending, steps = [json.loads(part.__getstate__())], []
    while pending:
        step = pending.pop()
        if step["type"] == "Sequence":
            pending += step[name]
        else:
            steps.append(step)
    return steps
