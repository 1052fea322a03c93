"""Architectures that route by a softmax: Qwen2, Qwen3, OLMoE, Mixtral, Granite and gpt-oss."""

from typing import Any

import numpy as np

from moecache.decoding.gguf._architecture import Architecture, Source
from moecache.decoding.gguf._common import (
    expert_width,
    has_bias,
    head_dim,
    key_heads,
    plain_settings,
)
from moecache.decoding.gguf._metadata import Metadata

_QKV = ("attn_q", "attn_k", "attn_v")


def _dense_layers(said: Metadata) -> list[int]:
    blocks = range(said.num_blocks)
    return [block for block in blocks if f"blk.{block}.ffn_gate_inp.weight" not in said.tensors]


def _qwen2moe(said: Metadata) -> dict[str, Any]:
    width = expert_width(said)
    return {
        **plain_settings(said),
        "intermediate_size": said.size("feed_forward_length", width),
        "num_experts": said.size("expert_count", least=1),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": said.size("expert_shared_feed_forward_length"),
        "mlp_only_layers": _dense_layers(said),
        "norm_topk_prob": False,
        "qkv_bias": has_bias(said, *_QKV),
    }


def _qwen3moe(said: Metadata) -> dict[str, Any]:
    width = expert_width(said)
    return {
        **plain_settings(said),
        "intermediate_size": said.size("feed_forward_length", width),
        "num_experts": said.size("expert_count", least=1),
        "moe_intermediate_size": width,
        "mlp_only_layers": _dense_layers(said),
        "norm_topk_prob": True,
        "attention_bias": has_bias(said, *_QKV),
    }


def _qwen3vlmoe(said: Metadata) -> dict[str, Any]:
    # Images go before a text in a file of their own. Of a text alone all three parts of a position
    # are one number, and no layer has anything of an image added.
    said.get("rope.dimension_sections", None)
    said.get("n_deepstack_layers", None)
    return _qwen3moe(said)


def _olmoe(said: Metadata) -> dict[str, Any]:
    clip = said.number("attention.clamp_kqv", 0)
    return {
        **plain_settings(said),
        "intermediate_size": expert_width(said),
        "num_experts": said.size("expert_count", least=1),
        "norm_topk_prob": False,
        "clip_qkv": clip or None,
        "attention_bias": has_bias(said, *_QKV),
    }


def _mixtral(said: Metadata) -> dict[str, Any]:
    return {
        **plain_settings(said),
        "intermediate_size": expert_width(said),
        "num_local_experts": said.size("expert_count", least=1),
        "sliding_window": said.size("attention.sliding_window", 0) or None,
    }


def _window(said: Metadata) -> int:
    found = said.real("attention.sliding_window")
    if not 1 <= found < 2.0**62:
        raise said.unsupported("attention.sliding_window", found)
    return int(found)


