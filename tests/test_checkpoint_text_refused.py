"""Checkpoints that no recipe without torch says: those that torch computes, and broken ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache.decoding.files.known import NoTextModelError
from moecache.decoding.files.opening import open_text_model
from moecache.decoding.files.recipes import FileModel
from moecache.errors import MoeCacheError
from moecache.stores import open_store
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.more_families import MORE_FAMILIES
from tests.helpers.pages import num_descriptors

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(FAMILIES["qwen3_moe"], tmp_path_factory.mktemp("model"), "float32")


def changed(path: Path, into: Path, change: dict[str, Any]) -> Path:
    """Return a checkpoint with another config.json."""
    shutil.copytree(path, into)
    config = json.loads((path / "config.json").read_text()) | change
    config = {key: value for key, value in config.items() if value != "gone"}
    (into / "config.json").write_text(json.dumps(config))
    return into


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "jamba"}, "model type 'jamba' runs with torch"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}}, "rope"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "x": 1}},
            "rope_parameters is",
        ),
        ({"architectures": ["Qwen3MoeForSequenceClassification"]}, "are torch's"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu' in config.json"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0, "factor": 2}}, "rope"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is not in config.json"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters is"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"norm_topk_prob": None}, "norm_topk_prob is None"),
        ({"rms_norm_eps": "gone"}, "rms_norm_eps is not in config.json"),
        ({"vocab_size": 127}, "token_embd.weight is"),
        ({"num_hidden_layers": 5}, "no tensor blk.4"),
        ({"num_attention_heads": 8}, "attn_q.weight is"),
        ({"num_attention_heads": 2**70}, "num_attention_heads is"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({"decoder_sparse_step": 1}, "blk.0"),
        ({"model_type": "ernie4_5_moe", "moe_norm_min": 0.9}, "moe_norm_min is 0.9"),
    ],
    ids=str,
)
def test_what_no_recipe_says_runs_with_torch(
    path: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    """With the reason; all files are closed."""
    other = changed(path, tmp_path / "other", change)
    before = num_descriptors()
    with pytest.raises(NoTextModelError, match=reason):
        open_text_model(other)
    assert num_descriptors() == before


LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
    **{f"{part}_factor": [1.0] * 4 for part in ("short", "long")},
    **{f"{part}_mscale": 1.0 for part in ("short", "long")},
}


@pytest.mark.parametrize(
    ("name", "said", "reason"),
    [
        ("llama4", {"no_rope_layers": [2, 1, 1, 1]}, r"no_rope_layers is \[2"),
        ("llama4", {"no_rope_layers": [1]}, r"no_rope_layers is \[1\]"),
        ("llama4", {"no_rope_layers": [], "layer_types": "gone", "moe_layers": [7]}, "moe_layers"),
        ("llama4", {"attention_chunk_size": None}, "attention_chunk_size is None"),
        ("llama4", {"attention_chunk_size": 7.9}, "attention_chunk_size is 7.9"),
        ("llama4", {"attn_temperature_tuning": "no"}, "attn_temperature_tuning is 'no'"),
        ("phimoe", {"rope_parameters": LONG | {"rope_type": "linear", "factor": 2.0}}, "rope_"),
        ("llama4", {"num_experts_per_tok": 2}, "inputs of 2 experts of a token have scales"),
        ("glm4_moe_lite", {"rope_interleave": False}, "rope_interleave is False"),
        (
            "glm4_moe_lite",
            {"first_k_dense_replace": 2, "mlp_layer_types": "gone"},
            "first_k_dense_replace is 2",
        ),
        ("mistral4", {"rope_interleave": False}, "rope_interleave is False"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope is False"),
        ("kimi_linear", {"linear_attn_config": 3}, "linear_attn_config is 3"),
        (
            "kimi_linear",
            {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [3]}},
            "linear_attn_config is",
        ),
        ("kimi_linear", {"linear_attn_config": {"head_dim": "8"}}, "head_dim is '8'"),
        ("kimi_linear", {"num_experts_per_token": None}, "num_experts_per_token is None"),
        ("bailing_hybrid", {"kda_lower_bound": 5.0}, "a bound of 5 run with torch"),
        ("bailing_hybrid", {"kda_lower_bound": -1e-46}, "a bound of -0 run with torch"),
        ("bailing_hybrid", {"num_expert_group": "gone"}, "num_expert_group is not in config.json"),
        ("bailing_hybrid", {"topk_group": "gone"}, "topk_group is not in config.json"),
        ("deepseek_v3", {"rope_interleave": None}, "rope_interleave is None"),
        ("mimo_v2_flash", {"sliding_window": 2.5}, "sliding_window is 2.5"),
        ("mimo_v2_flash", {"rope_parameters": "gone", "swa_rope_theta": 3e4}, "swa_rope_theta is"),
        ("kimi_linear", {"n_group": 4}, "n_group is 4"),
        ("bailing_hybrid", {"no_kda_lora": False}, "no_kda_lora is False"),
        ("granitemoe_swa", {"layer_rope_theta": [1e4]}, "layer_rope_theta is"),
        ("granitemoe_swa", {"layer_rope_theta": [1e4, 0.5, 0]}, "layer_rope_theta is"),
        ("granitemoe_swa", {"layer_rope_theta": [1e4, False, 0]}, "layer_rope_theta is"),
        ("laguna", {"gating": "per-layer"}, "gating is 'per-layer'"),
        ("laguna", {"num_attention_heads_per_layer": [4, 4]}, "heads_per_layer is"),
        ("laguna", {"num_attention_heads_per_layer": [4, 4, 0]}, "heads_per_layer is"),
        ("mimo_v2_flash", {"swa_head_dim": 8}, "swa_head_dim is 8"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 0, 0]}, "hybrid_layer_pattern is"),
        ("mimo_v2_flash", {"head_dim": 16}, "5 numbers of a head cannot be turned"),
        ("axk1", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        (
            "mistral4",
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "llama_4_scaling_beta": 0.1,
                }
            },
            "rope_parameters is",
        ),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace is 1"),
        ("mellum", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_param"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3"),
        ("phimoe", {"head_dim": 4}, "num_attention_heads is"),
        (
            "phimoe",
            {"rope_parameters": LONG | {"long_mscale": 2.0}, "max_position_embeddings": 65},
            "rope_parameters is",
        ),
        ("phimoe", {"rope_parameters": LONG | {"short_mscale": None}}, "rope_parameters is"),
        ("phimoe", {"rope_parameters": LONG | {"long_factor": [1.0]}}, "rope_parameters is"),
        ("phimoe", {"rope_parameters": LONG | {"long_factor": [1.0] * 3 + [0]}}, "rope_parameters"),
        (
            "phimoe",
            {"rope_parameters": LONG | {"original_max_position_embeddings": None}},
            "rope_parameters is",
        ),
    ],
    ids=str,
)
def test_what_families_say_otherwise_runs_with_torch(
    tmp_path: Path, name: str, said: dict[str, Any], reason: str
) -> None:
    """Lists of other lengths and values, and scales that depend on a text's length."""
    family = {**MORE_FAMILIES, **FAMILIES}[name]
    written = write_checkpoint(family, tmp_path / "model", "float32")
    with pytest.raises(NoTextModelError, match=reason):
        open_text_model(changed(written, tmp_path / "other", said))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size in generation_config.json"),
        ({"min_new_tokens": 1}, "min_new_tokens in generation_config.json"),
        ({"num_beams": 2}, "num_beams in generation_config.json"),
        ({"do_sample": True, "top_p": 2.0}, "top_p must be"),
        ({"eos_token_id": "x"}, "eos_token_id is x"),
    ],
)
def test_texts_that_transformers_alone_draws_run_with_torch(
    path: Path, tmp_path: Path, said: dict[str, Any], reason: str
) -> None:
    """A `Sampler` does less than generation_config.json may ask for."""
    other = changed(path, tmp_path / "other", {})
    (other / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(NoTextModelError, match=reason):
        open_text_model(other)


def test_what_asks_for_nothing_is_heeded(path: Path, tmp_path: Path) -> None:
    """Files name much that is as usual; an end may stand beside the text's part."""
    other = changed(path, tmp_path / "other", {"eos_token_id": 9})
    said = {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "max_length": 20}
    (other / "generation_config.json").write_text(json.dumps(said))
    config = json.loads((other / "config.json").read_text())
    del config["eos_token_id"]
    nested = {"text_config": config, "architectures": ["A"], "eos_token_id": 9}
    nested["architectures"] = ["QwenForConditionalGeneration"]
    (other / "config.json").write_text(json.dumps(nested))
    with open_store(other) as store:
        assert FileModel(store).ends == {9}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "there is no lm_head.weight"),
        (
            lambda tensors: tensors.update(
                {"model.layers.1.mlp.router.weight": tensors["model.layers.1.mlp.gate.weight"]}
            ),
            "are one tensor",
        ),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.more.weight": np.ones(3)}),
            "is none of this model's",
        ),
    ],
)
def test_other_tensors_are_not_guessed(
    path: Path, tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None], reason: str
) -> None:
    """A head that is missing is no embedding, unless config.json says so."""
    from safetensors.numpy import load_file, save_file

    other = changed(path, tmp_path / "other", {})
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(NoTextModelError, match=reason):
        open_text_model(other)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.sampled_from((2**31, 2**70, -1e30, 1e30, float("inf"), float("nan"))),
    st.floats(0, 2),
    st.text(max_size=4),
    st.lists(st.integers(0, 5), max_size=3),
    st.dictionaries(st.sampled_from(("rope_type", "type", "factor")), st.integers(0, 3)),
)


@given(st.data())
@settings(max_examples=150)
def test_a_damaged_configuration_is_read_or_refused(path: Path, data: st.DataObject) -> None:
    """Never another error, nor a model whose tensors are of other shapes."""
    config = json.loads((path / "config.json").read_text())
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[key] = data.draw(VALUES)
    with open_store(path) as store:
        store.config.clear()
        store.config.update(config)
        try:
            found = FileModel(store)
        except MoeCacheError:
            return
        said = found.facts
        assert said.num_layers == 4
        assert said.hidden_size == 48
        assert said.all_heads()[0].width * said.num_heads == 64


def test_a_router_of_no_numbers_is_refused(path: Path, tmp_path: Path) -> None:
    """An expert whose score is none would be chosen always by torch, and never here."""
    from safetensors.numpy import load_file, save_file

    other = changed(path, tmp_path / "other", {})
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.gate.weight"][3] = np.nan
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(MoeCacheError, match="no numbers"):
        open_text_model(other)
