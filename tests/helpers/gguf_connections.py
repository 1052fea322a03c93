"""A tiny Hy4 as a GGUF file."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tests.helpers.gguf_models import GgufModel, Tensors

_PARTS = ("fn", "base", "scale")


def _turn_neighbours(model: Any) -> str:
    """Have rotations turn values beside each other, as llama.cpp's do."""
    import sys

    import torch

    modeling = sys.modules[type(model).__module__]
    usual = modeling.apply_rotary_pos_emb

    def turn(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
        q, k = (torch.cat([one[..., ::2], one[..., 1::2]], -1) for one in (q, k))
        found: tuple[Any, Any] = usual(q, k, cos, sin, unsqueeze_dim)
        return found

    modeling.apply_rotary_pos_emb = turn
    return "rotations turn values beside each other in transformers, too"


def connected(
    indexed: Callable[[Any], dict[str, Any]],
    names: Mapping[str, str],
    change: Callable[[str, np.ndarray, Any], Tensors | None],
) -> Iterator[GgufModel]:
    """Yield it; keys, names and changes of what chooses positions are given."""

    def keys(config: Any) -> dict[str, Any]:
        return {
            **indexed(config),
            "hyper_connection.count": config.hc_mult,
            "hyper_connection.epsilon": config.hc_eps,
            "hyper_connection.magnitude": config.hc_magnitude,
            "swiglu_clamp_exp": [config.swiglu_limit] * config.num_hidden_layers,
        }

    names = {
        **names,
        "self_attn.gate_proj": "attn_gate",
        "self_attn.sinks": "attn_sinks.weight",
        **{
            f"{kind}_hc.{part}": f"hc_{kind}_{part}.weight"
            for kind in ("attn", "ffn")
            for part in _PARTS
        },
        **{f"hc_head.hc_{part}": f"output_hc_{part}.weight" for part in _PARTS},
    }
    settings = {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "first_k_dense_replace": 1,
        "indexer_types": ["full", "shared", "full"],
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 64,
        "hc_mult": 2,
        "swiglu_limit": 1.5,
    }
    yield GgufModel(
        "hy_v4",
        "HYV4",
        settings,
        keys,
        names,
        change,
        renamed={
            "model.hc_pre.hc_head.": "model.hc_head.",
            "mlp.linear_gate.": "mlp.gate_proj.",
            "shared_experts.linear_gate.": "shared_experts.gate_proj.",
            **{f"hc_pre.hc_{kind}_layer.": f"hc_{kind}_layer.hc_pre." for kind in ("attn", "mlp")},
        },
        as_llama_cpp=_turn_neighbours,
    )
