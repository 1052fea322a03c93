"""Models of GGUF files as transformers builds them: configuration and names."""

from pathlib import Path

import pytest

from tests.helpers.gguf_models import MODELS, build_from, read_gguf, write_gguf

pytest.importorskip("transformers")
pytest.importorskip("gguf")

import torch

TOKENS = [[3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19]]


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor(TOKENS)).logits


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_a_file_has_the_logits_of_the_one_that_was_written(
    name: str, tmp_path: Path
) -> None:
    original = MODELS[name].build()
    path = tmp_path / "model.gguf"
    write_gguf(path, MODELS[name].metadata(original.config), MODELS[name].tensors(original))

    found = build_from(*read_gguf(path))

    assert torch.equal(_logits(found), _logits(original))
