"""The tokenizer of a file of tiktoken, tokens and their ranks, as Kimi's are published."""

import base64
import binascii
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from moecache.decoding.files.splits import SPLITS
from moecache.errors import FormatError
from moecache.stores._checkpoint import read_small

# Bytes that are letters of their own in a vocabulary, as GPT-2 has it; others come behind 255.
_PRINTED = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))
# Tokens that are no text, behind those of the file.
_NUM_RESERVED, _MOST_ADDED = 256, 2**16
_MOST_BYTES = 1024  # of a token
_RESERVED = "<|reserved_token_{}|>"


def read_ranks(file: Path, added: dict[int, AddedToken]) -> Tokenizer:
    """Return the tokenizer of a file of tiktoken.

    Texts are cut as Kimi's own tokenizer cuts them, and what is no token as a whole becomes the
    pair of least rank, again and again.

    Parameters
    ----------
    file : Path
        A line for each token: its bytes in base64, and its rank.
    added : dict of int to AddedToken
        Tokens behind those of the file, by their ids.

    Raises
    ------
    StoreError
        If the file cannot be read.
    FormatError
        If it is damaged, or an added token has the id of one of its tokens.
    """
    tokens = _tokens_of(file)
    if added and min(added) < len(tokens):
        raise FormatError(
            f"{file}: token {min(added)} is {added[min(added)].content!r}, too; download it and "
            "tokenizer_config.json again"
        )
    if any(not token.content for token in added.values()):
        raise FormatError(f"{file.parent}: tokenizer_config.json adds a token without text")
    letters = _letters()
    names = ["".join(map(letters.__getitem__, token)) for token in tokens]
    vocabulary = {name: rank for rank, name in enumerate(names)}
    split = SPLITS["kimi-k2"]
    found = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(vocabulary), ignore_merges=True))
    cuts = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in split.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    found.decoder = decoders.ByteLevel()
    more = [
        added.get(number) or AddedToken(_RESERVED.format(number), special=True, normalized=False)
        for number in range(len(tokens), _end(len(tokens), added))
    ]
    # Each has the next id, unless it is a token already.
    if found.add_tokens(more) != len(more):
        counts = Counter([*vocabulary, *(token.content for token in more)])
        raise FormatError(
            f"{file}: {counts.most_common(1)[0][0]!r} is two tokens; download "
            "tokenizer_config.json again"
        )
    return found


def _end(num_tokens: int, added: dict[int, AddedToken]) -> int:
    """Return the first id behind all tokens."""
    end = max(num_tokens + _NUM_RESERVED, max(added, default=0) + 1)
    if end > num_tokens + _MOST_ADDED:
        raise FormatError(
            f"tokenizer_config.json adds token {end - 1} to {num_tokens}; download it again"
        )
    return end


def _tokens_of(file: Path) -> list[bytes]:
    """Return the tokens of a file, by their ranks."""
    lines: Any = bytes(read_small(file)).split()
    try:
        tokens = [base64.b64decode(text, validate=True) for text in lines[::2]]
        ranks = [int(text) for text in lines[1::2]]
    except (binascii.Error, ValueError) as error:
        raise FormatError(f"{file}: is no file of tokens and ranks: {error}") from error
    found = dict(zip(ranks, tokens, strict=False))
    longest = max(map(len, tokens), default=0)
    if longest > _MOST_BYTES:
        raise FormatError(f"{file}: has a token of {longest} bytes; download it again")
    is_whole = len(found) == len(ranks) == len(tokens) == len({*tokens})
    if not is_whole or {*found} != {*range(len(found))} or b"" in tokens:
        raise FormatError(f"{file}: its tokens, or their ranks, are not one each from 0 on")
    if not {bytes([one]) for one in range(256)} <= {*tokens}:
        raise FormatError(f"{file}: has no token of some byte; download it again")
    return [found[rank] for rank in range(len(found))]


def _letters() -> list[str]:
    """Return the letter that stands for each byte in a vocabulary."""
    printed = {one for part in _PRINTED for one in part}
    others = iter(range(0x100, 0x200))
    return [chr(one if one in printed else next(others)) for one in range(256)]


def _merges(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that are one, by its rank and by theirs."""
    found: list[tuple[str, str]] = []
    get = vocabulary.get
    for name in vocabulary:
        pairs = []
        for cut in range(1, len(name)):
            first = get(name[:cut])
            if first is not None and (second := get(name[cut:])) is not None:
                pairs.append((first, second, cut))
        found += [(name[:cut], name[cut:]) for _, _, cut in sorted(pairs)]
    return found
