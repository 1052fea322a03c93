"""Models of GGUF files as transformers builds them: configuration and names."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache.errors import ConfigError, MissingDependencyError
from tests.helpers.gguf_factored import llama3_factors
from tests.helpers.gguf_members import MODELS
from tests.helpers.gguf_models import Tensors, build_from, read_gguf, write_gguf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
ROPE_INIT_FUNCTIONS = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
gguf = pytest.importorskip("moecache.integrations.transformers.gguf")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

TOKENS = [[3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19]]
# A key and its value, or a tensor and its shape, and what the error says.
CHANGES = [
    ("general.architecture", "zebra", "architecture 'zebra' is not supported; supported are "),
    ("general.architecture", "grok", "'grok' is not supported: transformers has no model of it; "),
    ("general.architecture", "step35", "'step35' is not supported: transformers has no model of"),
    ("general.architecture", None, "general.architecture is None"),
    ("general.type", "adapter", "holds no model but 'adapter'"),
    ("qwen3moe.block_count", 10**6, "qwen3moe.block_count is 1000000, and no number from 1 to "),
    ("qwen3moe.block_count", 60, "qwen3moe.block_count is 60, but the file has 27 tensors"),
    ("qwen3moe.block_count", "2", "qwen3moe.block_count is '2', which is no number"),
    ("qwen3moe.block_count", 1, "tensor blk.1."),
    ("qwen3moe.attention.head_count", 0, "qwen3moe.attention.head_count is 0, and no number"),
    ("qwen3moe.attention.head_count", [4, 2], "attention.head_count is [4, 2]"),
    ("qwen3moe.attention.value_length", 8, "attention.value_length is 8, which transformers"),
    ("qwen3moe.attention.key_length", 8, "attention.value_length is 16"),
    ("qwen3moe.embedding_length", 32, "qwen3moe.embedding_length is 32, but rows of token_embd"),
    ("qwen3moe.rope.scaling.type", "longrope", "rope.scaling.type is 'longrope'"),
    ("qwen3moe.rope.dimension_count", 8, "rope.dimension_count is 8"),
    ("qwen3moe.attention.layer_norm_rms_epsilon", float("nan"), "is nan, which is no number"),
    ("qwen3moe.rope.freq_base", 0.0, "qwen3moe.rope.freq_base is 0.0, and not above 1.0"),
    ("qwen3moe.attention.layer_norm_rms_epsilon", 0, "layer_norm_rms_epsilon is 0, and not above"),
    ("qwen3moe.attention.head_count_kv", [2, 1], "qwen3moe.attention.head_count_kv is [2, 1]"),
    ("qwen3moe.expert_weights_scale", 2.5, "qwen3moe.expert_weights_scale is 2.5"),
    ("qwen3moe.expert_gating_func", 2, "qwen3moe.expert_gating_func is 2"),
    ("qwen3moe.attention.sliding_window", 16, "qwen3moe.attention.sliding_window is 16"),
    ("token_embd.weight", None, "no tensor token_embd.weight"),
    ("blk.1.attn_norm.weight", None, "no tensor for model.layers.1.input_layernorm.weight (blk.1"),
    ("blk.1.ffn_gate_inp.weight", None, "tensor"),
    ("blk.0.ffn_up_exps.weight", (16, 8, 48), "blk.0.ffn_*_exps of the GGUF file are not the [16"),
    ("blk.0.ffn_up_exps.weight", None, "found none of one shape"),
    ("blk.1.ffn_down_exps.weight", (16, 40, 48), "the [16, 48, 40] of model.layers.1.mlp.experts"),
    ("blk.0.attn_q.weight", (32, 48), "blk.0.attn_q.weight is of shape [32, 48], but model"),
    ("blk.0.attn_sinks.weight", (4,), "tensor blk.0.attn_sinks.weight of the GGUF file is none"),
    ("rope_freqs.weight", (8,), "tensor rope_freqs.weight of the GGUF file is none"),
]


@pytest.fixture(name="described", scope="module")
def _described() -> tuple[dict[str, Any], Tensors]:
    """Return the metadata and the tensors of a file."""
    original = MODELS["qwen3moe"].build()
    return MODELS["qwen3moe"].metadata(original.config), MODELS["qwen3moe"].tensors(original)


def _logits(model: Any) -> Any:
    with torch.inference_mode():
        return model(torch.tensor(TOKENS)).logits


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_a_file_has_the_logits_of_the_one_that_was_written(
    name: str, tmp_path: Path
) -> None:
    """Bit for bit, with configuration, trunk and experts of the file alone."""
    original = MODELS[name].build()
    path = tmp_path / "model.gguf"
    write_gguf(path, MODELS[name].metadata(original.config), MODELS[name].tensors(original))

    found = build_from(*read_gguf(path))

    assert torch.equal(_logits(found), _logits(original))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change[0]}={change[1]}")
def test_a_file_that_transformers_cannot_represent_is_refused_by_name(
    change: tuple[str, Any, str], described: tuple[dict[str, Any], Tensors]
) -> None:
    """Rather than computed as another model, or built at a size that the file makes up."""
    key, value, message = change
    metadata, tensors = described
    if key.startswith(("general", "qwen3moe")):
        metadata = {**metadata, key: value}
    elif value is None:
        tensors = {name: array for name, array in tensors.items() if name != key}
    else:
        tensors = {**tensors, key: np.zeros(value, np.float32)}

    with pytest.raises(ConfigError, match=re.escape(message)):
        build_from(metadata, tensors)


def test_a_configuration_that_transformers_refuses_is_a_configuration_error() -> None:
    """With its own words."""
    original = MODELS["deepseek2 v2"].build()
    metadata = MODELS["deepseek2 v2"].metadata(original.config)
    tensors = MODELS["deepseek2 v2"].tensors(original)
    shapes = {name: array.shape for name, array in tensors.items()}

    with pytest.raises(ConfigError, match="transformers has no DeepseekV2Config as "):
        gguf.find_config(metadata | {"deepseek2.attention.head_count": 3}, shapes)


def _changed(name: str, factors: np.ndarray, **keys: Any) -> Any:
    """Return the configuration of a file whose rotation has other factors."""
    model, tensor = MODELS[name], "rope_freqs.weight"
    original = model.build()
    tensors = {**model.tensors(original), tensor: factors}
    shapes = {name: array.shape for name, array in tensors.items()}
    metadata = model.metadata(original.config)
    metadata |= {f"{name}.rope.{key.replace('__', '.')}": keys[key] for key in keys}
    return gguf.find_config(metadata, shapes, tensors.__getitem__)


@pytest.mark.parametrize(
    ("low", "high", "length", "factor"),
    [(1.0, 4.0, 40, 8.0), (1.0, 4.0, 32, 32.0), (1.0, 1.0, 64, 16.0), (2.0, 8.0, 90, 8.0)],
)
def test_a_rotation_of_which_the_file_has_the_factors_is_the_one_they_are_of(
    low: float, high: float, length: int, factor: float
) -> None:
    """With two waves between short and long ones, with one, with none, and not from 1 on."""
    rope = {"rope_type": "llama3", "rope_theta": 100.0, "factor": factor}
    rope |= {"low_freq_factor": low, "high_freq_factor": high}
    rope |= {"original_max_position_embeddings": length}
    wanted = MODELS["llama4"].build().config
    wanted.rope_parameters = dict(rope)

    found = _changed("llama4", llama3_factors(rope, wanted.head_dim))

    compute = ROPE_INIT_FUNCTIONS["llama3"]
    assert torch.equal(compute(found, "cpu")[0], compute(wanted, "cpu")[0])


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ([1, 1, 1, 1, 2, 3, 8, 4], "rope_freqs.weight is [1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 8.0, 4.0]"),
        ([1, 1, 1, 0, 2, 3, 8, 8], "rope_freqs.weight has values that are not above 0"),
        ([1, 1, 1, 1, 2, 3, 8], "rope_freqs.weight is of shape [7], and should have 8 values"),
    ],
)
def test_factors_of_no_rotation_are_refused(factors: list[float], message: str) -> None:
    """Rather than another one computed."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        _changed("llama4", np.array(factors, np.float32))
    for key, value in (("scaling__factor", 4.0), ("freq_base", 1e308)):
        with pytest.raises(ConfigError, match=r"rope\.(scaling\.type|freq_base) is "):
            _changed("llama4", np.array([1, 1, 1, 1, 8, 8, 8, 8], np.float32), **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("original_context_length", 1e308), ("yarn_beta_fast", 5e-324), ("yarn_beta_slow", 1e308)],
)
def test_a_scaled_rotation_of_impossible_numbers_is_refused(key: str, value: float) -> None:
    """Their logarithms are no numbers."""
    original = MODELS["deepseek4"].build()
    metadata = MODELS["deepseek4"].metadata(original.config)
    tensors = MODELS["deepseek4"].tensors(original)
    shapes = {name: array.shape for name, array in tensors.items()}

    with pytest.raises(ConfigError, match=rf"rope\.scaling\.{key} is "):
        gguf.find_config(metadata | {f"deepseek4.rope.scaling.{key}": value}, shapes)


