"""What families of attention alone say in config.json, beside what all families say."""

from typing import Any

from moecache.decoding.safetensors._config import Config

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def qwen(config: Config, *, is_normalized: bool = False) -> dict[str, Any]:
    config.require("use_sliding_window", False)
    only, step = config.get("mlp_only_layers", []), config.size("decoder_sparse_step", 1, least=1)
    if not isinstance(only, list):
        raise config.unsupported("mlp_only_layers")
    dense = [layer for layer in range(config.num_layers) if layer in only or (layer + 1) % step]
    return {
        "intermediate_size": config.size("intermediate_size"),
        "moe_intermediate_size": config.size("moe_intermediate_size", least=1),
        "norm_topk_prob": config.flag("norm_topk_prob", is_normalized),
        "mlp_only_layers": dense,
    }


def qwen2(config: Config) -> dict[str, Any]:
    return {
        **qwen(config),
        "shared_expert_intermediate_size": config.size("shared_expert_intermediate_size", least=1),
        "qkv_bias": config.flag("qkv_bias", True),
    }


def qwen3(config: Config, *, is_normalized: bool = False) -> dict[str, Any]:
    return {
        **qwen(config, is_normalized=is_normalized),
        "attention_bias": config.flag("attention_bias", False),
    }


def mixtral(config: Config) -> dict[str, Any]:
    return {
        "intermediate_size": config.size("intermediate_size", least=1),
        "sliding_window": config.number("sliding_window", None),
    }


def olmoe(config: Config) -> dict[str, Any]:
    return {
        "intermediate_size": config.size("intermediate_size", least=1),
        "norm_topk_prob": config.flag("norm_topk_prob", False),
        "clip_qkv": config.real("clip_qkv", None),
        "attention_bias": config.flag("attention_bias", False),
    }


def gpt_oss(config: Config) -> dict[str, Any]:
    usual = [FULL if layer % 2 else SLIDING for layer in range(config.num_layers)]
    return {
        "intermediate_size": config.size("intermediate_size", least=1),
        "attention_bias": config.flag("attention_bias", True),
        "sliding_window": config.number("sliding_window"),
        "layer_types": config.kinds("layer_types", (SLIDING, FULL), usual),
    }


def gpt_oss_gate(config: Config) -> dict[str, Any]:
    return {
        "alpha": config.real("swiglu_alpha", 1.702),
        "limit": config.real("swiglu_limit", 7.0, least=-1.0),
        "is_interleaved": True,
    }


def llama4(config: Config) -> dict[str, Any]:
    layers = range(config.num_layers)
    interval = config.size("no_rope_layer_interval", 4, least=1)
    # An empty list says nothing.
    turned = config.get("no_rope_layers") or [int((at + 1) % interval != 0) for at in layers]
    is_list = isinstance(turned, list) and len(turned) >= len(layers)
    if not is_list or any(type(one) is not int or one not in (0, 1) for one in turned):
        raise config.unsupported("no_rope_layers")
    step = config.size("interleave_moe_layer_step", 1, least=1)
    routed = config.get("moe_layers", list(layers[step - 1 :: step]))
    if not isinstance(routed, list) or not {*map(str, routed)} <= {*map(str, layers)}:
        raise config.unsupported("moe_layers")
    usual = [CHUNKED if one else FULL for one in turned[: len(layers)]]
    found = {
        "intermediate_size": config.size("intermediate_size", least=1),
        "intermediate_size_mlp": config.size("intermediate_size_mlp", 16384, least=1),
        "moe_layers": routed,
        "use_qk_norm": config.flag("use_qk_norm", True),
        "no_rope_layers": turned,
        "layer_types": config.kinds("layer_types", (CHUNKED, FULL), usual),
        "attention_chunk_size": config.number("attention_chunk_size", 8192),
        "attention_bias": config.flag("attention_bias", False),
    }
    # Published as a number, too.
    tuning = config.get("attn_temperature_tuning", True)
    if type(tuning) not in (bool, int):
        raise config.unsupported("attn_temperature_tuning")
    if tuning:
        found["floor_scale"] = config.number("floor_scale", 8192)
        found["attn_scale"] = config.real("attn_scale", 0.1)
    return found


