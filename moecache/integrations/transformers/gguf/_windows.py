"""Architectures whose layers of sliding windows have other heads than the rest: MiMo V2."""

from typing import Any

import numpy as np

from moecache.decoding.gguf._architecture import Architecture, Source
from moecache.decoding.gguf._common import (
    common_settings,
    correction,
    expert_width,
    group_counts,
    has_bias,
    rope,
)
from moecache.decoding.gguf._metadata import Metadata

_SIGMOID = 2  # of expert_gating_func


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


def _mimo2_source(leaf: str, layer: int, said: Metadata) -> Source | None:
    fused = f"blk.{layer}.attn_qkv.weight"
    if fused not in said.tensors or not leaf.startswith("self_attn."):
        return correction(leaf, layer, said)
    # Values are narrower than keys, and each layer has heads of its own.
    keys = said.sizes("attention.head_count_kv")[layer]
    sizes = (
        ("q", said.size("attention.head_count"), said.size("attention.key_length")),
        ("k", keys, said.size("attention.key_length")),
        ("v", keys, said.size("attention.value_length")),
    )
    start = 0
    for part, heads, width in sizes:
        rows = said.rows(heads, width)
        if leaf == f"self_attn.{part}_proj.weight":
            return Source((fused,), rows=np.arange(start, start + rows))
        start += rows
    return None


MIMO2 = Architecture("MiMoV2Flash", _mimo2, {"self_attn.sinks": "attn_sinks.weight"}, _mimo2_source)
