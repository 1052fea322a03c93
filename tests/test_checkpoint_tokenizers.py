"""Tokenizers of checkpoints, beside transformers' own of the same files."""

import json
from pathlib import Path
from typing import Any

import pytest

from moecache.decoding.safetensors.tokenizer import read_directory
from moecache.errors import FormatError, StoreError
from tests.helpers.gguf_tokenizers import SPECIAL, TEXTS, byte_level

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USUAL: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": SPECIAL[0],
    "eos_token": SPECIAL[2],
    "pad_token": None,
    "chat_template": TEMPLATE,
}
TALK = [{"role": "user", "content": "hi, Größe"}, {"role": "assistant", "content": "so"}]


@pytest.fixture(name="backend", scope="module")
def _backend() -> str:
    """Return a tokenizer.json."""
    from moecache.decoding.gguf.tokenizer import read_tokenizer

    return str(read_tokenizer(byte_level("qwen2")).backend_tokenizer.to_str())


def written(into: Path, backend: str, said: dict[str, Any]) -> Path:
    """Write a tokenizer's files."""
    (into / "tokenizer.json").write_text(backend)
    (into / "tokenizer_config.json").write_text(json.dumps(said))
    return into


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False, "bos_token": None},
        {"eos_token": {"__type": "AddedToken", "content": "<|end|>", "lstrip": True}},
        {"extra_special_tokens": ["<|more|>"]},
        {"clean_up_tokenization_spaces": True},
        {
            "added_tokens_decoder": {
                "705": {"content": "<tool>", "special": False},
                "704": {"content": "<|more|>", "special": True},
            }
        },
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(
    tmp_path: Path, backend: str, said: dict[str, Any]
) -> None:
    """Of texts, of conversations, and back."""
    path = written(tmp_path, backend, USUAL | said)
    ours = read_directory(path)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    assert ours.bos_token == theirs.bos_token
    assert ours.eos_token_id == theirs.eos_token_id
    for text in (*TEXTS, "a <|end|> b <tool>c<|more|> d"):
        wanted = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == wanted
        for skip in (False, True):
            found = ours.decode(wanted, skip_special_tokens=skip)
            assert found == theirs.decode(wanted, skip_special_tokens=skip)
    wanted = theirs.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False)
    if ours.bos_token is not None:
        assert ours.encode_chat(TALK) == wanted


def test_templates_are_files_or_settings(tmp_path: Path, backend: str) -> None:
    """A file goes before tokenizer_config.json; several have names."""
    path = written(tmp_path, backend, USUAL)
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert read_directory(path).render_chat(TALK) == "hi, Größe!"
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    found = read_directory(path)
    assert found.render_chat(TALK) == "hi, Größe!"
    assert found.render_chat(TALK, {"tools": [1]}) == "[1]"
    (path / "chat_template.jinja").unlink()
    listed = [{"name": "default", "template": "{{ 1 }}"}, {"name": "other"}, {"name": []}, 3]
    written(tmp_path, backend, USUAL | {"chat_template": listed})
    assert read_directory(path).render_chat(TALK) == "1"


def test_a_text_is_not_cut(tmp_path: Path, backend: str) -> None:
    """Whatever length tokenizer.json was saved with."""
    said = json.loads(backend)
    said["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path = written(tmp_path, json.dumps(said), USUAL)
    assert len(read_directory(path)(TEXTS[4])["input_ids"]) > 4


def test_what_tokenizers_cannot_read_is_said(tmp_path: Path, backend: str) -> None:
    """Each with the file."""
    with pytest.raises(StoreError, match=r"has no tokenizer\.json"):
        read_directory(tmp_path)
    pieces = json.loads(backend)
    pieces["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    with pytest.raises(StoreError, match="cleans spaces up"):
        read_directory(
            written(tmp_path, json.dumps(pieces), {"clean_up_tokenization_spaces": True})
        )
    for text in ("", "{", '{"version": "1.0"}', "\ud800"):
        (tmp_path / "tokenizer_config.json").write_text("{}")
        (tmp_path / "tokenizer.json").write_bytes(text.encode(errors="surrogatepass"))
        with pytest.raises(FormatError, match=r"tokenizer\.json"):
            read_directory(tmp_path)
    with pytest.raises(FormatError, match="lone surrogate"):
        read_directory(written(tmp_path, backend, {"chat_template": "\ud800"}))
    with pytest.raises(FormatError, match="cannot be used"):
        read_directory(written(tmp_path, backend, {"bos_token": "\ud800"}))
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(FormatError, match=r"tokenizer_config\.json"):
        read_directory(tmp_path)
