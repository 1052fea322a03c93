"""Tiny models as GGUF files of each architecture: their keys, and what becomes of their weights."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tests.helpers import family_settings as tiny
from tests.helpers.gguf_blocks import blocks
from tests.helpers.gguf_compressed import compressed
from tests.helpers.gguf_connections import connected
from tests.helpers.gguf_delta import delta
from tests.helpers.gguf_factored import factored
from tests.helpers.gguf_mamba import mamba
from tests.helpers.gguf_mixed import mixed
from tests.helpers.gguf_models import GgufModel, Tensors, expert_keys, head_keys
from tests.helpers.gguf_windows import windowed


def _qwen2moe(config: Any) -> dict[str, Any]:
    shared = config.shared_expert_intermediate_size
    return {**expert_keys(config), "expert_shared_feed_forward_length": shared}


def _llama(config: Any) -> dict[str, Any]:
    width = config.hidden_size // config.num_attention_heads
    return {
        **expert_keys(config),
        "vocab_size": config.vocab_size,
        "rope.dimension_count": width,
    }


def _interleave_heads(leaf: str, values: np.ndarray, config: Any) -> Tensors | None:
    for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        if leaf.startswith(f"self_attn.{part}_proj."):
            halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
            kind = leaf.rpartition(".")[2]
            return {f"attn_{part}.{kind}": halves.swapaxes(1, 2).reshape(values.shape)}
    return None


def _gpt_oss(config: Any) -> dict[str, Any]:
    return {
        **head_keys(config),
        "attention.sliding_window": config.sliding_window,
        "expert_feed_forward_length": config.intermediate_size,
    }


def _split_gpt_oss(leaf: str, values: np.ndarray, config: Any) -> Tensors | None:
    if not leaf.startswith("mlp.experts."):
        return None
    kind = "bias" if leaf.endswith("_bias") else "weight"
    values = values.swapaxes(1, 2) if kind == "weight" else values
    if "down_proj" in leaf:
        return {f"ffn_down_exps.{kind}": values}
    return {f"ffn_gate_exps.{kind}": values[:, ::2], f"ffn_up_exps.{kind}": values[:, 1::2]}


_LATENT = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
}


def _routed_keys(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "leading_dense_block_count": config.first_k_dense_replace,
    }


def _deepseek(config: Any) -> dict[str, Any]:
    scale = config.rope_parameters.get("mscale_all_dim")
    sigmoid = config.model_type == "deepseek_v3"
    return {
        **_routed_keys(config),
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.scaling.yarn_log_multiplier": scale and 0.1 * scale,
        "expert_gating_func": 2 if sigmoid else 1,
        "expert_weights_norm": config.norm_topk_prob or None,
    }


def _split_latent(leaf: str, values: np.ndarray, config: Any) -> Tensors | None:
    if leaf != "self_attn.kv_b_proj.weight":
        return None
    heads = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, rest = heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]
    return {"attn_k_b.weight": keys.swapaxes(1, 2), "attn_v_b.weight": rest}


def _indexed(config: Any) -> dict[str, Any]:
    types = getattr(config, "indexer_types", None)
    return {
        **_deepseek(config),
        "expert_gating_func": 2,
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "attention.indexer.types": None if types is None else [kind == "full" for kind in types],
    }


def _glm4(config: Any) -> dict[str, Any]:
    rotated = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    keys = {**head_keys(config), **_routed_keys(config), "rope.dimension_count": rotated}
    return {**keys, "expert_gating_func": 2}


def _dots1(config: Any) -> dict[str, Any]:
    return {**_routed_keys(config), "expert_gating_func": 2}


def _minimax(config: Any) -> dict[str, Any]:
    rotated = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    return {
        **head_keys(config),
        "expert_feed_forward_length": config.intermediate_size,
        "rope.dimension_count": rotated,
        "expert_gating_func": 2,
    }


def _ernie(config: Any) -> dict[str, Any]:
    return {
        **expert_keys(config),
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
        "expert_shared_count": config.moe_num_shared_experts,
        # So says the converter.
        "expert_shared_feed_forward_length": config.intermediate_size // config.num_key_value_heads,
    }


def _ernie_change(leaf: str, values: np.ndarray, config: Any) -> Tensors | None:
    if leaf == "mlp.gate.moe_statics.e_score_correction_bias":
        return {"exp_probs_b.bias": values[0]}
    return None


def _granite(config: Any) -> dict[str, Any]:
    return {
        **_llama(config),
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "expert_shared_feed_forward_length": getattr(config, "shared_intermediate_size", None),
    }


def _granite_change(leaf: str, values: np.ndarray, config: Any) -> Tensors | None:
    if leaf == "shared_mlp.input_linear.weight":
        gate, up = np.split(values, 2)
        return {"ffn_gate_shexp.weight": gate, "ffn_up_shexp.weight": up}
    return _interleave_heads(leaf, values, config)


def _hy_v3(config: Any) -> dict[str, Any]:
    return {
        **head_keys(config),
        "expert_shared_feed_forward_length": config.num_shared_experts
        * config.moe_intermediate_size,
        "expert_weights_norm": True,
        "expert_weights_scale": float(config.router_scaling_factor),
        "expert_gating_func": 2,
    }


def _qwen3vl(config: Any) -> dict[str, Any]:
    return {
        **head_keys(config),
        "rope.dimension_sections": [3, 3, 2, 0],
        "n_deepstack_layers": 0,
    }


def _hunyuan(config: Any) -> dict[str, Any]:
    return {
        **head_keys(config),
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size,
        "expert_shared_count": 1,
        "expert_used_count": config.moe_topk[0],
    }


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def _members() -> Iterator[GgufModel]:
    all_sparse = {"mlp_only_layers": [], "decoder_sparse_step": 1, "num_hidden_layers": 2}
    yield GgufModel("qwen2moe", "Qwen2Moe", {**tiny.QWEN2_MOE, **all_sparse}, _qwen2moe)
    yield GgufModel("qwen3moe", "Qwen3Moe", {**tiny.QWEN3_MOE, **all_sparse}, head_keys)
    # llama.cpp has no fewer heads of keys there.
    yield GgufModel("olmoe", "Olmoe", {**tiny.OLMOE, "num_key_value_heads": 4}, expert_keys)
    yield GgufModel("llama", "Mixtral", tiny.MIXTRAL, _llama, change=_interleave_heads)
    oss = {**tiny.GPT_OSS, "swiglu_limit": 7.0}
    oss_names = {
        "self_attn.sinks": "attn_sinks.weight",
        "mlp.router": "ffn_gate_inp",
        "post_attention_layernorm": "post_attention_norm",
    }
    yield GgufModel("gpt-oss", "GptOss", oss, _gpt_oss, oss_names, _split_gpt_oss)
    # llama.cpp rounds where the factors begin and end.
    yield GgufModel(
        "gpt-oss",
        "GptOss",
        {**oss, "rope_parameters": {**_YARN, "truncate": False}},
        _gpt_oss,
        oss_names,
        _split_gpt_oss,
        name="gpt-oss yarn",
        in_llama_cpp=False,
    )
    v2 = {**tiny.DEEPSEEK_V2, "scoring_func": "softmax", "norm_topk_prob": False}
    v2 |= {"rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}
    yield GgufModel(
        "deepseek2",
        "DeepseekV2",
        {**v2, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        _deepseek,
        _LATENT,
        _split_latent,
        name="deepseek2 v2",
    )
    # llama.cpp chooses groups as V3 does, and knows models without the rank by their layers.
    yield GgufModel(
        "deepseek2",
        "DeepseekV2",
        {**v2, "q_lora_rank": None},
        _deepseek,
        _LATENT,
        _split_latent,
        name="deepseek2 v2 groups",
        in_llama_cpp=False,
    )
    v3 = {**tiny.DEEPSEEK_V3, "scoring_func": "sigmoid", "norm_topk_prob": True}
    yield GgufModel(
        "deepseek2", "DeepseekV3", v3, _deepseek, _LATENT, _split_latent, name="deepseek2 v3"
    )

    # llama.cpp turns keys of 64 numbers at least.
    indexer = {"index_n_heads": 4, "index_head_dim": 64, "index_topk": 64, "head_dim": 8}
    indexed = {
        **_LATENT,
        "self_attn.indexer.wq_b": "indexer.attn_q_b",
        "self_attn.indexer.wk": "indexer.attn_k",
        "self_attn.indexer.k_norm": "indexer.k_norm",
        "self_attn.indexer.weights_proj": "indexer.proj",
    }
    for name, prefix in (("deepseek32", "DeepseekV32"), ("glm-dsa", "GlmMoeDsa")):
        yield GgufModel(name, prefix, {**v3, **indexer}, _indexed, indexed, _split_latent)
    yield from connected(_indexed, indexed, _split_latent)

    sigmoid = {"scoring_func": "sigmoid"}
    glm4 = {**tiny.GLM4_MOE, **sigmoid, "n_group": 1, "attention_bias": True}
    yield GgufModel(
        "glm4moe", "Glm4Moe", glm4, _glm4, {"post_attention_layernorm": "post_attention_norm"}
    )
    granite = {"block_sparse_moe.router": "ffn_gate_inp"}
    shared = {"shared_mlp.output_linear": "ffn_down_shexp"}
    yield GgufModel("granitemoe", "GraniteMoe", tiny.GRANITEMOE, _granite, granite, _granite_change)
    yield GgufModel(
        "granitemoe",
        "GraniteMoeShared",
        {**tiny.GRANITEMOE, "shared_intermediate_size": 20},
        _granite,
        granite | shared,
        _granite_change,
        name="granitemoe shared",
    )
    # The converter divides it by the heads of keys for the shared expert's width.
    ernie = {**tiny.ERNIE4_5_MOE, "intermediate_size": 48}
    yield GgufModel("ernie4_5-moe", "Ernie4_5_Moe", ernie, _ernie, change=_ernie_change)
    yield GgufModel(
        "minimax-m2",
        "MiniMaxM2",
        {**tiny.MINIMAX_M2, **sigmoid, "rotary_dim": 8},
        _minimax,
        {"mlp.e_score_correction_bias": "exp_probs_b.bias"},
    )
    dots1 = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3}
    dots1 |= {"first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5}
    dots1 |= {"intermediate_size": 56, "moe_intermediate_size": 24, "num_hidden_layers": 3}
    dots1 |= {"num_key_value_heads": 4, **sigmoid}
    yield GgufModel("dots1", "Dots1", dots1, _dots1)
    hy_v3 = {**tiny.QWEN3_MOE, "num_hidden_layers": 3, "router_scaling_factor": 1.5}
    hy_v3 |= {"head_dim": 16, "moe_intermediate_size": 24}
    correction = {"mlp.e_score_correction_bias": "exp_probs_b"}
    yield GgufModel("hy_v3", "HYV3", {**hy_v3, "num_shared_experts": 2}, _hy_v3, correction)
    latent = {**tiny.DEEPSEEK_V3, "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
    # What llama.cpp's converter leaves out, files do not ask for.
    further = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.0}
    latent |= {"rope_parameters": {**_YARN, **further}}
    yield GgufModel(
        "mistral4",
        "Mistral4",
        latent,
        _deepseek,
        _LATENT,
        _split_latent,
        published={"architectures": ["Mistral3ForConditionalGeneration"]},
    )
    yield GgufModel("qwen3vlmoe", "Qwen3Moe", {**tiny.QWEN3_MOE, **all_sparse}, _qwen3vl)
    hunyuan = {"mlp.gate.wg": "ffn_gate_inp"}
    for part in ("gate", "up", "down"):
        hunyuan[f"mlp.shared_mlp.{part}_proj"] = f"ffn_{part}_shexp"
    for part in ("query", "key"):
        hunyuan[f"self_attn.{part}_layernorm"] = f"attn_{part[0]}_norm"
    lists = {"moe_topk": [3, 3], "moe_intermediate_size": [24, 24], "num_shared_expert": [1, 1]}
    yield GgufModel(
        "hunyuan-moe", "HunYuanMoEV1", {**tiny.HUNYUAN_V1_MOE, **lists}, _hunyuan, hunyuan
    )
    yield from mixed()
    yield from mamba(_granite, _granite_change)
    yield from factored()
    yield from windowed()
    yield from blocks()
    yield from delta()
    yield from compressed()


MODELS: Mapping[str, GgufModel] = {model.name or model.architecture: model for model in _members()}
