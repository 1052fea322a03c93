"""Sizes of the tiny models: what transformers' configurations are given."""

from collections.abc import Mapping
from typing import Any

COMMON: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_EXPERTS_ONLY: Mapping[str, Any] = {"intermediate_size": 24, "num_hidden_layers": 2}
_DENSE_TOO: Mapping[str, Any] = {
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
}
_LINEAR_ATTENTION: Mapping[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LATENT_ATTENTION: Mapping[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
VISION: Mapping[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "out_hidden_size": 32,
}
_DEFAULT_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}

MIXTRAL: Mapping[str, Any] = {**_EXPERTS_ONLY, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN2_MOE: Mapping[str, Any] = {
    **_DENSE_TOO,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 28,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "mlp_only_layers": [1],
}
QWEN3_MOE: Mapping[str, Any] = {
    "hidden_size": 48,
    "head_dim": 16,
    "intermediate_size": 56,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 4,
    "decoder_sparse_step": 2,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
QWEN3_NEXT: Mapping[str, Any] = {
    **_DENSE_TOO,
    **_LINEAR_ATTENTION,
    "shared_expert_intermediate_size": 20,
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "mlp_only_layers": [0],
}
QWEN3_5_MOE: Mapping[str, Any] = {
    **_LINEAR_ATTENTION,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
QWEN3_5_MOE_VL: Mapping[str, Any] = {
    **_LINEAR_ATTENTION,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
QWEN3_VL_MOE: Mapping[str, Any] = {
    **_DENSE_TOO,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
    "rope_parameters": {**_DEFAULT_ROPE, "mrope_section": [4, 2, 2]},
}
OLMOE: Mapping[str, Any] = {**_EXPERTS_ONLY, "num_experts": 16, "num_experts_per_tok": 4}
DEEPSEEK_V2: Mapping[str, Any] = {
    **_DENSE_TOO,
    **_LATENT_ATTENTION,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
DEEPSEEK_V3: Mapping[str, Any] = {
    **_DENSE_TOO,
    **_LATENT_ATTENTION,
    "hidden_size": 48,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "num_mtp_layers": 0,
}
GLM4_MOE: Mapping[str, Any] = {
    **_DENSE_TOO,
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
    "num_mtp_layers": 0,
}
GPT_OSS: Mapping[str, Any] = {
    **_EXPERTS_ONLY,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 16,
    "swiglu_limit": 1.5,  # low enough to clamp some activations
    "rope_parameters": _DEFAULT_ROPE,
}
MINIMAX_M2: Mapping[str, Any] = {
    **_EXPERTS_ONLY,
    "head_dim": 16,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
}
ERNIE4_5_MOE: Mapping[str, Any] = {
    **_DENSE_TOO,
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
    "tie_word_embeddings": False,
}
ERNIE4_5_VL_MOE: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
    "moe_intermediate_size": [24, 12],
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_num_shared_experts": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [1, 1, 2],
    },
}
GRANITEMOE: Mapping[str, Any] = {
    **_EXPERTS_ONLY,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.5,
}
JAMBA: Mapping[str, Any] = {
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
}
PHIMOE: Mapping[str, Any] = {
    **_EXPERTS_ONLY,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "lm_head_bias": True,
}
LFM2_MOE: Mapping[str, Any] = {
    **_DENSE_TOO,
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "layer_types": ["conv", "full_attention", "conv"],
}
HUNYUAN_V1_MOE: Mapping[str, Any] = {
    **_EXPERTS_ONLY,
    "head_dim": 8,
    "num_experts": 8,
    "moe_topk": 3,
}
GEMMA4_TEXT: Mapping[str, Any] = {
    "head_dim": 8,
    "global_head_dim": 16,
    "intermediate_size": 56,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
}
NEMOTRON_H: Mapping[str, Any] = {
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 28,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 8,
    "use_mamba_kernels": False,
}
LLAMA4: Mapping[str, Any] = {
    "head_dim": 8,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_hidden_layers": 4,
    "interleave_moe_layer_step": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 64,
}
