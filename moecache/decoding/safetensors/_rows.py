"""Families whose checkpoints run without torch: their settings, and what their tensors are called.

Names are those that GGUF files have for the same tensors; so is what else a recipe has to know.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moecache.decoding.safetensors._config import Config

# transformers' configurations have one of these.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk")
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A family.

    Parameters
    ----------
    known : str
        The architecture of GGUF files with the same layers.
    prefix : str
        Of transformers' classes.
    settings : callable (Config)
        Returns what is said beside what all families say.
    gate : callable (Config), optional
        Returns how experts' gates are computed: options of `SlotKernel`.
    head_dim : int, optional
        Width of a head if it is not said; by default the hidden size is divided among heads.
    is_tied : bool, default False
        Whether the head is the embedding if that is not said.
    share : float, default 1
        Of a head, that is turned if it is not said.
    has_wide_routers : bool, default False
        Whether transformers has routers in float32, whatever they are stored in.
    epsilon : str
        What the number is called that norms add.
    """

    known: str
    prefix: str
    settings: Callable[[Config], dict[str, Any]]
    gate: Callable[[Config], dict[str, Any]] | None = None
    head_dim: int | None = None
    is_tied: bool = False
    share: float = 1.0
    has_wide_routers: bool = False
    epsilon: str = "rms_norm_eps"


def settings_of(config: Config, row: Row) -> dict[str, Any]:
    """Return a model's settings as `Facts` takes them.

    Raises
    ------
    NoTextModelError
        If a value is missing, or one that is not known here.
    """
    config.require("hidden_act", "silu", "swish")
    heads = config.size("num_attention_heads", least=1)
    found = {
        "vocab_size": config.size("vocab_size", least=1),
        "hidden_size": config.size("hidden_size", least=1),
        "num_hidden_layers": config.size("num_hidden_layers", least=1),
        "num_attention_heads": heads,
        "num_key_value_heads": config.size("num_key_value_heads", heads, least=1),
        "max_position_embeddings": int(config.real("max_position_embeddings")),
        "rms_norm_eps": config.real(row.epsilon),
        "num_experts": config.count(*_NUM_EXPERTS),
        "num_experts_per_tok": config.count(*_TOP_K),
        "rope_parameters": config.rope(row.share),
    }
    width = config.size("head_dim", row.head_dim, least=1)
    if width is not None:
        found["head_dim"] = width
    return {**found, **row.settings(config)}


def _layers(config: Config) -> range:
    return range(config.size("num_hidden_layers", least=1))


def _qwen(config: Config) -> dict[str, Any]:
    config.require("use_sliding_window", False)
    only, step = config.get("mlp_only_layers", []), config.size("decoder_sparse_step", 1, least=1)
    if not isinstance(only, list):
        raise config.unsupported("mlp_only_layers")
    dense = [layer for layer in _layers(config) if layer in only or (layer + 1) % step]
    return {
        "intermediate_size": config.size("intermediate_size"),
        "moe_intermediate_size": config.size("moe_intermediate_size", least=1),
        "norm_topk_prob": config.flag("norm_topk_prob", False),
        "mlp_only_layers": dense,
    }


def _qwen2(config: Config) -> dict[str, Any]:
    return {
        **_qwen(config),
        "shared_expert_intermediate_size": config.size("shared_expert_intermediate_size", least=1),
        "qkv_bias": config.flag("qkv_bias", True),
    }


def _qwen3(config: Config) -> dict[str, Any]:
    return {**_qwen(config), "attention_bias": config.flag("attention_bias", False)}


def _lfm2(config: Config) -> dict[str, Any]:
    layers = _layers(config)
    return {
        "intermediate_size": config.size("intermediate_size", least=1),
        "moe_intermediate_size": config.size("moe_intermediate_size", least=1),
        "num_dense_layers": config.size("num_dense_layers"),
        "layer_types": config.kinds("layer_types", len(layers), ("conv", _FULL)),
        "conv_L_cache": config.size("conv_L_cache", least=1),
        "conv_bias": config.flag("conv_bias", False),
        "use_expert_bias": config.flag("use_expert_bias", True),
        "norm_topk_prob": config.flag("norm_topk_prob", True),
        "routed_scaling_factor": config.real("routed_scaling_factor", 1.0, least=-1.0),
    }


def _linear(config: Config) -> dict[str, Any]:
    layers = _layers(config)
    interval = config.size("full_attention_interval", 4, least=1)
    usual = [_LINEAR if (layer + 1) % interval else _FULL for layer in layers]
    said = config.get("layer_types") is not None
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    return {
        "layer_types": (
            config.kinds("layer_types", len(layers), (_LINEAR, _FULL)) if said else usual
        ),
        "attention_bias": config.flag("attention_bias", False),
        "moe_intermediate_size": config.size("moe_intermediate_size", least=1),
        "shared_expert_intermediate_size": config.size("shared_expert_intermediate_size", least=1),
        "linear_conv_kernel_dim": config.size("linear_conv_kernel_dim", least=1),
        **{f"linear_{name}": config.size(f"linear_{name}", least=1) for name in sizes},
    }


def _qwen3_next(config: Config) -> dict[str, Any]:
    return {**_linear(config), **_qwen3(config)}


def _mixtral(config: Config) -> dict[str, Any]:
    width = config.size("intermediate_size", least=1)
    return {"intermediate_size": width, **_window(config)}


def _window(config: Config) -> dict[str, Any]:
    window = config.real("sliding_window", None)
    return {"sliding_window": None if window is None else int(window)}


def _olmoe(config: Config) -> dict[str, Any]:
    return {
        "intermediate_size": config.size("intermediate_size", least=1),
        "norm_topk_prob": config.flag("norm_topk_prob", False),
        "clip_qkv": config.real("clip_qkv", None),
        "attention_bias": config.flag("attention_bias", False),
    }


