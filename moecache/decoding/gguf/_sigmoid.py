"""Architectures whose router's scores are corrected by a bias: DeepSeek, and what came of it."""

from typing import Any

import numpy as np

from moecache.decoding.files.known import CORRECTION
from moecache.decoding.gguf._architecture import Architecture, Source
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
from moecache.errors import ConfigError

_SOFTMAX, _SIGMOID = 1, 2  # of expert_gating_func


def deepseek2(said: Metadata) -> Architecture:
    """Return DeepSeek V3 for scores by a sigmoid, V2 for those by a softmax."""
    corrected = any(name.endswith(CORRECTION) for name in said.tensors)
    usual = _SIGMOID if corrected else _SOFTMAX
    function = said.number("expert_gating_func", usual)
    if function not in {_SOFTMAX, _SIGMOID} or (function == _SOFTMAX and corrected):
        raise said.unsupported("expert_gating_func", function)
    return _DEEPSEEK_V2 if function == _SOFTMAX else _DEEPSEEK_V3


def _mistral4(said: Metadata) -> dict[str, Any]:
    said.require("expert_gating_func", _SOFTMAX)
    # The model's own default is another one than that of files.
    said.get("expert_weights_norm")
    settings = {**_latent(said), **_groups(said)}
    parameters, width = settings["rope_parameters"], settings["qk_nope_head_dim"]
    rotated = settings["qk_rope_head_dim"]
    parameters["partial_rotary_factor"] = rotated / (rotated + width)
    # Queries of far positions are scaled, if files say so.
    beta = said.real("attention.temperature_scale", 0.0, least=-1.0)
    parameters["llama_4_scaling_beta"] = beta
    usual = parameters.get("original_max_position_embeddings", settings["max_position_embeddings"])
    length = said.real("attention.temperature_length", usual)
    if beta and int(length) != usual:
        raise said.unsupported("attention.temperature_length", length)
    parameters["original_max_position_embeddings"] = usual
    return settings


def _latent(said: Metadata) -> dict[str, Any]:
    said.get("expert_gating_func", None)
    settings = common_settings(said)
    rotated = said.size("rope.dimension_count", least=1)
    keys = said.size("attention.key_length_mla", said.size("attention.key_length"))
    if keys < rotated:
        raise said.unsupported("attention.key_length_mla", keys)
    if rotated % 2:
        raise said.unsupported("rope.dimension_count", rotated)
    parameters = rope(said, rotated)
    scale = said.number("rope.scaling.yarn_log_multiplier", 0.0)
    if scale and parameters["rope_type"] == "yarn":
        # Times 10, as llama.cpp has it. The published models have it twice, which cancels the
        # factor of the rotation.
        multiplier = round(scale * 10, 6)
        parameters |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    return {
        **settings,
        # The file says one head, as llama.cpp computes with the latent keys themselves.
        "num_key_value_heads": settings["num_attention_heads"],
        "intermediate_size": said.size("feed_forward_length"),
        "moe_intermediate_size": expert_width(said),
        "n_routed_experts": said.size("expert_count", least=1),
        "n_shared_experts": said.size("expert_shared_count", least=1),
        "num_experts_per_tok": said.size("expert_used_count", least=1),
        "first_k_dense_replace": said.size("leading_dense_block_count", 0),
        "routed_scaling_factor": said.real("expert_weights_scale", 1.0, least=-1.0) or 1.0,
        "kv_lora_rank": said.size("attention.kv_lora_rank", least=1),
        "q_lora_rank": said.size("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": said.size("attention.value_length_mla", said.size("attention.value_length")),
        "rope_parameters": parameters,
        "attention_bias": has_bias(said, "attn_q_a", "attn_kv_a_mqa"),
    }


def _deepseek_v2(said: Metadata) -> dict[str, Any]:
    if said.flag("expert_weights_norm", default=False):
        raise said.unsupported("expert_weights_norm", value=True)
    groups, used = group_counts(said)
    return {
        **_latent(said),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": used,
    }


def _deepseek_v3(said: Metadata) -> dict[str, Any]:
    return {**_latent(said), **_groups(said)}


def indexed_settings(said: Metadata) -> dict[str, Any]:
    """Return V3's settings, and those of what chooses the positions that are seen."""
    said.require("expert_gating_func", _SIGMOID)
    return {
        **_deepseek_v3(said),
        "index_n_heads": said.size("attention.indexer.head_count", least=1),
        "index_head_dim": said.size("attention.indexer.key_length", least=1),
        "index_topk": int(said.real("attention.indexer.top_k")),
    }


def _glm_dsa(said: Metadata) -> dict[str, Any]:
    settings, count = indexed_settings(said), said.num_layers
    # As llama.cpp has it where a file does not say it: GLM 5.2 alone has so long a context.
    is_shared = settings["max_position_embeddings"] >= 2**20
    usual = [not is_shared or layer < 2 or layer % 4 == 2 for layer in range(count)]
    types = said.get("attention.indexer.types", usual)
    if not isinstance(types, list | tuple) or len(types) < count:
        raise said.unsupported("attention.indexer.types", types)
    return {**settings, "indexer_types": ["full" if one else "shared" for one in types[:count]]}


def _groups(said: Metadata) -> dict[str, Any]:
    groups, used = group_counts(said)
    return {
        "norm_topk_prob": said.flag("expert_weights_norm", default=False),
        "n_group": groups,
        "topk_group": used,
    }


def _shared(said: Metadata) -> dict[str, Any]:
    """Return what models with dense layers first, and experts that all tokens use, add."""
    said.require("expert_gating_func", _SIGMOID)
    return {
        "intermediate_size": said.size("feed_forward_length"),
        "moe_intermediate_size": expert_width(said),
        "n_routed_experts": said.size("expert_count", least=1),
        "n_shared_experts": said.size("expert_shared_count", least=1),
        "first_k_dense_replace": said.size("leading_dense_block_count", 0),
        "routed_scaling_factor": said.real("expert_weights_scale", 1.0, least=-1.0) or 1.0,
        "attention_bias": has_bias(said, "attn_q", "attn_k", "attn_v"),
        **_groups(said),
    }


def _glm4_moe(said: Metadata) -> dict[str, Any]:
    return {
        **plain_settings(said, is_partial=True),
        **_shared(said),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in said.tensors,
    }


def _dots1(said: Metadata) -> dict[str, Any]:
    return {**plain_settings(said), **_shared(said), "sliding_window": None}


def _minimax_m2(said: Metadata) -> dict[str, Any]:
    said.require("expert_gating_func", _SIGMOID)
    return {
        **plain_settings(said, is_partial=True),
        "intermediate_size": expert_width(said),
        "num_local_experts": said.size("expert_count", least=1),
    }


def _hy_v3(said: Metadata) -> dict[str, Any]:
    said.require("expert_gating_func", _SIGMOID)
    if not said.flag("expert_weights_norm", default=False):
        raise said.unsupported("expert_weights_norm", value=False)
    width, layers = expert_width(said), range(said.num_layers)
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in said.tensors for layer in layers]
    return {
        **plain_settings(said),
        "intermediate_size": said.size("feed_forward_length", width),
        "moe_intermediate_size": width,
        "num_experts": said.size("expert_count", least=1),
        "num_shared_experts": said.size("expert_shared_feed_forward_length", width) // width,
        "router_scaling_factor": said.real("expert_weights_scale", 1.0, least=-1.0) or 1.0,
        "mlp_layer_types": ["sparse" if one else "dense" for one in routed],
        "attention_bias": has_bias(said, "attn_q", "attn_k", "attn_v"),
    }


