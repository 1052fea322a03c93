"""GGUF files that no recipe without torch says: those that torch computes, and broken ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache.decoding.files.known import NoTextModelError
from moecache.decoding.files.opening import open_text_model
from moecache.decoding.files.recipes import FileModel
from moecache.errors import ConfigError
from moecache.stores import open_store
from tests.helpers.gguf_members import MODELS
from tests.helpers.gguf_models import write_gguf
from tests.helpers.gguf_texts import parts_of
from tests.helpers.pages import num_descriptors

GEMMA = "gemma4 keys as values"
pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def check_refused(path: Path, name: str, change: dict[str, Any], reason: str) -> None:
    """Write a file whose metadata or tensors are changed, and open it."""
    _, metadata, tensors = parts_of(name)
    for key, value in change.items():
        if value is None:
            del tensors[key]
        elif isinstance(value, np.ndarray):
            tensors[key] = value
        else:
            metadata[key] = value
    path = path / "model.gguf"
    write_gguf(path, metadata, tensors)
    before = num_descriptors()
    with pytest.raises(NoTextModelError, match=reason):
        open_text_model(path)
    assert num_descriptors() == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"blk.1.attn_q.weight": None}, "no tensor blk.1.attn_q.weight"),
        ({"blk.1.attn_k_norm.weight": None}, "no tensor blk.1.attn_k_norm"),
        ({"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}, "attn_sinks.weight is none"),
        ({"blk.0.attn_q.weight": np.zeros((32, 48), np.float32)}, "attn_q.weight is"),
        ({"output_norm.weight": None}, "no tensor output_norm"),
        (
            {f"blk.1.ffn_{part}_exps.weight": None for part in ("gate", "up", "down")},
            "blk.1 has a router or experts, and not both",
        ),
    ],
)
def test_what_no_recipe_says_runs_with_torch(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    """With the reason; all files are closed."""
    check_refused(tmp_path, "qwen3moe", change, reason)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gpt-oss", {"blk.1.ffn_gate_exps.bias": None}, "blk.1's experts have gate_up, down"),
        ("gpt-oss", {"blk.0.ffn_down_exps.bias": None}, "blk.0's experts have gate_up, down"),
        ("gpt-oss", {"blk.1.ffn_gate_inp.bias": None}, "no tensor blk.1.ffn_gate_inp.bias"),
        ("gpt-oss", {"blk.1.attn_output.bias": None}, "no tensor blk.1.attn_output.bias"),
        (
            "gpt-oss",
            {"blk.1.attn_sinks.weight": np.zeros((4, 1), np.float32)},
            "attn_sinks.weight is",
        ),
        ("llama", {"blk.0.attn_q.bias": np.zeros(32, np.float32)}, "attn_q.bias is none"),
        ("llama", {"blk.0.ffn_gate_inp.weight": None}, "no tensor blk.0.ffn_gate_inp"),
    ],
)
def test_what_a_family_has_is_there_and_nothing_else(
    tmp_path: Path, name: str, change: dict[str, Any], reason: str
) -> None:
    """A tensor that is missing is no zeros, and one too many is not added somewhere."""
    check_refused(tmp_path, name, change, reason)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("deepseek2 v3", {"deepseek2.expert_used_count": 9}, "9 experts of 2 groups of 4"),
        ("dots1", {"dots1.expert_group_count": 8}, "3 experts of 1 groups of 1"),
        ("deepseek2 v3", {"blk.1.attn_v_b.weight": None}, "no tensor blk.1.attn_v_b"),
        ("deepseek2 v3", {"blk.1.attn_kv_a_norm.weight": None}, "no tensor blk.1.attn_kv_a_norm"),
        ("ernie4_5-moe", {"blk.0.attn_q.bias": np.zeros(32, np.float32)}, "attn_q.bias is none"),
        ("qwen35moe", {"blk.0.ssm_dt.bias": None}, "no tensor blk.0.ssm_dt.bias"),
        ("qwen35moe", {"blk.0.ssm_conv1d.weight": np.zeros((64, 4), np.float32)}, "ssm_conv1d"),
        ("gemma4", {}, "have inputs of their own"),
        ("nemotron_h_moe", {"blk.0.ssm_d": None}, "no tensor blk.0.ssm_d"),
        ("nemotron_h_moe", {"blk.0.ssm_norm.weight": np.ones(64, np.float32)}, "ssm_norm.weight"),
        ("nemotron_h_moe", {"blk.1.ffn_up_shexp.weight": None}, "no tensor blk.1.ffn_up_shexp"),
        (
            "nemotron_h_moe latent",
            {"blk.1.ffn_latent_up.weight": None},
            "no tensor blk.1.ffn_latent_up",
        ),
        ("nemotron_h_moe", {"blk.1.exp_probs_b.bias": None}, "no tensor blk.1.exp_probs_b.bias"),
        ("granitehybrid", {"blk.0.ssm_dt.bias": None}, "no tensor blk.0.ssm_dt.bias"),
        ("granitehybrid", {"blk.2.ssm_conv1d.bias": None}, "no tensor blk.2.ssm_conv1d.bias"),
        ("lfm2moe", {"blk.1.exp_probs_b.bias": None}, "no tensor blk.1.exp_probs_b.bias"),
        (
            "lfm2moe",
            {"blk.0.shortconv.in_proj.bias": np.zeros(96, np.float32)},
            "no tensor blk.0.shortconv.conv.bias",
        ),
        (
            "lfm2moe",
            {
                "lfm2moe.shortconv.l_cache": 9,
                "blk.0.shortconv.conv.weight": np.ones((32, 9), np.float32),
            },
            "a convolution over 9 rows run with torch",
        ),
        ("lfm2moe", {"blk.0.shortconv.conv.weight": None}, "no tensor blk.0.shortconv.conv"),
        ("lfm2moe", {"blk.2.shortconv.in_proj.weight": np.zeros((64, 32), np.float32)}, "in_proj"),
        ("exaone-moe", {"blk.1.attn_k_norm.weight": None}, "no tensor blk.1.attn_k_norm"),
        ("exaone-moe", {"blk.2.ffn_up_shexp.weight": None}, "no tensor blk.2.ffn_up_shexp"),
        ("exaone-moe", {"exaone-moe.attention.sliding_window": 1.5}, "window of 1 positions"),
        ("afmoe", {"blk.1.attn_gate.weight": None}, "no tensor blk.1.attn_gate"),
        ("afmoe", {"blk.1.post_ffw_norm.weight": None}, "no tensor blk.1.post_ffw_norm"),
        (
            "afmoe",
            {"blk.3.attn_gate.weight": np.zeros((32, 32), np.float32)},
            "attn_gate.weight is",
        ),
        ("afmoe", {"blk.0.attn_q.bias": np.zeros(64, np.float32)}, "no tensor blk.0.attn_k.bias"),
        ("phimoe", {"blk.1.ffn_norm.bias": None}, "no tensor blk.1.ffn_norm.bias"),
        ("phimoe", {"output_norm.bias": None}, "no tensor output_norm.bias"),
        ("phimoe", {"output.weight": None}, "tensor output.bias is none of this model's"),
        ("llama4", {"llama4.expert_used_count": 2}, "inputs of 2 experts of a token have scales"),
        ("llama4", {"blk.1.ffn_up_shexp.weight": None}, "no tensor blk.1.ffn_up_shexp"),
        ("llama4", {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}, "attn_q_norm.weight is"),
        (GEMMA, {"blk.0.ffn_gate_inp.scale": None}, "no tensor blk.0.ffn_gate_inp.scale"),
        (GEMMA, {"rope_freqs.weight": np.ones(8, np.float32)}, "has other factors"),
    ],
)
def test_new_families_have_their_own_tensors_and_nothing_else(
    tmp_path: Path, name: str, change: dict[str, Any], reason: str
) -> None:
    """Latents, states, two kinds of layers; a choice that is undefined."""
    check_refused(tmp_path, name, change, reason)


@pytest.mark.parametrize("name", ["exp_probs_b.bias", "ffn_gate_inp.weight"])
def test_what_scores_experts_is_numbers(tmp_path: Path, name: str) -> None:
    """Torch would choose an expert whose score is none."""
    _, metadata, tensors = parts_of("deepseek2 v3")
    tensors[f"blk.1.{name}"][3] = np.nan
    write_gguf(tmp_path / "m.gguf", metadata, tensors)
    with pytest.raises(ConfigError, match=f"{name} has values that are no numbers"):
        open_text_model(tmp_path / "m.gguf")


def test_factors_of_a_rotation_are_those_of_the_family(tmp_path: Path) -> None:
    """As llama.cpp's converter writes them: a quarter of the pairs is turned."""
    _, metadata, tensors = parts_of(GEMMA)
    factors = np.array([1, 1, *[1e30] * 6], np.float32)
    write_gguf(tmp_path / "m.gguf", metadata, tensors | {"rope_freqs.weight": factors})
    open_text_model(tmp_path / "m.gguf").close()


