"""Checkpoints as they are published, whose configurations say it otherwise, without torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache.decoding.files.known import NoTextModelError
from moecache.decoding.files.opening import open_text_model
from tests.helpers.checkpoint_texts import (
    ALL,
    SHARP,
    YARN,
    assert_near,
    change_config,
    made,
    rewritten,
    saved,
)
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.offloading import load_whole

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]


@pytest.mark.usefixtures("exact_caches")
def test_configurations_of_older_releases_say_the_same(tmp_path: Path) -> None:
    """Rotations have keys of their own, and layers for further tokens are not run."""
    family = made("deepseek_v3", rope_parameters=YARN)
    path = write_checkpoint(family, tmp_path / "model", "float32")
    model = load_whole(family, path)

    def older(config: dict[str, Any]) -> None:
        said = config.pop("rope_parameters")
        config["rope_theta"] = said.pop("rope_theta")
        config["rope_scaling"] = {"type": said.pop("rope_type"), **said}
        config.update(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, ep_size=1)

    change_config(path, older)
    last = model.config.num_hidden_layers - 1

    def add(tensors: dict[str, np.ndarray]) -> None:
        for name, value in list(tensors.items()):
            if f"layers.{last}." in name:
                further = name.replace(f"layers.{last}.", f"layers.{last + 1}.")
                tensors[further] = 2 * value
        tensors[f"model.layers.{last + 1}.eh_proj.weight"] = np.ones((48, 96), np.float32)
        tensors["model.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors["model.mtp_block.0.norm.weight"] = np.ones(4, np.float32)

    rewritten(path, add)
    assert_near(path, model)


@pytest.mark.usefixtures("exact_caches")
def test_minimax_says_what_is_turned_in_numbers(tmp_path: Path) -> None:
    """As released: `rotary_dim`, which transformers makes a share."""
    family = FAMILIES["minimax_m2"]
    path = write_checkpoint(family, tmp_path / "model", "float32")
    change_config(path, lambda config: config.update(rotary_dim=8))
    model = load_whole(family, path)
    assert model.config.rope_parameters["partial_rotary_factor"] == 0.5
    assert_near(path, model)


@pytest.mark.usefixtures("exact_caches")
def test_hunyuans_rotation_is_stretched_once(tmp_path: Path) -> None:
    """Its checkpoints call it "dynamic"."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
    family = made("hunyuan_v1_moe", rope_parameters=rope)
    path = write_checkpoint(family, tmp_path / "model", "float32")
    assert_near(path, load_whole(family, path))


@pytest.mark.usefixtures("exact_caches")
def test_only_latents_are_sharpened(tmp_path: Path) -> None:
    """`mscale_all_dim` multiplies products of DeepSeek's queries and keys, and no others."""
    family = made("qwen3_moe", rope_parameters=SHARP)
    path = write_checkpoint(family, tmp_path / "model", "float32")
    assert_near(path, load_whole(family, path))


@pytest.mark.usefixtures("exact_caches")
def test_kimi_k2_is_deepseek_v3(tmp_path: Path) -> None:
    """By another name."""
    family = FAMILIES["deepseek_v3"]
    path = write_checkpoint(family, tmp_path / "model", "float32")
    model = load_whole(family, path)
    change_config(path, lambda config: config.update(model_type="kimi_k2"))
    assert_near(path, model)


@pytest.mark.usefixtures("exact_caches")
def test_mimo_is_read_as_published(tmp_path: Path) -> None:
    """Its epsilon has a name of its own, and rotations say what transformers has."""
    family = made("mimo_v2_flash", rope_parameters=None)
    path = write_checkpoint(family, tmp_path / "model", "float32")
    model = load_whole(family, path)

    def published(config: dict[str, Any]) -> None:
        del config["rope_parameters"]
        config["layernorm_epsilon"] = config.pop("rms_norm_eps")
        config.update(rope_theta=5000000, swa_rope_theta=10000, partial_rotary_factor=0.334)
        config.update(rope_scaling=None, scoring_func="sigmoid", topk_method="noaux_tc")

    change_config(path, published)
    assert_near(path, model)