def phimoe(config: Config) -> dict[str, Any]:
    config.demand("num_experts_per_tok", 2)  # its router chooses two
    hidden, heads = (config.size(name, least=1) for name in ("hidden_size", "num_attention_heads"))
    if hidden % heads or config.size("head_dim", hidden // heads) != hidden // heads:
        raise config.unsupported("num_attention_heads")
    return {
        "intermediate_size": config.size("intermediate_size", least=1),
        "router_jitter_noise": config.real("router_jitter_noise", 0.01, least=-1.0),
        "rope_parameters": config.long_rope(hidden // heads),
        "attention_bias": config.flag("attention_bias", False),
        "lm_head_bias": config.flag("lm_head_bias", False),
        "sliding_window": mixtral(config)["sliding_window"],
    }


def minimax(config: Config) -> dict[str, Any]:
    config.require("scoring_func", "sigmoid")
    return {"intermediate_size": config.size("intermediate_size", least=1)}


def shared(config: Config) -> dict[str, Any]:
    """Return what models say that have experts for all tokens by their number."""
    return {
        "intermediate_size": config.size("intermediate_size", least=1),
        "moe_intermediate_size": config.size("moe_intermediate_size", least=1),
        "num_shared_experts": config.size("num_shared_experts", least=1),
    }


def windows(config: Config) -> dict[str, Any]:
    """Return what models say that have sliding windows beside layers that turn nothing."""
    every, usual = config.size("global_attn_every_n_layers", None, least=1), None
    if every is not None:
        usual = [SLIDING if (layer + 1) % every else FULL for layer in range(config.num_layers)]
    return {
        **shared(config),
        "sliding_window": config.number("sliding_window"),
        "layer_types": config.kinds("layer_types", (SLIDING, FULL), usual),
    }


def afmoe(config: Config) -> dict[str, Any]:
    config.require("score_func", "sigmoid")
    config.require("route_norm", True)
    for name in ("n_group", "topk_group"):
        config.require(name, 1)
    return {
        **windows(config),
        "num_dense_layers": config.size("num_dense_layers"),
        "route_scale": config.real("route_scale", least=-1.0),
        "mup_enabled": config.flag("mup_enabled", False),
        "attention_bias": config.flag("attention_bias", False),
    }


def exaone(config: Config) -> dict[str, Any]:
    config.require("scoring_func", "sigmoid")
    dense: dict[str, Any] = {}
    if config.get("first_k_dense_replace") is None:
        dense["mlp_layer_types"] = config.kinds("mlp_layer_types", ("dense", "sparse"))
    else:
        dense["first_k_dense_replace"] = config.size("first_k_dense_replace")
    return {
        **windows(config),
        **dense,
        "norm_topk_prob": config.flag("norm_topk_prob", True),
        "routed_scaling_factor": config.real("routed_scaling_factor", least=-1.0),
        "n_group": config.size("n_group", least=1),
        "topk_group": config.size("topk_group", least=1),
    }


def hy_v3(config: Config) -> dict[str, Any]:
    config.require("norm_topk_prob", True)
    usual = ["dense", *["sparse"] * (config.num_layers - 1)]
    return {
        **shared(config),
        "router_scaling_factor": config.real("router_scaling_factor", least=-1.0),
        "mlp_layer_types": config.kinds("mlp_layer_types", ("dense", "sparse"), usual),
        "attention_bias": config.flag("attention_bias", False),
    }


def dots1(config: Config) -> dict[str, Any]:
    if config.get("layer_types") is not None:
        config.kinds("layer_types", (FULL,))
    elif config.size("max_window_layers", config.num_layers) < config.num_layers:
        raise config.unsupported("max_window_layers")
    return {**grouped(config, is_normalized=False), "sliding_window": None}


def granite(config: Config) -> dict[str, Any]:
    scales = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
    return {
        "intermediate_size": config.size("intermediate_size", least=1),
        "attention_bias": config.flag("attention_bias", False),
        "attention_multiplier": config.real("attention_multiplier", 1.0),
        **{name: config.real(name, usual) for name, usual in scales.items()},
    }


def granite_shared(config: Config) -> dict[str, Any]:
    width = config.size("shared_intermediate_size")
    return {**granite(config), "shared_intermediate_size": width}


def grouped(config: Config, *, is_normalized: bool = True) -> dict[str, Any]:
    """Return what models say that choose experts of the best groups, behind dense layers."""
    return {
        **chosen(config, is_normalized=is_normalized),
        "intermediate_size": config.size("intermediate_size", least=1),
        "first_k_dense_replace": config.size("first_k_dense_replace"),
    }


def chosen(config: Config, *, is_normalized: bool = True) -> dict[str, Any]:
    """Return what models say of experts of the best groups, and of those for all tokens."""
    config.require("moe_layer_freq", 1)
    # Transformers has no other, whatever is said.
    config.require("scoring_func", "sigmoid", "softmax", "noaux_tc")
    return {
        "moe_intermediate_size": config.size("moe_intermediate_size", least=1),
        "n_shared_experts": config.size("n_shared_experts", least=1),
        "routed_scaling_factor": config.real("routed_scaling_factor", least=-1.0),
        "norm_topk_prob": config.flag("norm_topk_prob", is_normalized),
        "n_group": config.size("n_group", 1, least=1),
        "topk_group": config.size("topk_group", 1, least=1),
        "attention_bias": config.flag("attention_bias", False),
    }


def glm4(config: Config) -> dict[str, Any]:
    return {**grouped(config), "use_qk_norm": config.flag("use_qk_norm", False)}


def glm4v(config: Config) -> dict[str, Any]:
    return {**grouped(config), "use_qk_norm": False}


def solar(config: Config) -> dict[str, Any]:
    width = config.size("moe_intermediate_size", least=1)
    settings = {"intermediate_size": width, "first_k_dense_replace": 0, "use_qk_norm": False}
    config.require("first_k_dense_replace", 0)
    return {**chosen(config), **settings}


def glm4_lite(config: Config) -> dict[str, Any]:
    config.require("topk_method", "noaux_tc")
    config.require("rope_interleave", True)
    if config.get("mlp_layer_types") is None:
        config.require("first_k_dense_replace", 1)  # transformers has no other then
    usual = ["dense", *["sparse"] * (config.num_layers - 1)]
    return {
        **chosen(config),
        **latent_sizes(config),
        "intermediate_size": config.size("intermediate_size", least=1),
        "mlp_layer_types": config.kinds("mlp_layer_types", ("dense", "sparse"), usual),
    }


def axk1(config: Config) -> dict[str, Any]:
    config.require("topk_method", "noaux_tc")
    config.require("rope_interleave", True)
    demand_groups(config)
    first = config.size("first_k_dense_replace", 1)
    usual = ["dense" if layer < first else "sparse" for layer in range(config.num_layers)]
    return {
        **chosen(config),
        **latent_sizes(config),
        "intermediate_size": config.size("intermediate_size", least=1),
        "mlp_layer_types": config.kinds("mlp_layer_types", ("dense", "sparse"), usual),
    }


def mistral4(config: Config) -> dict[str, Any]:
    config.require("rope_interleave", True)
    sizes = latent_sizes(config)
    turned, rest = sizes["qk_rope_head_dim"], sizes["qk_nope_head_dim"]
    return {
        **chosen(config),
        **sizes,
        "intermediate_size": config.size("intermediate_size", least=1),
        "first_k_dense_replace": config.size("first_k_dense_replace", 0),
        "rope_parameters": config.scaled_rope(turned / (turned + rest)),
    }


def latents(config: Config) -> dict[str, Any]:
    return {**grouped(config), **latent_sizes(config)}


def latent_sizes(config: Config) -> dict[str, Any]:
    if not config.has("q_lora_rank"):
        raise config.missing("q_lora_rank")
    # Some configurations have zero for what has no rank.
    rank = config.size("q_lora_rank", None) or None
    return {**latent_widths(config), "q_lora_rank": rank}


def latent_widths(config: Config) -> dict[str, Any]:
    widths = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return {name: config.size(name, least=1) for name in widths}


def demand_groups(config: Config) -> None:
    """Refuse a configuration that lacks groups of experts, of which transformers takes several."""
    for name in ("n_group", "topk_group"):
        config.size(name, least=1)


def deepseek2(config: Config) -> dict[str, Any]:
    config.require("topk_method", "greedy", "group_limited_greedy")
    config.require("norm_topk_prob", False)
    found = {**latents(config), "topk_method": config.get("topk_method", "greedy")}
    if found["topk_method"] == "greedy":
        found |= {"n_group": 1, "topk_group": 1}
    return found


def deepseek3(config: Config) -> dict[str, Any]:
    config.require("topk_method", "noaux_tc")
    config.require("rope_interleave", True)
    demand_groups(config)
    return latents(config)


def ernie(config: Config) -> dict[str, Any]:
    last = config.num_layers - 1
    config.require("use_bias", False)
    config.require("moe_norm_min", 1e-12)
    end = config.get("moe_layer_end_index", -1)
    end = end if end == -1 else config.size("moe_layer_end_index")
    return {
        "intermediate_size": config.size("intermediate_size", least=1),
        "moe_intermediate_size": config.size("moe_intermediate_size", least=1),
        "moe_num_shared_experts": config.size("moe_num_shared_experts"),
        "moe_layer_start_index": config.size("moe_layer_start_index"),
        "moe_layer_end_index": last if end == -1 else min(end, last),
        "moe_layer_interval": config.size("moe_layer_interval", 1, least=1),
    }


def hunyuan(config: Config) -> dict[str, Any]:
    usual = config.size("hidden_size", least=1) // config.size("num_attention_heads", least=1)
    return {
        "intermediate_size": config.size("intermediate_size", least=1),
        "attention_bias": config.flag("attention_bias", False),
        "rope_parameters": config.stretched_rope(config.size("head_dim", usual, least=1)),
    }
