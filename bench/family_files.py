"""GGUF files of several families beside llama.cpp: a token and a prompt, without torch and with it.

    pip install '.[transformers,bench-llama]'   # builds llama.cpp for this machine, ten minutes
    python -m bench.family_files FOLDER --json FILE
    python -m bench.family_files FOLDER --type BF16 --only qwen3moe --json FILE

FOLDER gets a file of half a gigabyte for each family, of random weights: eight layers of 64
experts, hidden size 1024, experts in Q4_0 and the rest in Q8_0, or all of it in bfloat16, all of it
in slots. All contestants
are given the same tokens, so that they use the same experts; figures are medians of rounds in
turns: milliseconds of a token behind a prompt, seconds of the prompt, and both as shares of
llama.cpp's, and how often they would choose its next token. The bound of a token is the time that
its weights take at the speed with which two threads read memory, measured in each round.
"""

import argparse
import importlib.util
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.against_llama_cpp import LLAMA, Contestant, llama, ours, ours_of_file
from bench.runs import begin, write_figures
from moecache.profiles.bandwidth import measure_bandwidth
from moecache.stores import open_store

NUM_TOKENS, CONTEXT = 64, 8192
QUANTIZED = {
    "_exps.weight": "Q4_0",
    **dict.fromkeys(("token_embd", "output.", "attn_output", "attn_qkv", "attn_gate"), "Q8_0"),
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "ssm_in", "ssm_out", "_proj."), "Q8_0"),
    "_shexp.weight": "Q8_0",
}
# Types that the first of `QUANTIZED` would give to norms and to what is one row.
PLAIN = {"norm": "F32", "inp_shexp": "F32"}


def _sizes(layers: int) -> dict[str, dict[str, Any]]:
    """Return what each family's configuration is given beside what all are."""
    latent = {
        "kv_lora_rank": 512,
        "q_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_key_value_heads": 16,
        "num_attention_heads": 16,
        "n_routed_experts": 64,
        "intermediate_size": 2048,
    }
    linear = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "num_experts": 64,
        "shared_expert_intermediate_size": 512,
    }
    wide = [(layer + 1) % 4 == 0 for layer in range(layers)]
    blocks = [("full_attention" if one else "linear_attention", "moe") for one in wide]
    return {
        "qwen3moe": {
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "num_experts": 64,
        },
        "glm4moe": {
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "n_routed_experts": 64,
            "intermediate_size": 2048,
        },
        "deepseek2 v3": latent,
        "qwen35moe": linear
        | {"layer_types": ["full_attention" if one else "linear_attention" for one in wide]},
        "nemotron_h_moe": {
            "layers_block_type": [kind for block in blocks for kind in block],
            "num_hidden_layers": 2 * layers,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 32,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "n_routed_experts": 64,
            "moe_shared_expert_intermediate_size": 1024,
        },
        "granitehybrid": {
            "layer_types": ["full_attention" if one else "linear_attention" for one in wide],
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "mamba_n_heads": 32,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "num_local_experts": 64,
            "intermediate_size": 512,
            "shared_intermediate_size": 1024,
        },
        "kimi-linear": {
            "layer_types": ["full_attention" if one else "linear_attention" for one in wide],
            "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "linear_head_dim": 128,
            "linear_num_heads": 16,
            "num_local_experts": 64,
            "intermediate_size": 2048,
        },
        "afmoe": {
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "sliding_window": 128,
            "num_experts": 64,
            "num_dense_layers": 1,
            "intermediate_size": 2048,
        },
        "exaone-moe": {
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "sliding_window": 128,
            "num_experts": 64,
            "intermediate_size": 2048,
        },
        "llama4": {
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "num_local_experts": 64,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "intermediate_size": 2048,
            "intermediate_size_mlp": 2048,
        },
        "lfm2moe": {
            "layer_types": ["full_attention" if one else "conv" for one in wide],
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "num_experts": 64,
            "intermediate_size": 2048,
        },
        "gemma4 keys as values": {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "global_head_dim": 256,
            "num_global_key_value_heads": 1,
            "sliding_window": 1024,
            "num_experts": 64,
            "top_k_experts": 8,
            "intermediate_size": 768,
            "layer_types": ["full_attention" if one else "sliding_attention" for one in wide],
        },
    }