def _ernie(said: Metadata) -> dict[str, Any]:
    width = expert_width(said)
    # The file's own number is another one: the tensors have the right one.
    shared = [
        shape for name, shape in said.tensors.items() if name.endswith("ffn_down_shexp.weight")
    ]
    routed = [
        block
        for block in range(said.num_blocks)
        if f"blk.{block}.ffn_gate_inp.weight" in said.tensors
    ]
    return {
        **plain_settings(said),
        "intermediate_size": said.size("feed_forward_length"),
        "moe_intermediate_size": width,
        "moe_num_experts": said.size("expert_count", least=1),
        "moe_k": said.size("expert_used_count", least=1),
        "moe_num_shared_experts": shared[0][-1] // width if shared else 0,
        "moe_layer_start_index": said.size("leading_dense_block_count", 0),
        "moe_layer_end_index": max(routed, default=-1),
        "moe_layer_interval": said.size("interleave_moe_layer_step", 1, least=1),
        "use_bias": has_bias(said, "attn_q", "attn_k", "attn_v"),
    }


def _ernie_source(leaf: str, layer: int, said: Metadata) -> Source | None:
    if not leaf.endswith("e_score_correction_bias"):
        return None
    name = f"blk.{layer}.{CORRECTION}"
    if name not in said.tensors:
        return correction(leaf, layer, said)
    return Source((name,), undo=lambda arrays: arrays[0].reshape(1, -1))


def latent_source(leaf: str, layer: int, said: Metadata) -> Source | None:
    """Return where the matrix is that makes heads' keys and values of latents, or a correction."""
    if leaf == "self_attn.kv_b_proj.weight":
        parts = tuple(f"blk.{layer}.attn_{part}_b.weight" for part in ("k", "v"))
        # Files of older converters have the matrix as it is.
        if parts[0] not in said.tensors:
            return None
        keys, values = (said.shape(part) for part in parts)
        if len(keys) != 3 or len(values) != 3 or keys[:2] != values[::2]:
            raise ConfigError(f"{parts[0]} and {parts[1]} have no heads in common")
        return Source(parts, undo=_join_heads)
    return correction(leaf, layer, said)


def _join_heads(arrays: list[np.ndarray]) -> np.ndarray:
    """Return each head's rows of k, stored transposed, above its rows of v."""
    keys, values = arrays
    joined = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return joined.reshape(-1, joined.shape[2])


_DEEPSEEK_V2 = Architecture("DeepseekV2", _deepseek_v2, source=latent_source)
_DEEPSEEK_V3 = Architecture("DeepseekV3", _deepseek_v3, source=latent_source)
GLM4_MOE = Architecture("Glm4Moe", _glm4_moe, source=correction)
DOTS1 = Architecture("Dots1", _dots1, source=correction)
MINIMAX_M2 = Architecture("MiniMaxM2", _minimax_m2, source=correction)
ERNIE4_5_MOE = Architecture("Ernie4_5_Moe", _ernie, source=_ernie_source)
MISTRAL4 = Architecture("Mistral4", _mistral4, source=latent_source)
HY_V3 = Architecture("HYV3", _hy_v3, source=correction, like="exaone-moe")
DEEPSEEK_V32 = Architecture("DeepseekV32", indexed_settings, source=latent_source, like="glm-dsa")
GLM_DSA = Architecture("GlmMoeDsa", _glm_dsa, source=latent_source)
