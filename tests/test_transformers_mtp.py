"""Layers that guess further tokens (MTP): named, not run, in no slot, and not for `generate`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache import cli
from moecache.errors import ConfigError
from moecache.stores._mtp import mtp_layers
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.gguf_members import MODELS
from tests.helpers.gguf_models import build_from, write_gguf
from tests.helpers.offloading import generated, load_whole

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

FAMILY = FAMILIES["glm4_moe"]
PARTS = ("gate", "up", "down")


def load(path: Path) -> Any:
    """Return a model with a quarter of its experts in slots."""
    from moecache.integrations import transformers

    return transformers.load(path, "25%", compute="torch", dtype=torch.float32)


def add_mtp_layer(path: Path, prefix: str) -> None:
    """Give a checkpoint a layer that guesses further tokens: the last one, and what joins."""
    from safetensors.torch import load_file, save_file

    shard = path / "model.safetensors"
    tensors = load_file(shard)
    last = "model.layers.2."
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith(last)}
    further = {f"{prefix}{name.removeprefix(last)}": t.clone() for name, t in layer.items()}
    further[f"{prefix}eh_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors | further, shard, metadata={"format": "pt"})


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `moecache inspect` says, words apart by one space."""
    assert cli.main(["inspect", str(path), "--memory", "100%"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_they_are_known_by_the_names_of_their_tensors() -> None:
    """As Qwen, DeepSeek, GLM, MiMo, Hunyuan and converters of GGUF call them, and no others."""
    layers = ("mtp.0", "mtp.layers.0", "mtp.layers.1", "model.mtp.layers.0", "model.mtp_layers.2")
    layers += ("model.language_model.mtp.layers.0",)
    own = {f"{layer}.mlp.experts.0.up_proj.weight": 2 for layer in layers}
    assert mtp_layers(own) == dict.fromkeys(layers, 2)
    joined = {"model.layers.61.eh_proj.weight": 1, "model.layers.61.mlp.gate.weight": 2}
    joined |= {"blk.46.nextn.eh_proj.weight": 4, "blk.46.ffn_up_exps.weight": 8, "blk.4.x": 16}
    joined |= {"model.layers.6.mlp.gate.weight": 32, "model.layers.610.mlp.gate.weight": 64}
    assert mtp_layers(joined) == {"model.layers.61": 3, "blk.46": 12}
    assert mtp_layers({"model.layers.0.mlp.gate.weight": 1, "mtp.fc.weight": 1, "": 1}) == {}


def test_a_layer_of_safetensors_that_guesses_is_named_and_in_no_slot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output is that of the model without it; so is the plan."""
    write_checkpoint(FAMILY, tmp_path, "float32")
    alone = inspected(tmp_path, capsys)
    wanted = generated(load_whole(FAMILY, tmp_path, "float32"))
    add_mtp_layer(tmp_path, "model.layers.3.")

    shown = inspected(tmp_path, capsys)
    assert "2 MoE layers x 8 experts" in shown
    assert "MTP" not in alone
    assert "MTP: model.layers.3 (" in shown
    assert "guess further tokens: not run, and not in slots" in shown
    assert "16 of 16 experts" in alone
    assert "16 of 16 experts" in shown
    model = load(tmp_path)
    with model.moecache as offload:
        assert offload.runtime.layout.num_layers == 2
        with pytest.raises(ConfigError, match=r"MTP layers with all of their experts.*prompt_look"):
            model.generate(torch.arange(3, 11)[None], use_mtp=True, max_new_tokens=4)
        assert torch.equal(generated(model), wanted)
        assert torch.equal(generated(model, prompt_lookup_num_tokens=3), wanted)
        offload.detach()
    assert "_get_candidate_generator" not in vars(model)


def test_a_block_of_a_gguf_that_guesses_is_named_and_in_no_slot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has experts, as the others have."""
    pytest.importorskip("gguf")
    member = MODELS["qwen3moe"]
    model = member.build()
    metadata, tensors = member.metadata(model.config), member.tensors(model)
    prompt = torch.arange(3, 20)[None]
    with torch.inference_mode():
        wanted = build_from(metadata, tensors)(prompt).logits
    layer = {name: values for name, values in tensors.items() if name.startswith("blk.1.")}
    further = {name.replace("blk.1.", "blk.2."): values for name, values in layer.items()}
    further["blk.2.nextn.eh_proj.weight"] = np.zeros((48, 96), np.float32)
    said = {"qwen3moe.block_count": 3, "qwen3moe.nextn_predict_layers": 1}
    write_gguf(tmp_path / "m.gguf", metadata | said, tensors | further)

    shown = inspected(tmp_path / "m.gguf", capsys)
    assert "2 MoE layers x 16 experts" in shown
    assert "MTP: blk.2 (" in shown
    assert "32 of 32 experts" in shown
    assert cli.main(["warm", str(tmp_path / "m.gguf"), "--status", "--experts-only"]) == 0
    assert "blk.2" not in capsys.readouterr().out
    found = load(tmp_path / "m.gguf")
    with found.moecache as offload, torch.inference_mode():
        assert offload.runtime.layout.layer_names == ("blk.0", "blk.1")
        assert torch.equal(found(prompt).logits, wanted)


def test_a_file_of_nothing_but_such_layers_is_shown_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As drafts are published: its experts are all there are."""
    pytest.importorskip("gguf")
    experts = {f"blk.2.ffn_{part}_exps.weight": np.zeros((4, 32, 32)) for part in PARTS}
    said = {"general.architecture": "glm4moe", "glm4moe.expert_used_count": 2}
    tensors = {**experts, "blk.2.nextn.eh_proj.weight": np.zeros((32, 64))}
    write_gguf(tmp_path / "m.gguf", said, tensors)

    assert "1 MoE layers x 4 experts" in inspected(tmp_path / "m.gguf", capsys)
