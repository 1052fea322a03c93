"""A GGUF file's model without torch, beside transformers' own of the same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache.decoding.files.opening import open_text_model
from tests.helpers.gguf_models import build_from, read_gguf, write_gguf
from tests.helpers.gguf_texts import QUANTIZED, parts_of

pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

GEMMA = "gemma4 keys as values"
FAMILIES = [
    *("olmoe", "qwen2moe", "qwen3moe", "qwen3vlmoe", "llama", "gpt-oss", "gpt-oss yarn"),
    *("deepseek2 v2", "deepseek2 v2 groups", "deepseek2 v3", "dots1", "ernie4_5-moe", "mistral4"),
    *("glm4moe", "granitemoe", "hunyuan-moe", "hy_v3", "minimax-m2", "qwen3next", "qwen35moe"),
    *("granitemoe shared", "granitehybrid", "lfm2moe", "nemotron_h_moe", "nemotron_h_moe dense"),
    *("nemotron_h_moe latent", "exaone-moe", "afmoe", "phimoe", "llama4", GEMMA),
    *("kimi-linear", "bailingmoe3", "mimo2"),
]
# transformers has a head of its own in these, whatever is said; and a head's bias in PhiMoE.
UNTIED = (
    *("nemotron_h_moe", "nemotron_h_moe dense", "nemotron_h_moe latent", "phimoe"),
    *("kimi-linear", "bailingmoe3"),
)
# With a length of training, so that pairs are kept, changed in part and changed.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
IDS = np.random.default_rng(0).integers(3, 90, 40).tolist()


def rounding_cache() -> Any:
    """Return a cache of transformers that keeps what bfloat16 leaves of keys and values."""

    class Rounding(transformers.DynamicCache):
        def update(self, keys: Any, values: Any, *rest: Any, **named: Any) -> Any:
            return super().update(
                keys.bfloat16().float(), values.bfloat16().float(), *rest, **named
            )

    return Rounding()


def assert_near(path: Path, model: Any, new_cache: Any = None) -> None:
    """Compare the logits of prompts, and of tokens after them."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            # Nemotron's steps in time have a least one in transformers' prompts, and no other's.
            module.time_step_limit = (0.0, float("inf"))
    with open_text_model(path, "50%") as ours, torch.no_grad():
        for num in (1, 2, 17, len(IDS)):
            cache = ours.new_cache()
            theirs = new_cache() if new_cache else transformers.DynamicCache(config=model.config)
            for ids in (IDS[:num], [7], [8, 9]):
                found = ours.read(ids, cache)
                wanted = model(torch.tensor([ids]), past_key_values=theirs).logits[0, -1].numpy()
                assert np.abs(found - wanted).max() < 2e-5 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {"tie_word_embeddings": 0}) for name in FAMILIES),
        *((name, {"tie_word_embeddings": 1}) for name in FAMILIES if name not in UNTIED),
        ("olmoe", {"clip_qkv": 0.5}),
        ("qwen2moe", {"mlp_only_layers": [0]}),
        ("qwen3moe", {"mlp_only_layers": [0]}),
        ("llama", {"sliding_window": 5}),
        ("qwen3moe", {"rope_parameters": YARN | {"rope_type": "linear"}}),
        ("qwen3moe", {"rope_parameters": YARN}),
        *((name, {"attention_bias": True}) for name in ("deepseek2 v3", "dots1", "granitemoe")),
        ("hunyuan-moe", {"attention_bias": True}),
        ("deepseek2 v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
        ("deepseek2 v3", {"q_lora_rank": None}),
        ("ernie4_5-moe", {"moe_num_shared_experts": 0}),
        ("ernie4_5-moe", {"moe_layer_interval": 2, "num_hidden_layers": 4}),
        ("glm4moe", {"use_qk_norm": True, "first_k_dense_replace": 0}),
        # Heads that are wider than a register, and no multiple of one; a key for each value.
        ("qwen3next", {"linear_value_head_dim": 72, "linear_key_head_dim": 24}),
        ("qwen35moe", {"linear_value_head_dim": 20, "linear_num_value_heads": 2}),
        ("qwen35moe", {"linear_num_value_heads": 6, "linear_conv_kernel_dim": 1}),
        # One group; a state wider than a register, and no multiple of one; biases everywhere.
        ("nemotron_h_moe", {"n_groups": 1, "ssm_state_size": 40, "norm_topk_prob": False}),
        ("nemotron_h_moe", {"use_conv_bias": False, "conv_kernel": 2, "mamba_head_dim": 20}),
        ("nemotron_h_moe", {"n_group": 2, "topk_group": 1}),
        ("granitehybrid", {"mamba_proj_bias": True, "position_embedding_type": "rope"}),
        ("lfm2moe", {"conv_bias": True, "conv_L_cache": 4, "num_dense_layers": 0}),
        ("lfm2moe", {"use_expert_bias": False, "routed_scaling_factor": 2.0}),
        ("afmoe", {"num_dense_layers": 0, "num_shared_experts": 2, "attention_bias": True}),
        ("phimoe", {"attention_bias": False, "lm_head_bias": False, "sliding_window": 5}),
        ("llama4", {"num_local_experts": 128, "use_qk_norm": False}),
        ("llama4", {"interleave_moe_layer_step": 1, "attention_bias": True}),
        ("llama4", {"rope_parameters": PLAIN}),
        ("exaone-moe", {"n_group": 2, "topk_group": 1, "num_shared_experts": 2}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("exact_caches")
def test_logits_are_those_of_transformers(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    """But for the order of sums."""
    settings = {
        key: bool(value) if key.startswith("tie") else value for key, value in settings.items()
    }
    if name in {"olmoe", "qwen2moe", "qwen3moe", "qwen3vlmoe"}:
        settings["norm_topk_prob"] = name.startswith("qwen3")
    model, metadata, tensors = parts_of(name, **settings)
    if "clip_qkv" in settings:
        metadata["olmoe.attention.clamp_kqv"] = settings["clip_qkv"]
    if "sliding_window" in settings:
        metadata["llama.attention.sliding_window"] = settings["sliding_window"]
    if settings.get("rope_parameters", PLAIN) != PLAIN:
        architecture = metadata["general.architecture"]
        metadata[f"{architecture}.rope.scaling.type"] = settings["rope_parameters"]["rope_type"]
        metadata[f"{architecture}.rope.scaling.factor"] = 4.0
        metadata[f"{architecture}.rope.scaling.original_context_length"] = 64
    write_gguf(tmp_path / "model.gguf", metadata, tensors)
    assert_near(tmp_path / "model.gguf", model)


@pytest.mark.usefixtures("exact_caches")
def test_chunks_and_temperatures_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Llama 4: files do not say them, and texts here are shorter than the published ones."""
    monkeypatch.setattr("moecache.decoding.gguf._factored._CHUNK", 8)
    monkeypatch.setattr("moecache.decoding.gguf._factored._TEMPERATURE", (7, 0.5))
    settings = {"attention_chunk_size": 8, "floor_scale": 7, "attn_scale": 0.5}
    model, metadata, tensors = parts_of("llama4", **settings)
    write_gguf(tmp_path / "model.gguf", metadata, tensors)
    assert_near(tmp_path / "model.gguf", model)


@pytest.mark.usefixtures("exact_caches")
def test_a_matrix_that_expands_latents_may_be_one(tmp_path: Path) -> None:
    """As older converters write it; a block behind the last one guesses further tokens."""
    model, metadata, tensors = parts_of("deepseek2 v3")
    for block in range(model.config.num_hidden_layers):
        for part in "kv":
            del tensors[f"blk.{block}.attn_{part}_b.weight"]
        expanding = model.model.layers[block].self_attn.kv_b_proj.weight
        tensors[f"blk.{block}.attn_kv_b.weight"] = expanding.detach().numpy()
    last = model.config.num_hidden_layers - 1
    further = {
        name.replace(f"blk.{last}.", f"blk.{last + 1}."): 2 * values
        for name, values in tensors.items()
        if name.startswith(f"blk.{last}.")
    }
    further[f"blk.{last + 1}.nextn.eh_proj.weight"] = np.zeros((48, 96), np.float32)
    metadata |= {"deepseek2.block_count": last + 2, "deepseek2.nextn_predict_layers": 1}
    write_gguf(tmp_path / "model.gguf", metadata, tensors | further)
    assert_near(tmp_path / "model.gguf", model)


def test_keys_and_values_are_kept_in_bfloat16(tmp_path: Path) -> None:
    """As transformers' are in a model of that type."""
    model, metadata, tensors = parts_of("qwen3moe")
    write_gguf(tmp_path / "model.gguf", metadata, tensors)
    assert_near(tmp_path / "model.gguf", model, rounding_cache)


@pytest.mark.parametrize(
    ("name", "types", "is_tied"),
    [
        ("qwen3moe", {"_exps": "Q4_0", "": "Q8_0"}, True),
        ("qwen3moe", {"_exps": "Q5_0", "": "BF16"}, False),
        ("qwen3moe", {"_exps": "Q5_1", "attn": "Q4_1", "": "F16"}, True),
        # As it is published: the heads' logits without a position stay numbers.
        ("gpt-oss yarn", {"_exps.weight": "MXFP4", "norm": "F32", ".weight": "BF16"}, False),
        ("llama", QUANTIZED, False),
        ("deepseek2 v2", QUANTIZED, False),
        ("deepseek2 v3", {"_exps": "Q4_0", "_b": "Q8_0", "": "BF16"}, False),
        ("glm4moe", QUANTIZED, False),
        ("qwen3next", {"_exps": "Q4_0", "ssm_ba": "Q8_0", "attn_": "Q8_0", "_out": "Q8_0"}, False),
        ("qwen35moe", {"_exps": "Q4_0", "_alpha": "Q8_0", "attn_": "Q8_0", "": "BF16"}, True),
        (GEMMA, {"_exps.weight": "Q4_0", "attn_": "Q8_0", "ffn_down.": "Q8_0", "": "BF16"}, False),
        ("granitehybrid", {"_exps": "Q4_0", "ssm_in": "Q8_0", "attn_": "Q8_0", "": "F16"}, True),
        ("lfm2moe", {"_exps": "Q4_0", "_proj": "Q8_0", "attn_": "Q8_0", "": "BF16"}, True),
        ("nemotron_h_moe", {"_exps": "Q4_0", "ssm_in": "Q8_0", "_shexp": "Q8_0"}, False),
        ("exaone-moe", QUANTIZED, False),
        ("afmoe", {"attn_gate": "Q4_0", **QUANTIZED}, True),
        ("phimoe", QUANTIZED, False),
        ("llama4", QUANTIZED, True),
    ],
    ids=str,
)
def test_quantized_weights_are_those_of_the_file(
    tmp_path: Path, name: str, types: dict[str, str], is_tied: bool
) -> None:
    """Near the model of the dequantised weights: kernels round what they multiply to 8 bits."""
    settings = {"hidden_size": 64, "intermediate_size": 32, "tie_word_embeddings": is_tied}
    if not name.startswith(("gpt-oss", "granite", "llama", "phimoe")):
        settings |= {"moe_intermediate_size": 32, "intermediate_size": 64, "kv_lora_rank": 32}
    _, metadata, tensors = parts_of(name, **settings)
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata, tensors, types)
    whole = build_from(*read_gguf(path))
    with open_text_model(path, "50%") as model, torch.no_grad():
        found = model.read(IDS, model.new_cache())
        wanted = whole(torch.tensor([IDS])).logits[0, -1].numpy()
        assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("name", "type_of_rest"),
    [
        *((name, "F32") for name in ("gpt-oss yarn", "llama", "deepseek2 v3", "qwen35moe", GEMMA)),
        *((name, "F32") for name in ("granitehybrid", "lfm2moe", "nemotron_h_moe", "exaone-moe")),
        *((name, "F32") for name in ("nemotron_h_moe latent", "afmoe", "llama4")),
        *((name, "BF16") for name in ("qwen3moe", "afmoe", "deepseek2 v3", "qwen35moe")),
    ],
)
def test_bits_depend_neither_on_cuts_nor_slots(
    tmp_path: Path, name: str, type_of_rest: str
) -> None:
    """Nor on what is foreseen; a window is passed, and inputs of bfloat16 are rounded alike."""
    own = {"moe_intermediate_size": 32} if name not in {"gpt-oss yarn", "llama"} else {}
    _, metadata, tensors = parts_of(name, hidden_size=64, intermediate_size=32, **own)
    types = {"_exps.weight": "Q4_0"} if type_of_rest == "F32" else {"norm": "F32", "": "BF16"}
    write_gguf(tmp_path / "model.gguf", metadata, tensors, types)
    found = []
    for options in ({"memory": "100%"}, {"slots": 2}, {"memory": "50%", "prefetch": "router"}):
        with open_text_model(tmp_path / "model.gguf", **options) as model:
            with model._computing() as how:
                assert how.step.product_type == "bf16"
            for cut in (40, 1, 17):
                cache = model.new_cache()
                for start in range(0, len(IDS), cut):
                    logits = model.read(IDS[start : start + cut], cache)
                found.append(logits)
    assert all(np.array_equal(one, found[0]) for one in found)