@pytest.mark.parametrize("factor", [-1.0, 0.0, 1e-30, np.inf, np.nan])
@pytest.mark.parametrize("part", ["short", "long"])
def test_factors_of_waves_are_numbers_above_zero(tmp_path: Path, part: str, factor: float) -> None:
    """None makes an angle that is no number."""
    _, metadata, tensors = parts_of("phimoe")
    tensors[f"rope_factors_{part}.weight"][2] = factor
    write_gguf(tmp_path / "m.gguf", metadata, tensors)
    with pytest.raises(ConfigError, match=f"rope_factors_{part}.weight"):
        open_text_model(tmp_path / "m.gguf")


def test_a_text_has_no_more_positions_than_its_factors_are_for(tmp_path: Path) -> None:
    """In a longer one all positions would have other angles, the first ones, too."""
    _, metadata, tensors = parts_of("phimoe")
    for num_positions in (256, 1024):
        write_gguf(tmp_path / "m.gguf", metadata, tensors)
        with open_text_model(tmp_path / "m.gguf", "50%") as model:
            assert model.context == num_positions
        tensors["rope_factors_long.weight"] = tensors["rope_factors_short.weight"]


@pytest.mark.parametrize("window", [0.5, 1.0, 2.0**63])
def test_a_window_is_some_positions(tmp_path: Path, window: float) -> None:
    """Neither none, nor more than there are."""
    _, metadata, tensors = parts_of("gpt-oss")
    metadata["gpt-oss.attention.sliding_window"] = window
    write_gguf(tmp_path / "m.gguf", metadata, tensors)
    with pytest.raises(ConfigError, match="window"):
        open_text_model(tmp_path / "m.gguf")


def test_other_architectures_run_with_torch(tmp_path: Path) -> None:
    """Theirs have recipes of modules, or none."""
    known = MODELS["jamba"]
    model = known.build()
    write_gguf(tmp_path / "m.gguf", known.metadata(model.config), known.tensors(model))
    with (
        open_store(tmp_path / "m.gguf") as store,
        pytest.raises(NoTextModelError, match="architecture 'jamba' runs with torch"),
    ):
        FileModel(store)