def write_family(path: Path, name: str, layers: int, hidden: int, *, is_bf16: bool) -> None:
    """Write a file of a family, with factors of rotations where llama.cpp wants them."""
    from tests.helpers.gguf_models import write_gguf
    from tests.helpers.gguf_texts import parts_of
    from tests.helpers.gguf_tokenizers import byte_level

    said = byte_level("qwen2", num_tokens=4000)
    sizes = {
        "hidden_size": hidden,
        "moe_intermediate_size": hidden // 2,
        "num_hidden_layers": layers,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 40960,
        "vocab_size": len(said["tokenizer.ggml.tokens"]),
        **_sizes(layers)[name],
    }
    _, metadata, tensors = parts_of(name, **sizes)
    if name.startswith("gemma4"):
        turned = sizes["global_head_dim"] // 2
        factors = np.full(turned, 1e30, np.float32)
        factors[: turned // 4] = 1
        tensors["rope_freqs.weight"] = factors
    # llama.cpp's name for it, which others write otherwise.
    if (epsilon := metadata.get("nemotron_h_moe.attention.layer_norm_rms_epsilon")) is not None:
        metadata["nemotron_h_moe.attention.layer_norm_epsilon"] = epsilon
    types = dict.fromkeys(QUANTIZED, "BF16") if is_bf16 else QUANTIZED
    write_gguf(path, metadata | said, tensors, PLAIN | types)


def token_bytes(path: Path) -> int:
    """Return the bytes of weights that a token is multiplied by."""
    import gguf

    with open_store(path) as store:
        layout = store.layout
        layers = range(len(layout.layer_names))
        experts = layout.top_k * sum(layout.expert_bytes(layer) for layer in layers)
    sizes = {one.name: int(one.n_bytes) for one in gguf.GGUFReader(path).tensors}
    # A token's own row is one of many, unless all of them are the head, too.
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    return experts + sum(size for name, size in sizes.items() if "_exps." not in name)


@contextmanager
def _named(opening: Any, name: str) -> Iterator[Contestant]:
    with opening as one:
        one.name = name
        yield one


def measure(path: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of one file's contestants, llama.cpp's first if it is there."""
    ways = {
        LLAMA: lambda: llama(path, arguments.threads, context=CONTEXT),
        "without torch": lambda: ours_of_file(path, "100%"),
        "with torch": lambda: ours(path, "100%", "fast", arguments.threads),
    }
    if importlib.util.find_spec("llama_cpp") is None:
        del ways[LLAMA]
    tokens = np.random.default_rng(0).integers(5, 800, arguments.prompt + NUM_TOKENS).tolist()
    prompt, new = tokens[: arguments.prompt], tokens[arguments.prompt :]
    found: dict[str, dict[str, list[float]]] = {
        name: {"prompt_s": [], "token_ms": [], "cpu_ms": []} for name in ways
    }
    chosen: dict[str, list[int]] = {}
    weights, bounds = token_bytes(path), []
    # One at a time in memory; a round of each, in another order.
    for number in range(arguments.rounds):
        order = list(ways)
        random.Random(number).shuffle(order)
        if (speed := measure_bandwidth()) is not None:
            bounds.append(1e3 * weights / speed)
        for name in order:
            with _named(ways[name](), name) as one:
                one.prompt(prompt[:64])
                begin_s = time.perf_counter()
                last = one.prompt(prompt)
                found[name]["prompt_s"].append(time.perf_counter() - begin_s)
                took, cpu = [], time.process_time()
                chosen[name] = [int(last.argmax())]
                for token in new:
                    begin_s = time.perf_counter()
                    last = one.token(token)
                    took.append(time.perf_counter() - begin_s)
                    chosen[name].append(int(last.argmax()))
                found[name]["token_ms"].append(1e3 * statistics.median(took))
                found[name]["cpu_ms"].append(1e3 * (time.process_time() - cpu) / len(new))
    first = next(iter(ways))
    bound = statistics.median(bounds) if bounds else None
    return [
        {
            "name": name,
            "bound_ms": bound,
            **{key: statistics.median(values) for key, values in one.items()},
            **{
                f"{key}_of_{first}": statistics.median(
                    a / b for a, b in zip(one[key], found[first][key], strict=True)
                )
                for key in ("prompt_s", "token_ms")
            },
            "same_choice": float(np.mean(np.array(chosen[name]) == np.array(chosen[first]))),
            "rounds": one,
        }
        for name, one in found.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.family_files",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--type", choices=("Q4_0", "BF16"), default="Q4_0", help="of experts")
    parser.add_argument("--only", nargs="*", metavar="FAMILY", help=", ".join(_sizes(0)))
    arguments = begin(parser, argv, rounds=5, threads=2)
    figures = {}
    for name in arguments.only or _sizes(0):
        is_bf16 = arguments.type == "BF16"
        ending = "-bf16" if is_bf16 else ""
        path = arguments.folder / f"{name.replace(' ', '_')}{ending}.gguf"
        if not path.exists():
            write_family(path, name, arguments.layers, arguments.hidden, is_bf16=is_bf16)
        figures[name] = measure(path, arguments)
        print(f"{name}, a prompt of {arguments.prompt} tokens", end="")
        bound = figures[name][0]["bound_ms"]
        print("" if bound is None else f"; a token's weights are read in {bound:.2f} ms")
        first = figures[name][0]["name"]
        for one in figures[name]:
            print(
                f"  {one['name']:14} token {one['token_ms']:7.2f} ms ({one['cpu_ms']:.2f} of the "
                f"processors), {one[f'token_ms_of_{first}']:.2f}; prompt {one['prompt_s']:6.3f} s, "
                f"{one[f'prompt_s_of_{first}']:.2f}; same choice {one['same_choice']:.2f}",
                flush=True,
            )
    write_figures(arguments, prompt=arguments.prompt, type=arguments.type, figures=figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
