"""Random checkpoints of any size, in the form of the tiny model that is shipped."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


@dataclass(frozen=True)
class Size:
    """What a checkpoint is to look like; experts are in float32."""

    num_layers: int
    num_experts: int
    top_k: int
    hidden: int
    width: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts."""
        return self.num_layers * self.num_experts * 3 * self.hidden * self.width * 4


def write_checkpoint(directory: Path, size: Size, *, seed: int = 0) -> None:
    """Write an OLMoE model with random weights over bytes, a shard for each layer."""
    rng = np.random.default_rng(seed)

    def weights(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(0.02)

    hidden = size.hidden
    shards = {
        "trunk.safetensors": {
            "model.embed_tokens.weight": weights(384, hidden),
            "model.norm.weight": np.ones(hidden, np.float32),
        }
    }
    save_file(shards["trunk.safetensors"], directory / "trunk.safetensors")
    weight_map = dict.fromkeys(shards["trunk.safetensors"], "trunk.safetensors")
    for layer in range(size.num_layers):
        prefix = f"model.layers.{layer}"
        tensors = {
            f"{prefix}.{name}.weight": np.ones(hidden, np.float32)
            for name in (
                "input_layernorm",
                "post_attention_layernorm",
                "self_attn.q_norm",
                "self_attn.k_norm",
            )
        }
        for name in "qkvo":
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = weights(hidden, hidden)
        # Large enough that tokens choose differently.
        tensors[f"{prefix}.mlp.gate.weight"] = weights(size.num_experts, hidden) * 50
        for expert in range(size.num_experts):
            for name, shape in (
                ("gate", (size.width, hidden)),
                ("up", (size.width, hidden)),
                ("down", (hidden, size.width)),
            ):
                tensors[f"{prefix}.mlp.experts.{expert}.{name}_proj.weight"] = weights(*shape)
        shard = f"layer-{layer:02}.safetensors"
        save_file(tensors, directory / shard)
        weight_map |= dict.fromkeys(tensors, shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "model_type": "olmoe",
        "hidden_size": hidden,
        "intermediate_size": size.width,
        "max_position_embeddings": 1024,
        "norm_topk_prob": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_experts": size.num_experts,
        "num_experts_per_tok": size.top_k,
        "num_hidden_layers": size.num_layers,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "vocab_size": 384,
    }
    (directory / "config.json").write_text(json.dumps(config))
