"""The families that have a recipe: a row for each, of transformers' classes that it is made of.

Their layers are x + attention(norm(x)), then x + block(norm(x)), or have norms behind these alone;
attention has q_proj, k_proj, v_proj and o_proj, or DeepSeek's latents. What differs is said here.
Attributes are named by paths.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Family:
    """How a family's blocks are to be read.

    Parameters
    ----------
    block, router : str
        Attributes of a layer's block, and of its router in it.
    router_weight : str
        Attribute of a router that has its weight; or that is a linear layer and has it.
    scores : str
        What its router makes of logits, as `Router` says it.
    is_normalized : bool or str
        Whether weights are divided by their sum; or the attribute of the router that says so.
    least : float
        Added to that sum.
    floor : str, optional
        Attribute of the router that has that sum's least.
    correction : str, optional
        Attribute of the block that has what is added to scores for the choice.
    has_groups : bool, default False
        Whether routers have `num_group`, `topk_group` and `routed_scaling_factor`.
    num_best : int
        Of a group, whose scores are its own.
    scale : str, optional
        Attribute of the router, or of the block, that multiplies weights, if it has no groups.
    router_cap : str, optional
        Attribute of the router that has the bound of its logits, if it is not 0.
    scales_input : bool, default False
        Whether a weight multiplies the input of a token's only expert.
    shared : str, optional
        Attribute of a block that has the experts of all tokens; it may be `None`.
    is_shared_beside : bool, default False
        Whether it is an attribute of the layer.
    shared_weight : str, optional
        Attribute of a block that has their weight.
    norms : (str, str)
        Attributes of attention that have the norms of queries and keys, if it has them.
    has_late_norms : bool, default False
        Whether these come after the rotation.
    pairs : str
        What a rotation turns together, as `Rotation` says it.
    bases : str, optional
        Attribute of the configuration that has the base of each layer's rotation, 0 where nothing
        is turned.
    turns_windows : bool, default False
        Whether layers that see all positions turn nothing, beside those with windows.
    linear : str, optional
        Attribute of a layer that has linear attention, a state space or a convolution instead.
    is_single : bool, default False
        Whether a layer has a norm and one part: attention, a state space or a feed-forward.
    layer_norms : (str, str), optional
        Attributes of a layer that has two parts: the norms before them, if there are some.
    part_norms : (str, str), optional
        And the norms of their results.
    block_norm : str, optional
        Attribute of a block that has experts: the norm of its result.
    attention, out : str
        Attributes of a layer, and of its attention, that have attention and its last product.
    is_gated : bool, default False
        Whether queries are followed by gates of what attention gives.
    gates : str, optional
        Attribute of attention that has the gates' matrix, where they do not follow queries.
    gate_function : str
        What gates become, as `Attention` says it.
    adds_one : bool, default False
        Whether norms of the residual stream, of queries and of keys are weighted by 1 and more.
    is_beside : bool, default False
        Whether a feed-forward is beside the experts of every layer, all with norms of their own,
        and values have norms without weights: Gemma 4. Its block is the layer, "".
    cap : str, optional
        Attribute of the configuration that has the bound of logits.
    is_latent : bool, default False
        Whether attention is DeepSeek's.
    may_turn_halves : bool, default False
        Whether its configuration's `rope_interleave` says that pairs are neighbours, or halves.
    is_scaled : bool, default False
        Whether latent attention's queries have a temperature.
    clip : str, optional
        Attribute of the configuration that has the bound of queries, keys and values.
    sinks : str, optional
        Attribute of attention that has the logits beside those of positions; it may be `None`.
    value_scale : str, optional
        Attribute of attention that multiplies values.
    residual, embedding, logits : str, optional
        Attributes of a layer, of the inner model and of the configuration that scale what is added
        to hidden states, embeddings, and (by division) logits.
    scales_by_root : str, optional
        Attribute of the configuration that says whether the root of the hidden size scales
        embeddings.
    """

    block: str = "mlp"
    router: str = "gate"
    router_weight: str = "weight"
    scores: str = "softmax"
    is_normalized: bool | str = "norm_topk_prob"
    least: float = 0.0
    floor: str | None = None
    correction: str | None = None
    has_groups: bool = False
    num_best: int = 2
    scale: str | None = None
    router_cap: str | None = None
    scales_input: bool = False
    shared: str | None = None
    is_shared_beside: bool = False
    shared_weight: str | None = None
    norms: tuple[str, str] = ("q_norm", "k_norm")
    has_late_norms: bool = False
    pairs: str = "halves"
    bases: str | None = None
    turns_windows: bool = False
    linear: str | None = None
    is_single: bool = False
    layer_norms: tuple[str, str] | None = ("input_layernorm", "post_attention_layernorm")
    part_norms: tuple[str, str] | None = None
    block_norm: str | None = None
    attention: str = "self_attn"
    out: str = "o_proj"
    is_gated: bool = False
    gates: str | None = None
    gate_function: str = "sigmoid"
    adds_one: bool = False
    is_beside: bool = False
    cap: str | None = None
    is_latent: bool = False
    may_turn_halves: bool = False
    is_scaled: bool = False
    clip: str | None = None
    sinks: str | None = None
    value_scale: str | None = None
    residual: str | None = None
    embedding: str | None = None
    logits: str | None = None
    scales_by_root: str | None = None


_SIGMOID = Family(
    scores="sigmoid",
    least=1e-20,
    correction="gate.e_score_correction_bias",
    has_groups=True,
    shared="shared_experts",
)

_LATENT = replace(_SIGMOID, pairs="neighbours to halves", is_latent=True, may_turn_halves=True)

_LINEAR = Family(
    shared="shared_expert",
    shared_weight="shared_expert_gate",
    linear="linear_attn",
    is_gated=True,
    adds_one=True,
)

_GRANITE = Family(
    block="block_sparse_moe",
    router="router",
    scores="softmax of the chosen",
    is_normalized=False,
    residual="residual_multiplier",
    embedding="embedding_multiplier",
    logits="logits_scaling",
)

# By the classes of attention and of the block of experts, and the file of `transformers.models`.
FAMILIES = {
    ("qwen3_moe", "Qwen3MoeAttention", "Qwen3MoeSparseMoeBlock"): Family(),
    ("mellum", "MellumAttention", "MellumSparseMoeBlock"): Family(),
    ("qwen3_vl_moe", "Qwen3VLMoeTextAttention", "Qwen3VLMoeTextSparseMoeBlock"): Family(
        is_normalized=True
    ),
    (
        "qwen3_omni_moe",
        "Qwen3OmniMoeThinkerTextAttention",
        "Qwen3OmniMoeThinkerTextSparseMoeBlock",
    ): Family(),
    ("qwen2_moe", "Qwen2MoeAttention", "Qwen2MoeSparseMoeBlock"): Family(
        shared="shared_expert", shared_weight="shared_expert_gate"
    ),
    ("qwen3_next", "Qwen3NextAttention", "Qwen3NextSparseMoeBlock"): _LINEAR,
    ("qwen3_5_moe", "Qwen3_5MoeAttention", "Qwen3_5MoeSparseMoeBlock"): replace(
        _LINEAR, is_normalized=True
    ),
    ("gemma4", "Gemma4TextAttention", "Gemma4TextDecoderLayer"): Family(
        block="", router="router", is_normalized=True, is_beside=True, cap="final_logit_softcapping"
    ),
    ("mixtral", "MixtralAttention", "MixtralSparseMoeBlock"): Family(is_normalized=True),
    ("olmoe", "OlmoeAttention", "OlmoeSparseMoeBlock"): Family(clip="clip_qkv"),
    ("flex_olmo", "FlexOlmoAttention", "FlexOlmoSparseMoeBlock"): Family(
        layer_norms=None, part_norms=("post_attention_layernorm", "post_feedforward_layernorm")
    ),
    ("afmoe", "AfmoeAttention", "AfmoeSparseMoeBlock"): Family(
        router="router",
        router_weight="gate",
        scores="sigmoid",
        is_normalized=True,
        least=1e-20,
        correction="expert_bias",
        scale="route_scale",
        shared="shared_experts",
        turns_windows=True,
        layer_norms=("input_layernorm", "pre_mlp_layernorm"),
        part_norms=("post_attention_layernorm", "post_mlp_layernorm"),
        gates="gate_proj",
        scales_by_root="mup_enabled",
    ),
    ("laguna", "LagunaAttention", "LagunaSparseMoeBlock"): Family(
        scores="sigmoid",
        is_normalized=True,
        correction="gate.e_score_correction_bias",
        scale="routed_scaling_factor",
        router_cap="router_logit_softcapping",
        shared="shared_experts",
        gates="g_proj",
        gate_function="softplus",
    ),
    ("glm4_moe", "Glm4MoeAttention", "Glm4MoeMoE"): _SIGMOID,
    ("glm4v_moe", "Glm4vMoeTextAttention", "Glm4vMoeTextMoE"): _SIGMOID,
    ("solar_open", "SolarOpenAttention", "SolarOpenMoE"): _SIGMOID,
    ("dots1", "Dots1Attention", "Dots1MoE"): _SIGMOID,
    ("exaone_moe", "ExaoneMoeAttention", "ExaoneMoeSparseMoEBlock"): replace(
        _SIGMOID, turns_windows=True
    ),
    ("hy_v3", "HYV3Attention", "HYV3MoE"): replace(
        _SIGMOID,
        is_normalized=True,
        correction="e_score_correction_bias",
        has_groups=False,
        scale="router_scaling_factor",
    ),
    # Kimi K2 is one, too.
    ("deepseek_v3", "DeepseekV3Attention", "DeepseekV3MoE"): _LATENT,
    ("kimi_linear", "KimiLinearAttention", "KimiLinearMoE"): replace(
        _SIGMOID, is_latent=True, linear="self_attn"
    ),
    ("bailing_hybrid", "BailingHybridAttention", "BailingHybridMoE"): replace(
        _LATENT, may_turn_halves=False, linear="self_attn", gates="g_proj"
    ),
    ("axk1", "AXK1Attention", "AXK1MoE"): replace(_LATENT, block_norm="post_mlp_layernorm"),
    ("mimo_v2_flash", "MiMoV2FlashAttention", "MiMoV2FlashMoE"): replace(
        _SIGMOID, shared=None, sinks="sinks", value_scale="v_scale"
    ),
    ("mistral4", "Mistral4Attention", "Mistral4MoE"): replace(
        _LATENT, scores="softmax", correction=None, is_scaled=True
    ),
    ("glm4_moe_lite", "Glm4MoeLiteAttention", "Glm4MoeLiteMoE"): _LATENT,
    ("deepseek_v2", "DeepseekV2Attention", "DeepseekV2Moe"): Family(
        is_normalized=False,
        has_groups=True,
        num_best=1,
        shared="shared_experts",
        pairs="neighbours",
        is_latent=True,
    ),
    ("gpt_oss", "GptOssAttention", "GptOssMLP"): Family(
        router="router", scores="softmax of the chosen", is_normalized=False, sinks="sinks"
    ),
    ("minimax_m2", "MiniMaxM2Attention", "MiniMaxM2SparseMoeBlock"): Family(
        scores="sigmoid", is_normalized=True, correction="e_score_correction_bias"
    ),
    ("ernie4_5_moe", "Ernie4_5_MoeAttention", "Ernie4_5_MoeSparseMoeBlock"): Family(
        is_normalized=True,
        floor="norm_min",
        correction="gate.moe_statics.e_score_correction_bias",
        shared="shared_experts",
        pairs="neighbours",
    ),
    ("hunyuan_v1_moe", "HunYuanMoEV1Attention", "HunYuanMoEV1Moe"): Family(
        router_weight="wg",
        is_normalized=True,
        shared="shared_mlp",
        norms=("query_layernorm", "key_layernorm"),
        has_late_norms=True,
    ),
    ("granitemoe", "GraniteMoeAttention", "GraniteMoeMoE"): _GRANITE,
    ("granitemoeshared", "GraniteMoeSharedAttention", "GraniteMoeSharedMoE"): replace(
        _GRANITE, shared="shared_mlp", is_shared_beside=True
    ),
    ("granitemoehybrid", "GraniteMoeHybridAttention", "GraniteMoeHybridMoE"): replace(
        _GRANITE, shared="shared_mlp", is_shared_beside=True, linear="mamba"
    ),
    ("granitemoe_swa", "GraniteMoeSWAAttention", "GraniteMoeSWAMoE"): replace(
        _GRANITE,
        shared="shared_mlp",
        is_shared_beside=True,
        sinks="sinks",
        bases="layer_rope_theta",
    ),
    ("nemotron_h", "NemotronHAttention", "NemotronHMoE"): replace(
        _SIGMOID, block="mixer", attention="mixer", linear="mixer", is_single=True
    ),
    ("lfm2_moe", "Lfm2MoeAttention", "Lfm2MoeSparseMoeBlock"): Family(
        block="feed_forward",
        scores="sigmoid",
        least=1e-6,
        correction="expert_bias",
        scale="routed_scaling_factor",
        norms=("q_layernorm", "k_layernorm"),
        linear="conv",
        layer_norms=("operator_norm", "ffn_norm"),
        out="out_proj",
    ),
    ("phimoe", "PhimoeAttention", "PhimoeSparseMoeBlock"): Family(
        router="router", scores="sparsemixer", is_normalized=False
    ),
    ("llama4", "Llama4TextAttention", "Llama4TextMoe"): Family(
        block="feed_forward",
        router="router",
        scores="sigmoid of the chosen",
        is_normalized=False,
        scales_input=True,
        shared="shared_expert",
        norms=("qk_norm", "qk_norm"),
        has_late_norms=True,
        pairs="neighbours",
    ),
}

# Of transformers' `model_type` and of GGUF's architecture, without what separates their parts.
_MODEL_TYPES = {name.replace("_", "") for name, _, _ in FAMILIES}
_MODEL_TYPES |= {"kimik2", "deepseek2", "hunyuanmoe", "llama", "qwen35moetext", "gemma4text"}
_MODEL_TYPES |= {"bailingmoe3", "granitehybrid", "nemotronhmoe", "llama4text", "mimo2"}
_WITHOUT_KERNELS = {"longcatflash", "step3p7"}
# A score weights their experts' input, which kernels on a GPU do not know.
_WITHOUT_KERNELS_ON_GPU = {"llama4", "llama4text"}


def has_recipe(model_type: str) -> bool:
    """Return whether models of a type decode by a program, as their configurations usually are.

    Parameters
    ----------
    model_type : str
        As in transformers' `config.json`, or the architecture in a GGUF file.
    """
    return _plain(model_type) in _MODEL_TYPES and has_kernels(model_type)


def has_kernels(model_type: str, *, on_gpu: bool = False) -> bool:
    """Return whether kernels compute the experts of a type of model.

    They do not where the experts have no interface in transformers, so that `load` patches the
    module around them.

    Parameters
    ----------
    model_type : str
    on_gpu : bool, default False
        Whether slots are on a GPU, and not in RAM.
    """
    kind = _plain(model_type)
    return kind not in _WITHOUT_KERNELS and not (on_gpu and kind in _WITHOUT_KERNELS_ON_GPU)


def _plain(model_type: str) -> str:
    return "".join(filter(str.isalnum, model_type))
