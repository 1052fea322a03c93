"""Architectures whose layers differ in kind: LFM2's convolutions, sliding windows of others."""

from dataclasses import replace
from typing import Any

from moecache.decoding.gguf import _lfm2
from moecache.decoding.gguf._architecture import Architecture, Source
from moecache.decoding.gguf._common import (
    correction,
    expert_width,
    group_counts,
    has_bias,
    plain_settings,
)
from moecache.decoding.gguf._metadata import Metadata

_SOFTMAX, _SIGMOID = 1, 2  # of expert_gating_func


def _lfm2_source(leaf: str, layer: int, _said: Metadata) -> Source | None:
    if leaf == "conv.conv.weight":
        name = f"blk.{layer}.shortconv.conv.weight"
        return Source((name,), undo=lambda arrays: arrays[0][:, None])
    return None


def _window_settings(said: Metadata) -> dict[str, Any]:
    """Return what models of sliding windows and a router that is corrected have in common."""
    function = said.number("expert_gating_func", _SIGMOID)
    if function != _SIGMOID:
        raise said.unsupported("expert_gating_func", function)
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
        "layer_types": _layer_types(said),
    }


def _layer_types(said: Metadata) -> list[str]:
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
        **_window_settings(said),
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
        **_window_settings(said),
        "num_dense_layers": said.size("leading_dense_block_count", 0),
        "route_scale": said.real("expert_weights_scale", 1.0, least=-1.0) or 1.0,
        # Files do not say it, and llama.cpp scales.
        "mup_enabled": True,
        "attention_bias": has_bias(said, "attn_q", "attn_k", "attn_v"),
    }


def _cohere2(said: Metadata) -> dict[str, Any]:
    function = said.number("expert_gating_func", _SIGMOID)
    is_normed = said.flag("expert_weights_norm", default=False)
    # Scores by a softmax are those of the chosen experts alone.
    if function not in {_SOFTMAX, _SIGMOID} or (function == _SOFTMAX and not is_normed):
        raise said.unsupported("expert_gating_func", function)
    said.get("attention.sliding_window_pattern")
    said.get("leading_dense_block_count", None)  # as the tensors say
    settings, layers = plain_settings(said), range(said.num_layers)
    epsilon = settings.pop("rms_norm_eps")
    # Norms are those of the root mean square where files name them so.
    is_rms = "attention.layer_norm_rms_epsilon" in said
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in said.tensors for layer in layers]
    return {
        **settings,
        "rms_norm_eps" if is_rms else "layer_norm_eps": epsilon,
        "rope_theta": settings["rope_parameters"]["rope_theta"],
        "logit_scale": said.real("logit_scale", least=-1.0),
        "intermediate_size": expert_width(said),
        "prefix_dense_intermediate_size": None
        if all(routed)
        else said.matrix(f"blk.{routed.index(False)}.ffn_up.weight")[0],
        "num_experts": said.size("expert_count", least=1),
        "num_shared_experts": said.size("expert_shared_count", 0),
        "expert_selection_fn": "softmax" if function == _SOFTMAX else "sigmoid",
        "norm_topk_prob": is_normed,
        "sliding_window": int(said.real("attention.sliding_window")),
        "layer_types": _layer_types(said),
        "mlp_layer_types": ["sparse" if one else "dense" for one in routed],
        "attention_bias": has_bias(said, "attn_q", "attn_k", "attn_v"),
    }


COHERE2MOE = Architecture("Cohere2Moe", _cohere2, like="exaone-moe")
EXAONE_MOE = Architecture("ExaoneMoe", _exaone_moe, source=correction)
AFMOE = Architecture("Afmoe", _afmoe, source=correction)
LFM2MOE = replace(
    _lfm2.LFM2MOE,
    names={
        "feed_forward.expert_bias": "exp_probs_b.bias",
        "model.embedding_norm.weight": "token_embd_norm.weight",
    },
    source=_lfm2_source,
)
