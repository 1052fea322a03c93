"""Tiny models with layers of Kimi's delta attention, as GGUF files."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.helpers.gguf_models import GgufModel, Tensors

_NAMES = {
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
}
_KIMI = {
    "self_attn.forget_gate.f_a_proj": "ssm_f_a",
    "self_attn.forget_gate.f_b_proj": "ssm_f_b",
    "self_attn.g_a_proj": "ssm_g_a",
    "self_attn.g_b_proj": "ssm_g_b",
}


def _delta(config: Any) -> dict[str, Any]:
    return {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "kda.head_dim": config.linear_head_dim,
        "expert_count": config.num_local_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_gating_func": 2,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "leading_dense_block_count": 1,
    }


def _bailing3(config: Any) -> dict[str, Any]:
    return {
        **_delta(config),
        "expert_weights_norm": config.norm_topk_prob,
        "kda.safe_gate": config.kda_safe_gate,
        "kda.gate_lower_bound": config.kda_lower_bound,
        "swiglu_clamp_exp": [0.0] * config.num_hidden_layers,
    }


def _change(leaf: str, values: np.ndarray, config: Any) -> Tensors | None:
    name = leaf.removeprefix("self_attn.")
    if name == "kv_b_proj.weight":
        heads = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, rest = heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]
        return {"attn_k_b.weight": keys.swapaxes(1, 2), "attn_v_b.weight": rest}
    if name == "conv1d.weight":
        parts = np.split(values.reshape(1, -1, 1, values.shape[-1]), 3, axis=1)
        return {f"ssm_conv1d_{one}.weight": part for one, part in zip("qkv", parts, strict=True)}
    if name == "forget_gate.A_log":
        import torch

        decays = torch.from_numpy(values).exp().numpy()
        return {"ssm_a": -decays if "kimi" in config.model_type else decays.reshape(-1, 1)}
    return None


def _bailing3_change(leaf: str, values: np.ndarray, config: Any) -> Tensors | None:
    if leaf == "self_attn.g_proj.weight":
        is_gate = values.shape[0] == config.num_attention_heads
        return {f"{'attn_gate' if is_gate else 'ssm_g_a'}.weight": values}
    return _change(leaf, values, config)


def delta() -> Iterator[GgufModel]:
    """Yield Kimi Linear and Ling 3."""
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    settings = {
        "num_key_value_heads": 4,
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_local_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 8,
        "layer_types": kinds,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    }
    linear = {"full_attn_layers": [3], "kda_layers": [1, 2]}
    linear |= {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4}
    yield GgufModel(
        "kimi-linear",
        "KimiLinear",
        {**settings, "linear_head_dim": 16, "linear_num_heads": 4},
        _delta,
        {**_NAMES, **_KIMI},
        _change,
        published={
            "linear_attn_config": linear,
            "moe_router_activation_func": "sigmoid",
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        # transformers writes the dense layer's as those of experts.
        renamed={"layers.0.block_sparse_moe.": "layers.0.mlp."},
    )
    yield GgufModel(
        "bailingmoe3",
        "BailingHybrid",
        {**settings, "head_dim": 16, "num_mtp_layers": 0, "n_group": 4, "topk_group": 2},
        _bailing3,
        {**_NAMES, "self_attn.forget_gate.f_proj": "ssm_f_a"},
        _bailing3_change,
        published={
            "architectures": ["BailingMoeV3ForCausalLM"],
            "model_type": "bailing_moe_v3",
            "head_dim": 16,
            "no_kda_lora": True,
            "gated_attention_proj_granularity_type": "head_wise",
            "layer_group_size": 3,
            "first_k_dense_replace": 1,
            "score_function": "sigmoid",
            "norm_topk_prob": True,
            "n_group": 4,
            "topk_group": 2,
            "max_position_embeddings": 128,
            "moe_shared_expert_intermediate_size": 24,
            "num_shared_experts": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_nextn_predict_layers": 0,
        },
    )
