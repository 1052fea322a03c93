"""Architectures whose layers differ in kind: LFM2's convolutions, and Cohere's windows."""

from dataclasses import replace
from typing import Any

from moecache.decoding.gguf import _lfm2
from moecache.decoding.gguf._architecture import Architecture, Source
from moecache.decoding.gguf._common import expert_width, has_bias, plain_settings
from moecache.decoding.gguf._metadata import Metadata
from moecache.decoding.gguf._windows import layer_types

_SOFTMAX, _SIGMOID = 1, 2  # of expert_gating_func


def _lfm2_source(leaf: str, layer: int, _said: Metadata) -> Source | None:
    if leaf == "conv.conv.weight":
        name = f"blk.{layer}.shortconv.conv.weight"
        return Source((name,), undo=lambda arrays: arrays[0][:, None])
    return None


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
        "layer_types": layer_types(said),
        "mlp_layer_types": ["sparse" if one else "dense" for one in routed],
        "attention_bias": has_bias(said, "attn_q", "attn_k", "attn_v"),
    }


COHERE2MOE = Architecture("Cohere2Moe", _cohere2, like="exaone-moe")
LFM2MOE = replace(
    _lfm2.LFM2MOE,
    names={
        "feed_forward.expert_bias": "exp_probs_b.bias",
        "model.embedding_norm.weight": "token_embd_norm.weight",
    },
    source=_lfm2_source,
)
