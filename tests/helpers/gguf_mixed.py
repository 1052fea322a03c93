"""Tiny models whose layers differ in kind, as GGUF files: keys, and what becomes of weights."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.helpers import family_settings as tiny
from tests.helpers.gguf_models import GgufModel, Tensors, expert_keys, head_keys


def _is_tiled(config: Any) -> bool:
    """Return whether heads of values are stored one of each head of keys after another."""
    return "3_5" in config.model_type or "qwen4" in config.model_type


def _linear(config: Any) -> dict[str, Any]:
    width = config.linear_value_head_dim * config.linear_num_value_heads
    return {
        **head_keys(config),
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": width,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "rope.dimension_count": int(
            config.head_dim * config.rope_parameters["partial_rotary_factor"]
        ),
        "rope.dimension_sections": [2, 1, 1, 0] if _is_tiled(config) else None,
    }


def _linear_change(leaf: str, values: np.ndarray, config: Any) -> Tensors | None:
    name = leaf.removeprefix("linear_attn.")
    heads, width = config.linear_num_key_heads, config.linear_key_head_dim
    if name == "in_proj_qkvz.weight":
        rest = (values.shape[0] // heads - 2 * width) // 2
        each = values.reshape(heads, -1, values.shape[1])
        parts = np.split(each, [width, 2 * width, 2 * width + rest], axis=1)
        q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
        return {"attn_qkv.weight": np.concatenate([q, k, v]), "attn_gate.weight": z}
    if name not in _LINEAR:
        return None
    if name == "A_log":
        import torch

        values = -torch.from_numpy(values).exp().numpy()
    if name == "conv1d.weight":
        values = values[:, 0]
    if _is_tiled(config) and name != "norm.weight":
        first = 2 * heads * width if name in {"conv1d.weight", "in_proj_qkv.weight"} else 0
        values = values.T if name == "out_proj.weight" else values
        rest = values[first:].reshape(heads, config.linear_num_value_heads // heads, -1)
        rest = rest.swapaxes(0, 1).reshape(values[first:].shape)
        values = np.concatenate([values[:first], rest])
        values = values.T if name == "out_proj.weight" else values
    return {_LINEAR[name]: values}


_LINEAR = {
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "conv1d.weight": "ssm_conv1d.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "out_proj.weight": "ssm_out.weight",
    "norm.weight": "ssm_norm.weight",
}


_LFM2 = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "embedding_norm": "token_embd_norm",
}


def _lfm2(config: Any) -> dict[str, Any]:
    heads = config.num_key_value_heads
    return {
        **expert_keys(config),
        "attention.head_count_kv": [
            heads if kind == "full_attention" else 0 for kind in config.layer_types
        ],
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_gating_func": 2,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "shortconv.l_cache": config.conv_L_cache,
    }


def _lfm2_change(leaf: str, values: np.ndarray, config: Any) -> Tensors | None:
    return {"shortconv.conv.weight": values[:, 0]} if leaf == "conv.conv.weight" else None


_GEMMA4 = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}


def _gemma4(config: Any) -> dict[str, Any]:
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    each = [config.per_layer_config[layer] for layer in range(len(sliding))]
    whole = each[sliding.index(False)]
    rope = config.rope_parameters
    first = config.num_hidden_layers - config.num_kv_shared_layers
    wide = [1 if i < first or not config.use_double_wide_mlp else 2 for i in range(len(sliding))]
    return {
        **expert_keys(config),
        "expert_used_count": config.top_k_experts,
        "attention.head_count_kv": [layer.num_key_value_heads for layer in each],
        "attention.key_length": whole.head_dim,
        "attention.value_length": whole.head_dim,
        "attention.key_length_swa": each[0].head_dim,
        "attention.value_length_swa": each[0].head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "feed_forward_length": [config.intermediate_size * factor for factor in wide],
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "rope.dimension_count": whole.head_dim,
        "rope.dimension_count_swa": each[0].head_dim,
    }


_QWEN4 = {
    "ple.key_proj": "ple_key",
    "ple.value_proj": "ple_value",
    "self_attn.indexer.q_layernorm": "indexer.q_norm",
    "self_attn.indexer.k_layernorm": "indexer.k_norm",
}
for _module, _tensor in (
    ("attn_hyper_connection", "hc_attn"),
    ("mlp_hyper_connection", "hc_ffn"),
    ("hyper_connection_mixer", "output_hc"),
):
    _QWEN4 |= {
        f"{_module}.hc_norm": f"{_tensor}_norm",
        f"{_module}.input_mix_weight_down": f"{_tensor}_down",
        f"{_module}.input_mix_weight_up": f"{_tensor}_up",
        f"{_module}.block_inject_weight": f"{_tensor}_inject",
    }


class _Qwen4(GgufModel):
    def metadata(self, config: Any) -> dict[str, Any]:
        """Return all keys of the file, with the constants of the table of n-grams."""
        import torch
        import transformers

        with torch.random.fork_rng(devices=[]):
            model = transformers.Qwen4ExpForCausalLM(config)
        state = model.state_dict()
        prefix = "model.layers.0.ple.ple_embedding."
        return super().metadata(config) | {
            f"qwen4exp.ple.{key}": state[f"{prefix}{name}"].tolist()
            for key, name in (
                ("layer_multipliers", "layer_multipliers"),
                ("head_offsets", "ngram_heads_offsets"),
                ("head_vocab_sizes", "ngram_heads_vocab_sizes"),
            )
        }

    def tensors(self, model: Any) -> Tensors:
        """Return all tensors of the file; one table is of no block."""
        found = super().tensors(model)
        found["per_layer_token_embd.weight"] = found.pop("blk.0.per_layer_token_embd.weight")
        return found


def _qwen4(config: Any) -> dict[str, Any]:
    linear = [kind == "linear_attention" for kind in config.layer_types]
    return {
        **_linear(config),
        "attention.compress_ratios": [
            0 if one else config.indexer_compress_ratio for one in linear
        ],
        "attention.indexer.head_count": config.indexer_n_heads,
        "attention.indexer.key_length": config.indexer_head_dim,
        "attention.indexer.top_k": config.indexer_budget,
        "hyper_connection.count": config.hc_count,
        "hyper_connection.low_rank": config.hc_lowrank,
        "ple.layers": [0],
        "ple.ngram_size": config.ngram_size,
        "ple.heads_per_ngram": config.heads_per_ngram,
        "ple.conv_kernel": config.ple_conv_kernel_size,
        "ple.eos_token_id": config.eos_token_id,
    }


def _qwen4_change(leaf: str, values: np.ndarray, config: Any) -> Tensors | None:
    name = leaf.removeprefix("ple.")
    if name.startswith("ple_embedding."):
        is_table = name.endswith("ngram_embedding.weight")
        return {"per_layer_token_embd.weight": values} if is_table else {}
    if name in {"norm_key.weight", "norm_query.weight", "norm_conv.weight"}:
        return {f"ple_{name}": values + np.float32(1)}
    if leaf == "ple.conv1d.weight":
        return {"ple_conv1d.weight": values[:, 0]}
    if leaf == "self_attn.indexer.index_qk_proj.weight":
        cut = config.indexer_n_heads * config.indexer_head_dim
        return {"indexer.q_proj.weight": values[:cut], "indexer.k_proj.weight": values[cut:]}
    return _linear_change(leaf, values, config)


_SECTIONS = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
}


def mixed() -> Iterator[GgufModel]:
    """Yield LFM2, Qwen3-Next, Qwen 3.5, Qwen 3.8 and Gemma 4."""
    yield GgufModel("lfm2moe", "Lfm2Moe", tiny.LFM2_MOE, _lfm2, _LFM2, _lfm2_change)
    after = {"post_attention_layernorm": "post_attention_norm"}
    yield GgufModel(
        "qwen3next",
        "Qwen3Next",
        {**tiny.QWEN3_NEXT, "mlp_only_layers": []},
        _linear,
        after,
        _linear_change,
        shift=True,
    )
    yield GgufModel(
        "qwen35moe",
        "Qwen3_5Moe",
        {**tiny.QWEN3_5_MOE, "rope_parameters": _SECTIONS},
        _linear,
        after,
        _linear_change,
        config_suffix="TextConfig",
        shift=True,
    )
    ngrams = {"ple_layer_ids": [1], "ple_embed_dim": 32, "ngram_size": 3, "heads_per_ngram": 2}
    ngrams |= {"ngram_vocab_size_base": 50, "split_ngram_parts": 2, "eos_token_id": 2}
    # llama.cpp pools keys only once all positions are more than these.
    indexer = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
    indexer |= {"indexer_budget": 64, "indexer_compress_ratio": 4}
    yield _Qwen4(
        "qwen4exp",
        "Qwen4Exp",
        {
            **tiny.QWEN3_5_MOE,
            **ngrams,
            **indexer,
            "hc_count": 2,
            "hc_lowrank": 8,
            "output_gate_type": "sigmoid",
            "rope_parameters": _SECTIONS,
        },
        _qwen4,
        _QWEN4,
        _qwen4_change,
        config_suffix="TextConfig",
        shift=True,
        published={
            # transformers would call the layers otherwise.
            "model_type": "qwen4",
            "layer_types": tiny.QWEN3_5_MOE["layer_types"],
        },
    )

    gemma4 = {**tiny.GEMMA4_TEXT, "final_logit_softcapping": 30.0}
    yield GgufModel("gemma4", "Gemma4", gemma4, _gemma4, _GEMMA4, config_suffix="TextConfig")
    larger = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
    larger |= {"num_global_key_value_heads": 1, "num_hidden_layers": 3}
    larger["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"]
    yield GgufModel(
        "gemma4",
        "Gemma4",
        {**gemma4, **larger},
        _gemma4,
        _GEMMA4,
        config_suffix="TextConfig",
        name="gemma4 keys as values",
    )