def test_without_the_package_that_knows_the_names_the_error_says_how_to_install_it(
    described: tuple[dict[str, Any], Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for when a model is built, not before."""
    monkeypatch.setitem(sys.modules, "gguf", None)

    with pytest.raises(MissingDependencyError, match=re.escape("pip install 'moecache[gguf]'")):
        build_from(*described)


def test_what_guesses_further_tokens_is_left_out(
    described: tuple[dict[str, Any], Tensors],
) -> None:
    """Neither a layer of the model nor an error."""
    metadata, tensors = described
    further = {"blk.2.nextn.eh_proj.weight": (32, 64), "blk.2.ffn_down_exps.weight": (8, 32, 24)}
    shapes = {name: array.shape for name, array in tensors.items()} | further
    metadata = {**metadata, "qwen3moe.block_count": 3, "qwen3moe.nextn_predict_layers": 1}

    config = gguf.find_config(metadata, shapes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)

    assert config.num_hidden_layers == 2
    assert gguf.find_sources(model, config, metadata, shapes).keys() >= {"model.norm.weight"}
    assert gguf.find_layers(model, shapes) == {
        0: "model.layers.0.mlp.experts",
        1: "model.layers.1.mlp.experts",
    }


def test_queries_keys_and_values_of_one_tensor_are_rows_of_it(
    described: tuple[dict[str, Any], Tensors],
) -> None:
    """As converters that fuse them write them."""
    metadata, tensors = described
    original = build_from(metadata, tensors)
    fused = dict(tensors)
    for block in range(2):
        parts = [fused.pop(f"blk.{block}.attn_{part}.weight") for part in "qkv"]
        fused[f"blk.{block}.attn_qkv.weight"] = np.concatenate(parts)

    assert torch.equal(_logits(build_from(metadata, fused)), _logits(original))


def test_numbers_are_those_that_were_written_not_their_nearest_of_32_bits(
    described: tuple[dict[str, Any], Tensors],
) -> None:
    """So what is computed from them in 64 bits is the same, too."""
    metadata, tensors = described
    scaling = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(np.float32(4.1)),
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_attn_factor": float(np.float32(1.3)),
        "attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
    }
    metadata = metadata | {f"qwen3moe.{key}": value for key, value in scaling.items()}

    config = gguf.find_config(metadata, {name: array.shape for name, array in tensors.items()})

    assert config.rms_norm_eps == 1e-6
    assert config.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.1,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
