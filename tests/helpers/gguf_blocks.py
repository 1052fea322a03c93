"""A tiny MiniMax M3 as a GGUF file."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.helpers.gguf_models import GgufModel, Tensors, head_keys


def _minimax_m3(config: Any) -> dict[str, Any]:
    return {
        **head_keys(config),
        "feed_forward_length": config.dense_intermediate_size,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_count": 1,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "rope.dimension_count": config.rotary_dim,
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk_blocks,
        "attention.indexer.block_size": config.index_block_size,
        "attention.indexer.local_blocks": config.index_local_blocks,
    }


def _change(leaf: str, values: np.ndarray, _config: Any) -> Tensors | None:
    for module, suffix in (("mlp", ""), ("mlp.shared_experts", "_shexp")):
        if leaf == f"{module}.gate_up_proj.weight":
            gate, up = np.split(values, 2)
            return {f"ffn_gate{suffix}.weight": gate, f"ffn_up{suffix}.weight": up}
    return None


def blocks() -> Iterator[GgufModel]:
    """Yield it; of more than two blocks of four positions it chooses two."""
    settings = {
        "head_dim": 16,
        "rotary_dim": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
        },
        "intermediate_size": 24,
        "dense_intermediate_size": 56,
        "shared_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_local_blocks": 1,
    }
    published = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        # transformers would take what it knows of it out of the configuration.
        "model_type": "minimax_m3",
        "scoring_func": "sigmoid",
        "n_shared_experts": 1,
        "moe_layer_freq": [0, 1, 1],
        "sparse_attention_config": {
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 8,
            "sparse_block_size": 4,
            "sparse_topk_blocks": 32,
            "sparse_local_block": 1,
        },
    }
    names = {f"self_attn.indexer.{part}": f"indexer.{part}" for part in ("q_proj", "k_proj")}
    names |= {f"self_attn.indexer.{part}": f"indexer.{part}" for part in ("q_norm", "k_norm")}
    for name, further in (
        # llama.cpp chooses only with flash attention: here the blocks are all that there are.
        ("minimax-m3", {"index_topk_blocks": 32}),
        ("minimax-m3 chosen", {}),
    ):
        yield GgufModel(
            "minimax-m3",
            "MiniMaxM3VL",
            {**settings, **further},
            _minimax_m3,
            {**names, "mlp.shared_experts.down_proj": "ffn_down_shexp"},
            _change,
            config_suffix="TextConfig",
            name=name,
            in_llama_cpp=not name.endswith("chosen"),
            shift=True,
            published=published,
            published_names="minimax_m3_vl",
        )
