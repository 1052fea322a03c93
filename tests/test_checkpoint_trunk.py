"""The memory that a trunk takes is the memory that a plan leaves for it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from moecache.decoding.files.recipes import FileModel
from moecache.decoding.files.trunk import Trunk
from moecache.decoding.memory import Memory
from moecache.kernels import SlotKernel
from moecache.stores import open_store
from tests.helpers import quantized
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.gguf_texts import write_text_file

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def plain(path: Path) -> Path:
    """Return a checkpoint in bfloat16."""
    return write_checkpoint(FAMILIES["qwen3_moe"], path / "model", "bfloat16")


def tied(path: Path) -> Path:
    """Return one whose head is the embedding."""
    return write_checkpoint(FAMILIES["lfm2_moe"], path / "model", "bfloat16")


def fp8(path: Path) -> Path:
    """Return one in FP8."""
    return quantized.write_quantized(FAMILIES["qwen3_moe"], quantized.fp8(), path)[0]


def latents(path: Path) -> Path:
    """Return one with latents, and a layer that guesses further tokens."""
    from safetensors.numpy import load_file, save_file

    path = write_checkpoint(FAMILIES["deepseek_v3"], path / "model", "bfloat16")
    tensors = load_file(path / "model.safetensors")
    for name, value in list(tensors.items()):
        if "layers.2." in name:
            tensors[name.replace("layers.2.", "layers.3.")] = value
    tensors["model.layers.3.eh_proj.weight"] = np.ones((48, 96), np.float32)
    save_file(tensors, path / "model.safetensors")
    return path


def gguf(path: Path) -> Path:
    """Return a quantized GGUF file."""
    return write_text_file(path / "model.gguf")


@pytest.mark.parametrize("make", [plain, tied, fp8, latents, gguf])
def test_a_trunk_takes_what_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path]
) -> None:
    """And its progress ends."""
    taken: list[int] = []
    lasting = Memory.lasting

    def counted(memory: Memory, nbytes: int) -> np.ndarray:
        taken.append(nbytes)
        return lasting(memory, nbytes)

    monkeypatch.setattr(Memory, "lasting", counted)
    with open_store(make(tmp_path)) as store:
        said = FileModel(store)
        trunk = Trunk(said.tensors, said.names())
        kernel = cast("SlotKernel", SimpleNamespace(experts=None))
        said.recipe(trunk, lambda _: (0, kernel))
        trunk.embed()
        trunk.close()
        assert sum(taken) == said.trunk_bytes
        assert trunk.progress() == (said.trunk_bytes, said.trunk_bytes)
