"""Sliding windows beside layers that see all positions: K-EXAONE, AFMoE and MiMo V2."""

from typing import Any

from moecache.decoding.gguf._architecture import Architecture
from moecache.decoding.gguf._common import (
    common_settings,
    correction,
    expert_width,
    group_counts,
    has_bias,
    plain_settings,
    rope,
)
from moecache.decoding.gguf._metadata import Metadata

_SIGMOID = 2  # of expert_gating_func


def window_settings(said: Metadata) -> dict[str, Any]:
    """Return what models of sliding windows and a router that is corrected have in common."""
    said.require("expert_gating_func", _SIGMOID)
    settings = plain_settings(said)
    theta = settings["rope_parameters"]["rope_theta"]
    if said.number("rope.freq_base_swa", theta) != theta:
        raise said.unsupported("rope.freq_base_swa", said.number("rope.freq_base_swa"))
    return {
        **settings,
        "intermediate_size": said.size("feed_forward_length"),
        "moe_intermediate_size": expert_width(said),
        "num_experts": said.size("expert_count", least=1),
        "num_shared_experts": said.size("expert_shared_count", least=1),
        "sliding_window": int(said.real("attention.sliding_window")),
        "layer_types": layer_types(said),
    }


def layer_types(said: Metadata) -> list[str]:
    """Return the kind of each layer's attention: by default every fourth sees all positions."""
    count = said.num_layers
    pattern = said.get("attention.sliding_window_pattern", 4)
    if type(pattern) is int and 0 < pattern <= said.num_blocks:
        pattern = [(layer + 1) % pattern != 0 for layer in range(count)]
    if not isinstance(pattern, list | tuple) or len(pattern) < count:
        raise said.unsupported("attention.sliding_window_pattern", pattern)
    return ["sliding_attention" if one else "full_attention" for one in pattern[:count]]


def _exaone_moe(said: Metadata) -> dict[str, Any]:
    groups, used = group_counts(said)
    return {
        **window_settings(said),
        "first_k_dense_replace": said.size("leading_dense_block_count", 0),
        "norm_topk_prob": said.flag("expert_weights_norm", default=False),
        "routed_scaling_factor": said.real("expert_weights_scale", 1.0, least=-1.0) or 1.0,
        "n_group": groups,
        "topk_group": used,
    }


def _afmoe(said: Metadata) -> dict[str, Any]:
    if not said.flag("expert_weights_norm", default=False):
        raise said.unsupported("expert_weights_norm", value=False)
    return {
        **window_settings(said),
        "num_dense_layers": said.size("leading_dense_block_count", 0),
        "route_scale": said.real("expert_weights_scale", 1.0, least=-1.0) or 1.0,
        # Files do not say it, and llama.cpp scales.
        "mup_enabled": True,
        "attention_bias": has_bias(said, "attn_q", "attn_k", "attn_v"),
    }


def _mimo2(said: Metadata) -> dict[str, Any]:
    said.require("expert_gating_func", _SIGMOID)
    layers, width = range(said.num_layers), said.size("attention.key_length", least=1)
    sliding = _sliding(said)
    counts = said.sizes("attention.head_count_kv")
    # Layers of windows have twice the heads of keys.
    keys = next((counts[layer] for layer in layers if not sliding[layer]), counts[0] // 2)
    if any(counts[layer] != keys * (2 if sliding[layer] else 1) for layer in layers) or not keys:
        raise said.unsupported("attention.head_count_kv", counts)
    groups, used = group_counts(said)
    whole = rope(said, width, is_partial=True)
    theta = said.real("rope.freq_base_swa", whole["rope_theta"], least=1.0)
    return {
        **common_settings(said, keys=keys),
        "head_dim": width,
        "v_head_dim": said.size("attention.value_length", least=1),
        "intermediate_size": said.size("feed_forward_length"),
        "moe_intermediate_size": expert_width(said),
        "n_routed_experts": said.size("expert_count", least=1),
        "num_experts_per_tok": said.size("expert_used_count", least=1),
        "norm_topk_prob": True,
        "routed_scaling_factor": said.real("expert_weights_scale", 1.0, least=-1.0) or 1.0,
        "n_group": groups,
        "topk_group": used,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
        "mlp_layer_types": [
            "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in said.tensors else "dense"
            for layer in layers
        ],
        # The published number counts the positions before a token's own, which is seen, too.
        "sliding_window": int(said.real("attention.sliding_window")) + 1,
        "swa_num_key_value_heads": 2 * keys,
        "add_full_attention_sink_bias": False,
        "attention_value_scale": said.real("attention.value_scale", 1.0),
        "attention_bias": has_bias(said, "attn_q", "attn_k", "attn_v"),
        "rope_parameters": {
            "full_attention": whole,
            "sliding_attention": {**whole, "rope_theta": theta},
        },
    }


def _sliding(said: Metadata) -> list[bool]:
    pattern, count = said.get("attention.sliding_window_pattern"), said.num_layers
    if not isinstance(pattern, list | tuple) or len(pattern) < count:
        raise said.unsupported("attention.sliding_window_pattern", pattern)
    return [bool(one) for one in pattern[:count]]


EXAONE_MOE = Architecture("ExaoneMoe", _exaone_moe, source=correction)
AFMOE = Architecture("Afmoe", _afmoe, source=correction)
MIMO2 = Architecture("MiMoV2Flash", _mimo2)
