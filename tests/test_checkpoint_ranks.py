"""Tokenizers of tiktoken's files, beside its way of merging written down plainly."""

import base64
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moecache.decoding.safetensors.tokenizer import read_directory
from moecache.errors import FormatError, StoreError
from tests.helpers.gguf_tokenizers import TEXTS

tokenizers = pytest.importorskip("tokenizers")
regex = pytest.importorskip("regex")

# As Moonshot publishes it, for `regex`.
_START = r"[^\r\n\p{L}\p{N}]?"
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = (
    rf"[\p{{Han}}]+|{_START}{_CAPITALS}*{_SMALL}+{_ENDING}|{_START}{_CAPITALS}+{_SMALL}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MORE = (
    "Don't STOP: 12345 Häuser,\n\n  \t x",
    "北京市長江大橋 and 東京タワーs",
    "I'LL we've\r\n\r\n¿qué?",
)
SPECIAL = {"[BOS]": True, "[EOS]": True, "<|turn_end|>": True, "<|tool_call_begin|>": False}


def merge(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Return a piece's tokens: the pair of least rank becomes one until none is a token."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([one]) for one in piece]
    while True:
        pairs = [a + b for a, b in pairwise(parts)]
        known = [(ranks[pair], at) for at, pair in enumerate(pairs) if pair in ranks]
        if not known:
            return [ranks[part] for part in parts]
        _, at = min(known)
        parts[at : at + 2] = [pairs[at]]


def tokens_of(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Return a text's tokens."""
    pieces = regex.findall(PATTERN, text, flags=regex.VERSION1)
    return [token for piece in pieces for token in merge(piece.encode(), ranks)]


@pytest.fixture(name="ranks", scope="module")
def _ranks() -> dict[bytes, int]:
    """Return tokens and their ranks: all bytes, then what a training merges of some texts."""
    found = {bytes([one]): one for one in range(256)}
    pieces = [piece.encode() for text in (*TEXTS, *MORE) for piece in regex.findall(PATTERN, text)]
    for _ in range(150):
        counts: dict[bytes, int] = {}
        for piece in pieces:
            ids = merge(piece, found)
            parts = [list(found)[one] for one in ids]
            for a, b in pairwise(parts):
                counts[a + b] = counts.get(a + b, 0) + 1
        if not counts:
            break
        found[max(counts, key=lambda pair: (counts[pair], pair))] = len(found)
    return found


@pytest.fixture(name="path")
def _path(tmp_path: Path, ranks: dict[bytes, int]) -> Path:
    """Return a directory as Kimi is published."""
    write_ranks(tmp_path, ranks)
    added = {
        str(len(ranks) + number): {"content": name, "special": special}
        for number, (name, special) in enumerate(SPECIAL.items(), 2)
    }
    write_config(tmp_path, added_tokens_decoder=added)
    return tmp_path


def write_ranks(directory: Path, ranks: dict[bytes, int]) -> None:
    """Write tokens in the order of their ranks."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (directory / "tiktoken.model").write_text("".join(lines))


def write_config(directory: Path, **said: Any) -> None:
    """Write tokenizer_config.json."""
    usual = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": "{% for m in messages %}{{ m.content }}<|turn_end|>{% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(usual | said))


def test_tokens_are_those_of_tiktoken(path: Path, ranks: dict[bytes, int]) -> None:
    """Of texts, and back; special ones have their ids, and those between them names."""
    found = read_directory(path)
    assert len(found) == len(ranks) + 256
    for text in (*TEXTS, *MORE):
        ids = tokens_of(text, ranks)
        assert found(text)["input_ids"] == ids
        assert found.decode(ids) == text
    first = len(ranks)
    assert found("a<|turn_end|>b<|tool_call_begin|>")["input_ids"][1::2] == [first + 4, first + 5]
    assert found.decode([first + 4, first + 5], skip_special_tokens=True) == "<|tool_call_begin|>"
    assert found.decode([first]) == f"<|reserved_token_{first}|>"
    assert found.eos_token_id == first + 3
    assert found.encode_chat([{"role": "user", "content": "so"}])[-1] == first + 4


def test_models_with_torch_have_the_same_tokens(path: Path) -> None:
    """Those that transformers makes of the file are cut as Llama 3's."""
    pytest.importorskip("transformers")
    from moecache.integrations.transformers.generation import load_tokenizer

    ours, theirs = read_directory(path), load_tokenizer(str(path))
    for text in (*MORE, "a<|turn_end|>[EOS]"):
        ids = ours(text)["input_ids"]
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids)
    talk = [{"role": "user", "content": "so"}]
    assert theirs.apply_chat_template(talk)["input_ids"] == ours.encode_chat(talk)
    assert theirs.eos_token_id == ours.eos_token_id


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda ranks: ranks.pop(b"a"), "one each from 0 on"),
        (lambda ranks: ranks.update({b"": len(ranks)}), "is no file of tokens and ranks"),
        (lambda ranks: ranks.update({b"zzz": 3}), "one each from 0 on"),
        (lambda ranks: ranks.update({b"zzzz": ranks.pop(b"z")}), "no token of some byte"),
        (lambda ranks: ranks.update({b"z" * 2000: len(ranks)}), "a token of 2000 bytes"),
    ],
    ids=["gone", "empty", "twice", "no byte", "long"],
)
def test_ranks_that_are_damaged_are_refused(
    path: Path, ranks: dict[bytes, int], damage: Callable[[dict[bytes, int]], Any], message: str
) -> None:
    """Each with the file."""
    changed = dict(ranks)
    damage(changed)
    write_ranks(path, changed)
    with pytest.raises(FormatError, match=rf"tiktoken\.model: .*{message}"):
        read_directory(path)


def test_other_damage_is_told(path: Path, ranks: dict[bytes, int]) -> None:
    """No file of ranks, tokens that are added twice, or far away, and other ways to cut texts."""
    first = str(len(ranks))
    for added, message in (
        ({"7": {"content": "[BOS]"}}, r"token 7 is '\[BOS\]', too"),
        ({first: {"content": "a"}, str(int(first) + 1): {"content": "a"}}, "is two tokens"),
        ({"9999999999": {"content": "far"}}, "adds token 9999999999"),
        ({first: {"content": ""}}, "adds a token without text"),
        ({first: {"content": "[BOS]"}}, "has no id"),
    ):
        write_config(path, added_tokens_decoder=added)
        with pytest.raises(FormatError, match=message):
            read_directory(path)
    write_config(path)
    for text in ("?? 0\n", "YQ== x\n", "YQ==\n"):
        (path / "tiktoken.model").write_text(text)
        with pytest.raises(FormatError, match=r"tiktoken\.model"):
            read_directory(path)
    for said in ({"auto_map": {"AutoTokenizer": ["other.Tokenizer", None]}}, {"auto_map": 3}):
        write_config(path, **said)
        with pytest.raises(StoreError, match=r"has no tokenizer\.json"):
            read_directory(path)
