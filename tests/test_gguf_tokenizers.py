"""Tokenizers of GGUF files."""

import re
from typing import Any

import pytest

from moecache.decoding.files.splits import SPLITS
from moecache.errors import ConfigError
from tests.helpers.gguf_tokenizers import TEXTS, byte_level, gemma, sentencepiece

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
find_tokenizer = pytest.importorskip("moecache.integrations.transformers.gguf").find_tokenizer

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A key, its value, and what the error says.
CHANGES = [
    (
        "ggml.model",
        "rwkv",
        "tokenizer model 'rwkv' is not supported; supported are gemma4, gpt2, llama",
    ),
    ("ggml.pre", "zebra", "tokenizer.ggml.pre 'zebra' is not supported; supported are "),
    ("ggml.tokens", None, "has no vocabulary (tokenizer.ggml.tokens)"),
    ("ggml.tokens", [1, 2], "tokenizer.ggml.tokens has other values than the format's"),
    ("ggml.tokens", "ab", "tokenizer.ggml.tokens is str, and no list"),
    ("ggml.token_type", [1, 1], "tokens, but types of 2"),
    ("ggml.merges", ["a b", "zz q"], "vocabulary cannot be used: "),
]


@pytest.fixture(name="described", scope="module")
def _described() -> dict[str, Any]:
    """Return the metadata of a byte-level vocabulary."""
    return byte_level("qwen2")


def test_byte_pairs_are_merged_in_pieces_that_the_file_names(described: dict[str, Any]) -> None:
    """Ids are those of the tokenizer that was trained, and decode to the text."""
    tokens = described["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in described["tokenizer.ggml.merges"]]
    ids = {token: i for i, token in enumerate(tokens)}
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN2), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    found = find_tokenizer(described)
    texts = [text for text in TEXTS if "<" not in text]

    assert [found(text)["input_ids"] for text in texts] == [plain.encode(t).ids for t in texts]
    assert [found.decode(found(text)["input_ids"]) for text in TEXTS] == list(TEXTS)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("afmoe", "a  12345 1234567a 666", "a, , ,12,345, ,1,234,567,a, ,666"),
        ("afmoe", "x\n\n1 \n22", "x,\n\n,1, \n,22"),
        ("exaone-moe", "ab cd  ef 12/\ngh", "ab cd, , ef, ,1,2,/\n,gh"),
    ],
)
def test_texts_are_cut_as_llama_cpp_does(pre: str, text: str, pieces: str) -> None:
    """Digits by three, lines; words with a space between them."""
    rest = [text]
    for pattern in SPLITS[pre].patterns:
        cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        rest = [piece for one in rest for piece, _ in cut.pre_tokenize_str(one)]
    assert rest == pieces.split(",")


def test_special_tokens_are_whole_and_those_of_the_user_stay_in_a_text(
    described: dict[str, Any],
) -> None:
    """By the types that the file has for its tokens."""
    found = find_tokenizer(described)
    ids = found("<|im_start|>hi<think>")["input_ids"]

    assert found.convert_ids_to_tokens(ids) == ["<|im_start|>", "hi", "<think>"]
    assert found.decode(ids, skip_special_tokens=True) == "hi<think>"
    assert (found.bos_token, found.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert found.pad_token == "<|endoftext|>"
    assert len(found) == len(described["tokenizer.ggml.tokens"])


@pytest.mark.parametrize("adds", [True, False, None])
def test_texts_begin_and_end_as_the_file_says(adds: bool | None, described: dict[str, Any]) -> None:
    """Where it says nothing, SentencePiece alone begins them with a token."""
    flags = {} if adds is None else {"tokenizer.ggml.add_bos_token": adds}
    ends = {"tokenizer.ggml.add_eos_token": True}
    found = find_tokenizer(described | flags | ends)
    pieces = find_tokenizer(sentencepiece(**{} if adds is None else {"add_bos_token": adds}))

    ids = found("a")["input_ids"]

    assert ids[0] == found.bos_token_id if adds else ids[0] == found.convert_tokens_to_ids("a")
    assert ids[-1] == found.eos_token_id
    assert (pieces("a")["input_ids"][0] == 1) == (adds is not False)


@pytest.mark.parametrize("has_prefix", [True, False])
def test_pieces_are_merged_by_score_and_unknown_characters_are_bytes(has_prefix: bool) -> None:
    """A space comes first where the file does not forbid it."""
    found = find_tokenizer(sentencepiece(add_space_prefix=has_prefix, add_bos_token=False))

    assert found.tokenize("the dog")[-1] == "▁dog"
    assert (found.tokenize("the dog")[0] == "▁the") == has_prefix
    assert found.tokenize("ö")[-2:] == ["<0xC3>", "<0xB6>"]
    for text in TEXTS:
        if "\x00" not in text and "<" not in text:
            assert found.decode(found(text)["input_ids"]) == text


def test_spaces_are_characters_and_lines_are_apart() -> None:
    """As Gemma 4 has it, whose merges are the file's."""
    found = find_tokenizer(gemma())

    assert found.tokenize("the dog")[0] == "the▁"
    assert found("\n")["input_ids"][0] == found.bos_token_id
    for text in TEXTS:
        if "<" not in text:
            assert found.decode(found(text)["input_ids"], skip_special_tokens=True) == text


def test_the_chat_template_is_the_files(described: dict[str, Any]) -> None:
    """Or all of them by their names, if there are several."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}{% endfor %}"
    named = {"tokenizer.chat_template.tool_use": "tools"}
    messages = [{"role": "user", "content": "hi"}]

    found = find_tokenizer(described | {"tokenizer.chat_template": template})
    several = find_tokenizer(described | {"tokenizer.chat_template": template} | named)

    assert found.apply_chat_template(messages, tokenize=False) == "<|im_start|>user hi"
    assert several.chat_template == {"default": template, "tool_use": "tools"}
    assert find_tokenizer(described).chat_template is None


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change[0]}={change[1]}")
def test_a_vocabulary_that_is_not_known_is_refused_by_name(
    change: tuple[str, Any, str], described: dict[str, Any]
) -> None:
    """What is known is named, too."""
    key, value, message = change

    with pytest.raises(ConfigError, match=re.escape(message)):
        find_tokenizer({**described, f"tokenizer.{key}": value})