@pytest.mark.usefixtures("exact_caches")
def test_kimi_linear_is_read_as_published(tmp_path: Path) -> None:
    """Layers go by numbers from 1 on, and a dense one is none of experts."""
    family = ALL["kimi_linear"]
    path = write_checkpoint(family, tmp_path / "model", "float32")
    model = load_whole(family, path)

    def published(config: dict[str, Any]) -> None:
        kinds = config.pop("layer_types")
        linear = {"head_dim": config.pop("linear_head_dim"), "num_heads": 2}
        linear["short_conv_kernel_size"] = config.pop("linear_conv_kernel_dim")
        for key, kind in (("kda_layers", "linear"), ("full_attn_layers", "full")):
            linear[key] = [i for i, one in enumerate(kinds, 1) if one == f"{kind}_attention"]
        del config["mlp_layer_types"], config["linear_num_heads"]
        config.update(linear_attn_config=linear, first_k_dense_replace=1, mla_use_nope=True)
        config.update(moe_router_activation_func="sigmoid", moe_layer_freq=1, head_dim=72)

    change_config(path, published)

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.replace("0.block_sparse_moe.", "0.mlp.")] = tensors.pop(name)

    rewritten(path, rename)
    assert_near(path, model)


@pytest.mark.usefixtures("exact_caches")
def test_a_norm_of_a_dense_layer_may_have_no_use(tmp_path: Path) -> None:
    """A.X-K1 is published with norms of all layers' feed-forwards, and has those of experts."""
    path = write_checkpoint(made("axk1"), tmp_path / "model", "float32")
    model = load_whole(made("axk1"), path)

    def add(tensors: dict[str, np.ndarray]) -> None:
        norms = [name for name in tensors if name.endswith("post_mlp_layernorm.weight")]
        assert len(norms) == 2
        tensors["model.layers.0.post_mlp_layernorm.weight"] = 2 * tensors[norms[0]]

    rewritten(path, add)
    assert_near(path, model)


@pytest.mark.parametrize(
    ("name", "gone", "message"),
    [
        ("bailing_hybrid", "0.attention.f_proj", r"no tensor blk\.0\.ssm_f_a\.weight"),
        ("kimi_linear", "0.self_attn.g_b_proj", r"no tensor blk\.0\.ssm_g_b\.weight"),
    ],
)
def test_a_product_is_in_the_place_of_no_other(
    tmp_path: Path, name: str, gone: str, message: str
) -> None:
    """Though it has the shape of the one that is missing."""
    family = made(name, **({} if name == "bailing_hybrid" else {"linear_num_heads": 1}))
    path = write_checkpoint(family, tmp_path / "model", "float32")
    rewritten(path, lambda tensors: tensors.pop(f"model.layers.{gone}.weight"))
    with pytest.raises(NoTextModelError, match=message):
        open_text_model(path, "50%")


@pytest.mark.usefixtures("exact_caches")
def test_a_part_of_a_model_has_its_head_beside_it(tmp_path: Path) -> None:
    """Whatever names of the text's part begin with."""
    family = FAMILIES["qwen3_moe"]
    path = write_checkpoint(family, tmp_path / "model", "float32")
    model = load_whole(family, path)

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_tower.embed_tokens.weight"] = np.ones((4, 4), np.float32)

    rewritten(path, rename)
    assert_near(path, model)


@pytest.mark.usefixtures("exact_caches")
def test_a_head_that_is_stored_is_the_head(tmp_path: Path) -> None:
    """Even if config.json says that it is the embedding, as transformers has it."""
    family = FAMILIES["qwen3_moe"]
    path = write_checkpoint(family, tmp_path / "model", "float32")
    change_config(path, lambda config: config.update(tie_word_embeddings=True))
    assert_near(path, load_whole(family, path))


def without(*keys: str, **others: Any) -> Callable[[dict[str, Any]], None]:
    """Return what takes keys away from a configuration, and writes others."""

    def change(config: dict[str, Any]) -> None:
        for key in keys:
            del config[key]
        config.update(others)

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("afmoe", without("layer_types")),
        ("dots1", without("layer_types")),
        ("exaone-moe", without("first_k_dense_replace")),
        ("hy_v3", without("mlp_layer_types")),
        ("granitehybrid", without(layer_types=["mamba", "attention", "mamba"])),
        (
            "nemotron_h_moe",
            without("layers_block_type", hybrid_override_pattern="ME*E", num_hidden_layers=4),
        ),
        ("nemotron_h_moe", without(layers_block_type=["mamba", "moe", "attention", "moe"])),
    ],
    ids=["windows", "no windows", "dense first", "one dense", "mamba", "letters", "names"],
)
@pytest.mark.usefixtures("exact_caches")
def test_published_configurations_say_it_otherwise(
    tmp_path: Path, name: str, change: Callable[[dict[str, Any]], None]
) -> None:
    """By other keys, or none where all of them have the same."""
    model = saved(name, tmp_path, torch.float32)
    change_config(tmp_path, change)
    assert_near(tmp_path, model)
