"""Qwen3-Next and Qwen 3.5: layers of linear attention between those of full attention."""

from typing import Any

from moecache.decoding.gguf._architecture import Architecture
from moecache.decoding.gguf._common import expert_width, has_bias, plain_settings
from moecache.decoding.gguf._metadata import Metadata


def linear_settings(said: Metadata) -> dict[str, Any]:
    """Return what models with such layers say in the same way."""
    values = said.size("ssm.time_step_rank", least=1)
    keys = said.size("ssm.group_count", least=1)
    if values % keys or said.size("ssm.inner_size") % values:
        raise said.unsupported("ssm.time_step_rank", values)
    linear = [f"blk.{layer}.ssm_a" in said.tensors for layer in range(said.num_layers)]
    return {
        **plain_settings(said, is_partial=True),
        "num_experts": said.size("expert_count", least=1),
        "moe_intermediate_size": expert_width(said),
        "shared_expert_intermediate_size": said.size("expert_shared_feed_forward_length"),
        "layer_types": ["linear_attention" if one else "full_attention" for one in linear],
        "linear_conv_kernel_dim": said.size("ssm.conv_kernel", least=1),
        "linear_key_head_dim": said.size("ssm.state_size", least=1),
        "linear_value_head_dim": said.size("ssm.inner_size", least=1) // values,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "attention_bias": has_bias(said, "attn_q", "attn_k", "attn_v"),
    }


def _qwen3next(said: Metadata) -> dict[str, Any]:
    width = expert_width(said)
    return {
        **linear_settings(said),
        "intermediate_size": said.size("feed_forward_length", width),
        "norm_topk_prob": True,
    }


def qwen35moe_settings(said: Metadata) -> dict[str, Any]:
    """Return what Qwen 3.5, and what came of it, says."""
    settings = linear_settings(said)
    sections = said.get("rope.dimension_sections", None)
    if sections is not None:
        if not isinstance(sections, list | tuple) or not all(type(n) is int for n in sections):
            raise said.unsupported("rope.dimension_sections", sections)
        # In a text all sections have the token's position.
        settings["rope_parameters"]["mrope_section"] = list(sections[:3])
        settings["rope_parameters"]["mrope_interleaved"] = True
    return settings


QWEN3NEXT = Architecture("Qwen3Next", _qwen3next)
QWEN35MOE = Architecture("Qwen3_5Moe", qwen35moe_settings, config_suffix="TextConfig")
