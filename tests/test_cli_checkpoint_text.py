"""`moecache generate`, `chat` and `serve` of a checkpoint of safetensors, without torch."""

import argparse
import importlib.util
import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache import cli
from moecache.commands import without_torch
from moecache.decoding.files.continuing import continue_text, open_prefixes, sampling_of
from moecache.decoding.files.opening import open_text_model, read_tokenizer
from moecache.decoding.sampler import Sampler, Sampling
from moecache.decoding.streams import TokenTimes
from moecache.errors import MissingDependencyError
from moecache.stores import open_store
from tests.helpers import quantized
from tests.helpers.families import FAMILIES
from tests.helpers.gguf_tokenizers import byte_level
from tests.helpers.pages import run_child
from tests.helpers.serving import serving_file
from tests.helpers.without_torch import RUN, greedy_text

pytest.importorskip("tokenizers")
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
WIDE = {"vocab_size": 704, "max_position_embeddings": 512}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint in FP8 with a tokenizer."""
    from dataclasses import replace

    from moecache.decoding.gguf.tokenizer import read_tokenizer as read_metadata

    family = FAMILIES["qwen3_moe"]
    family = replace(family, settings={**family.settings, **WIDE})
    path, _ = quantized.write_quantized(family, quantized.fp8(), tmp_path_factory.mktemp("text"))
    backend = read_metadata(byte_level("qwen2")).backend_tokenizer
    (path / "tokenizer.json").write_text(backend.to_str())
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**said, "chat_template": TEMPLATE}))
    return path


def _arguments(*options: str) -> argparse.Namespace:
    given = argparse.Namespace(device="cpu", dtype=None, compute=None)
    for option in options:
        name, _, value = option.partition("=")
        setattr(given, name, value)
    return given


def test_generate_writes_a_text_without_torch(path: Path) -> None:
    """The model's own text, as a prompt and as a conversation."""
    with open_text_model(path, "50%") as model:
        tokenizer = read_tokenizer(model.runtime.store)  # type: ignore[arg-type]
        text = greedy_text(model, tokenizer, "hello, world", 8)
    options = ["--memory", "50%", "--max-new-tokens", "8"]
    done = run_child(RUN, "generate", path, "hello, world", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == text
    assert done.stderr.splitlines()[-1] == "False False"
    chat = run_child(RUN, "generate", path, "hello, world", "--chat", *options)
    assert chat.stdout == done.stdout


def test_what_torch_is_needed_for(path: Path) -> None:
    """Experts in numbers are torch's, unless kernels are asked for."""
    with open_store(path) as store:
        assert without_torch.why_torch(_arguments(), store, is_chat=True) == ""
        why = without_torch.why_torch(_arguments("compute=torch"), store, is_chat=False)
        assert why == "--compute is computed by torch's way"
    with open_store(path.parent / "plain") as store:
        why = without_torch.why_torch(_arguments(), store, is_chat=False)
        assert why == "torch multiplies its experts unless --compute is fast"
        why = without_torch.why_torch(_arguments("compute=fast"), store, is_chat=False)
        assert why == "it has no tokenizer.json"


def test_inspect_says_which_way(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the memory that the trunk takes there."""
    with open_text_model(path, "50%") as model:
        report = model.report()
    for checkpoint, wanted in (
        (path, f"without torch; the {report.splitlines()[0].replace('trunk', 'trunk takes')} then"),
        (path.parent / "plain", "with torch: it has no tokenizer.json"),
    ):
        cli.main(["inspect", str(checkpoint)])
        assert f"text of qwen3_moe: {wanted}\n" in capsys.readouterr().out


def test_without_torch_what_needs_it_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in numbers are multiplied here then."""
    find, missing = importlib.util.find_spec, {"torch"}

    def find_spec(name: str) -> object:
        return None if name in missing else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with (
        open_store(path.parent / "plain") as store,
        pytest.raises(MissingDependencyError, match=r"no tokenizer.json, and torch is not"),
    ):
        without_torch.why_torch(_arguments(), store, is_chat=False)
    with open_store(path) as store:
        assert without_torch.why_torch(_arguments(), store, is_chat=True) == ""
        missing.add("tokenizers")
        with pytest.raises(MissingDependencyError, match=r"pip install 'moecache\[text\]'"):
            without_torch.why_torch(_arguments(), store, is_chat=False)


def test_a_server_answers_without_torch(path: Path) -> None:
    """What `generate` writes behind the same conversation."""
    options = ["--memory", "50%", "--max-new-tokens", "8"]
    done = run_child(RUN, "generate", path, "hello, world", "--chat", *options)
    asked = {"messages": [{"role": "user", "content": "hello, world"}], "max_tokens": 8}
    with serving_file(path, "50%") as served:
        request = urllib.request.Request(
            f"{served.url}/v1/chat/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
    assert answer["choices"][0]["message"]["content"] == done.stdout.rstrip("\n")


def test_texts_are_drawn_as_the_files_say(path: Path) -> None:
    """As with torch; what is asked for goes first."""
    file = path / "generation_config.json"
    before = file.read_text()
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "eos_token_id": [5, 7]}))
    try:
        with open_text_model(path, "50%") as model:
            assert model.ends == {5, 7}
            assert sampling_of(model, 3) == Sampling(temperature=0.6, top_k=50, seed=3)
            assert sampling_of(model, temperature=0.0, top_p=0.5) == Sampling(0.0, 50, 0.5)
    finally:
        file.write_text(before)
    with open_text_model(path, "50%") as model:
        assert sampling_of(model) == Sampling(temperature=0.0, top_k=50)


def test_a_prompt_that_was_read_is_not_read_again(path: Path, tmp_path: Path) -> None:
    """Also by a later process; another config.json is another model."""

    def run(num: int) -> tuple[list[int], int]:
        with open_text_model(path, "50%") as model:
            prefixes = open_prefixes(model, 2**20, directory=tmp_path, max_disk_bytes=2**24)
            stream = TokenTimes()
            drawn = Sampler(Sampling(temperature=0.0))
            tokens = np.random.default_rng(0).integers(3, 700, num).tolist()
            continue_text(model, tokens, drawn, stream, max_new_tokens=4, prefixes=prefixes)
            prefixes.close()
            return list(stream.tokens), stream.cached_tokens

    first, known = run(300)
    assert known == 0
    again, known = run(300)
    assert again == first
    assert known > 128
    file = path / "config.json"
    before = file.read_text()
    config: dict[str, Any] = json.loads(before)
    config["rope_parameters"]["rope_theta"] = 5000.0
    file.write_text(json.dumps(config))
    try:
        other, known = run(300)
    finally:
        file.write_text(before)
    assert known == 0
    assert other != first
