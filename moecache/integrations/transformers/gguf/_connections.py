"""Hy4 and Qwen 3.8: several streams of hidden states, hyper-connections, instead of one."""

from typing import Any

import numpy as np

from moecache.decoding.gguf._architecture import Architecture, Source
from moecache.decoding.gguf._common import tokens
from moecache.decoding.gguf._linear import qwen35moe_settings
from moecache.decoding.gguf._metadata import Metadata
from moecache.decoding.gguf._sigmoid import indexed_settings, latent_source
from moecache.integrations.transformers.gguf._linear_sources import (
    LINEAR_NAMES,
    dense_source,
    less_one,
)

_PARTS = ("fn", "base", "scale")


def _hy_v4(said: Metadata) -> dict[str, Any]:
    settings, layers = indexed_settings(said), range(said.num_layers)
    del settings["first_k_dense_replace"]
    types = said.get("attention.indexer.types", [True] * len(layers))
    if not isinstance(types, list | tuple) or len(types) < len(layers) or not types[0]:
        raise said.unsupported("attention.indexer.types", types)
    return {
        **settings,
        "mlp_layer_types": [
            "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in said.tensors else "dense"
            for layer in layers
        ],
        "indexer_types": ["full" if types[layer] else "shared" for layer in layers],
        "hc_mult": said.size("hyper_connection.count", least=1),
        "hc_eps": said.real("hyper_connection.epsilon", least=-1.0),
        "hc_magnitude": said.real("hyper_connection.magnitude"),
        "swiglu_limit": said.real("swiglu_clamp_exp"),
    }


def _qwen4(said: Metadata) -> dict[str, Any]:
    settings = qwen35moe_settings(said)
    layers = range(said.num_layers)
    ratios = said.get("attention.compress_ratios")
    known = isinstance(ratios, list | tuple) and len(ratios) >= len(layers)
    linear = [kind == "linear_attention" for kind in settings["layer_types"]]
    found = {ratios[layer] for layer in layers if not linear[layer]} if known else set()
    if len(found) != 1:
        raise said.unsupported("attention.compress_ratios", ratios)
    (ratio,) = found
    return {
        **settings,
        "norm_topk_prob": True,
        # As llama.cpp computes it: files do not say it.
        "output_gate_type": "sigmoid",
        "indexer_n_heads": said.size("attention.indexer.head_count", least=1),
        "indexer_kv_heads": 1,
        "indexer_head_dim": said.size("attention.indexer.key_length", least=1),
        "indexer_budget": int(said.real("attention.indexer.top_k")),
        "indexer_compress_ratio": ratio,
        "hc_count": said.size("hyper_connection.count", least=1),
        "hc_lowrank": said.size("hyper_connection.low_rank", least=1),
        **_ngrams(said, settings["vocab_size"]),
    }


