"""PhiMoE: the factors of its rotation are a tensor of the file."""

from typing import Any

from moecache.decoding.gguf._architecture import Architecture
from moecache.decoding.gguf._common import expert_width, has_bias, head_dim, plain_settings
from moecache.decoding.gguf._metadata import Metadata, as_written

# Positions that any model was trained with, and more; and what no wave is shortened by.
_LONGEST = 2.0**40
_SHORTEST = 2.0**-20
# Of transformers' configuration; files do not say it.
_JITTER = 0.01


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
        if not 1 <= length < _LONGEST:
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


PHIMOE = Architecture("Phimoe", _phimoe)
