"""Llama 4 and PhiMoE: the factors of their rotations are tensors of the file."""

from typing import Any

from moecache.decoding.gguf._architecture import Architecture
from moecache.decoding.gguf._common import expert_width, has_bias, head_dim, plain_settings
from moecache.decoding.gguf._metadata import Metadata, as_written

_SIGMOID = 2  # of expert_gating_func
# llama.cpp computes with these, and files do not say them: positions of a chunk, experts of the
# model whose heads have no norms, and (floor, scale) of the temperature of layers without rotation.
_CHUNK = 8192
_UNNORMED_EXPERTS = 128
_TEMPERATURE = (8192, 0.1)
# Positions that any model was trained with, and more; and what no wave is shortened by.
LONGEST = 2.0**40
_SHORTEST = 2.0**-20
# Of transformers' configuration; files do not say it.
_JITTER = 0.01


def llama4_settings(said: Metadata) -> dict[str, Any]:
    """Return Llama 4's settings, with the factors of its rotation as the file has them."""
    said.require("expert_gating_func", _SIGMOID)
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
        check_plain(said, parameters)
        found = factors(said, "rope_freqs.weight", settings["head_dim"] // 2)
        parameters |= {"rope_type": "llama3", "factors": found}
    floor, scale = _TEMPERATURE
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
        "floor_scale": floor,
        "attn_scale": scale,
        "attention_bias": has_bias(said, "attn_q", "attn_k", "attn_v"),
    }


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
        check_plain(said, settings["rope_parameters"])
        scale = said.real("rope.scaling.attn_factor", 1.0)
        length = int(said.real("rope.scaling.original_context_length"))
        if not 1 <= length < LONGEST:
            raise said.unsupported("rope.scaling.original_context_length", length)
        settings["rope_parameters"] = {
            "rope_type": "longrope",
            "rope_theta": settings["rope_parameters"]["rope_theta"],
            "original_max_position_embeddings": length,
            "attention_factor": scale,
            **{f"{part}_mscale": scale for part in parts},
            **{
                f"{part}_factor": factors(said, f"rope_factors_{part}.weight", width // 2)
                for part in parts
            },
        }
    # llama.cpp takes no notice of it, and converters write the published 131,072: all positions.
    window = int(said.number("attention.sliding_window", 0))
    return {
        **settings,
        "intermediate_size": expert_width(said),
        "num_local_experts": said.size("expert_count", least=1),
        "router_jitter_noise": _JITTER,
        "sliding_window": window or None,
        "attention_bias": has_bias(said, "attn_q", "attn_k", "attn_v"),
        "lm_head_bias": "output.bias" in said.tensors,
    }


def check_plain(said: Metadata, parameters: dict[str, Any]) -> None:
    """Raise ConfigError if a rotation that has factors is scaled otherwise, too."""
    if parameters["rope_type"] != "default":
        raise said.unsupported("rope.scaling.type", parameters["rope_type"])


def factors(said: Metadata, name: str, count: int) -> list[float]:
    """Return the factors by which a rotation's waves are longer, as they were written."""
    found = [as_written(float(factor)) for factor in said.vector(name, count)]
    if min(found, default=1.0) < _SHORTEST:
        raise said.unsupported(name, found)
    return found


LLAMA4 = Architecture("Llama4", llama4_settings, config_suffix="TextConfig")
PHIMOE = Architecture("Phimoe", _phimoe)
