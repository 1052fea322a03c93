"""Families whose checkpoints run without torch: a row for each `model_type`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moecache.decoding.safetensors import _layered, _settings, _stateful
from moecache.decoding.safetensors._config import Config

# transformers' configurations have one of these.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PART_NORMS = ("post_attention_norm", "post_ffw_norm")
_TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")


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
        Of a head, that is turned if it is not said; 0 where nothing is turned, or
        `settings` say it.
    turned : str, optional
        Key by which older configurations say how many numbers of a head are turned.
    has_wide_routers : bool, default False
        Whether transformers has routers in float32, whatever they are stored in.
    epsilon : str
        What the number is called that norms add.
    stored : {"rows", "columns", "either"}
        How experts that are numbers are stored: as [out, in], as [in, out], or as the shape of each
        matrix tells.
    activation : tuple of str
        What the activation of feed-forwards is called, and the values that it may have.
    names : mapping of str to str
        Names of keys in this family's config.json, by the usual names.
    overrides : mapping
        Fields of `Known` that are otherwise than those of GGUF files.
    """

    known: str
    prefix: str
    settings: Callable[[Config], dict[str, Any]]
    gate: Callable[[Config], dict[str, Any]] | None = None
    head_dim: int | None = None
    is_tied: bool = False
    share: float = 1.0
    turned: str = ""
    has_wide_routers: bool = False
    epsilon: str = "rms_norm_eps"
    stored: str = "rows"
    activation: tuple[str, ...] = ("hidden_act", "silu", "swish")
    names: Mapping[str, str] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)


def settings_of(config: Config, row: Row) -> dict[str, Any]:
    """Return a model's settings as `Facts` takes them.

    Raises
    ------
    NoTextModelError
        If a value is missing, or one that is not known here.
    """
    config = config.renamed(row.names)
    config.require(row.activation[0], *row.activation[1:])
    heads = config.size("num_attention_heads", least=1)
    found = {
        "vocab_size": config.size("vocab_size", least=1),
        "hidden_size": config.size("hidden_size", least=1),
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.size("num_key_value_heads", heads, least=1),
        "max_position_embeddings": int(config.real("max_position_embeddings")),
        row.epsilon: config.real(row.epsilon),
        "num_experts": config.count(*_NUM_EXPERTS),
        "num_experts_per_tok": config.count(*_TOP_K),
    }
    width = config.size("head_dim", row.head_dim, least=1)
    if width is not None:
        found["head_dim"] = width
    if row.share:
        turned = config.size(row.turned, None) if row.turned else None
        share = row.share if turned is None else turned / (width or found["hidden_size"] // heads)
        found["rope_parameters"] = config.rope(share, is_partial=bool(row.turned))
    return {**found, **row.settings(config)}


_KIMI_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}