def _ngrams(said: Metadata, vocabulary: int) -> dict[str, Any]:
    """Return what the one layer with embeddings of n-grams says, if there is one."""
    layers = said.get("ple.layers", [])
    if not layers:
        return {"ple_layer_ids": []}
    if not isinstance(layers, list | tuple) or len(layers) != 1 or type(layers[0]) is not int:
        raise said.unsupported("ple.layers", layers)
    size, heads = said.size("ple.ngram_size", least=2), said.size("ple.heads_per_ngram", least=1)
    rows, width = said.matrix(_TABLE)
    count = (size - 1) * heads
    first = _constants(said, "head_vocab_sizes")[:1]
    # The others are the primes after the first, which transformers looks for itself.
    if any(len(_constants(said, name)) != n for name, n in _constant_counts(count, size)) or not (
        1 < first[0] <= rows
    ):
        raise said.unsupported("ple.head_vocab_sizes", said.get("ple.head_vocab_sizes"))
    ends = tokens(said, vocabulary)["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    end = said.size("ple.eos_token_id")
    return {
        "ple_layer_ids": [layers[0] + 1],
        "ple_embed_dim": count * width,
        "ple_conv_kernel_size": said.size("ple.conv_kernel", least=1),
        "ngram_size": size,
        "heads_per_ngram": heads,
        "ngram_vocab_size_base": first[0],
        "make_ngram_vocab_size_divisible_by": rows,
        "split_ngram_parts": 1,
        # N-grams end with the first of them.
        "eos_token_id": [end, *(one for one in ends if one not in {None, end})],
    }


def _constant_counts(heads: int, size: int) -> tuple[tuple[str, int], ...]:
    return ("layer_multipliers", size), ("head_offsets", heads), ("head_vocab_sizes", heads)


def _constants(said: Metadata, name: str) -> list[int]:
    found = said.get(f"ple.{name}")
    if not isinstance(found, list | tuple) or any(type(one) is not int for one in found):
        raise said.unsupported(f"ple.{name}", found)
    if any(not 0 <= one < 2**63 for one in found):
        raise said.unsupported(f"ple.{name}", found)
    return list(found)


def _qwen4_source(leaf: str, layer: int, said: Metadata) -> Source | None:
    prefix = f"blk.{layer}." if layer >= 0 else ""
    if leaf in _LESS_ONE:
        return Source((f"{prefix}{_LESS_ONE[leaf]}.weight",), undo=less_one)
    if leaf in _HASHED:
        values = np.array(_constants(said, _HASHED[leaf]), np.int64)
        return Source((), undo=lambda _: values)
    if leaf == "ple.ple_embedding.ngram_embedding.weight":
        return Source((_TABLE,))
    if leaf == "ple.conv1d.weight":
        return Source((f"{prefix}ple_conv1d.weight",), undo=lambda arrays: arrays[0][:, None])
    if leaf == "self_attn.indexer.index_qk_proj.weight":
        parts = tuple(f"{prefix}indexer.{part}_proj.weight" for part in ("q", "k"))
        return Source(parts, rows=np.arange(sum(said.shape(part)[0] for part in parts)))
    return dense_source(leaf, layer, said)


_TABLE = "per_layer_token_embd.weight"
_HASHED = {
    "ple.ple_embedding.layer_multipliers": "layer_multipliers",
    "ple.ple_embedding.ngram_heads_vocab_sizes": "head_vocab_sizes",
    "ple.ple_embedding.ngram_heads_offsets": "head_offsets",
}
_LESS_ONE = {
    "attn_hyper_connection.hc_norm.weight": "hc_attn_norm",
    "mlp_hyper_connection.hc_norm.weight": "hc_ffn_norm",
    "model.hyper_connection_mixer.hc_norm.weight": "output_hc_norm",
    "self_attn.indexer.q_layernorm.weight": "indexer.q_norm",
    "self_attn.indexer.k_layernorm.weight": "indexer.k_norm",
    **{f"ple.norm_{part}.weight": f"ple_norm_{part}" for part in ("key", "query", "conv")},
}
_MIXERS = {
    "input_mix_weight_down": "down",
    "input_mix_weight_up": "up",
    "block_inject_weight": "inject",
}
QWEN4 = Architecture(
    "Qwen4Exp",
    _qwen4,
    {
        **LINEAR_NAMES,
        "ple.key_proj.weight": "ple_key.weight",
        "ple.value_proj.weight": "ple_value.weight",
        **{
            f"{module}_hyper_connection.{part}.weight": f"hc_{tensor}_{kind}.weight"
            for module, tensor in (("attn", "attn"), ("mlp", "ffn"))
            for part, kind in _MIXERS.items()
        },
        **{
            f"model.hyper_connection_mixer.{part}.weight": f"output_hc_{kind}.weight"
            for part, kind in _MIXERS.items()
        },
    },
    _qwen4_source,
    config_suffix="TextConfig",
    like="qwen35moe",
)
HY_V4 = Architecture(
    "HYV4",
    _hy_v4,
    {
        "self_attn.gate_proj.weight": "attn_gate.weight",
        "self_attn.sinks": "attn_sinks.weight",
        **{
            f"{kind}_hc.{part}": f"hc_{kind}_{part}.weight"
            for kind in ("attn", "ffn")
            for part in _PARTS
        },
        **{f"model.hc_head.hc_{part}": f"output_hc_{part}.weight" for part in _PARTS},
    },
    latent_source,
    like="glm-dsa",
)
