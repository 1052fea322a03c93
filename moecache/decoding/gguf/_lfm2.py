"""LFM2: convolutions over the last tokens between layers of attention."""

from typing import Any

from moecache.decoding.gguf._architecture import Architecture
from moecache.decoding.gguf._common import expert_width, has_bias, plain_settings
from moecache.decoding.gguf._metadata import Metadata

_SIGMOID = 2  # of expert_gating_func


def _lfm2(said: Metadata) -> dict[str, Any]:
    settings = plain_settings(said)
    said.require("expert_gating_func", _SIGMOID)
    heads = said.sizes("attention.head_count_kv")[: said.num_layers]
    return {
        **settings,
        "norm_eps": settings.pop("rms_norm_eps"),
        "intermediate_size": said.size("feed_forward_length"),
        "moe_intermediate_size": expert_width(said),
        "num_experts": said.size("expert_count", least=1),
        "num_dense_layers": said.size("leading_dense_block_count", 0),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": said.size("shortconv.l_cache", least=1),
        "conv_bias": has_bias(said, "shortconv.in_proj"),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in said.tensors),
        "norm_topk_prob": True,
        "routed_scaling_factor": said.real("expert_weights_scale", 1.0, least=-1.0) or 1.0,
    }


LFM2MOE = Architecture("Lfm2Moe", _lfm2)
