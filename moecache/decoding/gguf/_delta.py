"""Kimi Linear and Ling 3: layers of Kimi's delta attention beside those with latents."""

from typing import Any

from moecache.decoding.gguf._architecture import Architecture
from moecache.decoding.gguf._common import (
    common_settings,
    expert_width,
    group_counts,
    has_bias,
    rope,
)
from moecache.decoding.gguf._metadata import Metadata

_SIGMOID = 2  # of expert_gating_func


def _settings(said: Metadata) -> dict[str, Any]:
    """Return what both have in common."""
    said.require("expert_gating_func", _SIGMOID)
    said.get("leading_dense_block_count", None)  # as the tensors say
    heads, layers = said.size("attention.head_count", least=1), range(said.num_layers)
    rotated, width = said.size("rope.dimension_count"), said.size("attention.key_length_mla")
    if width <= rotated or rotated % 2:
        raise said.unsupported("rope.dimension_count", rotated)
    groups, used = group_counts(said)
    return {
        **common_settings(said, keys=heads),
        "intermediate_size": said.size("feed_forward_length"),
        "moe_intermediate_size": expert_width(said),
        "num_local_experts": said.size("expert_count", least=1),
        "num_experts_per_tok": said.size("expert_used_count", least=1),
        "n_shared_experts": said.size("expert_shared_count", least=1),
        "routed_scaling_factor": said.real("expert_weights_scale", 1.0, least=-1.0) or 1.0,
        "n_group": groups,
        "topk_group": used,
        "kv_lora_rank": said.size("attention.kv_lora_rank", least=1),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": said.size("attention.value_length_mla", least=1),
        "attention_bias": has_bias(said, "attn_kv_a_mqa"),
        "layer_types": [
            "linear_attention" if is_linear(said, layer) else "full_attention" for layer in layers
        ],
        "mlp_layer_types": [
            "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in said.tensors else "dense"
            for layer in layers
        ],
    }


def is_linear(said: Metadata, layer: int) -> bool:
    """Return whether a layer holds states."""
    return f"blk.{layer}.ssm_a" in said.tensors


def _kimi_linear(said: Metadata) -> dict[str, Any]:
    # Nothing is rotated.
    said.get("rope.freq_base", None)
    width, layers = said.size("kda.head_dim", least=1), range(said.num_layers)
    counts = [
        said.matrix(f"blk.{layer}.ssm_beta.weight")[0] for layer in layers if is_linear(said, layer)
    ]
    if len(set(counts)) > 1:
        raise said.unsupported("kda.head_dim", width)
    return {
        **_settings(said),
        "norm_topk_prob": said.flag("expert_weights_norm", default=True),
        "q_lora_rank": said.size("attention.q_lora_rank", 0) or None,
        "linear_head_dim": width,
        "linear_num_heads": counts[0] if counts else said.size("attention.head_count"),
        "linear_conv_kernel_dim": said.size("ssm.conv_kernel", least=1),
    }


def _bailing3(said: Metadata) -> dict[str, Any]:
    settings = _settings(said)
    shared = settings["n_shared_experts"] * settings["moe_intermediate_size"]
    if said.size("expert_shared_feed_forward_length", shared) != shared:
        raise said.unsupported(
            "expert_shared_feed_forward_length", said.get("expert_shared_feed_forward_length")
        )
    if said.size("attention.q_lora_rank", 0):
        raise said.unsupported("attention.q_lora_rank", said.get("attention.q_lora_rank"))
    parameters = rope(said, settings["qk_rope_head_dim"])
    return {
        **settings,
        "norm_topk_prob": said.flag("expert_weights_norm", default=False),
        "rope_theta": parameters["rope_theta"],
        "rope_parameters": parameters,
        "head_dim": said.size("kda.head_dim", least=1),
        "short_conv_kernel_size": said.size("ssm.conv_kernel", least=1),
        "linear_head_dim": said.size("kda.head_dim", least=1),
        "linear_num_heads": settings["num_attention_heads"],
        "linear_conv_kernel_dim": said.size("ssm.conv_kernel", least=1),
        "kda_safe_gate": said.flag("kda.safe_gate", default=True),
        "kda_lower_bound": float(said.number("kda.gate_lower_bound", -5.0)),
        "num_mtp_layers": 0,
    }


KIMI_LINEAR = Architecture("KimiLinear", _kimi_linear)
BAILING3 = Architecture("BailingHybrid", _bailing3, like="kimi-linear")
