"""Granite 4, Nemotron-H and Jamba: layers of Mamba beside those of attention."""

from typing import Any

from moecache.decoding.gguf._architecture import Architecture, Source
from moecache.decoding.gguf._common import (
    common_settings,
    expert_width,
    group_counts,
    has_bias,
    head_dim,
    key_heads,
)
from moecache.decoding.gguf._metadata import Metadata
from moecache.decoding.gguf._softmax import (
    granite_settings,
    granite_source,
    permuted_heads,
)
from moecache.errors import ConfigError
from moecache.integrations.transformers.gguf._linear_sources import logarithms

_SIGMOID = 2  # of expert_gating_func
# Parameters of a layer of Mamba, without the name of its module.
_MAMBA = {
    "in_proj.weight": "ssm_in.weight",
    "in_proj.bias": "ssm_in.bias",
    "conv1d.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias",
    "out_proj.weight": "ssm_out.weight",
    "out_proj.bias": "ssm_out.bias",
}


def _mamba_sizes(said: Metadata) -> tuple[int, int, int]:
    """Return the heads of a layer of Mamba, their width, and how many groups they form."""
    heads, groups = said.size("ssm.time_step_rank", least=1), said.size("ssm.group_count", least=1)
    width, rest = divmod(said.size("ssm.inner_size", least=1), heads)
    if rest or heads % groups:
        raise said.unsupported("ssm.time_step_rank", heads)
    return heads, width, groups


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


def _granite_hybrid(said: Metadata) -> dict[str, Any]:
    heads, width, groups = _mamba_sizes(said)
    expand, rest = divmod(heads * width, said.size("embedding_length", least=1))
    if rest:
        raise said.unsupported("ssm.inner_size", heads * width)
    counts = said.sizes("attention.head_count_kv")
    rotates = said.flag("rope.scaling.finetuned", default=True)
    return {
        **granite_settings(said),
        "position_embedding_type": "rope" if rotates else None,
        "shared_intermediate_size": said.size("expert_shared_feed_forward_length", least=1),
        "layer_types": ["full_attention" if count else "linear_attention" for count in counts],
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_n_groups": groups,
        "mamba_d_state": said.size("ssm.state_size", least=1),
        "mamba_d_conv": said.size("ssm.conv_kernel", least=1),
        "mamba_expand": expand,
        "mamba_conv_bias": has_bias(said, "ssm_conv1d"),
        "mamba_proj_bias": has_bias(said, "ssm_in"),
    }


def _granite_hybrid_source(leaf: str, layer: int, said: Metadata) -> Source | None:
    return _mamba_source(leaf, layer, "mamba") or granite_source(leaf, layer, said)


def _nemotron(said: Metadata) -> dict[str, Any]:
    function = said.number("expert_gating_func", _SIGMOID)
    if function != _SIGMOID:
        raise said.unsupported("expert_gating_func", function)
    heads, width, groups = _mamba_sizes(said)
    settings = common_settings(said)
    width_of_experts = expert_width(said)
    chosen, used = group_counts(said)
    # A block is one of these alone.
    kinds = [_nemotron_kind(said, layer) for layer in range(said.num_layers)]
    # Nothing is rotated.
    for key in ("rope.dimension_count", "rope.freq_base"):
        said.get(key, None)
    dense = [f"blk.{layer}.ffn_up.weight" for layer, kind in enumerate(kinds) if kind == "mlp"]
    return {
        **settings,
        "layer_norm_epsilon": settings.pop("rms_norm_eps"),
        "head_dim": head_dim(said),
        "num_key_value_heads": key_heads(said),
        "layers_block_type": kinds,
        "intermediate_size": said.matrix(dense[0])[0] if dense else width_of_experts,
        "attention_bias": has_bias(said, "attn_q", "attn_k", "attn_v"),
        "mamba_num_heads": heads,
        "mamba_head_dim": width,
        "n_groups": groups,
        "ssm_state_size": said.size("ssm.state_size", least=1),
        "conv_kernel": said.size("ssm.conv_kernel", least=1),
        "use_conv_bias": has_bias(said, "ssm_conv1d"),
        "mamba_proj_bias": has_bias(said, "ssm_in"),
        "n_routed_experts": said.size("expert_count", least=1),
        "n_shared_experts": said.size("expert_shared_count", 1, least=1),
        "num_experts_per_tok": said.size("expert_used_count", least=1),
        "moe_intermediate_size": width_of_experts,
        "moe_shared_expert_intermediate_size": said.size("expert_shared_feed_forward_length"),
        "moe_latent_size": said.size("moe_latent_size", None),
        "routed_scaling_factor": said.real("expert_weights_scale", 1.0, least=-1.0) or 1.0,
        "norm_topk_prob": said.flag("expert_weights_norm", default=False),
        "n_group": chosen,
        "topk_group": used,
    }


def _nemotron_kind(said: Metadata, layer: int) -> str:
    for tensor, kind in (
        ("ssm_a", "linear_attention"),
        ("attn_output.weight", "full_attention"),
        ("ffn_gate_inp.weight", "moe"),
        ("ffn_up.weight", "mlp"),
    ):
        if f"blk.{layer}.{tensor}" in said.tensors:
            return kind
    raise ConfigError(
        f"block {layer} of the GGUF file is neither attention, Mamba nor a feed-forward; if the "
        "file is one of several parts, give the first"
    )


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


GRANITE_HYBRID = Architecture(
    "GraniteMoeHybrid",
    _granite_hybrid,
    {
        "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
        "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
        **{f"mamba.{leaf}": tensor for leaf, tensor in _MAMBA.items()},
    },
    _granite_hybrid_source,
)
NEMOTRON_H_MOE = Architecture(
    "NemotronH",
    _nemotron,
    {
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
        **{f"mixer.{leaf}": tensor for leaf, tensor in _MAMBA.items()},
    },
    _nemotron_source,
)
JAMBA = Architecture("Jamba", _jamba, {"mamba.D": "ssm_d"}, _jamba_source)
