"""Quantized checkpoints to measure with, as publishers write them.

    python -m bench.qwen3_moe DIR                       # a model of 3.2 GB in bfloat16
    python -m bench.quantized fp8 OUT --of DIR          # the same in FP8, blocks of 128 x 128
    python -m bench.quantized int4 OUT --of DIR         # its experts in integers of 4 bits
    python -m bench.quantized mxfp4 OUT --layers 8      # gpt-oss's shapes, random numbers, 3.4 GB

FP8 is that of Qwen and DeepSeek, integers are those of compressed-tensors in groups of 32 as Kimi
has them, and MXFP4 is gpt-oss-20b with fewer layers.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.progress import track
from safetensors.numpy import save_file

from bench.byte_tokenizer import write_tokenizer
from moecache.formats import find_format
from moecache.stores import open_store
from moecache.units import format_bytes

BF16 = np.dtype(ml_dtypes.bfloat16)
Tensors = dict[str, np.ndarray]


def main(argv: list[str] | None = None) -> int:
    """Write a checkpoint; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.quantized",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("form", choices=("fp8", "int4", "mxfp4"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--of", type=Path, help="the checkpoint that is quantized")
    parser.add_argument("--layers", type=int, default=8, help="of mxfp4")
    arguments = parser.parse_args(argv)
    if (arguments.form == "mxfp4") == (arguments.of is not None):
        parser.error("--of is for fp8 and int4, which need it")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.form == "mxfp4":
        shards, config = gpt_oss(arguments.layers)
        write_tokenizer(arguments.out, config["vocab_size"])
    else:
        shards, config = quantized(arguments.of, arguments.form)
        for file in arguments.of.iterdir():
            if file.suffix == ".json" and "index" not in file.name:
                shutil.copy(file, arguments.out)
    weight_map = {}
    for number, tensors in enumerate(track(shards, "writing")):
        name = f"model-{number + 1:05}.safetensors"
        save_file(tensors, arguments.out / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (arguments.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    index = {"metadata": {}, "weight_map": weight_map}
    (arguments.out / "model.safetensors.index.json").write_text(json.dumps(index))
    size = sum(file.stat().st_size for file in arguments.out.glob("*.safetensors"))
    print(f"{arguments.out}: {format_bytes(size)}")
    return 0


def quantized(source: Path, form: str) -> tuple[Iterator[Tensors], dict[str, Any]]:
    """Return the tensors of a quantized checkpoint, a layer at a time, and its configuration."""
    config = json.loads((source / "config.json").read_text())
    if form == "fp8":
        said: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        said |= {"fmt": "e4m3", "activation_scheme": "dynamic"}
        known, ending = find_format("fp8[128x128,f32]"), "_proj.weight"
    else:
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
        group = {"targets": ["Linear"], "weights": {**weights, "group_size": 32}}
        said = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        said |= {"config_groups": {"group_0": group}, "ignore": ["re:.*self_attn.*", "lm_head"]}
        known, ending = find_format("int4[1x32,bf16]"), "_proj.weight"

    def made(name: str, array: np.ndarray) -> Tensors:
        is_chosen = name.endswith(ending) and (form == "fp8" or ".experts." in name)
        if not is_chosen:
            return {name: array}
        parts = known.quantize(array.astype(np.float32))
        if form == "fp8":
            return {name: parts["codes"], f"{name}_scale_inv": parts["scales"]}
        shape = np.array(array.shape, np.int64)
        packed = {f"{name}_packed": parts["codes"], f"{name}_scale": parts["scales"]}
        return {**packed, f"{name}_shape": shape}

    def shards() -> Iterator[Tensors]:
        with open_store(source) as store:
            names: dict[str, list[str]] = {}
            for name in store.tensor_names:
                layer = name.split(".layers.")[1].split(".")[0] if ".layers." in name else ""
                names.setdefault(layer, []).append(name)
            for of_layer in names.values():
                tensors: Tensors = {}
                for name in of_layer:
                    tensors |= made(name, store.read_tensor(name))
                yield tensors

    return shards(), {**config, "quantization_config": said}


def gpt_oss(num_layers: int) -> tuple[Iterator[Tensors], dict[str, Any]]:
    """Return the tensors of a random model of gpt-oss-20b's shapes, and its configuration."""
    hidden, width, experts, heads, groups, size = 2880, 2880, 32, 64, 8, 64
    vocabulary = 512
    kinds = ["sliding_attention", "full_attention"] * num_layers
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": num_layers,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "vocab_size": vocabulary,
        "sliding_window": 128,
        "layer_types": kinds[:num_layers],
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
        "bos_token_id": 256,
        "eos_token_id": None,
        "pad_token_id": 257,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }
    rng = np.random.default_rng(0)

    def normal(*shape: int, std: float | None = None) -> np.ndarray:
        std = shape[-1] ** -0.5 if std is None else std
        return (rng.standard_normal(shape, np.float32) * std).astype(BF16)

    def stack(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
        # Codes have a size of 2.4 in the mean of squares: weights as of `normal`.
        power = round(np.log2(columns**-0.5 / 2.4))
        scales = rng.integers(126 + power, 128 + power, (experts, rows, columns // 32))
        return blocks, scales.astype(np.uint8)

    def shards() -> Iterator[Tensors]:
        yield {
            "model.embed_tokens.weight": normal(vocabulary, hidden, std=1.0),
            "model.norm.weight": np.ones(hidden, BF16),
            "lm_head.weight": normal(vocabulary, hidden),
        }
        for layer in range(num_layers):
            path = f"model.layers.{layer}"
            up, up_scales = stack(2 * width, hidden)
            down, down_scales = stack(hidden, width)
            attention = {"q": heads * size, "k": groups * size, "v": groups * size}
            tensors = {
                f"{path}.input_layernorm.weight": np.ones(hidden, BF16),
                f"{path}.post_attention_layernorm.weight": np.ones(hidden, BF16),
                f"{path}.self_attn.sinks": normal(heads, std=1.0),
                f"{path}.self_attn.o_proj.weight": normal(hidden, heads * size),
                f"{path}.self_attn.o_proj.bias": normal(hidden, std=0.02),
                f"{path}.mlp.router.weight": normal(experts, hidden),
                f"{path}.mlp.router.bias": normal(experts, std=0.1),
                f"{path}.mlp.experts.gate_up_proj_blocks": up,
                f"{path}.mlp.experts.gate_up_proj_scales": up_scales,
                f"{path}.mlp.experts.gate_up_proj_bias": normal(experts, 2 * width, std=0.02),
                f"{path}.mlp.experts.down_proj_blocks": down,
                f"{path}.mlp.experts.down_proj_scales": down_scales,
                f"{path}.mlp.experts.down_proj_bias": normal(experts, hidden, std=0.02),
            }
            for name, rows in attention.items():
                tensors[f"{path}.self_attn.{name}_proj.weight"] = normal(rows, hidden)
                tensors[f"{path}.self_attn.{name}_proj.bias"] = normal(rows, std=0.02)
            yield tensors

    return shards(), config


if __name__ == "__main__":
    raise SystemExit(main())
