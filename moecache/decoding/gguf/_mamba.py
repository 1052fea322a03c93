"""Granite 4 and Nemotron-H: layers of Mamba 2 beside those of attention."""

from typing import Any

from moecache.decoding.gguf._architecture import Architecture
from moecache.decoding.gguf._common import (
    common_settings,
    expert_width,
    group_counts,
    has_bias,
    head_dim,
    key_heads,
)
from moecache.decoding.gguf._metadata import Metadata
from moecache.decoding.gguf._softmax import granite_settings, granite_source
from moecache.errors import ConfigError

_SIGMOID = 2  # of expert_gating_func


def _mamba_sizes(said: Metadata) -> tuple[int, int, int]:
    """Return the heads of a layer of Mamba, their width, and how many groups they form."""
    heads, groups = said.size("ssm.time_step_rank", least=1), said.size("ssm.group_count", least=1)
    width, rest = divmod(said.size("ssm.inner_size", least=1), heads)
    if rest or heads % groups:
        raise said.unsupported("ssm.time_step_rank", heads)
    return heads, width, groups


def _granite_hybrid(said: Metadata) -> dict[str, Any]:
    heads, width, groups = _mamba_sizes(said)
    expand, rest = divmod(heads * width, said.size("embedding_length", least=1))
    if rest:
        raise said.unsupported("ssm.inner_size", heads * width)
    counts = said.sizes("attention.head_count_kv")
    rotates = said.flag("rope.scaling.finetuned", default=True)
    return {
        **granite_settings(said),
        "position_embedding_type": "rope" if rotates else None,
        "shared_intermediate_size": said.size("expert_shared_feed_forward_length", least=1),
        "layer_types": ["full_attention" if count else "linear_attention" for count in counts],
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_n_groups": groups,
        "mamba_d_state": said.size("ssm.state_size", least=1),
        "mamba_d_conv": said.size("ssm.conv_kernel", least=1),
        "mamba_expand": expand,
        "mamba_conv_bias": has_bias(said, "ssm_conv1d"),
        "mamba_proj_bias": has_bias(said, "ssm_in"),
    }


def _nemotron(said: Metadata) -> dict[str, Any]:
    said.require("expert_gating_func", _SIGMOID)
    heads, width, groups = _mamba_sizes(said)
    settings = common_settings(said)
    width_of_experts = expert_width(said)
    chosen, used = group_counts(said)
    # A block is one of these alone.
    kinds = [_nemotron_kind(said, layer) for layer in range(said.num_layers)]
    # Nothing is rotated.
    for key in ("rope.dimension_count", "rope.freq_base"):
        said.get(key, None)
    dense = [f"blk.{layer}.ffn_up.weight" for layer, kind in enumerate(kinds) if kind == "mlp"]
    return {
        **settings,
        "layer_norm_epsilon": settings.pop("rms_norm_eps"),
        "head_dim": head_dim(said),
        "num_key_value_heads": key_heads(said),
        "layers_block_type": kinds,
        "intermediate_size": said.matrix(dense[0])[0] if dense else width_of_experts,
        "attention_bias": has_bias(said, "attn_q", "attn_k", "attn_v"),
        "mamba_num_heads": heads,
        "mamba_head_dim": width,
        "n_groups": groups,
        "ssm_state_size": said.size("ssm.state_size", least=1),
        "conv_kernel": said.size("ssm.conv_kernel", least=1),
        "use_conv_bias": has_bias(said, "ssm_conv1d"),
        "mamba_proj_bias": has_bias(said, "ssm_in"),
        "n_routed_experts": said.size("expert_count", least=1),
        "n_shared_experts": said.size("expert_shared_count", 1, least=1),
        "num_experts_per_tok": said.size("expert_used_count", least=1),
        "moe_intermediate_size": width_of_experts,
        "moe_shared_expert_intermediate_size": said.size("expert_shared_feed_forward_length"),
        "moe_latent_size": said.size("moe_latent_size", None),
        "routed_scaling_factor": said.real("expert_weights_scale", 1.0, least=-1.0) or 1.0,
        "norm_topk_prob": said.flag("expert_weights_norm", default=False),
        "n_group": chosen,
        "topk_group": used,
    }


def _nemotron_kind(said: Metadata, layer: int) -> str:
    for tensor, kind in (
        ("ssm_a", "linear_attention"),
        ("attn_output.weight", "full_attention"),
        ("ffn_gate_inp.weight", "moe"),
        ("ffn_up.weight", "mlp"),
    ):
        if f"blk.{layer}.{tensor}" in said.tensors:
            return kind
    raise ConfigError(
        f"block {layer} of the GGUF file is neither attention, Mamba nor a feed-forward; if the "
        "file is one of several parts, give the first"
    )


GRANITE_HYBRID = Architecture("GraniteMoeHybrid", _granite_hybrid, source=granite_source)
NEMOTRON_H_MOE = Architecture("NemotronH", _nemotron)
