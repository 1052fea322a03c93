"""A random Qwen3-MoE checkpoint of any size whose router chooses as trained ones do.

    python -m bench.qwen3_moe DIR                   # 8 layers x 128 experts, 3.2 GB in bfloat16
    python -m bench.qwen3_moe DIR --check           # what it routes to while it writes

In a model of plain random weights hidden states collapse to one direction, or, where they do not,
experts are drawn evenly: neither says anything about a cache. Here a hidden state is a direction
common to all tokens, beside the token's own; heads attend to the last few tokens, so that it also
changes slowly; and each router prefers some experts along the common direction, just so much that
`--overlap` of a token's experts are those that the token before used. This share is measured
and set layer by layer, as each is written. The same arguments give the same files on one machine.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import track

from bench.byte_tokenizer import write_tokenizer
from bench.decoded import decode_trace, mean_overlap, table
from moecache.units import format_bytes

NUM_KV_HEADS = 4
# Sizes of what a layer adds to a hidden state, relative to the token's embedding.
COMMON, EXPERTS = 0.7, 0.35
# Attention's part: what the first layer mixes in stays in all hidden states.
FIRST_ATTENTION, ATTENTION = 2.0, 0.7
SHARPNESS = 0.6
# Spread of the logits: the router's as far as tokens differ, and the vocabulary's.
ROUTER_STD, LOGIT_STD = 1.0, 2.0
NUM_CALIBRATION_TOKENS = 512


def main(argv: list[str] | None = None) -> int:
    """Write a checkpoint, or look at one; return the exit code."""
    arguments = parser().parse_args(argv)
    if arguments.vocabulary < 258:
        parser().error(f"--vocabulary {arguments.vocabulary} has no room for 256 bytes and 2 more")
    directory = Path(arguments.directory)
    if not arguments.check:
        config = make_config(
            num_layers=arguments.layers,
            num_experts=arguments.experts,
            top_k=arguments.top_k,
            hidden=arguments.hidden,
            width=arguments.width,
            vocabulary=arguments.vocabulary,
        )
        num_bytes = write_checkpoint(
            directory, config, overlap=arguments.overlap, seed=arguments.seed
        )
        print(f"{directory}: {format_bytes(num_bytes)}")
    if arguments.check or arguments.tokens:
        trace = decode_trace(directory, arguments.tokens or 300, seed=arguments.seed)
        print("\n".join(table(trace)))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    form = argparse.RawDescriptionHelpFormatter
    found = argparse.ArgumentParser("qwen3_moe", description=__doc__, formatter_class=form)
    add = found.add_argument
    add("directory", metavar="DIR")
    add("--layers", type=int, default=8)
    add("--experts", type=int, default=128, help="per layer")
    add("--top-k", type=int, default=8, help="experts per token")
    add("--hidden", type=int, default=1024, help="elements of a hidden state")
    add("--width", type=int, default=512, help="elements inside an expert")
    add("--vocabulary", type=int, default=4096, help="tokens; at least 258")
    add("--overlap", type=float, default=0.4, help="share of the experts that repeat (0.4)")
    add("--seed", type=int, default=0)
    add("--check", action="store_true", help="write nothing: decode with what is in DIR")
    add("--tokens", type=int, default=0, help="tokens to decode in the end (0; with --check 300)")
    return found


def make_config(
    num_layers: int,
    num_experts: int,
    top_k: int,
    *,
    hidden: int,
    width: int,
    vocabulary: int,
    heads: int = 0,
    head_dim: int = 64,
) -> Any:
    """Return a `Qwen3MoeConfig`; no token ends a text. By default heads divide what is hidden."""
    from transformers import Qwen3MoeConfig

    # What transformers makes of it is a dataclass that mypy does not see.
    make: Any = Qwen3MoeConfig
    config = make(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * width,
        moe_intermediate_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=heads or max(NUM_KV_HEADS, hidden // head_dim),
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=0,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )
    # A layer that is made alone has no other way to know it; config.json does not get it.
    config._attn_implementation = "sdpa"  # noqa: SLF001
    config._experts_implementation = "grouped_mm"  # noqa: SLF001
    return config


def write_checkpoint(directory: Path, config: Any, *, overlap: float = 0.4, seed: int = 0) -> int:
    """Write the files that `save_pretrained` would, a layer at a time; return their bytes."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Any:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(std=std, generator=generator)

    num_shards = config.num_hidden_layers + 1
    weight_map: dict[str, str] = {}
    total_bytes = 0

    def write(number: int, tensors: dict[str, Any]) -> None:
        nonlocal total_bytes
        name = f"model-{number:05}-of-{num_shards:05}.safetensors"
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())

    common = torch.full((config.hidden_size,), config.hidden_size**-0.5)
    trunk = trunk_tensors(config, common, normal)
    write(1, trunk)
    prompt, again = (1, NUM_CALIBRATION_TOKENS), torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, prompt, generator=again)
    states = torch.nn.functional.embedding(ids, trunk["model.embed_tokens.weight"])
    for number in track(range(config.num_hidden_layers), "writing layers", transient=True):
        layer = make_layer(config, number, common, normal)
        states = balance(layer, states, config, common, overlap, is_first=number == 0)
        write(number + 2, layer_tensors(layer, f"model.layers.{number}."))
    config.save_pretrained(directory)
    write_tokenizer(directory, config.vocab_size)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    # Sampling draws from all of the vocabulary: the likeliest alone give a narrower text.
    (directory / "generation_config.json").write_text('{"top_k": 0}\n')
    return total_bytes


