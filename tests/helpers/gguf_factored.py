"""Tiny models whose rotations have factors of their own, as GGUF files."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.helpers import family_settings as tiny
from tests.helpers.gguf_models import GgufModel, Tensors, head_keys

_LLAMA4 = {
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "feed_forward.shared_expert.gate_proj": "ffn_gate_shexp",
    "feed_forward.shared_expert.up_proj": "ffn_up_shexp",
    "feed_forward.shared_expert.down_proj": "ffn_down_shexp",
}


def llama3_factors(rope: dict[str, Any], width: int) -> np.ndarray:
    """Return the factors of Llama 3's rotation, as llama.cpp's converter computes them."""
    import torch

    factor, low, high, length = (
        rope[key]
        for key in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
    )
    found = []
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2).float() / width))
    for frequency in frequencies:
        wave = 2 * math.pi / frequency
        if wave < length / high:
            found.append(1)
        elif wave > length / low:
            found.append(factor)
        else:
            smooth = (length / wave - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(found, dtype=torch.float32).numpy()


def _llama4(config: Any) -> dict[str, Any]:
    return {
        **head_keys(config),
        "expert_feed_forward_length": config.intermediate_size,
        "feed_forward_length": config.intermediate_size_mlp,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "rope.dimension_count": config.head_dim,
    }


def _llama4_change(leaf: str, values: np.ndarray, config: Any) -> Tensors | None:
    if leaf == "feed_forward.experts.down_proj":
        return {"ffn_down_exps.weight": values.swapaxes(1, 2)}
    if leaf == "feed_forward.experts.gate_up_proj":
        gate, up = np.split(values.swapaxes(1, 2), 2, axis=1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    return None


def _llama4_factors(config: Any) -> Tensors:
    rope = config.rope_parameters
    if rope["rope_type"] != "llama3":
        return {}
    return {"rope_freqs.weight": llama3_factors(rope, config.head_dim)}


def _phimoe(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "expert_count": config.num_local_experts,
        "attention.sliding_window": config.sliding_window or 0,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.attn_factor": rope["short_mscale"],
    }


def _phimoe_factors(config: Any) -> Tensors:
    return {
        f"rope_factors_{part}.weight": np.array(
            config.rope_parameters[f"{part}_factor"], np.float32
        )
        for part in ("short", "long")
    }


def _norm_and_route(model: Any) -> str:
    """Have norms not take the mean off, and the router be a softmax, as llama.cpp has them."""
    import torch
    from torch.nn.functional import linear

    def norm(x: Any, module: Any) -> Any:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + module.eps)
        return x * scale * module.weight + module.bias

    def route(x: Any, module: Any) -> Any:
        logits = linear(x, module.weight)
        best = logits.softmax(-1).topk(2)
        return logits, best.values / best.values.sum(-1, keepdim=True), best.indices

    for module in model.modules():
        name = type(module).__name__
        computes = {"LayerNorm": norm, "PhimoeTopKRouter": route}.get(name)
        if computes is not None:
            module.forward = lambda x, module=module, f=computes: f(x, module)
    return "norms do not take the mean off, and routers are a softmax, in transformers, too"


def factored() -> Iterator[GgufModel]:
    """Yield Llama 4 and Phi MoE."""
    # Waves of 6 to 35 positions, two of them between those that are stretched and those that not.
    rope = {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 40,
    }
    llama4 = {**tiny.LLAMA4, "head_dim": 16, "attention_chunk_size": 8192}
    yield GgufModel(
        "llama4",
        "Llama4",
        {**llama4, "rope_parameters": rope},
        _llama4,
        _LLAMA4,
        _llama4_change,
        config_suffix="TextConfig",
        further=_llama4_factors,
    )
    # As the converter has it: a function of both lengths.
    scale = float(np.float32(math.sqrt(1 + math.log(4) / math.log(256))))
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0, 1.0, 1.1, 1.1, 1.5, 1.7, 2.0, 2.0],
        "long_factor": [1.0, 1.3, 2.2, 3.0, 3.5, 4.0, 5.0, 5.5],
        "short_mscale": scale,
        "long_mscale": scale,
        "original_max_position_embeddings": 256,
    }
    lengths = {"max_position_embeddings": 1024}
    yield GgufModel(
        "phimoe",
        "Phimoe",
        {**tiny.PHIMOE, "hidden_size": 64, "rope_parameters": longrope, **lengths},
        _phimoe,
        {"mlp.router": "ffn_gate_inp"},
        published={"architectures": ["PhiMoEForCausalLM"]},
        further=_phimoe_factors,
        as_llama_cpp=_norm_and_route,
    )
