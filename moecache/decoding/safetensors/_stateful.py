"""What families say in config.json whose layers hold states, or are of one part."""

import math
from typing import Any

from moecache.decoding.safetensors._config import Config
from moecache.decoding.safetensors._settings import (
    FULL,
    chosen,
    demand_groups,
    granite_shared,
    latent_sizes,
    latent_widths,
    qwen3,
)

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


def kimi_linear(config: Config) -> dict[str, Any]:
    """Return Kimi Linear's: layers of delta attention beside latents that nothing turns."""
    said = config.get("linear_attn_config", {})
    if not isinstance(said, dict):
        raise config.unsupported("linear_attn_config")
    config.require("mla_use_nope", True)
    config.require("moe_router_activation_func", "sigmoid")
    # What is published has sizes apart, and layers by their numbers from 1 on.
    names = ("head_dim", "num_heads", "short_conv_kernel_size")
    usual = ("head_dim", "num_heads", "conv_kernel_dim")
    sizes = {
        f"linear_{name}": Config({own: said[own]}, config.largest).size(own, least=1)
        if own in said
        else config.size(f"linear_{name}", least=1)
        for own, name in zip(names, usual, strict=True)
    }
    linear, full = (said.get(f"{kind}_layers") for kind in ("kda", "full_attn"))
    kinds = None
    if linear is not None and full is not None:
        kinds = _kinds_of(config, linear, full)
    return {
        **chosen(config),
        **latent_sizes(config),
        **sizes,
        "intermediate_size": config.size("intermediate_size", least=1),
        "layer_types": config.kinds("layer_types", (_LINEAR, FULL), kinds),
        "mlp_layer_types": _mlp_kinds(config, config.size("first_k_dense_replace", 1)),
    }


def _kinds_of(config: Config, linear: Any, full: Any) -> list[str]:
    """Return the kind of each layer, of lists of both kinds."""
    numbers = range(1, config.num_layers + 1)
    both = [*linear, *full] if isinstance(linear, list) and isinstance(full, list) else []
    if {*map(type, both)} != {int} or sorted(both) != [*numbers]:
        raise config.unsupported("linear_attn_config")
    return [_LINEAR if number in linear else FULL for number in numbers]


def _mlp_kinds(config: Config, num_dense: int) -> list[str]:
    usual = ["dense" if layer < num_dense else "sparse" for layer in range(config.num_layers)]
    return config.kinds("mlp_layer_types", ("dense", "sparse"), usual)


def bailing(config: Config) -> dict[str, Any]:
    """Return Ling 3's: the same beside latents that are turned, and decays that have a bound."""
    config.require("q_lora_rank", None)
    config.require("score_function", "sigmoid")
    config.require("no_kda_lora", True)
    config.require("gated_attention_proj_granularity_type", "head_wise")
    demand_groups(config)
    every = config.size("layer_group_size", 6, least=1)
    usual = [FULL if (layer + 1) % every == 0 else _LINEAR for layer in range(config.num_layers)]
    width = config.size("head_dim", 128, least=1)
    kernel = config.size("short_conv_kernel_size", 4, least=1)
    return {
        **chosen(config),
        **latent_widths(config),
        "linear_head_dim": config.size("linear_head_dim", width, least=1),
        "linear_num_heads": config.size(
            "linear_num_heads", config.size("num_attention_heads"), least=1
        ),
        "linear_conv_kernel_dim": config.size("linear_conv_kernel_dim", kernel, least=1),
        "kda_safe_gate": config.flag("kda_safe_gate", True),
        "kda_lower_bound": config.real("kda_lower_bound", -5.0, least=-math.inf),
        "intermediate_size": config.size("intermediate_size", least=1),
        "layer_types": config.kinds("layer_types", (_LINEAR, FULL), usual),
        "mlp_layer_types": _mlp_kinds(config, config.size("first_k_dense_replace", 2)),
    }


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
