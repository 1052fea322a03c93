"""A GGUF file of a real model's size: the shapes of Qwen3-30B-A3B as Q4_K_M, 17 GB.

    python -m bench.real_size FILE.gguf

Everything but the experts is made as `bench.qwen3_moe` makes it, for routers that repeat as trained
ones do, and quantized by ggml (the extra bench-llama). Experts are random codes with scales that
give the values their usual spread, of the types that llama.cpp's own Q4_K_M has: Q6_K for `down` in
half of the layers, else Q4_K. They are written as fast as the disk takes them.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from bench import qwen3_moe
from bench.byte_tokenizer import vocabulary
from bench.ggml import quantized
from moecache.units import format_bytes

F32, Q4_K, Q6_K = 0, 12, 14
# ggml's name for a mix whose most tensors are Q4_K ("medium").
Q4_K_M = 15
SUPER_BLOCK = 256
BLOCK_BYTES = {Q4_K: 144, Q6_K: 210}
# Blocks to choose experts from: many times what a processor's caches hold.
POOL_BLOCKS = 300_000
# Inside experts that stand for real ones while routers are balanced.
NARROW = 16

# transformers' names of a layer's weights, and GGUF's.
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
}


def main(argv: list[str] | None = None) -> int:
    """Write a file; return the exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m bench.real_size", None, __doc__, formatter_class=form
    )
    add = parser.add_argument
    add("file", type=Path)
    add("--layers", type=int, default=48)
    add("--experts", type=int, default=128, help="per layer")
    add("--top-k", type=int, default=8, help="experts per token")
    add("--hidden", type=int, default=2048, help="elements of a hidden state")
    add("--width", type=int, default=768, help="elements inside an expert")
    add("--heads", type=int, default=32)
    add("--head-dim", type=int, default=128)
    add("--vocabulary", type=int, default=151936, help="tokens; at least 258")
    add("--overlap", type=float, default=0.4, help="share of the experts that repeat (0.4)")
    add("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    for size in (arguments.hidden, arguments.width, arguments.heads * arguments.head_dim):
        if size % SUPER_BLOCK:
            parser.error(f"Q4_K stores whole blocks of {SUPER_BLOCK} columns; {size} are not")
    write(arguments)
    print(f"{arguments.file}: {format_bytes(arguments.file.stat().st_size)}")
    return 0


def write(arguments: argparse.Namespace) -> None:
    """Write the file, a layer at a time."""
    import torch

    generator = torch.Generator().manual_seed(arguments.seed)

    def normal(*shape: int, std: float = 1.0) -> Any:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(std=std, generator=generator)

    config = qwen3_moe.make_config(
        arguments.layers,
        arguments.experts,
        arguments.top_k,
        hidden=arguments.hidden,
        width=NARROW,
        vocabulary=arguments.vocabulary,
        heads=arguments.heads,
        head_dim=arguments.head_dim,
    )
    common = torch.full((config.hidden_size,), config.hidden_size**-0.5)
    trunk = qwen3_moe.trunk_tensors(config, common, normal)
    tokens = torch.randint(config.vocab_size, (1, qwen3_moe.NUM_CALIBRATION_TOKENS))
    states = torch.nn.functional.embedding(tokens, trunk["model.embed_tokens.weight"])
    writer = begin(arguments, config)
    experts = Experts(arguments)
    named = {
        "token_embd.weight": (trunk["model.embed_tokens.weight"], Q4_K),
        "output_norm.weight": (trunk["model.norm.weight"], F32),
        "output.weight": (trunk["lm_head.weight"], Q6_K),
    }
    for name, (tensor, kind) in named.items():
        declare(writer, name, kind, tuple(tensor.shape))
    for index in range(arguments.layers):
        for name, kind, shape in layer_shapes(arguments, index):
            declare(writer, name, kind, shape)
    writer.open_output_file(arguments.file)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, kind in named.values():
        writer.write_tensor_data(encoded(tensor, kind))
    for index in track(range(arguments.layers), "writing layers", transient=True):
        layer = qwen3_moe.make_layer(config, index, common, normal)
        states = qwen3_moe.balance(layer, states, config, common, arguments.overlap)
        weights = {NAMES[name]: w for name, w in layer.named_parameters() if name in NAMES}
        for name, kind, shape in layer_shapes(arguments, index):
            own = name.removeprefix(f"blk.{index}.")
            data = encoded(weights[own], kind) if own in weights else experts.make(own, kind, shape)
            writer.write_tensor_data(data)
    writer.close()


def layer_shapes(
    arguments: argparse.Namespace, index: int
) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return name, type and shape, the last dimension contiguous, of a layer's tensors."""
    hidden, width, head_dim = arguments.hidden, arguments.width, arguments.head_dim
    queries, keys = arguments.heads * head_dim, qwen3_moe.NUM_KV_HEADS * head_dim
    num, eighth = arguments.experts, arguments.layers // 8
    # llama.cpp's rule: the first and the last eighth of the layers, and every third between.
    is_wide = not eighth <= index < 7 * eighth or (index - eighth) % 3 == 2
    wide = Q6_K if is_wide else Q4_K
    shapes: dict[str, tuple[int, tuple[int, ...]]] = {
        "attn_norm.weight": (F32, (hidden,)),
        "attn_q.weight": (Q4_K, (queries, hidden)),
        "attn_k.weight": (Q4_K, (keys, hidden)),
        "attn_v.weight": (wide, (keys, hidden)),
        "attn_output.weight": (Q4_K, (hidden, queries)),
        "attn_q_norm.weight": (F32, (head_dim,)),
        "attn_k_norm.weight": (F32, (head_dim,)),
        "ffn_norm.weight": (F32, (hidden,)),
        "ffn_gate_inp.weight": (F32, (num, hidden)),
        "ffn_gate_exps.weight": (Q4_K, (num, width, hidden)),
        "ffn_up_exps.weight": (Q4_K, (num, width, hidden)),
        "ffn_down_exps.weight": (wide, (num, hidden, width)),
    }
    return [(f"blk.{index}.{name}", kind, shape) for name, (kind, shape) in shapes.items()]


class Experts:
    """Random matrices, cut at random places out of blocks that are made once."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._rng = np.random.default_rng(arguments.seed)
        inner = 1 / math.sqrt(arguments.hidden)
        spreads = {"gate": inner, "up": inner}
        spreads["down"] = qwen3_moe.down_std(arguments.top_k, arguments.width)
        self._pools = {
            ("gate", Q4_K): self._q4_k(inner),
            ("down", Q4_K): self._q4_k(spreads["down"]),
            ("down", Q6_K): self._q6_k(spreads["down"]),
        }

    def make(self, name: str, kind: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return all experts' matrices of a layer, uint8 [experts, rows, bytes of a row]."""
        pool = self._pools["down" if "down" in name else "gate", kind]
        num, rows, columns = shape
        blocks = rows * columns // SUPER_BLOCK
        starts = self._rng.integers(len(pool) - blocks, size=num)
        found = np.concatenate([pool[start : start + blocks] for start in starts])
        return found.reshape(num, rows, -1)

    def _q4_k(self, std: float) -> np.ndarray:
        # Values are d * s * (q - 7.5), codes q evenly of 0 to 15, whose spread is 4.61, six-bit
        # scales s of 32 to 63, the same for minima, and dmin = 7.5 d.
        pool = self._random(Q4_K)
        d = np.float16(std / (4.61 * 48))
        pool[:, :4] = np.array([d, np.float16(7.5) * d]).view(np.uint8)
        scales = self._rng.integers(32, 64, (len(pool), 8), dtype=np.uint8)
        low, high = scales[:, :4], scales[:, 4:]
        pool[:, 4:8] = pool[:, 8:12] = low | high >> 4 << 6
        pool[:, 12:16] = (high & 15) | high << 4
        return pool

    def _q6_k(self, std: float) -> np.ndarray:
        # Values are d * s * (q - 32), codes evenly of 0 to 63, whose spread is 18.5.
        pool = self._random(Q6_K)
        pool[:, 192:208] = self._rng.integers(8, 16, (len(pool), 16), dtype=np.uint8)
        pool[:, 208:] = np.array([std / (18.5 * 11.5)], np.float16).view(np.uint8)
        return pool

    def _random(self, kind: int) -> np.ndarray:
        return self._rng.integers(0, 256, (POOL_BLOCKS, BLOCK_BYTES[kind]), dtype=np.uint8)


def encoded(tensor: Any, kind: int) -> np.ndarray:
    """Return a tensor's values in a type of ggml."""
    values: np.ndarray = tensor.detach().float().numpy()
    return values if kind == F32 else quantized(values, kind)


def begin(arguments: argparse.Namespace, config: Any) -> Any:
    """Return a writer that has the metadata: those that llama.cpp's converter gives."""
    import gguf

    writer = gguf.GGUFWriter(None, "qwen3moe")
    writer.add_name("bench.real_size")
    writer.add_file_type(Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(arguments.layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(arguments.hidden)
    writer.add_feed_forward_length(8 * arguments.width)
    writer.add_head_count(arguments.heads)
    writer.add_head_count_kv(qwen3_moe.NUM_KV_HEADS)
    writer.add_key_length(arguments.head_dim)
    writer.add_value_length(arguments.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(arguments.experts)
    writer.add_expert_used_count(arguments.top_k)
    writer.add_expert_feed_forward_length(arguments.width)
    tokens, merges = vocabulary(arguments.vocabulary)
    types = [gguf.TokenType.NORMAL] * len(tokens)
    types[:2] = [gguf.TokenType.CONTROL] * 2
    types += [gguf.TokenType.UNUSED] * (arguments.vocabulary - len(tokens))
    tokens += [f"<unused {number}>" for number in range(len(tokens), arguments.vocabulary)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    return writer


def declare(writer: Any, name: str, kind: int, shape: tuple[int, ...]) -> None:
    """Say what a tensor will be."""
    import gguf

    columns = shape[-1]
    row_bytes = columns * 4 if kind == F32 else columns // SUPER_BLOCK * BLOCK_BYTES[kind]
    nbytes = math.prod(shape[:-1]) * row_bytes
    if kind == F32:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes)
        return
    raw = (*shape[:-1], row_bytes)
    kind = gguf.GGMLQuantizationType(kind)
    writer.add_tensor_info(name, raw, np.dtype(np.uint8), nbytes, kind)


if __name__ == "__main__":
    raise SystemExit(main())
