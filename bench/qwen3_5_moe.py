"""Layers of a random Qwen 3.5 whose router chooses as trained ones do, for `bench.real_size`.

As those of `bench.qwen3_moe`, three of four with the gated delta rule instead of attention. A
state's own decay mixes the last tokens in.
"""

import math
from collections.abc import Callable
from typing import Any

from bench import qwen3_moe
from bench.qwen3_moe import down_std, without


def make_config(arguments: Any, narrow: int) -> Any:
    """Return a `Qwen3_5MoeTextConfig` of Qwen3.5-35B-A3B's shapes, its experts `narrow`."""
    from transformers import Qwen3_5MoeTextConfig

    make: Any = Qwen3_5MoeTextConfig
    # Numbers of states are as in the published model, by which heads their width is divided.
    config = make(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        moe_intermediate_size=narrow,
        shared_expert_intermediate_size=arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=2,
        head_dim=arguments.head_dim,
        linear_num_key_heads=arguments.heads,
        linear_num_value_heads=2 * arguments.heads,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.top_k,
        layer_types=[
            "full_attention" if (index + 1) % 4 == 0 else "linear_attention"
            for index in range(arguments.layers)
        ],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
        pad_token_id=0,
    )
    config._attn_implementation = "sdpa"  # noqa: SLF001
    config._experts_implementation = "grouped_mm"  # noqa: SLF001
    return config


def make_layer(config: Any, index: int, common: Any, normal: Callable[..., Any]) -> Any:
    """Return a decoder layer with all weights but the router's preferences."""
    import torch
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer

    with torch.device("meta"):
        layer = Qwen3_5MoeDecoderLayer(config, index)
    hidden, width = config.hidden_size, config.moe_intermediate_size
    # Pairs that turn fast, as `bench.qwen3_moe` has them.
    recent = torch.zeros(config.head_dim)
    recent[: config.head_dim // 16] = recent[config.head_dim // 8 : config.head_dim * 3 // 16] = 1
    recent = recent[:, None] * common * 12 / math.sqrt(hidden)
    weights = {}
    for name, shape in ((name, weight.shape) for name, weight in layer.named_parameters()):
        plain = normal(*shape, std=1 / math.sqrt(hidden))
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weights[name] = torch.full(shape, qwen3_moe.SHARPNESS - 1, dtype=torch.bfloat16)
        elif name == "linear_attn.norm.weight":
            weights[name] = torch.ones(shape, dtype=torch.bfloat16)
        elif name.endswith("norm.weight"):
            weights[name] = torch.zeros(shape, dtype=torch.bfloat16)
        elif name.endswith("A_log"):
            weights[name] = torch.linspace(0.0, 2.8, shape[0]).bfloat16()
        elif name.endswith("dt_bias"):
            weights[name] = torch.linspace(-4.0, 0.0, shape[0]).bfloat16()
        elif name.endswith("conv1d.weight"):
            weights[name] = normal(*shape, std=0.5)
        elif name.endswith(("experts.down_proj", "shared_expert.down_proj.weight")):
            own = config.shared_expert_intermediate_size if "shared" in name else width
            chosen = 1 if "shared" in name else config.num_experts_per_tok
            weights[name] = normal(*shape, std=down_std(chosen, own))
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            # A head's query is followed by its gate.
            each = torch.cat([recent, 0 * recent]) if name.endswith("q_proj.weight") else recent
            weights[name] = (each.repeat(shape[0] // len(each), 1) + plain).bfloat16()
        elif name.endswith(("o_proj.weight", "out_proj.weight", "experts.gate_up_proj")):
            columns = shape[-1]
            weights[name] = normal(*shape, std=1 / math.sqrt(columns))
        else:
            weights[name] = without(plain.float(), common).bfloat16()
    layer.load_state_dict(weights, assign=True)
    return layer.eval()


def attend(layer: Any, normed: Any, config: Any) -> tuple[Any, Any]:
    """Return what a layer adds before its experts, and the module that makes it."""
    import torch
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextRotaryEmbedding

    if layer.block_type == "linear_attention":
        return layer.linear_attn(normed), layer.linear_attn.out_proj
    angles = Qwen3_5MoeTextRotaryEmbedding(config)(normed, torch.arange(normed.shape[1])[None])
    found = layer.self_attn(normed, position_embeddings=angles, attention_mask=None)
    return found[0], layer.self_attn.o_proj