def trunk_tensors(config: Any, common: Any, normal: Callable[..., Any]) -> dict[str, Any]:
    """Return embeddings that share a direction, and a head that does not look at it."""
    import torch

    hidden = config.hidden_size
    own = normal(config.vocab_size, hidden).float()
    head = normal(config.vocab_size, hidden, std=LOGIT_STD / math.sqrt(hidden)).float()
    return {
        "model.embed_tokens.weight": (own + COMMON * math.sqrt(hidden) * common).bfloat16(),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": without(head, common).bfloat16(),
    }


def make_layer(config: Any, index: int, common: Any, normal: Callable[..., Any]) -> Any:
    """Return a decoder layer with all weights but the router's preferences."""
    import torch
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

    with torch.device("meta"):
        layer = Qwen3MoeDecoderLayer(config, index)
    hidden, width = config.hidden_size, config.moe_intermediate_size
    # Along the common direction, queries and keys are alike, and their pairs turn fast: the
    # product of two falls with their distance.
    recent = torch.zeros(config.head_dim // 2)
    recent[: config.head_dim // 4] = 1
    recent = recent.repeat(2)[:, None] * common * 12 / math.sqrt(hidden)
    weights = {}
    for name, shape in ((name, weight.shape) for name, weight in layer.named_parameters()):
        if name.endswith("q_norm.weight"):
            weights[name] = torch.full(shape, SHARPNESS, dtype=torch.bfloat16)
        elif name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, dtype=torch.bfloat16)
        elif name.endswith("experts.gate_up_proj"):
            weights[name] = normal(*shape, std=1 / math.sqrt(hidden))
        elif name.endswith("experts.down_proj"):
            weights[name] = normal(*shape, std=down_std(config.num_experts_per_tok, width))
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            aligned = recent.repeat(shape[0] // config.head_dim, 1)
            weights[name] = (aligned + normal(*shape, std=1 / math.sqrt(hidden))).bfloat16()
        elif name.endswith("o_proj.weight"):
            weights[name] = normal(*shape, std=1 / math.sqrt(shape[1]))
        else:
            own = normal(*shape, std=1 / math.sqrt(hidden))
            weights[name] = without(own.float(), common).bfloat16()
    layer.load_state_dict(weights, assign=True)
    return layer.eval()


def down_std(top_k: int, width: int) -> float:
    """Return the spread of an expert's down matrix, so that experts add `EXPERTS`."""
    # The root mean square of silu(g) * u is 0.6; a few experts share a weight of 1.
    return EXPERTS * math.sqrt(top_k / width) / 0.6


def attend(layer: Any, normed: Any, config: Any) -> tuple[Any, Any]:
    """Return what a layer adds before its experts, and the module that makes it."""
    import torch
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

    angles = Qwen3MoeRotaryEmbedding(config)(normed, torch.arange(normed.shape[1])[None])
    found = layer.self_attn(normed, position_embeddings=angles, attention_mask=None)
    return found[0], layer.self_attn.o_proj


def balance(
    layer: Any,
    states: Any,
    config: Any,
    common: Any,
    overlap: float,
    *,
    attends: Callable[[Any, Any, Any], tuple[Any, Any]] = attend,
    is_first: bool,
) -> Any:
    """Let the router prefer experts until `overlap` of them repeat; return the layer's output."""
    import torch

    with torch.inference_mode():
        attended, out = attends(layer, layer.input_layernorm(states), config)
        scale = (FIRST_ATTENTION if is_first else ATTENTION) / attended.std()
        out.weight *= scale
        states = states + attended * scale
        inputs = layer.post_attention_layernorm(states)
        seen = inputs[0].float()
        own = layer.mlp.gate.weight.float()
        own *= ROUTER_STD / (seen @ own.T).std(dim=0).mean()
        quantiles = (torch.arange(len(own)) + 0.5) / len(own)
        order = torch.argsort(layer.mlp.gate.weight[:, 0].float())
        liking = torch.special.ndtri(quantiles)[order, None] * common / (seen @ common).mean()
        low, high = 0.0, 8.0
        for _ in range(12):
            middle = (low + high) / 2
            chosen = (seen @ (own + middle * liking).T).topk(config.num_experts_per_tok).indices
            enough = mean_overlap(chosen.numpy()) >= overlap
            low, high = (low, middle) if enough else (middle, high)
        layer.mlp.gate.weight.data = (own + low * liking).bfloat16()
        return states + layer.mlp(inputs)


def without(rows: Any, direction: Any) -> Any:
    """Return the rows less what they have along a unit vector."""
    return rows - (rows @ direction)[:, None] * direction


def layer_tensors(layer: Any, prefix: str) -> dict[str, Any]:
    """Return views of a layer's weights by the names that they have on disk."""
    tensors = {}
    for name, tensor in layer.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            half = tensor.shape[1] // 2
            for expert, both in enumerate(tensor):
                tensors[f"{prefix}mlp.experts.{expert}.gate_proj.weight"] = both[:half]
                tensors[f"{prefix}mlp.experts.{expert}.up_proj.weight"] = both[half:]
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                tensors[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = down
        else:
            tensors[prefix + name] = tensor
    return tensors


if __name__ == "__main__":
    raise SystemExit(main())
