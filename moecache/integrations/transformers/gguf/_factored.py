"""Llama 4 and Phi MoE: the factors of their rotations are a tensor of the file."""

import math
from typing import Any

import numpy as np
import torch

from moecache.decoding.gguf._architecture import Architecture
from moecache.decoding.gguf._common import (
    expert_width,
    has_bias,
    head_dim,
    plain_settings,
)
from moecache.decoding.gguf._metadata import Metadata, as_written

_SIGMOID = 2  # of expert_gating_func
# llama.cpp computes with these, and files do not say them.
_CHUNK = 8192
_UNNORMED_EXPERTS = 128
# Positions that any model was trained with, and more.
_LONGEST = 2.0**40


def _llama4(said: Metadata) -> dict[str, Any]:
    function = said.number("expert_gating_func", _SIGMOID)
    if function != _SIGMOID:
        raise said.unsupported("expert_gating_func", function)
    layers = range(said.num_layers)
    chunk = said.number("attention.sliding_window", _CHUNK)
    if chunk not in {0, _CHUNK}:
        raise said.unsupported("attention.sliding_window", chunk)
    # Every fourth layer sees all positions, and rotates nothing.
    rotated = [chunk == 0 or (layer + 1) % 4 != 0 for layer in layers]
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in said.tensors for layer in layers]
    count = said.size("expert_count", least=1)
    settings = plain_settings(said)
    parameters = settings["rope_parameters"]
    if said.number("rope.freq_base_swa", parameters["rope_theta"]) != parameters["rope_theta"]:
        raise said.unsupported("rope.freq_base_swa", said.number("rope.freq_base_swa"))
    if "rope_freqs.weight" in said.tensors:
        _check_plain(said, parameters)
        factors = said.vector("rope_freqs.weight", settings["head_dim"] // 2)
        settings["rope_parameters"] = _llama3(said, parameters, factors)
    return {
        **settings,
        "intermediate_size": expert_width(said),
        "intermediate_size_mlp": said.size("feed_forward_length"),
        "num_local_experts": count,
        "moe_layers": [layer for layer in layers if routed[layer]],
        "use_qk_norm": count != _UNNORMED_EXPERTS,
        "no_rope_layers": [int(one) for one in rotated],
        "layer_types": [
            "chunked_attention" if one and chunk else "full_attention" for one in rotated
        ],
        "attention_chunk_size": _CHUNK,
        "attention_bias": has_bias(said, "attn_q", "attn_k", "attn_v"),
    }


def _llama3(said: Metadata, parameters: dict[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """Return the parameters of Llama 3's rotation that has such factors.

    Short waves are not changed, long ones are stretched by a factor, and those between by a share
    of it that is linear in their frequency: two of them say where it begins and ends. If there are
    fewer, several rotations have these factors, and any of them is right.
    """
    width, theta, largest = 2 * len(factors), parameters["rope_theta"], float(factors.max())
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    waves = 2 * math.pi / frequencies
    between = np.flatnonzero((factors > 1) & (factors < largest))
    ratio, length = 1.0, math.sqrt(waves[factors == 1].max(initial=1.0))
    length *= math.sqrt(waves[factors == largest].min(initial=waves[-1]))
    if len(between):
        ends = between[[0, -1]]
        # A share is (length / wave - low) / (high - low), and low is 1.
        shares = (1 / factors[ends].astype(np.float64) - 1 / largest) / (1 - 1 / largest)
        ratio, slope = 4.0, (shares[0] + 1 / 3) * waves[ends[0]]
        if len(between) > 1:
            slope = (shares[0] - shares[1]) / (frequencies[ends[0]] - frequencies[ends[1]])
            slope *= 2 * math.pi
            ratio = 1 + 1 / max(slope / waves[ends[0]] - shares[0], 1e-9)
        length = slope * (ratio - 1)
    if not length < _LONGEST:
        raise said.unsupported("rope.freq_base", theta)
    for digits in (3, 5, 8):  # the number of fewest is the one that was written
        found = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": largest,
            "low_freq_factor": 1.0,
            "high_freq_factor": float(f"{ratio:.{digits}e}"),
            "original_max_position_embeddings": max(round(float(f"{length:.{digits}e}")), 1),
        }
        if np.allclose(_llama3_factors(found, width), factors, rtol=1e-6, atol=0.0):
            return found
    raise said.unsupported("rope_freqs.weight", [float(one) for one in factors])


def _llama3_factors(parameters: dict[str, Any], width: int) -> np.ndarray:
    """Return the factors that llama.cpp's converter writes for such parameters."""
    largest, low, high = (
        parameters[key] for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    length = parameters["original_max_position_embeddings"]
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    waves = 2 * math.pi / (1.0 / (parameters["rope_theta"] ** exponents))
    shares = (length / waves - low) / (high - low) if high > low else torch.zeros_like(waves)
    found = 1 / ((1 - shares) / largest + shares)
    found = torch.where(waves > length / low, largest, found)
    values: np.ndarray = torch.where(waves < length / high, 1.0, found).numpy()
    return values


def _phimoe(said: Metadata) -> dict[str, Any]:
    width = head_dim(said)
    used = said.size("expert_used_count", least=1)
    if used != 2:
        raise said.unsupported("expert_used_count", used)  # its router chooses two
    settings = plain_settings(said)
    # Heads have no width of their own.
    if settings.pop("head_dim") * settings["num_attention_heads"] != settings["hidden_size"]:
        raise said.unsupported("attention.key_length", width)
    parts = ("short", "long")
    if any(f"rope_factors_{part}.weight" in said.tensors for part in parts):
        _check_plain(said, settings["rope_parameters"])
        scale = said.real("rope.scaling.attn_factor", 1.0)
        length = int(said.real("rope.scaling.original_context_length"))
        if not 1 <= length < _LONGEST:
            raise said.unsupported("rope.scaling.original_context_length", length)
        settings["rope_parameters"] = {
            "rope_type": "longrope",
            "rope_theta": settings["rope_parameters"]["rope_theta"],
            "original_max_position_embeddings": length,
            "attention_factor": scale,
            **{f"{part}_mscale": scale for part in parts},
            **{f"{part}_factor": _factors(said, part, width // 2) for part in parts},
        }
    # llama.cpp takes no notice of it, and converters write the published 131,072: all positions.
    window = int(said.number("attention.sliding_window", 0))
    return {
        **settings,
        "intermediate_size": expert_width(said),
        "num_local_experts": said.size("expert_count", least=1),
        "sliding_window": window or None,
        "attention_bias": has_bias(said, "attn_q", "attn_k", "attn_v"),
        "lm_head_bias": "output.bias" in said.tensors,
    }


def _check_plain(said: Metadata, parameters: dict[str, Any]) -> None:
    """Raise ConfigError if a rotation that has factors is scaled otherwise, too."""
    if parameters["rope_type"] != "default":
        raise said.unsupported("rope.scaling.type", parameters["rope_type"])


def _factors(said: Metadata, part: str, count: int) -> list[float]:
    """Return the factors by which a rotation's waves are longer, as they were written."""
    found = said.vector(f"rope_factors_{part}.weight", count)
    return [as_written(float(factor)) for factor in found]


LLAMA4 = Architecture(
    "Llama4", _llama4, config_suffix="TextConfig", ignored=(r"rope_freqs\.weight",)
)
PHIMOE = Architecture("Phimoe", _phimoe, ignored=(r"rope_factors_(short|long)\.weight",))
