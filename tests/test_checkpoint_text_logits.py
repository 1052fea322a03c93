"""A checkpoint's model without torch, beside transformers' own and the program of `load`."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache.decoding import states_cache
from moecache.decoding.files.known import NoTextModelError
from moecache.decoding.files.model import TextModel
from moecache.decoding.files.opening import open_text_model
from moecache.decoding.safetensors._rows import ROWS
from tests.helpers import quantized
from tests.helpers.families import FAMILIES, Family, write_checkpoint
from tests.helpers.gguf_texts import parts_of
from tests.helpers.more_families import MORE_FAMILIES
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
ALL = {**MORE_FAMILIES, **FAMILIES}
# Made as for GGUF files.
GEMMA = "gemma4 keys as values"
OTHERS = (
    *("afmoe", "dots1", "exaone-moe", "granitehybrid", "granitemoe", "granitemoe shared", "hy_v3"),
    *("nemotron_h_moe", "nemotron_h_moe dense", "nemotron_h_moe latent"),
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHARP = YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}
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
IDS = np.random.default_rng(0).integers(3, 90, 40).tolist()


def made(name: str, **settings: Any) -> Family:
    """Return a family with other settings."""
    family = ALL[name]
    return replace(family, settings={**family.settings, **settings})


def change_config(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a checkpoint's config.json anew."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


@pytest.fixture
def exact_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep keys and values in float32: sums in another order move none to another bfloat16."""

    def exact(recipe: Any, _: str, *others: Any) -> Any:
        return states_cache.empty_cache(recipe, "f32", *others)

    monkeypatch.setattr("moecache.decoding.program_model.empty_cache", exact)


def assert_near(path: Path, model: Any) -> None:
    """Compare the logits of prompts, and of tokens after them."""
    with open_text_model(path, "50%") as ours, torch.no_grad():
        for num in (1, 17, len(IDS)):
            cache, theirs = ours.new_cache(), transformers.DynamicCache(config=model.config)
            for ids in (IDS[:num], [7], [8, 9]):
                found = ours.read(ids, cache)
                wanted = model(torch.tensor([ids]), past_key_values=theirs).logits[0, -1].numpy()
                assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


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


def saved(name: str, into: Path, dtype: Any) -> Any:
    """Write a model, and return it."""
    model, _, _ = parts_of(name)
    model.to(dtype).save_pretrained(into)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            # Nemotron's steps in time have a least one in transformers' prompts, and no other's.
            module.time_step_limit = (0.0, float("inf"))
    return model


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


def rewritten(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Write a checkpoint's tensors anew."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


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
