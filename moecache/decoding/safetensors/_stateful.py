"""What families say in config.json whose layers hold states, or are of one part."""

import math
from typing import Any

from moecache.decoding.safetensors._config import Config
from moecache.decoding.safetensors._settings import FULL, granite_shared, qwen3

_LINEAR = "linear_attention"
# As published.
_OLDER = {"mamba": _LINEAR, "attention": FULL}


def lfm2(config: Config) -> dict[str, Any]:
    return {
        "intermediate_size": config.size("intermediate_size", least=1),
        "moe_intermediate_size": config.size("moe_intermediate_size", least=1),
        "num_dense_layers": config.size("num_dense_layers"),
        "layer_types": config.kinds("layer_types", ("conv", FULL)),
        "conv_L_cache": config.size("conv_L_cache", least=1),
        "conv_bias": config.flag("conv_bias", False),
        "use_expert_bias": config.flag("use_expert_bias", True),
        "norm_topk_prob": config.flag("norm_topk_prob", True),
        "routed_scaling_factor": config.real("routed_scaling_factor", 1.0, least=-1.0),
    }


def linear(config: Config) -> dict[str, Any]:
    every = config.size("full_attention_interval", 4, least=1)
    usual = [_LINEAR if (layer + 1) % every else FULL for layer in range(config.num_layers)]
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    return {
        "layer_types": config.kinds("layer_types", (_LINEAR, FULL), usual),
        "attention_bias": config.flag("attention_bias", False),
        "moe_intermediate_size": config.size("moe_intermediate_size", least=1),
        "shared_expert_intermediate_size": config.size("shared_expert_intermediate_size", least=1),
        "linear_conv_kernel_dim": config.size("linear_conv_kernel_dim", least=1),
        **{f"linear_{name}": config.size(f"linear_{name}", least=1) for name in sizes},
    }


def qwen3_next(config: Config) -> dict[str, Any]:
    return {**linear(config), **qwen3(config, is_normalized=True)}


def nemotron(config: Config) -> dict[str, Any]:
    """Return Nemotron's: a layer is attention, a state space, experts or a feed-forward."""
    kinds = (_LINEAR, FULL, "moe", "mlp")
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        # As published.
        by_letter = dict(zip("M*E-", kinds, strict=True))
        found = [by_letter.get(letter, "") for letter in pattern]
        if len(found) != config.num_layers or "" in found:
            raise config.unsupported("hybrid_override_pattern")
    else:
        said = config.kinds("layers_block_type", (*kinds, *_OLDER))
        found = [_OLDER.get(kind, kind) for kind in said]
    config.require("mamba_hidden_act", "silu")
    _check_time_steps(config)
    config.require("mlp_bias", False)
    sizes = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    return {
        "layers_block_type": found,
        **{name: config.size(name, least=1) for name in sizes},
        "intermediate_size": config.size("intermediate_size", 0),
        "moe_intermediate_size": config.size("moe_intermediate_size", least=1),
        "moe_shared_expert_intermediate_size": config.size("moe_shared_expert_intermediate_size"),
        "moe_latent_size": config.size("moe_latent_size", None),
        "n_shared_experts": config.size("n_shared_experts", 1),
        "use_conv_bias": config.flag("use_conv_bias", True),
        "mamba_proj_bias": config.flag("mamba_proj_bias", False),
        "attention_bias": config.flag("attention_bias", False),
        "routed_scaling_factor": config.real("routed_scaling_factor", least=-1.0),
        "norm_topk_prob": config.flag("norm_topk_prob", True),
        "n_group": config.size("n_group", 1, least=1),
        "topk_group": config.size("topk_group", 1, least=1),
    }


def granite_hybrid(config: Config) -> dict[str, Any]:
    """Return Granite 4's: layers of attention beside state spaces."""
    _check_time_steps(config)
    config.require("position_embedding_type", None, "rope", "nope")
    found = config.kinds("layer_types", (_LINEAR, FULL, *_OLDER))
    sizes = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    return {
        **granite_shared(config),
        "layer_types": [_OLDER.get(kind, kind) for kind in found],
        "position_embedding_type": config.get("position_embedding_type"),
        **{name: config.size(name, least=1) for name in sizes},
        "mamba_conv_bias": config.flag("mamba_conv_bias", True),
        "mamba_proj_bias": config.flag("mamba_proj_bias", False),
    }


def _check_time_steps(config: Config) -> None:
    """Refuse state spaces that have bounds of their steps in time."""
    said = config.get("time_step_limit", [0, math.inf])
    endless = (math.inf, {"__float__": "Infinity"})
    if not isinstance(said, list) or len(said) != 2 or said[0] != 0 or said[1] not in endless:
        raise config.unsupported("time_step_limit")
