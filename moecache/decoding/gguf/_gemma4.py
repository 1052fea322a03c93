"""Gemma 4: windows of narrow heads between wide ones, and experts beside a feed-forward."""

from typing import Any

from moecache.decoding.gguf._architecture import Architecture
from moecache.decoding.gguf._common import common_settings, expert_width, has_bias, rope
from moecache.decoding.gguf._metadata import Metadata


def _gemma4(said: Metadata) -> dict[str, Any]:
    count, shared = said.num_layers, said.size("attention.shared_kv_layers", 0)
    pattern = said.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list | tuple) or len(pattern) < count:
        raise said.unsupported("attention.sliding_window_pattern", pattern)
    sliding = [bool(one) for one in pattern[:count]]
    heads = said.sizes("attention.head_count_kv")
    # The last layer that has keys of its own, of each kind.
    own = range(count - shared)
    windows, full = [i for i in own if sliding[i]], [i for i in own if not sliding[i]]
    if not windows or not full or sliding[-1]:
        raise said.unsupported("attention.sliding_window_pattern", pattern)
    same = f"blk.{full[0]}.attn_v.weight" not in said.tensors
    counts = {heads[windows[0]], heads[full[0]]}
    if 0 in counts or (len(counts) > 1 and not same):
        raise said.unsupported("attention.head_count_kv", heads)
    feed = said.sizes("feed_forward_length")
    table = said.tensors.get("per_layer_token_embd.weight", said.shape("token_embd.weight"))
    return {
        **common_settings(said, keys=heads[windows[0]]),
        "head_dim": said.size("attention.key_length_swa", least=1),
        "global_head_dim": said.size("attention.key_length", least=1),
        "num_global_key_value_heads": heads[full[0]],
        "attention_k_eq_v": same,
        "num_kv_shared_layers": shared,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
        "sliding_window": int(said.real("attention.sliding_window")),
        "rope_parameters": _gemma4_rope(said),
        "attention_bias": has_bias(said, "attn_q"),
        "intermediate_size": feed[0],
        "use_double_wide_mlp": feed[count - 1] == 2 * feed[0],
        "final_logit_softcapping": said.real("final_logit_softcapping", 0.0, least=-1.0) or None,
        "hidden_size_per_layer_input": said.size("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table[0],
        "enable_moe_block": True,
        "num_experts": said.size("expert_count", least=1),
        "top_k_experts": said.size("expert_used_count", least=1),
        "moe_intermediate_size": expert_width(said),
    }


def _gemma4_rope(said: Metadata) -> dict[str, Any]:
    width = said.size("attention.key_length", least=1)
    whole = rope(said, width)
    if whole["rope_type"] != "default":
        raise said.unsupported("rope.scaling.type", whole["rope_type"])
    narrow = said.size("attention.key_length_swa", least=1)
    rotated = said.size("rope.dimension_count_swa", narrow)
    if rotated != narrow:
        raise said.unsupported("rope.dimension_count_swa", rotated)
    theta = said.real("rope.freq_base_swa", 10_000.0, least=1.0)
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        # The file has it as a tensor of factors, rope_freqs: 1 for a quarter, infinite for others.
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": whole["rope_theta"],
        },
    }


GEMMA4 = Architecture(
    "Gemma4",
    _gemma4,
    {
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "layer_scalar": "layer_output_scale.weight",
    },
    # Layers that share another's keys have none of their own in transformers.
    ignored=(r"rope_freqs\.weight", r"blk\.\d+\.attn_(k|v|k_norm)\.weight"),
    config_suffix="TextConfig",
)
