"""Models of GGUF files that change while they are loaded, or run."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moecache import cli
from moecache.errors import StoreError
from tests.helpers.gguf_members import MODELS
from tests.helpers.gguf_models import write_gguf
from tests.helpers.gguf_tokenizers import byte_level

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytestmark = pytest.mark.usefixtures("one_thread")

Change = Callable[[Path], object]


def replace(path: Path) -> None:
    """Put another file in its place, with the same bytes."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


def cut(path: Path) -> None:
    """Cut the file short."""
    os.truncate(path, path.stat().st_size // 2)


def write(path: Path) -> None:
    """Write to the file."""
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


CHANGES = {
    replace: "replaced by another file",
    cut: "changed from .* to .* bytes",
    write: "written to",
    Path.unlink: "removed",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a small model's file, with a vocabulary."""
    said = byte_level("qwen2")
    size = {"vocab_size": len(said["tokenizer.ggml.tokens"])}
    known = dataclasses.replace(
        MODELS["qwen3moe"], settings={**MODELS["qwen3moe"].settings, **size}
    )
    original, found = known.build(), tmp_path / "model.gguf"
    write_gguf(found, known.metadata(original.config) | said, known.tensors(original))
    return found


def load(path: Path, **options: Any) -> Any:
    """Return a file's model with half of its experts in slots."""
    from moecache.integrations import transformers

    return transformers.load(path, "50%", **options)


def logits(model: Any) -> Any:
    """Return a model's logits of tokens that need nearly all experts."""
    with torch.inference_mode():
        return model(input_ids=torch.arange(64)[None] + 3).logits


@pytest.mark.parametrize("when", ["after its configuration", "after its trunk"])
@pytest.mark.parametrize(("change", "said"), CHANGES.items(), ids=lambda one: str(one)[:20])
def test_a_file_that_changes_while_it_is_loaded_is_no_model(
    path: Path, change: Change, said: str, when: str
) -> None:
    """Half of one file and half of another would compute nonsense."""

    class Late:
        @staticmethod
        def from_pretrained(*args: Any, **options: Any) -> Any:
            if when == "after its configuration":
                change(path)
            model = transformers.Qwen3MoeForCausalLM.from_pretrained(*args, **options)
            if when == "after its trunk":
                change(path)
            return model

    with pytest.raises(StoreError, match=rf"model\.gguf: was {said} while .* load it again"):
        load(path, model_class=Late)


def test_a_file_that_is_replaced_after_its_tokenizer_was_read_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens of one file mean nothing to the model of another."""
    from moecache.integrations.transformers import generation

    encode = generation.encode

    def late(*args: Any, **options: Any) -> Any:
        replace(path)
        return encode(*args, **options)

    monkeypatch.setattr(generation, "encode", late)
    assert cli.main(["generate", str(path), "while", "--memory", "50%"]) == 1
    assert "was replaced by another file" in capsys.readouterr().err


@pytest.mark.parametrize("read", ["buffered", "direct", "mmap"])
def test_a_file_that_is_replaced_while_the_model_runs_stays_the_one_it_was(
    path: Path, read: str
) -> None:
    """It is still open."""
    model = load(path, read=read)
    with model.moecache:
        wanted = logits(model)
        path.with_name("other").write_bytes(b"short")
        os.replace(path.with_name("other"), path)
        assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("read", ["buffered", "direct", "mmap"])
def test_a_file_that_is_cut_short_while_the_model_runs_is_an_error(path: Path, read: str) -> None:
    """Not the end of the process, though a page of the mapping is gone."""
    model = load(path, read=read)
    with model.moecache:
        logits(model)
        os.truncate(path, 4096)
        with pytest.raises(StoreError, match=r"model\.gguf: expert .* the file has only 4096 now"):
            logits(model)
