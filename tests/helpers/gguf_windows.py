"""Tiny models with layers of sliding windows beside others, as GGUF files."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.helpers.gguf_models import GgufModel, Tensors, head_keys


def _exaone_moe(config: Any) -> dict[str, Any]:
    shared = config.num_shared_experts
    return {
        **head_keys(config),
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [
            kind == "sliding_attention" for kind in config.layer_types
        ],
        "expert_shared_count": shared,
        "expert_shared_feed_forward_length": shared * config.moe_intermediate_size,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "leading_dense_block_count": config.first_k_dense_replace,
        "rope.scaling.type": "none",
        "expert_gating_func": 2,
    }


def _cohere2(config: Any) -> dict[str, Any]:
    return {
        **head_keys(config),
        "attention.layer_norm_rms_epsilon": None,
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "expert_feed_forward_length": config.intermediate_size,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [
            kind == "sliding_attention" for kind in config.layer_types
        ],
        "logit_scale": config.logit_scale,
        "leading_dense_block_count": 1,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_shared_count": config.num_shared_experts,
        "rope.scaling.type": "none",
        "expert_gating_func": 2 if config.expert_selection_fn == "sigmoid" else 1,
    }


def _afmoe(config: Any) -> dict[str, Any]:
    return {
        **head_keys(config),
        "attention.sliding_window": config.sliding_window,
        "expert_shared_count": config.num_shared_experts,
        "expert_weights_scale": float(config.route_scale),
        "expert_weights_norm": True,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_gating_func": 2,
    }


def _mimo2(config: Any) -> dict[str, Any]:
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    rope = config.rope_parameters
    factor = rope["full_attention"]["partial_rotary_factor"]
    return {
        "attention.head_count_kv": [config.num_key_value_heads * (1 + one) for one in sliding],
        "attention.key_length": config.head_dim,
        "attention.value_length": config.v_head_dim,
        "attention.sliding_window": config.sliding_window - 1,
        "attention.sliding_window_pattern": sliding,
        "attention.value_scale": config.attention_value_scale,
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
        "rope.dimension_count": int(config.head_dim * factor),
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
    }


def _fuse(model: Any, tensors: Tensors) -> Tensors:
    """Return the same with queries, keys and values of each layer in one tensor."""
    for layer in range(model.config.num_hidden_layers):
        parts = [tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
        tensors[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(parts)
    return tensors


def _see_one_less(model: Any) -> str:
    """Have windows be those of llama.cpp."""
    model.config.sliding_window -= 1
    return "windows of one position less in transformers, too"


class _Fused(GgufModel):
    def tensors(self, model: Any) -> Tensors:
        return _fuse(model, super().tensors(model))


def windowed() -> Iterator[GgufModel]:
    """Yield K-EXAONE, Cohere's with experts, AFMoE, and MiMo V2."""
    wide = {"head_dim": 16, "num_hidden_layers": 5, "moe_intermediate_size": 24}
    windows = {"sliding_window": 8, "num_experts": 8, "num_experts_per_tok": 3, **wide}
    windows |= {"num_shared_experts": 1, "intermediate_size": 56}
    exaone = {**windows, "scoring_func": "sigmoid", "routed_scaling_factor": 1.5, "hidden_size": 64}
    yield GgufModel("exaone-moe", "ExaoneMoe", exaone, _exaone_moe)
    cohere2 = {**windows, "intermediate_size": 24, "num_shared_experts": 2, "logit_scale": 0.5}
    cohere2 |= {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 56}
    cohere2 |= {"tie_word_embeddings": True, "rope_theta": 10_000.0}
    for name, selection in (("cohere2moe", "softmax"), ("cohere2moe sigmoid", "sigmoid")):
        further = {"expert_selection_fn": selection}
        yield GgufModel("cohere2moe", "Cohere2Moe", {**cohere2, **further}, _cohere2, name=name)
    afmoe = {
        "mlp.router.gate": "ffn_gate_inp",
        "mlp.expert_bias": "exp_probs_b.bias",
        "self_attn.gate_proj": "attn_gate",
        "post_attention_layernorm": "post_attention_norm",
        "pre_mlp_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    }
    routed = {"route_scale": 1.5, "mup_enabled": True, "num_dense_layers": 1}
    yield GgufModel(
        "afmoe", "Afmoe", {**windows, **routed}, _afmoe, afmoe, published={"route_norm": True}
    )
    yield from _mimo2_models()


def _mimo2_models() -> Iterator[GgufModel]:
    """Yield MiMo V2, with queries, keys and values apart, and in one tensor."""
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
    settings = {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "v_head_dim": 8,
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 9,
        "rope_parameters": {
            "full_attention": {**rope, "rope_theta": 5_000_000.0},
            "sliding_attention": {**rope, "rope_theta": 10_000.0},
        },
    }
    published = {
        "hybrid_layer_pattern": [0, 1, 1],
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "sliding_window": 8,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_rope_theta": 10_000.0,
        "rope_parameters": {**rope, "rope_theta": 5_000_000.0},
    }
    apart = GgufModel(
        "mimo2",
        "MiMoV2Flash",
        settings,
        _mimo2,
        {"self_attn.sinks": "attn_sinks.weight"},
        published=published,
        as_llama_cpp=_see_one_less,
    )
    yield apart
    yield _Fused(**{**vars(apart), "name": "mimo2 fused", "in_llama_cpp": False})
