"""What families say in config.json whose layers have attention of several kinds."""

from typing import Any

from moecache.decoding.safetensors._config import Config
from moecache.decoding.safetensors._settings import FULL, SLIDING, granite


def mellum(config: Config) -> dict[str, Any]:
    num = config.num_layers
    kinds = config.kinds("layer_types", (SLIDING, FULL), [FULL] * num)
    return {
        "mlp_layer_types": config.kinds("mlp_layer_types", ("dense", "sparse"), ["sparse"] * num),
        "intermediate_size": config.size("intermediate_size"),
        "moe_intermediate_size": config.size("moe_intermediate_size", least=1),
        "norm_topk_prob": config.flag("norm_topk_prob", True),
        "attention_bias": config.flag("attention_bias", False),
        "layer_types": kinds,
        "sliding_window": config.number("sliding_window"),
        "rope_parameters": {kind: config.rope_of(kind, "proportional") for kind in {*kinds}},
        "num_global_key_value_heads": config.size("num_key_value_heads", least=1),
        "global_head_dim": config.size("head_dim", 128, least=1),
    }


def gemma4(config: Config) -> dict[str, Any]:
    """Return Gemma 4's: windows of narrow heads between wide ones."""
    config.require("use_bidirectional_attention", None, "vision", False)
    config.demand("enable_moe_block", True)
    config.demand("hidden_size_per_layer_input", 0)
    config.require("num_kv_shared_layers", 0)
    config.require("use_double_wide_mlp", False)
    kinds = config.kinds("layer_types", (SLIDING, FULL))
    width, heads = config.size("head_dim", least=1), config.size("num_key_value_heads", least=1)
    # Newer releases say it by layers; all of one kind have the same.
    by_layer = config.get("per_layer_config", {})
    if not isinstance(by_layer, dict):
        raise config.unsupported("per_layer_config")
    full = [by_layer.get(str(layer)) for layer, kind in enumerate(kinds) if kind == FULL]
    if by_layer and (len(full) != len(by_layer) or full.count(full[0]) != len(full)):
        raise config.unsupported("per_layer_config")
    wide = (full[0] if by_layer else None) or {}
    found = {
        "global_head_dim": wide.get("head_dim", config.size("global_head_dim", width)),
        "num_global_key_value_heads": wide.get(
            "num_key_value_heads", config.size("num_global_key_value_heads", heads)
        ),
    }
    if not all(type(value) is int and value > 0 for value in found.values()):
        raise config.unsupported("per_layer_config")
    return {
        **found,
        "attention_k_eq_v": config.flag("attention_k_eq_v", False),
        "layer_types": kinds,
        "sliding_window": config.number("sliding_window"),
        "rope_parameters": {kind: config.rope_of(kind, "proportional") for kind in (SLIDING, FULL)},
        "attention_bias": config.flag("attention_bias", False),
        "intermediate_size": config.size("intermediate_size", least=1),
        "final_logit_softcapping": config.real("final_logit_softcapping", None),
        "moe_intermediate_size": config.size("moe_intermediate_size", least=1),
    }


def granite_swa(config: Config) -> dict[str, Any]:
    """Return those of Granite with windows: each layer has the base of its rotation, or none."""
    num = config.num_layers
    usual = [SLIDING if layer % 4 else FULL for layer in range(num)]
    rope = config.rope()
    bases = config.bases("layer_rope_theta", [rope["rope_theta"]] * num)
    found = {
        **granite(config),
        "shared_intermediate_size": config.size("shared_intermediate_size", 0),
        "sliding_window": config.number("sliding_window", 128),
        "layer_types": config.kinds("layer_types", (SLIDING, FULL), usual),
    }
    if not any(bases):
        return {**found, "position_embedding_type": "nope"}
    return {
        **found,
        "rope_parameters": {
            str(base): {**rope, "rope_theta": base} for base in bases if base is not None
        },
        "rope_kinds": [None if base is None else str(base) for base in bases],
    }


