"""A checkpoint's model without torch, beside transformers' own and the program of `load`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache.decoding.files.model import TextModel
from moecache.decoding.files.opening import open_text_model
from moecache.decoding.safetensors._rows import ROWS
from tests.helpers import quantized
from tests.helpers.checkpoint_texts import ALL, IDS, SHARP, YARN, assert_near, made, saved
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.gguf_texts import parts_of
from tests.helpers.offloading import load_in_slots, load_whole

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

NAMES = (
    *("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "hunyuan_v1_moe", "lfm2_moe"),
    *("minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_vl"),
    *("qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_vl_moe_hub", "gpt_oss"),
    *("llama4", "phimoe", "glm4_moe_lite", "glm4v_moe", "mellum", "solar_open"),
    *("mistral4", "bailing_hybrid", "kimi_linear", "flex_olmo", "axk1"),
    *("granitemoe_swa", "laguna", "mimo_v2_flash"),
)
# Made as for GGUF files.
GEMMA = "gemma4 keys as values"
OTHERS = (
    *("afmoe", "dots1", "exaone-moe", "granitehybrid", "granitemoe", "granitemoe shared", "hy_v3"),
    *("nemotron_h_moe", "nemotron_h_moe dense", "nemotron_h_moe latent"),
)
FEW = {"original_max_position_embeddings": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "short_mscale": 1.2,
    "long_mscale": 1.2,
}
# As published: the positions before a token's own, and lists of numbers.
MIMO = {
    "sliding_window_size": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "hybrid_layer_pattern": [1, 0, 1],
    "moe_layer_freq": [0, 1, 1],
    "attention_value_scale": 0.5,
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in NAMES),
        *((name, {"tie_word_embeddings": True}) for name in ("qwen3_moe", "ernie4_5_moe")),
        ("qwen3_moe", {"rope_parameters": YARN | {"rope_type": "linear"}}),
        ("qwen3_moe", {"rope_parameters": YARN | {"truncate": False, "attention_factor": 1.3}}),
        ("qwen3_moe", {"attention_bias": True, "norm_topk_prob": False, "mlp_only_layers": [1]}),
        ("qwen2_moe", {"qkv_bias": False}),
        ("mixtral", {"sliding_window": 5, "head_dim": 16}),
        ("olmoe", {"clip_qkv": 0.5}),
        ("deepseek_v3", {"rope_parameters": SHARP, "q_lora_rank": None}),
        ("deepseek_v3", {"attention_bias": True, "norm_topk_prob": False}),
        ("deepseek_v2", {"topk_method": "greedy"}),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": True}),
        ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_interval": 2}),
        ("minimax_m2", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}),
        ("qwen3_next", {"linear_num_value_heads": 2, "mlp_only_layers": []}),
        ("lfm2_moe", {"conv_bias": True, "use_expert_bias": False}),
        ("qwen3_moe", {"rope_parameters": LLAMA3}),
        ("llama4", {"rope_parameters": LLAMA3, "floor_scale": 4, "attention_chunk_size": 16}),
        (
            "llama4",
            {
                "rope_parameters": LLAMA3 | {"high_freq_factor": 1.0},
                "no_rope_layers": [1, 0, 0, 1],
                "attn_temperature_tuning": False,
                "use_qk_norm": False,
                "moe_layers": [0, 2, 3],
            },
        ),
        (
            "mellum",
            {
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
        (
            "granitemoe_swa",
            {
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "layer_rope_theta": [1e4, 0, 5e5],
                "shared_intermediate_size": 20,
            },
        ),
        ("granitemoe_swa", {"layer_rope_theta": [0, 0, 0]}),
        ("mimo_v2_flash", MIMO),
        (
            "laguna",
            {
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "num_attention_heads_per_layer": [6, 4, 6],
                "gating": "per-element",
                "moe_routed_scaling_factor": 2.5,
                "moe_router_logit_softcapping": 0.7,
                "rope_parameters": {
                    "full_attention": YARN | {"partial_rotary_factor": 0.5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                },
            },
        ),
        ("mistral4", {"rope_parameters": SHARP | {"llama_4_scaling_beta": 0.5} | FEW}),
        ("phimoe", {"rope_parameters": LONG, "sliding_window": 12, "lm_head_bias": False}),
        ("bailing_hybrid", {"kda_safe_gate": False, "norm_topk_prob": False}),
        ("kimi_linear", {"q_lora_rank": None, "attention_bias": True}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("exact_caches")
def test_logits_are_those_of_transformers(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    """But for the order of sums."""
    family = made(name, **settings)
    path = write_checkpoint(family, tmp_path / "model", "float32")
    assert_near(path, load_whole(family, path))


@pytest.mark.parametrize("name", [*OTHERS, GEMMA])
@pytest.mark.usefixtures("exact_caches")
def test_logits_of_other_families_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """But for the order of sums."""
    assert_near(tmp_path, saved(name, tmp_path, torch.float32))


def test_every_row_is_compared() -> None:
    """Kimi K2's is DeepSeek V3's."""
    kinds = {ALL[name].config().get_text_config().model_type for name in NAMES}
    kinds |= {parts_of(name)[0].config.model_type for name in (*OTHERS, GEMMA)}
    assert kinds | {"kimi_k2"} == set(ROWS)


def program_logits(path: Path, ours: TextModel) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return logits without torch, and of the program in a model of transformers."""
    from moecache.integrations.transformers._decoded import decoded_model

    theirs = decoded_model(load_in_slots(path, "50%", compute="fast"))
    assert theirs is not None
    return [
        (ours.read(ids, ours.new_cache()), theirs.read(ids, theirs.new_cache()))
        for ids in (IDS[:1], IDS)
    ]


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_bits_are_those_of_the_program_with_torch(tmp_path: Path, name: str) -> None:
    """In bfloat16, as most are published. Gemma 4's embeddings are scaled in it, and not here."""
    path = tmp_path / "model"
    if name in NAMES:
        write_checkpoint(ALL[name], path, "bfloat16")
    else:
        saved(name, path, torch.bfloat16)
    with open_text_model(path, "50%") as ours:
        for found, wanted in program_logits(path, ours):
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("scheme", "format_name"),
    [
        (quantized.fp8(), "fp8[16x32,f32]"),
        (quantized.channels(), "fp8[1x*,bf16]"),
        (quantized.int4(), "int4[1x32,bf16]"),
        (quantized.nvfp4(), "nvfp4"),
        (quantized.grouped("gptq"), "gptq4[32,f16,in order]"),
        (quantized.grouped("awq"), "awq4[32,f16]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_trunk_stays_quantized(
    tmp_path: Path, scheme: quantized.Scheme, format_name: str
) -> None:
    """With torch it is bfloat16: the rounding of that is what logits differ by."""
    path, _ = quantized.write_quantized(FAMILIES["qwen3_moe"], scheme, tmp_path)
    with open_text_model(path, "50%") as ours:
        assert format_name in ours.tensor_types
        wanted = load_in_slots(path, "50%", compute="fast")
        with torch.no_grad():
            found, theirs = (
                ours.read(IDS, ours.new_cache()),
                wanted(torch.tensor([IDS])).logits[0, -1].float().numpy(),
            )
        assert np.abs(found - theirs).max() < 3e-2 * np.abs(theirs).max()


def test_gpt_oss_has_its_gate(tmp_path: Path) -> None:
    """Rows of gate and up alternate, and values are limited as config.json says."""
    path, _ = quantized.write_quantized(quantized.GPT_OSS, quantized.mxfp4(), tmp_path)
    with open_text_model(path, "50%") as ours:
        for found, wanted in program_logits(path, ours):
            assert np.array_equal(found, wanted)
