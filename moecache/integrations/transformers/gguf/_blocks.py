"""MiniMax M3: attention to blocks of positions that an indexer chooses."""

from typing import Any

import numpy as np

from moecache.decoding.gguf._architecture import Architecture, Source
from moecache.decoding.gguf._common import correction, expert_width, plain_settings
from moecache.decoding.gguf._metadata import Metadata
from moecache.integrations.transformers.gguf._linear_sources import less_one

_SIGMOID = 2  # of expert_gating_func
_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.indexer.q_norm": "indexer.q_norm",
    "self_attn.indexer.k_norm": "indexer.k_norm",
}


def _minimax_m3(said: Metadata) -> dict[str, Any]:
    said.require("expert_gating_func", _SIGMOID)
    if not said.flag("expert_weights_norm", default=True):
        raise said.unsupported("expert_weights_norm", value=False)
    said.get("leading_dense_block_count", None)  # as the tensors say
    settings, layers = plain_settings(said, is_partial=True), range(said.num_layers)
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in said.tensors for layer in layers]
    chosen = [f"blk.{layer}.indexer.q_proj.weight" in said.tensors for layer in layers]
    width = expert_width(said)
    dense = [layer for layer in layers if not routed[layer]]
    return {
        **settings,
        "intermediate_size": width,
        "dense_intermediate_size": said.matrix(f"blk.{dense[0]}.ffn_up.weight")[0]
        if dense
        else said.size("feed_forward_length", width),
        "shared_intermediate_size": said.size("expert_shared_count", least=1) * width,
        "num_local_experts": said.size("expert_count", least=1),
        "routed_scaling_factor": said.real("expert_weights_scale", 1.0, least=-1.0) or 1.0,
        "rotary_dim": said.size("rope.dimension_count", settings["head_dim"]),
        "mlp_layer_types": ["sparse" if one else "dense" for one in routed],
        "layer_types": ["minimax_m3_sparse" if one else "full_attention" for one in chosen],
        "index_n_heads": said.size("attention.indexer.head_count", least=1),
        "index_head_dim": said.size("attention.indexer.key_length", least=1),
        "index_block_size": int(said.real("attention.indexer.block_size")),
        "index_topk_blocks": int(said.real("attention.indexer.top_k")),
        "index_local_blocks": int(said.real("attention.indexer.local_blocks", least=-1.0)),
    }


def _minimax_m3_source(leaf: str, layer: int, said: Metadata) -> Source | None:
    if leaf == "model.norm.weight":
        return Source(("output_norm.weight",), undo=less_one)
    stem = leaf.removesuffix(".weight")
    if stem in _NORMS:
        return Source((f"blk.{layer}.{_NORMS[stem]}.weight",), undo=less_one)
    for module, suffix in (("mlp", ""), ("mlp.shared_experts", "_shexp")):
        if leaf == f"{module}.gate_up_proj.weight":
            parts = tuple(f"blk.{layer}.ffn_{part}{suffix}.weight" for part in ("gate", "up"))
            return Source(parts, rows=np.arange(sum(said.shape(part)[0] for part in parts)))
    return correction(leaf, layer, said)


MINIMAX_M3 = Architecture(
    "MiniMaxM3VL",
    _minimax_m3,
    {
        **{
            f"self_attn.indexer.{part}_proj.weight": f"indexer.{part}_proj.weight"
            for part in ("q", "k")
        },
        "mlp.down_proj.weight": "ffn_down.weight",
        "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    },
    _minimax_m3_source,
    config_suffix="TextConfig",
    like="minimax-m2",
)