def _gpt_oss(said: Metadata) -> dict[str, Any]:
    settings = {
        **plain_settings(said),
        "intermediate_size": expert_width(said),
        "num_local_experts": said.size("expert_count", least=1),
        "sliding_window": _window(said),
        "layer_types": ["sliding_attention", "full_attention"] * (said.num_layers // 2)
        + ["sliding_attention"] * (said.num_layers % 2),
        "attention_bias": has_bias(said, *_QKV),
    }
    said.get("expert_gating_func", None)  # a softmax over the chosen ones, as llama.cpp has it
    theta = settings["rope_parameters"]["rope_theta"]
    if said.number("rope.freq_base_swa", theta) != theta:
        raise said.unsupported("rope.freq_base_swa", said.number("rope.freq_base_swa"))
    if settings["rope_parameters"]["rope_type"] == "yarn":
        # The file does not say it, and llama.cpp rounds: the published models do not.
        settings["rope_parameters"]["truncate"] = False
    return settings


def _hunyuan(said: Metadata) -> dict[str, Any]:
    settings = plain_settings(said)
    return {
        **settings,
        # The expert for all tokens has the same width.
        "intermediate_size": expert_width(said),
        "num_experts": said.size("expert_count", least=1),
        "moe_topk": settings["num_experts_per_tok"],
        "attention_bias": has_bias(said, *_QKV),
    }


def granitemoe(said: Metadata) -> Architecture:
    """Return Granite with a shared expert, or without."""
    return _GRANITE_SHARED if "expert_shared_feed_forward_length" in said else _GRANITE


def _granite(said: Metadata) -> dict[str, Any]:
    if not said.flag("rope.scaling.finetuned", default=True):
        raise said.unsupported("rope.scaling.finetuned", value=False)  # no rotation at all
    return granite_settings(said)


def granite_settings(said: Metadata) -> dict[str, Any]:
    """Return what all of Granite's models with experts say."""
    settings = plain_settings(said)
    width = settings.pop("head_dim")
    if width * settings["num_attention_heads"] != settings["hidden_size"]:
        raise said.unsupported("attention.key_length", width)
    return {
        **settings,
        "intermediate_size": expert_width(said),
        "num_local_experts": said.size("expert_count", least=1),
        # Zero where nothing is scaled.
        "embedding_multiplier": said.real("embedding_scale", 1.0, least=-1.0) or 1.0,
        "residual_multiplier": said.real("residual_scale", 1.0, least=-1.0) or 1.0,
        "attention_multiplier": said.real("attention.scale", 0.0, least=-1.0) or width**-0.5,
        "logits_scaling": said.real("logit_scale", 1.0, least=-1.0) or 1.0,
        "attention_bias": has_bias(said, *_QKV),
    }


def _granite_shared(said: Metadata) -> dict[str, Any]:
    shared = said.size("expert_shared_feed_forward_length")
    return {**_granite(said), "shared_intermediate_size": shared}


def granite_source(leaf: str, layer: int, said: Metadata) -> Source | None:
    """Return where a parameter of Granite's attention, or of its shared expert, is."""
    if leaf == "shared_mlp.input_linear.weight":
        parts = tuple(f"blk.{layer}.ffn_{part}_shexp.weight" for part in ("gate", "up"))
        return Source(parts, rows=np.arange(sum(said.shape(part)[0] for part in parts)))
    return permuted_heads(leaf, layer, said)


def permuted(said: Metadata, heads: int, tensor: str) -> Source:
    """Return a projection whose heads' halves were interleaved for another form of rotation."""
    width = head_dim(said)
    if width % 2:
        raise said.unsupported("attention.key_length", width)
    order = np.arange(said.rows(heads, width)).reshape(heads, width // 2, 2)
    return Source((tensor,), rows=order.swapaxes(1, 2).reshape(-1))


def permuted_heads(leaf: str, layer: int, said: Metadata) -> Source | None:
    """Return where q and k are if llama.cpp's converter interleaved their heads' halves."""
    for projection, heads in (("q", said.size("attention.head_count")), ("k", key_heads(said))):
        for kind in ("weight", "bias"):
            if leaf == f"self_attn.{projection}_proj.{kind}":
                return permuted(said, heads, f"blk.{layer}.attn_{projection}.{kind}")
    return None


QWEN2MOE = Architecture("Qwen2Moe", _qwen2moe)
QWEN3MOE = Architecture("Qwen3Moe", _qwen3moe)
QWEN3VLMOE = Architecture("Qwen3Moe", _qwen3vlmoe)
OLMOE = Architecture("Olmoe", _olmoe)
MIXTRAL = Architecture("Mixtral", _mixtral, source=permuted_heads)
GPT_OSS = Architecture(
    "GptOss",
    _gpt_oss,
    names={
        "self_attn.sinks": "attn_sinks.weight",
        "mlp.router.weight": "ffn_gate_inp.weight",
        "mlp.router.bias": "ffn_gate_inp.bias",
    },
)
HUNYUAN_MOE = Architecture("HunYuanMoEV1", _hunyuan)
_GRANITE_NAMES = {
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
}
_GRANITE = Architecture("GraniteMoe", _granite, _GRANITE_NAMES, granite_source)
_GRANITE_SHARED = Architecture("GraniteMoeShared", _granite_shared, _GRANITE_NAMES, granite_source)