def laguna(config: Config) -> dict[str, Any]:
    """Return Laguna's: layers with other numbers of heads, and a gate for each of them."""
    config.require("moe_apply_router_weight_on_input", False)
    num = config.num_layers
    each = [config.size("num_attention_heads", least=1)] * num
    heads = config.get("num_attention_heads_per_layer", each)
    is_list = isinstance(heads, list) and len(heads) == num
    if not is_list or not all(type(one) is int and 1 <= one < 2**20 for one in heads):
        raise config.unsupported("num_attention_heads_per_layer")
    config.require("gating", True, "per-head", "per-element")
    by_element = config.get("gating", True) == "per-element"
    kinds = config.kinds("layer_types", (SLIDING, FULL), [FULL] * num)
    usual = ["dense", *["sparse"] * (num - 1)]
    shared = config.size("shared_expert_intermediate_size", least=1)
    return {
        "num_attention_heads_per_layer": heads,
        "gating": "per-element" if by_element else "per-head",
        "mlp_layer_types": config.kinds("mlp_layer_types", ("dense", "sparse"), usual),
        "intermediate_size": config.size("intermediate_size", least=1),
        "moe_intermediate_size": config.size("moe_intermediate_size", least=1),
        "shared_expert_intermediate_size": shared,
        "moe_routed_scaling_factor": config.real("moe_routed_scaling_factor", 1.0, least=-1.0),
        "moe_router_logit_softcapping": config.real("moe_router_logit_softcapping", 0.0, least=-1),
        "attention_bias": config.flag("attention_bias", False),
        "layer_types": kinds,
        "sliding_window": config.number("sliding_window"),
        "rope_parameters": {kind: config.rope_of(kind, "linear", "yarn") for kind in {*kinds}},
        "num_global_key_value_heads": config.size("num_key_value_heads", least=1),
        "global_head_dim": config.size("head_dim", 128, least=1),
    }


def mimo(config: Config) -> dict[str, Any]:
    """Return those of MiMo V2: windows have twice the heads of keys, and sinks."""
    keys = config.size("num_key_value_heads", least=1)
    width, value_width = (
        config.size("head_dim", 192, least=1),
        config.size("v_head_dim", 128, least=1),
    )
    # Published configurations say what transformers takes for granted.
    known: dict[str, Any] = {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "swa_num_attention_heads": config.size("num_attention_heads", least=1),
        "swa_num_key_value_heads": 2 * keys,
        "swa_head_dim": width,
        "swa_v_head_dim": value_width,
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
    }
    layers = range(config.num_layers)
    usual = [SLIDING if layer and (layer + 1) % 6 else FULL for layer in layers]
    kinds = config.kinds("layer_types", (SLIDING, FULL), usual)
    usual = ["dense", *["sparse"] * (config.num_layers - 1)]
    blocks = config.kinds("mlp_layer_types", ("dense", "sparse"), usual)
    known["hybrid_layer_pattern"] = [int(kind == SLIDING) for kind in kinds]
    known["moe_layer_freq"] = [int(block == "sparse") for block in blocks]
    known["layernorm_epsilon"] = 1e-5
    if config.get("rope_parameters") is None:
        known |= {"rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334}
        known["rope_scaling"] = None
    for name, value in known.items():
        config.require(name, value)
    own = config.number("sliding_window", 129)
    before = config.number("sliding_window_size", None)
    factor = config.real("routed_scaling_factor", None, least=-1.0)
    return {
        "add_full_attention_sink_bias": False,
        "attention_bias": config.flag("attention_bias", False),
        "attention_value_scale": config.real("attention_value_scale", 0.707),
        "intermediate_size": config.size("intermediate_size", least=1),
        "layer_types": kinds,
        "mlp_layer_types": blocks,
        "moe_intermediate_size": config.size("moe_intermediate_size", least=1),
        "n_group": config.size("n_group", 1, least=1),
        "norm_topk_prob": config.flag("norm_topk_prob", True),
        "swa_num_key_value_heads": 2 * keys,
        "rope_parameters": {kind: _mimo_rope(config, kind) for kind in {*kinds}},
        "routed_scaling_factor": 1.0 if factor is None else factor,
        # A window's size counts the positions before a token's own.
        "sliding_window": own if before is None else before + 1,
        "topk_group": config.size("topk_group", 1, least=1),
        "v_head_dim": value_width,
    }


def _mimo_rope(config: Config, kind: str) -> dict[str, Any]:
    if config.get("rope_parameters") is not None:
        return config.rope_of(kind, "linear", "yarn", share=0.334)
    theta = 5e6 if kind == FULL else 1e4
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
