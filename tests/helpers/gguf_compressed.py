"""A tiny DeepSeek V4 as a GGUF file; published checkpoints have its experts in MXFP4."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.gguf_models import GgufModel, Tensors, read_gguf, write_gguf

_RATIOS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
_COMPRESSOR = {"kv_proj": "kv", "gate_proj": "gate", "kv_norm": "norm"}
_NAMES = {
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_norm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_proj": "attn_kv",
    "self_attn.kv_norm": "attn_kv_a_norm",
    "self_attn.o_a_proj": "attn_output_a",
    "self_attn.o_b_proj": "attn_output_b",
    "self_attn.compressor.position_bias": "attn_compressor_ape.weight",
    "self_attn.compressor.indexer.position_bias": "indexer_compressor_ape.weight",
    "self_attn.compressor.indexer.q_b_proj": "indexer.attn_q_b",
    "self_attn.compressor.indexer.scorer.weights_proj": "indexer.proj",
    **{f"self_attn.compressor.{a}": f"attn_compressor_{b}" for a, b in _COMPRESSOR.items()},
    **{
        f"self_attn.compressor.indexer.{a}": f"indexer_compressor_{b}"
        for a, b in _COMPRESSOR.items()
    },
    **{
        f"{kind}_hc.{part}": f"hc_{kind}_{part}.weight"
        for kind in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    **{f"hc_head.hc_{part}": f"output_hc_{part}.weight" for part in ("fn", "base", "scale")},
}


class _DeepseekV4(GgufModel):
    def build(self) -> Any:
        """Return it with experts that MXFP4 represents, and others for each token."""
        import gguf
        import torch

        model, kind = super().build(), gguf.GGMLQuantizationType.MXFP4
        state = model.state_dict()
        with torch.no_grad():
            for name, values in state.items():
                if name.endswith("tid2eid"):
                    order = torch.from_numpy(np.random.default_rng(0).random((len(values), 8)))
                    values.copy_(order.argsort(1)[:, : values.shape[1]])
                elif ".experts." in name:
                    stored = gguf.quantize(values.numpy(), kind)
                    values.copy_(torch.from_numpy(gguf.dequantize(stored, kind)))
        return model

    def publish(self, tensors: Tensors) -> Tensors:
        """Return the checkpoint with its experts packed, and a scale for 32 values of a row."""
        import gguf

        found: Tensors = {}
        for name, values in super().publish(tensors).items():
            if not re.search(r"\.experts\.\d+\.w\d\.weight$", name):
                found[name] = values
                continue
            blocks = gguf.quantize(values, gguf.GGMLQuantizationType.MXFP4)
            blocks = blocks.reshape(len(values), -1, 17)
            codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
            found[name] = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(len(values), -1)
            found[name.replace(".weight", ".scale")] = np.ascontiguousarray(blocks[..., 0])
        return found

    def rewrite(self, file: Path) -> str:
        """Write the experts of a file in float32."""
        metadata, tensors = read_gguf(file)
        # What was read is the mapped file itself.
        write_gguf(file, metadata, {name: values.copy() for name, values in tensors.items()})
        return "experts in float32 instead of MXFP4, beside which it rounds activations to 8 bits"


def _keys(config: Any) -> dict[str, Any]:
    main, scaled = (config.rope_parameters[kind] for kind in ("main", "compress"))
    return {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.sliding_window": config.sliding_window,
        "attention.output_group_count": config.o_groups,
        "attention.output_lora_rank": config.o_lora_rank,
        "attention.compress_ratios": [_RATIOS[kind] for kind in config.layer_types],
        "attention.compress_rope_freq_base": scaled["rope_theta"],
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "rope.freq_base": main["rope_theta"],
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaled["factor"],
        "rope.scaling.original_context_length": scaled["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": scaled["beta_fast"],
        "rope.scaling.yarn_beta_slow": scaled["beta_slow"],
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "swiglu_clamp_exp": [config.swiglu_limit] * config.num_hidden_layers,
        "swiglu_clamp_shexp": [config.swiglu_limit] * config.num_hidden_layers,
        "hash_layer_count": config.mlp_layer_types.count("hash_moe"),
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iters,
        "hyper_connection.epsilon": config.hc_eps,
    }


def _change(leaf: str, values: np.ndarray, _config: Any) -> Tensors | None:
    if leaf == "mlp.gate.tid2eid":
        return {"ffn_gate_tid2eid.weight": values.astype(np.int32)}
    return None


def compressed() -> Iterator[GgufModel]:
    """Yield it: a layer of each kind, and one whose experts tokens have from a table."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0}
    yield _DeepseekV4(
        "deepseek4",
        "DeepseekV4",
        {
            "hidden_size": 64,
            "num_key_value_heads": 1,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 3,
            "head_dim": 64,
            "q_lora_rank": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "layer_types": list(_RATIOS),
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "sliding_window": 8,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 4,
            "index_head_dim": 64,
            "index_topk": 64,
            "hc_mult": 4,
            "swiglu_limit": 1.5,
            "partial_rotary_factor": 0.5,
            "rope_parameters": yarn,
        },
        _keys,
        _NAMES,
        _change,
        published={
            "compress_ratios": list(_RATIOS.values()),
            "num_hash_layers": 1,
            "qk_rope_head_dim": 32,
            "rope_scaling": yarn,
            "rope_theta": 10_000.0,
            "num_nextn_predict_layers": 0,
        },
        renamed={
            "model.layers.": "layers.",
            "model.embed_tokens.": "embed.",
            "model.norm.": "norm.",
            "model.hc_head.hc_": "hc_head_",
            "attn.norm.": "attn.kv_norm.",
        },
    )