def _gpt_oss(config: Config) -> dict[str, Any]:
    layers = _layers(config)
    usual = [_FULL if layer % 2 else _SLIDING for layer in layers]
    said = config.get("layer_types") is not None
    return {
        "intermediate_size": config.size("intermediate_size", least=1),
        "attention_bias": config.flag("attention_bias", True),
        "sliding_window": int(config.real("sliding_window")),
        "layer_types": (
            config.kinds("layer_types", len(layers), (_SLIDING, _FULL)) if said else usual
        ),
    }


def _gpt_oss_gate(config: Config) -> dict[str, Any]:
    return {
        "alpha": config.real("swiglu_alpha", 1.702),
        "limit": config.real("swiglu_limit", 7.0, least=-1.0),
        "is_interleaved": True,
    }


def _minimax(config: Config) -> dict[str, Any]:
    config.require("scoring_func", "sigmoid")
    return {"intermediate_size": config.size("intermediate_size", least=1)}


def _grouped(config: Config) -> dict[str, Any]:
    """Return what models say that choose experts of the best groups, behind dense layers."""
    config.require("moe_layer_freq", 1)
    # Transformers has no other, whatever is said.
    config.require("scoring_func", "sigmoid", "softmax")
    return {
        "intermediate_size": config.size("intermediate_size", least=1),
        "moe_intermediate_size": config.size("moe_intermediate_size", least=1),
        "n_shared_experts": config.size("n_shared_experts", least=1),
        "first_k_dense_replace": config.size("first_k_dense_replace"),
        "routed_scaling_factor": config.real("routed_scaling_factor", least=-1.0),
        "norm_topk_prob": config.flag("norm_topk_prob", True),
        "n_group": config.size("n_group", 1, least=1),
        "topk_group": config.size("topk_group", 1, least=1),
        "attention_bias": config.flag("attention_bias", False),
    }


def _glm4(config: Config) -> dict[str, Any]:
    return {**_grouped(config), "use_qk_norm": config.flag("use_qk_norm", False)}


def _latents(config: Config) -> dict[str, Any]:
    # Some configurations have zero for what has no rank.
    rank = config.size("q_lora_rank", None) or None
    widths = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return {
        **_grouped(config),
        **{name: config.size(name, least=1) for name in widths},
        "q_lora_rank": rank,
    }


def _deepseek2(config: Config) -> dict[str, Any]:
    config.require("topk_method", "greedy", "group_limited_greedy")
    config.require("norm_topk_prob", False)
    found = {**_latents(config), "topk_method": config.get("topk_method", "greedy")}
    # transformers' own rotates neighbours by complex numbers; lengths that are scaled differ there.
    if found["topk_method"] == "greedy":
        found |= {"n_group": 1, "topk_group": 1}
    return found


def _deepseek3(config: Config) -> dict[str, Any]:
    config.require("topk_method", "noaux_tc")
    config.require("rope_interleave", True)
    return _latents(config)


def _ernie(config: Config) -> dict[str, Any]:
    layers = _layers(config)
    config.require("use_bias", False)
    return {
        "intermediate_size": config.size("intermediate_size", least=1),
        "moe_intermediate_size": config.size("moe_intermediate_size", least=1),
        "moe_num_shared_experts": config.size("moe_num_shared_experts"),
        "moe_layer_start_index": config.size("moe_layer_start_index"),
        "moe_layer_end_index": min(config.size("moe_layer_end_index"), len(layers) - 1),
        "moe_layer_interval": config.size("moe_layer_interval", 1, least=1),
    }


def _hunyuan(config: Config) -> dict[str, Any]:
    return {
        "intermediate_size": config.size("intermediate_size", least=1),
        "attention_bias": config.flag("attention_bias", False),
    }


# By `model_type`.
ROWS: Mapping[str, Row] = {
    "deepseek_v2": Row("deepseek2", "DeepseekV2", _deepseek2),
    "deepseek_v3": Row("deepseek2", "DeepseekV3", _deepseek3),
    "ernie4_5_moe": Row(
        "ernie4_5-moe", "Ernie4_5_Moe", _ernie, is_tied=True, has_wide_routers=True
    ),
    "glm4_moe": Row("glm4moe", "Glm4Moe", _glm4, share=0.5),
    "gpt_oss": Row("gpt-oss", "GptOss", _gpt_oss, gate=_gpt_oss_gate, head_dim=64),
    "hunyuan_v1_moe": Row("hunyuan-moe", "HunYuanMoEV1", _hunyuan, has_wide_routers=True),
    "kimi_k2": Row("deepseek2", "DeepseekV3", _deepseek3),
    "lfm2_moe": Row("lfm2moe", "Lfm2Moe", _lfm2, is_tied=True, epsilon="norm_eps"),
    "minimax_m2": Row("minimax-m2", "MiniMaxM2", _minimax, head_dim=128),
    "mixtral": Row("llama", "Mixtral", _mixtral),
    "olmoe": Row("olmoe", "Olmoe", _olmoe),
    "qwen2_moe": Row("qwen2moe", "Qwen2Moe", _qwen2),
    "qwen3_5_moe_text": Row("qwen35moe", "Qwen3_5Moe", _linear, head_dim=256, share=0.25),
    "qwen3_moe": Row("qwen3moe", "Qwen3Moe", _qwen3),
    "qwen3_vl_moe_text": Row("qwen3vlmoe", "Qwen3VLMoe", _qwen3),
    "qwen3_next": Row("qwen3next", "Qwen3Next", _qwen3_next, head_dim=256, share=0.25),
}
