"""A tokenizer for models of random weights: any text, and a text for every id."""

from pathlib import Path
from string import ascii_lowercase
from typing import Any


def vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return tokens, and the pairs of tokens that become one; the first two are special."""
    from tokenizers import pre_tokenizers

    tokens = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [first + second for first in ascii_lowercase for second in ascii_lowercase]
    merges = [(pair[0], pair[1]) for pair in pairs]
    merges += [(first, second) for first in pairs for second in pairs]
    del merges[max(0, size - len(tokens)) :]
    return tokens + ["".join(merge) for merge in merges], merges


def write_tokenizer(directory: Path, size: int) -> None:
    """Write a byte-level tokenizer; the ids that are left are words of two and four letters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, merges = vocabulary(size)
    ids = {token: index for index, token in enumerate(tokens)}
    found = Tokenizer(models.BPE(vocab=ids, merges=merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("</s>", special=True)])
    make: Any = PreTrainedTokenizerFast
    names = {"pad_token": "<pad>", "eos_token": "</s>"}
    make(tokenizer_object=found, **names).save_pretrained(directory)
