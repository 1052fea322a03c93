"""Tiny models with layers of Mamba, as GGUF files: their keys, and what becomes of weights."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.helpers import family_settings as tiny
from tests.helpers.gguf_models import GgufModel, Tensors, head_keys

_MAMBA = {
    "in_proj": "ssm_in",
    "out_proj": "ssm_out",
    "conv1d": "ssm_conv1d",
    "dt_bias": "ssm_dt.bias",
}
_NEMOTRON = {
    "embeddings": "token_embd",
    "norm_f": "output_norm",
    "norm": "attn_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}


def _mamba_change(name: str, values: np.ndarray, groups: int) -> Tensors | None:
    """Return the tensors of a parameter of Mamba, by its name without its module's."""
    if name == "A_log":
        import torch

        return {"ssm_a": -torch.from_numpy(values).exp().numpy()[:, None]}
    if name == "D":
        return {"ssm_d": values[:, None]}
    if name == "conv1d.weight":
        return {"ssm_conv1d.weight": values[:, 0]}
    if name == "norm.weight":
        return {"ssm_norm.weight": values.reshape(groups, -1)}
    return None


def mamba(
    granite: Callable[[Any], dict[str, Any]],
    granite_change: Callable[[str, np.ndarray, Any], Tensors | None],
) -> Iterator[GgufModel]:
    """Yield Granite 4, Nemotron-H and Jamba; Granite's keys and changes are given."""

    def hybrid(config: Any) -> dict[str, Any]:
        attends = [kind == "full_attention" for kind in config.layer_types]
        return {
            **granite(config),
            "attention.head_count_kv": [config.num_key_value_heads * one for one in attends],
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.group_count": config.mamba_n_groups,
            "ssm.inner_size": config.mamba_expand * config.hidden_size,
            "ssm.time_step_rank": config.mamba_n_heads,
            "rope.scaling.finetuned": config.position_embedding_type == "rope",
        }

    def hybrid_change(leaf: str, values: np.ndarray, config: Any) -> Tensors | None:
        name = leaf.removeprefix("mamba.")
        if name != leaf:
            return _mamba_change(name, values, config.mamba_n_groups)
        return granite_change(leaf, values, config)

    layers = {"num_hidden_layers": 3, "shared_intermediate_size": 20}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    sizes = {"mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_d_state": 8}
    yield GgufModel(
        "granitehybrid",
        "GraniteMoeHybrid",
        {**tiny.GRANITEMOE, **layers, **sizes, "layer_types": kinds},
        hybrid,
        {
            "block_sparse_moe.router": "ffn_gate_inp",
            "shared_mlp.output_linear": "ffn_down_shexp",
            **{f"mamba.{name}": tensor for name, tensor in _MAMBA.items()},
        },
        hybrid_change,
        published={"layer_types": ["mamba", "attention", "mamba"]},
    )
    settings = {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
        "num_hidden_layers": 5,
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "intermediate_size": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 20,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    }
    names = {**_NEMOTRON, **{f"mixer.{name}": tensor for name, tensor in _MAMBA.items()}}
    # llama.cpp knows no block of a feed-forward alone beside those of experts, and its latents are
    # as near to transformers' as their width allows: 4e-4 with 32 of them, 4e-3 with 16.
    own = {"layers_block_type": settings["layers_block_type"][:4], "num_hidden_layers": 4}
    for name, further in (
        ("nemotron_h_moe", own),
        ("nemotron_h_moe dense", {}),
        ("nemotron_h_moe latent", {**own, "moe_latent_size": 16}),
    ):
        yield GgufModel(
            "nemotron_h_moe",
            "NemotronH",
            {**settings, **further},
            _nemotron,
            names,
            _nemotron_change,
            name=name,
            in_llama_cpp=name == "nemotron_h_moe",
            published={"norm_eps": 1e-5},
        )
    jamba = {
        "pre_ff_layernorm": "ffn_norm",
        "feed_forward.router": "ffn_gate_inp",
        "feed_forward.gate_proj": "ffn_gate",
        "feed_forward.up_proj": "ffn_up",
        "feed_forward.down_proj": "ffn_down",
        "final_layernorm": "output_norm",
        "mamba.x_proj": "ssm_x",
        "mamba.dt_proj": "ssm_dt",
        "mamba.dt_layernorm": "ssm_dt_norm",
        "mamba.b_layernorm": "ssm_b_norm",
        "mamba.c_layernorm": "ssm_c_norm",
        "mamba.D": "ssm_d",
        **{f"mamba.{name}": tensor for name, tensor in _MAMBA.items()},
    }
    yield GgufModel("jamba", "Jamba", tiny.JAMBA, _jamba, jamba, _jamba_change)


def _jamba(config: Any) -> dict[str, Any]:
    attends = [kind == "full_attention" for kind in config.layer_types]
    return {
        "attention.head_count_kv": [config.num_key_value_heads * one for one in attends],
        "expert_count": config.num_experts,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.time_step_rank": config.mamba_dt_rank,
    }


def _jamba_change(leaf: str, values: np.ndarray, _config: Any) -> Tensors | None:
    if leaf == "mamba.A_log":
        import torch

        return {"ssm_a": -torch.from_numpy(values).exp().numpy()}
    return {"ssm_conv1d.weight": values[:, 0]} if leaf == "mamba.conv1d.weight" else None


def _nemotron(config: Any) -> dict[str, Any]:
    kinds = config.layers_block_type
    attends = [kind == "full_attention" for kind in kinds]
    return {
        **head_keys(config),
        "block_count": len(kinds),
        "attention.head_count_kv": [config.num_key_value_heads * one for one in attends],
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "feed_forward_length": [config.moe_intermediate_size * (kind == "moe") for kind in kinds],
        "expert_shared_count": config.n_shared_experts,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_group_count": config.n_group,
        "moe_latent_size": config.moe_latent_size,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
    }


def _nemotron_change(leaf: str, values: np.ndarray, config: Any) -> Tensors | None:
    for part in ("up", "down"):
        if leaf == f"mixer.experts.{part}_proj":
            return {f"ffn_{part}_exps.weight": values}
    name = leaf.removeprefix("mixer.")
    for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        if name == f"{part}_proj.weight":
            halves = values.reshape(heads, 2, -1, values.shape[1])
            return {f"attn_{part}.weight": halves.swapaxes(1, 2).reshape(values.shape)}
    return None if name == leaf else _mamba_change(name, values, config.n_groups)