# By `model_type`.
ROWS: Mapping[str, Row] = {
    "afmoe": Row("afmoe", "Afmoe", _settings.afmoe, head_dim=128),
    "bailing_hybrid": Row("bailingmoe3", "BailingHybrid", _stateful.bailing, names=_KIMI_NAMES),
    "axk1": Row("deepseek2", "AXK1", _settings.axk1, overrides={"sum_norm": "post_ffw_norm"}),
    "deepseek_v2": Row("deepseek2", "DeepseekV2", _settings.deepseek2),
    "deepseek_v3": Row("deepseek2", "DeepseekV3", _settings.deepseek3),
    "dots1": Row("dots1", "Dots1", _settings.dots1),
    "ernie4_5_moe": Row(
        "ernie4_5-moe", "Ernie4_5_Moe", _settings.ernie, is_tied=True, has_wide_routers=True
    ),
    "exaone_moe": Row("exaone-moe", "ExaoneMoe", _settings.exaone),
    "flex_olmo": Row("olmoe", "FlexOlmo", _settings.olmoe, overrides={"part_norms": _PART_NORMS}),
    "gemma4_text": Row(
        "gemma4",
        "Gemma4",
        _layered.gemma4,
        is_tied=True,
        share=0.0,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    ),
    "glm4_moe": Row("glm4moe", "Glm4Moe", _settings.glm4, share=0.5),
    "glm4_moe_lite": Row("deepseek2", "Glm4MoeLite", _settings.glm4_lite),
    "glm4v_moe_text": Row("glm4moe", "Glm4vMoe", _settings.glm4v, share=0.5),
    "gpt_oss": Row(
        "gpt-oss",
        "GptOss",
        _settings.gpt_oss,
        gate=_settings.gpt_oss_gate,
        head_dim=64,
        stored="columns",
    ),
    "granitemoe": Row("granitemoe", "GraniteMoe", _settings.granite),
    "granitemoehybrid": Row("granitehybrid", "GraniteMoeHybrid", _stateful.granite_hybrid),
    "granitemoe_swa": Row("granitemoe", "GraniteMoeSWA", _layered.granite_swa, share=0.0),
    "granitemoeshared": Row("granitemoe", "GraniteMoeShared", _settings.granite_shared),
    "hunyuan_v1_moe": Row(
        "hunyuan-moe", "HunYuanMoEV1", _settings.hunyuan, share=0.0, has_wide_routers=True
    ),
    "hy_v3": Row("hy_v3", "HYV3", _settings.hy_v3, head_dim=128),
    "kimi_k2": Row("deepseek2", "DeepseekV3", _settings.deepseek3),
    "kimi_linear": Row(
        "kimi-linear", "KimiLinear", _stateful.kimi_linear, share=0.0, names=_KIMI_NAMES
    ),
    "laguna": Row("qwen3moe", "Laguna", _layered.laguna, head_dim=128, share=0.0),
    "llama4_text": Row("llama4", "Llama4", _settings.llama4, head_dim=128, stored="columns"),
    "lfm2_moe": Row("lfm2moe", "Lfm2Moe", _stateful.lfm2, is_tied=True, epsilon="norm_eps"),
    "mellum": Row("qwen3moe", "Mellum", _layered.mellum, head_dim=128, share=0.0),
    "mimo_v2_flash": Row(
        "mimo2",
        "MiMoV2Flash",
        _layered.mimo,
        head_dim=192,
        share=0.0,
        names={"rms_norm_eps": "layernorm_epsilon"},
    ),
    "minimax_m2": Row(
        "minimax-m2", "MiniMaxM2", _settings.minimax, head_dim=128, turned="rotary_dim"
    ),
    "mistral4": Row("mistral4", "Mistral4", _settings.mistral4, share=0.0),
    "mixtral": Row("llama", "Mixtral", _settings.mixtral),
    "nemotron_h": Row(
        "nemotron_h_moe",
        "NemotronH",
        _stateful.nemotron,
        head_dim=128,
        share=0.0,
        epsilon="layer_norm_epsilon",
        activation=("mlp_hidden_act", "relu2"),
    ),
    "olmoe": Row("olmoe", "Olmoe", _settings.olmoe),
    "phimoe": Row("phimoe", "Phimoe", _settings.phimoe, share=0.0),
    "qwen2_moe": Row("qwen2moe", "Qwen2Moe", _settings.qwen2),
    "qwen3_5_moe_text": Row("qwen35moe", "Qwen3_5Moe", _stateful.linear, head_dim=256, share=0.25),
    "qwen3_moe": Row("qwen3moe", "Qwen3Moe", _settings.qwen3),
    "qwen3_next": Row("qwen3next", "Qwen3Next", _stateful.qwen3_next, head_dim=256, share=0.25),
    "solar_open": Row("glm4moe", "SolarOpen", _settings.solar, head_dim=128),
    "qwen3_vl_moe_text": Row("qwen3vlmoe", "Qwen3VLMoe", _settings.qwen3, stored="either"),
}
