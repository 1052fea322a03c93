"""A GGUF file of a real model's size: the shapes of Qwen3-30B-A3B as Q4_K_M, 17 GB.

    python -m bench.real_size FILE.gguf
    python -m bench.real_size FILE.gguf --family qwen35moe   # those of Qwen3.5-35B-A3B, 20 GB

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

from bench import qwen3_5_moe, qwen3_moe
from bench.byte_tokenizer import vocabulary
from bench.ggml import quantized
from moecache.units import format_bytes
from tests.helpers.gguf_members import MODELS
from tests.helpers.gguf_models import add_metadata

F32, Q4_K, Q6_K = 0, 12, 14
# ggml's name for a mix whose most tensors are Q4_K ("medium").
Q4_K_M = 15
SUPER_BLOCK = 256
BLOCK_BYTES = {Q4_K: 144, Q6_K: 210}
# Blocks to choose experts from: many times what a processor's caches hold.
POOL_BLOCKS = 300_000
# Inside experts that stand for real ones while routers are balanced.
NARROW = 16

# Sizes that are not said: layers, experts, elements inside one, heads, their width, tokens.
SIZES = {
    "qwen3moe": {"layers": 48, "experts": 128, "width": 768, "heads": 32, "head_dim": 128}
    | {"vocabulary": 151936},
    "qwen35moe": {"layers": 40, "experts": 256, "width": 512, "heads": 16, "head_dim": 256}
    | {"vocabulary": 248320},
}


def main(argv: list[str] | None = None) -> int:
    """Write a file; return the exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m bench.real_size", None, __doc__, formatter_class=form
    )
    add = parser.add_argument
    add("file", type=Path)
    add("--family", choices=SIZES, default="qwen3moe")
    add("--layers", type=int)
    add("--experts", type=int, help="per layer")
    add("--top-k", type=int, default=8, help="experts per token")
    add("--hidden", type=int, default=2048, help="elements of a hidden state")
    add("--width", type=int, help="elements inside an expert")
    add("--heads", type=int)
    add("--head-dim", type=int)
    add("--vocabulary", type=int, help="tokens; at least 258")
    add("--overlap", type=float, default=0.4, help="share of the experts that repeat (0.4)")
    add("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    for name, usual in SIZES[arguments.family].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, usual)
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

    family: Any = qwen3_moe
    if arguments.family == "qwen3moe":
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
    else:
        family, config = qwen3_5_moe, qwen3_5_moe.make_config(arguments, NARROW)
    known = MODELS[arguments.family]
    common = torch.full((config.hidden_size,), config.hidden_size**-0.5)
    trunk = qwen3_moe.trunk_tensors(config, common, normal)
    tokens = torch.randint(config.vocab_size, (1, qwen3_moe.NUM_CALIBRATION_TOKENS))
    states = torch.nn.functional.embedding(tokens, trunk["model.embed_tokens.weight"])
    writer = begin(arguments, known.metadata(config))
    experts = Experts(arguments)
    named = {
        "token_embd.weight": (trunk["model.embed_tokens.weight"], Q4_K),
        "output_norm.weight": (trunk["model.norm.weight"], F32),
        "output.weight": (trunk["lm_head.weight"], Q6_K),
    }
    for name, (tensor, kind) in named.items():
        declare(writer, name, kind, tuple(tensor.shape))
    for index in range(arguments.layers):
        for name, kind, shape in layer_shapes(arguments, config, index):
            declare(writer, name, kind, shape)
    writer.open_output_file(arguments.file)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, kind in named.values():
        writer.write_tensor_data(encoded(tensor, kind))
    for index in track(range(arguments.layers), "writing layers", transient=True):
        layer = family.make_layer(config, index, common, normal)
        states = qwen3_moe.balance(
            layer,
            states,
            config,
            common,
            arguments.overlap,
            attends=family.attend,
            is_first=index == 0,
        )
        weights: dict[str, np.ndarray] = {}
        for leaf, tensor in layer.state_dict().items():
            if "mlp.experts." not in leaf:
                weights |= known.of_layer(leaf, tensor.float().numpy(), config)
        for name, kind, shape in layer_shapes(arguments, config, index):
            own = name.removeprefix(f"blk.{index}.")
            if own in weights:
                data = encoded(weights[own].reshape(shape), kind)
            else:
                data = experts.make(own, kind, shape)
            writer.write_tensor_data(data)
    writer.close()


def layer_shapes(
    arguments: argparse.Namespace, config: Any, index: int
) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return name, type and shape, the last dimension contiguous, of a layer's tensors."""
    hidden, width, num = arguments.hidden, arguments.width, arguments.experts
    eighth = arguments.layers // 8
    # llama.cpp's rule: the first and the last eighth of the layers, and every third between.
    is_wide = not eighth <= index < 7 * eighth or (index - eighth) % 3 == 2
    wide = Q6_K if is_wide else Q4_K
    shapes: dict[str, tuple[int, tuple[int, ...]]] = {
        "attn_norm.weight": (F32, (hidden,)),
        **attention_shapes(arguments, config, index, wide),
        "ffn_gate_inp.weight": (F32, (num, hidden)),
        "ffn_gate_exps.weight": (Q4_K, (num, width, hidden)),
        "ffn_up_exps.weight": (Q4_K, (num, width, hidden)),
        "ffn_down_exps.weight": (wide, (num, hidden, width)),
    }
    if arguments.family == "qwen35moe":
        shapes |= {
            "post_attention_norm.weight": (F32, (hidden,)),
            "ffn_gate_inp_shexp.weight": (F32, (1, hidden)),
            "ffn_gate_shexp.weight": (Q4_K, (width, hidden)),
            "ffn_up_shexp.weight": (Q4_K, (width, hidden)),
            "ffn_down_shexp.weight": (wide, (hidden, width)),
        }
    else:
        shapes["ffn_norm.weight"] = F32, (hidden,)
    return [(f"blk.{index}.{name}", kind, shape) for name, (kind, shape) in shapes.items()]


def attention_shapes(
    arguments: argparse.Namespace, config: Any, index: int, wide: int
) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return types and shapes of a layer's attention."""
    hidden, head_dim = arguments.hidden, arguments.head_dim
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[index] == "linear_attention":
        heads, kernel = config.linear_num_value_heads, config.linear_conv_kernel_dim
        values = heads * config.linear_value_head_dim
        channels = values + 2 * config.linear_num_key_heads * config.linear_key_head_dim
        return {
            "attn_qkv.weight": (Q4_K, (channels, hidden)),
            "attn_gate.weight": (Q4_K, (values, hidden)),
            "ssm_alpha.weight": (F32, (heads, hidden)),
            "ssm_beta.weight": (F32, (heads, hidden)),
            "ssm_conv1d.weight": (F32, (channels, kernel)),
            "ssm_a": (F32, (heads,)),
            "ssm_dt.bias": (F32, (heads,)),
            "ssm_norm.weight": (F32, (config.linear_value_head_dim,)),
            "ssm_out.weight": (Q4_K, (hidden, values)),
        }
    outs, keys = arguments.heads * head_dim, config.num_key_value_heads * head_dim
    queries = outs * (1 + (kinds is not None))
    return {
        "attn_q.weight": (Q4_K, (queries, hidden)),
        "attn_k.weight": (Q4_K, (keys, hidden)),
        "attn_v.weight": (wide, (keys, hidden)),
        "attn_output.weight": (Q4_K, (hidden, outs)),
        "attn_q_norm.weight": (F32, (head_dim,)),
        "attn_k_norm.weight": (F32, (head_dim,)),
    }


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
    is_array = isinstance(tensor, np.ndarray)
    values: np.ndarray = tensor if is_array else tensor.detach().float().numpy()
    values = np.ascontiguousarray(values, np.float32)
    return values if kind == F32 else quantized(values, kind)


def begin(arguments: argparse.Namespace, metadata: dict[str, Any]) -> Any:
    """Return a writer that has the metadata: those that llama.cpp's converter gives."""
    import gguf

    family = arguments.family
    metadata |= {
        f"{family}.expert_feed_forward_length": arguments.width,
        f"{family}.feed_forward_length": 8 * arguments.width,
        f"{family}.context_length": 32768,
    }
    writer = gguf.GGUFWriter(None, family)
    writer.add_name("bench.real_size")
    writer.add_file_type(Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_metadata(writer, {k: v for k, v in metadata.items() if not k.startswith("tokenizer.")})
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
