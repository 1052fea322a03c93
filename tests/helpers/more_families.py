"""Families whose configurations have transformers' usual names for the usual sizes."""

import copy
from collections.abc import Mapping
from typing import Any

from tests.helpers.families import Family
from tests.helpers.family_settings import VISION

# Each configuration takes those that it knows.
SIZES: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 16,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "mlp_only_layers": [0],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "decoder_sparse_step": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
}
_LATENT = {"num_key_value_heads": 4}
_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_RELATIVE = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 16,
    "d_rel": 4,
    "rel_extent": 16,
}
_SAM = {
    "sam_config": {
        "hidden_size": 16,
        "output_channels": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "window_size": 2,
        "global_attn_indexes": [0],
        "mlp_dim": 16,
        "downsample_channels": [8, 16],
    },
    "encoder_config": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    },
}
_MULTIMODAL_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


class SizedFamily(Family):
    """A family that is given the usual sizes under those of their names that it knows.

    Its settings are what else it needs; of a model that reads images too, its text part's.
    """

    def config(self) -> Any:
        """Return a new configuration of the tiny model."""
        import transformers

        kind = getattr(transformers, self.prefix + self.config_suffix)
        text = kind if self.vision is None else kind.sub_configs["text_config"]
        known = {name for cls in text.__mro__ for name in getattr(cls, "__annotations__", ())}
        known |= (text.attribute_map or {}).keys()
        usual = {name: value for name, value in SIZES.items() if name in known}
        given = copy.deepcopy({**usual, **self.settings})
        if self.vision is None:
            return kind(**given)
        return kind(text_config=given, **copy.deepcopy(dict(self.vision)))


def _of(name: str, prefix: str, settings: Mapping[str, Any] | None = None, **rest: Any) -> Family:
    return SizedFamily(name, prefix, settings or {}, rest.pop("expert_layers", (1, 2)), **rest)


def _with_images(
    name: str,
    prefix: str,
    settings: Mapping[str, Any],
    vision: Mapping[str, Any] = VISION,
    **others: Any,
) -> Family:
    others = {"vision_config": vision, **others}
    suffix = others.pop("model_suffix", "ForConditionalGeneration")
    kind = others.pop("config_suffix", "Config")
    interface = others.pop("has_interface", True)
    return _of(
        name,
        prefix,
        settings,
        model_suffix=suffix,
        config_suffix=kind,
        has_interface=interface,
        vision=others,
    )


