"""DeepSeek V4: attention to positions that are compressed, and streams of hidden states."""

from typing import Any

from moecache.decoding.gguf._architecture import Architecture
from moecache.decoding.gguf._common import common_settings, correction, expert_width, head_dim, rope
from moecache.decoding.gguf._metadata import Metadata

_SQRT_SOFTPLUS = 4  # of expert_gating_func
_PARTS = ("fn", "base", "scale")
# How many positions become one, and what transformers calls such a layer.
_KINDS = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}


def _deepseek_v4(said: Metadata) -> dict[str, Any]:
    said.require("expert_gating_func", _SQRT_SOFTPLUS)
    if not said.flag("expert_weights_norm", default=True):
        raise said.unsupported("expert_weights_norm", value=False)
    layers, width = range(said.num_layers), head_dim(said)
    ratios = said.get("attention.compress_ratios")
    known = isinstance(ratios, list | tuple) and len(ratios) >= len(layers)
    if not known or any(type(one) is not int or one not in _KINDS for one in ratios[: len(layers)]):
        raise said.unsupported("attention.compress_ratios", ratios)
    limit = said.real("swiglu_clamp_exp")
    if said.real("swiglu_clamp_shexp", limit) != limit:
        raise said.unsupported("swiglu_clamp_shexp", said.get("swiglu_clamp_shexp"))
    hashed = said.size("hash_layer_count", 0)
    scaled = rope(said, width, is_partial=True)
    plain = {**scaled, "rope_type": "default"}
    main = {key: plain[key] for key in ("rope_type", "rope_theta", "partial_rotary_factor")}
    theta = said.real("attention.compress_rope_freq_base", least=1.0)
    compressed = {**scaled, "rope_theta": theta}
    if scaled["rope_type"] == "yarn":
        compressed.setdefault("attention_factor", 1.0)
    return {
        **common_settings(said, keys=1),
        "head_dim": width,
        "q_lora_rank": said.size("attention.q_lora_rank", least=1),
        "o_groups": said.size("attention.output_group_count", least=1),
        "o_lora_rank": said.size("attention.output_lora_rank", least=1),
        "moe_intermediate_size": expert_width(said),
        "n_routed_experts": said.size("expert_count", least=1),
        "n_shared_experts": _one(said, "expert_shared_count"),
        "num_experts_per_tok": said.size("expert_used_count", least=1),
        "routed_scaling_factor": said.real("expert_weights_scale", 1.0, least=-1.0) or 1.0,
        "swiglu_limit": limit,
        "layer_types": [_KINDS[ratios[layer]] for layer in layers],
        "mlp_layer_types": ["hash_moe" if layer < hashed else "moe" for layer in layers],
        "sliding_window": int(said.real("attention.sliding_window")),
        "index_n_heads": said.size("attention.indexer.head_count", least=1),
        "index_head_dim": said.size("attention.indexer.key_length", least=1),
        "index_topk": int(said.real("attention.indexer.top_k")),
        "hc_mult": said.size("hyper_connection.count", least=1),
        "hc_sinkhorn_iters": int(said.real("hyper_connection.sinkhorn_iterations")),
        "hc_eps": said.real("hyper_connection.epsilon", least=-1.0),
        "rope_theta": main["rope_theta"],
        "compress_rope_theta": theta,
        "partial_rotary_factor": main["partial_rotary_factor"],
        "rope_parameters": {"main": main, "compress": compressed},
        "num_nextn_predict_layers": 0,
    }


def _one(said: Metadata, key: str) -> int:
    """Return 1: transformers' expert for all tokens is as wide as one of the others."""
    if said.size(key, 1) != 1:
        raise said.unsupported(key, said.get(key))
    return 1


_COMPRESSOR = {
    "position_bias": "ape.weight",
    "kv_proj.weight": "kv.weight",
    "gate_proj.weight": "gate.weight",
    "kv_norm.weight": "norm.weight",
}
DEEPSEEK_V4 = Architecture(
    "DeepseekV4",
    _deepseek_v4,
    {
        "self_attn.sinks": "attn_sinks.weight",
        "self_attn.q_a_norm.weight": "attn_q_a_norm.weight",
        "self_attn.kv_proj.weight": "attn_kv.weight",
        "self_attn.kv_norm.weight": "attn_kv_a_norm.weight",
        "self_attn.o_a_proj.weight": "attn_output_a.weight",
        "self_attn.o_b_proj.weight": "attn_output_b.weight",
        "self_attn.compressor.indexer.q_b_proj.weight": "indexer.attn_q_b.weight",
        "self_attn.compressor.indexer.scorer.weights_proj.weight": "indexer.proj.weight",
        **{
            f"self_attn.compressor.{module}{leaf}": f"{tensor}_compressor_{part}"
            for module, tensor in (("", "attn"), ("indexer.", "indexer"))
            for leaf, part in _COMPRESSOR.items()
        },
        "mlp.gate.tid2eid": "ffn_gate_tid2eid.weight",
        **{
            f"{kind}_hc.{part}": f"hc_{kind}_{part}.weight"
            for kind in ("attn", "ffn")
            for part in _PARTS
        },
        **{f"model.hc_head.hc_{part}": f"output_hc_{part}.weight" for part in _PARTS},
    },
    correction,
    like="deepseek2",
)
