"""Granite 4, Nemotron-H and Jamba: layers of Mamba beside those of attention."""

from dataclasses import replace
from typing import Any

from moecache.decoding.gguf import _mamba
from moecache.decoding.gguf._architecture import Architecture, Source
from moecache.decoding.gguf._common import common_settings, expert_width, has_bias, head_dim
from moecache.decoding.gguf._metadata import Metadata
from moecache.decoding.gguf._softmax import (
    granite_source,
    permuted_heads,
)
from moecache.integrations.transformers.gguf._linear_sources import logarithms

# Parameters of a layer of Mamba, without the name of its module.
_PARTS = {
    "in_proj.weight": "ssm_in.weight",
    "in_proj.bias": "ssm_in.bias",
    "conv1d.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias",
    "out_proj.weight": "ssm_out.weight",
    "out_proj.bias": "ssm_out.bias",
}


def _mamba_source(leaf: str, layer: int, module: str) -> Source | None:
    """Return where a parameter of a layer of Mamba is."""
    prefix, name = f"blk.{layer}.", leaf.removeprefix(f"{module}.")
    if name == leaf:
        return None
    if name == "A_log":
        return Source((f"{prefix}ssm_a",), undo=lambda arrays: logarithms(arrays[0].reshape(-1)))
    if name == "conv1d.weight":
        return Source((f"{prefix}ssm_conv1d.weight",), undo=lambda arrays: arrays[0][:, None])
    for parameter, tensor in (("D", "ssm_d"), ("norm.weight", "ssm_norm.weight")):
        if name == parameter:
            return Source((f"{prefix}{tensor}",), undo=lambda arrays: arrays[0].reshape(-1))
    return None


def _granite_hybrid_source(leaf: str, layer: int, said: Metadata) -> Source | None:
    return _mamba_source(leaf, layer, "mamba") or granite_source(leaf, layer, said)


def _nemotron_source(leaf: str, layer: int, said: Metadata) -> Source | None:
    if layer >= 0 and f"blk.{layer}.ssm_a" in said.tensors:
        return _mamba_source(leaf, layer, "mixer")
    # The converter interleaves the heads' halves, though nothing is rotated.
    return permuted_heads(leaf.replace("mixer.", "self_attn."), layer, said)


def _jamba(said: Metadata) -> dict[str, Any]:
    hidden, layers = said.size("embedding_length", least=1), range(said.num_layers)
    expand, rest = divmod(said.size("ssm.inner_size", least=1), hidden)
    if rest:
        raise said.unsupported("ssm.inner_size", said.size("ssm.inner_size"))
    head_dim(said)  # heads are no wider than hidden states
    counts = said.sizes("attention.head_count_kv")
    attends = [layer for layer in layers if counts[layer]]
    routed = [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" in said.tensors]
    periods: dict[str, int] = {}
    for kind, key, chosen in (
        ("attn", "attention.head_count_kv", attends),
        ("expert", "expert_count", routed),
    ):
        offset, period = _period(chosen, said.num_layers)
        if chosen != list(layers)[offset::period]:
            raise said.unsupported(key, said.get(key))
        periods |= {f"{kind}_layer_offset": offset, f"{kind}_layer_period": period}
    return {
        **common_settings(said),
        **periods,
        "intermediate_size": expert_width(said),
        "num_experts": said.size("expert_count", least=1),
        "num_experts_per_tok": said.size("expert_used_count", least=1),
        "mamba_d_state": said.size("ssm.state_size", least=1),
        "mamba_d_conv": said.size("ssm.conv_kernel", least=1),
        "mamba_expand": expand,
        "mamba_dt_rank": said.size("ssm.time_step_rank", least=1),
        "mamba_conv_bias": has_bias(said, "ssm_conv1d"),
        "mamba_proj_bias": has_bias(said, "ssm_in"),
    }


def _period(layers: list[int], count: int) -> tuple[int, int]:
    """Return the first of some layers, and how many layers it is to the next of them."""
    if not layers:
        return count, count + 1
    return layers[0], layers[1] - layers[0] if len(layers) > 1 else count


def _jamba_source(leaf: str, layer: int, _said: Metadata) -> Source | None:
    if leaf == "mamba.A_log":
        return Source((f"blk.{layer}.ssm_a",), undo=lambda arrays: logarithms(arrays[0]))
    if leaf == "mamba.conv1d.weight":
        name = f"blk.{layer}.ssm_conv1d.weight"
        return Source((name,), undo=lambda arrays: arrays[0][:, None])
    return None


GRANITE_HYBRID = replace(
    _mamba.GRANITE_HYBRID,
    names={
        "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
        "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
        **{f"mamba.{leaf}": tensor for leaf, tensor in _PARTS.items()},
    },
    source=_granite_hybrid_source,
)
NEMOTRON_H_MOE = replace(
    _mamba.NEMOTRON_H_MOE,
    names={
        "model.embeddings.weight": "token_embd.weight",
        "model.norm_f.weight": "output_norm.weight",
        "norm.weight": "attn_norm.weight",
        **{
            f"mixer.{part}_proj.{kind}": f"attn_{tensor}.{kind}"
            for part, tensor in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))
            for kind in ("weight", "bias")
        },
        "mixer.up_proj.weight": "ffn_up.weight",
        "mixer.down_proj.weight": "ffn_down.weight",
        "mixer.gate.weight": "ffn_gate_inp.weight",
        "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
        "mixer.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
        "mixer.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
        "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight",
        "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight",
        **{f"mixer.{leaf}": tensor for leaf, tensor in _PARTS.items()},
    },
    source=_nemotron_source,
)
JAMBA = Architecture("Jamba", _jamba, {"mamba.D": "ssm_d"}, _jamba_source)