_MEMBERS = (
    _of("afmoe", "Afmoe"),
    _of(
        "aria",
        "AriaText",
        {"moe_num_experts": 8, "moe_topk": 3, "moe_num_shared_experts": 1},
    ),
    _of("axk1", "AXK1", _LATENT),
    _of("axk2", "AXK2", _LATENT),
    _of("bailing_hybrid", "BailingHybrid", {**_LATENT, **_LINEAR}),
    _of("beam", "Beam"),
    _of("cohere2_moe", "Cohere2Moe"),
    _of("deepseek_v32", "DeepseekV32", _LATENT),
    _of(
        "deepseek_v4",
        "DeepseekV4",
        {
            "num_key_value_heads": 1,
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "o_groups": 2,
            "o_lora_rank": 8,
            "swiglu_limit": 1.5,
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 8,
            },
        },
    ),
    _with_images(
        "deepseek_ocr2",
        "DeepseekOcr2",
        _LATENT,
        {**_SAM, "encoder_config": {**_SAM["encoder_config"], "num_key_value_heads": 2}},
    ),
    _of("dots1", "Dots1"),
    _of(
        "dots3_note",
        "Dots3Note",
        {
            **_LATENT,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 16,
            "swa_kv_lora_rank": 16,
            "swa_head_dim": 16,
            "swa_qk_nope_head_dim": 8,
            "swa_v_head_dim": 8,
            "shared_experts_intermediate_size": 24,
        },
        config_suffix="TextConfig",
    ),
    _of("exaone_moe", "ExaoneMoe"),
    _of("flex_olmo", "FlexOlmo"),
    _of("flint", "Flint"),
    _of("glm4_moe_lite", "Glm4MoeLite", _LATENT),
    _with_images(
        "glm4v_moe",
        "Glm4vMoe",
        {"head_dim": 16, "rope_parameters": {**_MULTIMODAL_ROPE, "mrope_section": [2, 1, 1]}},
    ),
    _with_images(
        "glm5_next",
        "Glm5Next",
        {
            **_LATENT,
            **_LINEAR,
            "qk_rope_head_dim": 0,
            "linear_num_heads": 2,
            "linear_head_dim": 8,
            "index_kpool": 4,
            "indexer_types": ["full"] * 3,
            "swiglu_limit": 1.5,
        },
    ),
    _of("glm_moe_dsa", "GlmMoeDsa", _LATENT),
    _of("granitemoe_swa", "GraniteMoeSWA"),
    _of(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        {
            "layer_types": ["mamba", "attention", "mamba"],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    _of("granitemoeshared", "GraniteMoeShared"),
    _of("hy_v3", "HYV3"),
    _of("hy_v4", "HYV4"),
    _of("inkling", "Inkling", _RELATIVE, config_suffix="TextConfig"),
    _of(
        "inkling2",
        "Inkling2",
        {**_RELATIVE, "unpadded_vocab_size": 120, "n_layers_per_attn_res_block": 2},
        config_suffix="TextConfig",
    ),
    _of(
        "kimi_linear",
        "KimiLinear",
        {**_LATENT, **_LINEAR, "linear_num_heads": 2, "linear_head_dim": 8},
    ),
    _of("kolibri1", "Kolibri1"),
    _of("laguna", "Laguna"),
    _of(
        "longcat_flash",
        "LongcatFlash",
        {
            **_LATENT,
            "num_layers": 2,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "ffn_hidden_size": 40,
            "expert_ffn_hidden_size": 24,
            "moe_topk": 3,
            "zero_expert_num": 4,
        },
        has_interface=False,
    ),
    _of("mellum", "Mellum"),
    # Of so many numbers of a head a third, which is turned, is even.
    _of("mimo_v2_flash", "MiMoV2Flash", {"head_dim": 24}),
    _of("minimax", "MiniMax"),
    _of("minimax_m3_vl", "MiniMaxM3VL", config_suffix="TextConfig"),
    _of("mistral4", "Mistral4", _LATENT),
    _with_images(
        "mistral_large4",
        "MistralLarge4",
        _LATENT,
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "head_dim": 8,
        },
        has_interface=False,  # its image part takes no experts implementation
    ),
    _with_images(
        "muse_spark",
        "MuseSpark",
        {"moe_hidden_size": 48},
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 4,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
            "max_position_embeddings": 16,
        },
        audio_config={"out_hidden_size": 32, "hidden_sizes": [8] * 4, "depths": [1] * 4},
        out_hidden_size=32,
        projector_hidden_size=16,
    ),
    _of("openai_privacy_filter", "OpenAIPrivacyFilter", model_suffix="ForTokenClassification"),
    _with_images(
        "qwen3_omni_moe",
        "Qwen3OmniMoe",
        {"rope_parameters": {**_MULTIMODAL_ROPE, "mrope_section": [4, 2, 2]}},
        {**VISION, "deepstack_visual_indexes": [0]},
        audio_config={
            "num_mel_bins": 8,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "d_model": 16,
            "output_dim": 32,
            "downsample_hidden_size": 8,
            "max_source_positions": 16,
        },
        model_suffix="ThinkerForConditionalGeneration",
        config_suffix="ThinkerConfig",
        **{
            f"{token}_token_id": 120 + number
            for number, token in enumerate(
                ("vision_start", "vision_end", "audio_start", "audio_end", "image", "video")
            )
        },
    ),
    _of(
        "qwen4_exp",
        "Qwen4Exp",
        {
            **_LINEAR,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
            "hc_count": 2,
            "hc_lowrank": 8,
        },
        config_suffix="TextConfig",
    ),
    _of("solar_open", "SolarOpen"),
    _with_images(
        "step3p7",
        "Step3p7",
        {
            "share_expert_dim": 20,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_sliding_attention_heads": 8,
            # Of one layer's experts only.
            "swiglu_limits": [0.0, 1.5, 0.0],
        },
        {
            "width": 16,
            "layers": 1,
            "heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "max_position_embeddings": 4,
        },
        has_interface=False,
    ),
    _with_images(
        "unlimited_ocr",
        "UnlimitedOcr",
        {},
        _SAM,
    ),
    # One expert per token, and so many layers that not all experts that are used fit.
    _of(
        "zaya",
        "Zaya",
        {
            "num_experts_per_tok": 1,
            "num_hidden_layers": 5,
            "router_hidden_size": 16,
            "tie_word_embeddings": False,
        },
    ),
)
MORE_FAMILIES: Mapping[str, Family] = {family.name: family for family in _MEMBERS}
