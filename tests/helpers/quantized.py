"""Quantized checkpoints of tiny models, as publishers write them, and what their weights mean.

What a checkpoint means is computed here once more, by the definitions and without moecache.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moecache.formats import find_format
from tests.helpers import family_settings as tiny
from tests.helpers.families import FAMILIES, Family, write_checkpoint

Tensors = dict[str, np.ndarray]
# Values of OCP's FP4 without its sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Scheme:
    """How a publisher quantizes.

    Parameters
    ----------
    config : dict
        What config.json says.
    encode : callable (name, values) -> dict of str to ndarray
        The tensors that stand for a weight.
    decode : callable (name, tensors) -> ndarray of float32
        What they mean.
    chosen : str
        Regular expression that the names of the weights match.
    """

    config: Mapping[str, Any]
    encode: Callable[[str, np.ndarray], Tensors]
    decode: Callable[[str, Tensors], np.ndarray]
    chosen: str = r"\.(\w+_proj|kv_a_proj_with_mqa)\.weight$"


def fp8(block: tuple[int, int] = (16, 32), scale: str = "f32") -> Scheme:
    """Return FP8 by blocks, as DeepSeek, Qwen and MiniMax publish it; MXFP8 with "e8m0"."""
    known = find_format(f"fp8[{block[0]}x{block[1]},{scale}]")

    def encode(name: str, values: np.ndarray) -> Tensors:
        parts = known.quantize(values)
        return {name: parts["codes"], f"{name}_scale_inv": parts["scales"]}

    def decode(name: str, tensors: Tensors) -> np.ndarray:
        codes, scales = tensors[name].astype(np.float32), tensors[f"{name}_scale_inv"]
        if scales.dtype == np.uint8:
            scales = np.exp2(scales.astype(np.float32) - 127)
        scales = scales.astype(np.float32).repeat(block[0], axis=0).repeat(block[1], axis=1)
        return codes * scales[: codes.shape[0], : codes.shape[1]]

    config = {"quant_method": "fp8", "weight_block_size": list(block), "fmt": "e4m3"}
    config["activation_scheme"] = "dynamic"
    if scale == "e8m0":
        config["scale_fmt"] = "ue8m0"
    return Scheme(config, encode, decode)


def int4(bits: int = 4, group: int = 32) -> Scheme:
    """Return integers by groups, as compressed-tensors packs them and Kimi has them."""
    known = find_format(f"int{bits}[1x{group},bf16]")

    def encode(name: str, values: np.ndarray) -> Tensors:
        parts = known.quantize(values)
        return {
            f"{name}_packed": parts["codes"],
            f"{name}_scale": parts["scales"],
            f"{name}_shape": np.array(values.shape, np.int64),
        }

    def decode(name: str, tensors: Tensors) -> np.ndarray:
        rows, columns = tensors[f"{name}_shape"]
        words = tensors[f"{name}_packed"].view(np.uint32)
        values = np.empty((rows, columns), np.float32)
        for row in range(rows):
            stream = sum(int(word) << 32 * at for at, word in enumerate(words[row]))
            for column in range(columns):
                code = (stream >> bits * column) % 2**bits - 2 ** (bits - 1)
                scale = np.float32(tensors[f"{name}_scale"][row, column // group])
                values[row, column] = np.float32(code) * scale
        return values

    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group"}
    return Scheme(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": {**weights, "group_size": group}}
            },
            "ignore": ["re:.*self_attn.*", "lm_head"],
        },
        encode,
        decode,
        r"\.mlp\..*_proj\.weight$",
    )


def channels() -> Scheme:
    """Return FP8 with a scale for each row, as compressed-tensors has it."""
    known = find_format("fp8[1x*,bf16]")

    def encode(name: str, values: np.ndarray) -> Tensors:
        parts = known.quantize(values)
        return {name: parts["codes"], f"{name}_scale": parts["scales"]}

    def decode(name: str, tensors: Tensors) -> np.ndarray:
        scales = tensors[f"{name}_scale"].astype(np.float32)
        return tensors[name].astype(np.float32) * scales

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return Scheme({**config, "config_groups": groups, "ignore": ["lm_head"]}, encode, decode)


def mxfp4() -> Scheme:
    """Return MXFP4 as gpt-oss is published in: stacks [E, out, in / 32, 16]."""
    known = find_format("mxfp4")

    def encode(name: str, values: np.ndarray) -> Tensors:
        # The model has [E, in, out].
        parts = [known.quantize(np.ascontiguousarray(one.T)) for one in values]
        codes = np.stack([part["codes"] for part in parts])
        return {
            f"{name}_blocks": codes.reshape(*codes.shape[:2], -1, 16),
            f"{name}_scales": np.stack([part["scales"] for part in parts]),
        }

    def decode(name: str, tensors: Tensors) -> np.ndarray:
        blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        num, rows, count, _ = blocks.shape
        values = np.empty((num, rows, count * 32), np.float32)
        for at in np.ndindex(num, rows, count):
            power = 2.0 ** (int(scales[at]) - 127)
            for column in range(32):
                byte = int(blocks[at][column // 2])
                code = byte >> 4 if column % 2 else byte & 15
                value = _E2M1[code & 7] * (-1 if code & 8 else 1) * power
                values[at[0], at[1], at[2] * 32 + column] = value
        return values.transpose(0, 2, 1)

    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    return Scheme(config, encode, decode, r"\.experts\.(gate_up|down)_proj$")


def nvfp4(*, divides: bool = True) -> Scheme:
    """Return NVFP4, as compressed-tensors has it; or as ModelOpt, whose whole scale multiplies."""
    known = find_format("nvfp4" if divides else "nvfp4[modelopt]")
    codes, whole = ("_packed", "_global_scale") if divides else ("", "_scale_2")

    def encode(name: str, values: np.ndarray) -> Tensors:
        parts = known.quantize(values)
        return {
            f"{name}{codes}": parts["codes"],
            f"{name}_scale": parts["scales"],
            f"{name}{whole}": parts["global_scale"],
        }

    def decode(name: str, tensors: Tensors) -> np.ndarray:
        packed, scales = tensors[f"{name}{codes}"], tensors[f"{name}_scale"].astype(np.float32)
        number = np.float32(tensors[f"{name}{whole}"][0])
        values = np.empty((len(packed), 2 * packed.shape[1]), np.float32)
        for row, column in np.ndindex(values.shape):
            code = int(packed[row, column // 2]) >> 4 * (column % 2)
            value = np.float32(_E2M1[code & 7] * (-1 if code & 8 else 1))
            scale = scales[row, column // 16]
            values[row, column] = value * (scale / number if divides else scale * number)
        return values

    if not divides:
        return Scheme({"quant_method": "modelopt", "quant_algo": "NVFP4"}, encode, decode)
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    return Scheme({**config, "config_groups": groups, "ignore": ["lm_head"]}, encode, decode)


def grouped(method: str, group: int = 32, *, is_ordered: bool = False) -> Scheme:
    """Return 4-bit GPTQ or AWQ: integers from 0 to 15, zero points and scales, stored [in, out]."""
    is_awq = method == "awq"

    def shifts(row: int) -> tuple[int, int]:
        """Return word and shift of a row."""
        return row // 8, 4 * ((0, 4, 1, 5, 2, 6, 3, 7)[row % 8] if is_awq else row % 8)

    def encode(name: str, values: np.ndarray) -> Tensors:
        rows, columns = values.shape
        of_column = np.arange(columns) // group
        if is_ordered:
            of_column = np.random.default_rng(columns).permutation(of_column)
        num = int(of_column.max()) + 1
        low, high = (np.zeros((num, rows), np.float32) for _ in range(2))
        for column in range(columns):
            at = of_column[column]
            low[at] = np.minimum(low[at], values[:, column])
            high[at] = np.maximum(high[at], values[:, column])
        scales = ((high - low) / 15).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 1, 15).astype(np.uint32)
        wide, whole = scales[of_column].astype(np.float32), zeros[of_column]
        codes = np.clip(np.rint(values.T / wide) + whole, 0, 15).astype(np.uint32)
        stored = np.zeros((columns, rows // 8) if is_awq else (columns // 8, rows), np.uint32)
        packed = np.zeros((num, rows // 8), np.uint32)
        for row in range(rows):
            word, shift = shifts(row)
            packed[:, word] |= (zeros[:, row] - (method == "gptq")) << shift
            for column in range(columns) if not is_awq else ():
                stored[column // 8, row] |= codes[column, row] << 4 * (column % 8)
            if is_awq:
                stored[:, word] |= codes[:, row] << shift
        module = name.removesuffix("weight")
        made = {
            f"{module}qweight": stored.view(np.int32),
            f"{module}qzeros": packed.view(np.int32),
            f"{module}scales": scales,
        }
        return made if is_awq else {**made, f"{module}g_idx": of_column.astype(np.int32)}

    def decode(name: str, tensors: Tensors) -> np.ndarray:
        module = name.removesuffix("weight")
        stored, packed = (
            tensors[f"{module}{key}"].view(np.uint32) for key in ("qweight", "qzeros")
        )
        scales = tensors[f"{module}scales"].astype(np.float32)
        rows, columns = scales.shape[1], stored.shape[0] * (1 if is_awq else 8)
        of_column = tensors.get(f"{module}g_idx", np.arange(columns) // group)
        values = np.empty((rows, columns), np.float32)
        for row, column in np.ndindex(values.shape):
            word, shift = shifts(row)
            at = of_column[column]
            zero = (int(packed[at, word]) >> shift & 15) + (method == "gptq")
            if is_awq:
                code = int(stored[column, word]) >> shift & 15
            else:
                code = int(stored[column // 8, row]) >> 4 * (column % 8) & 15
            values[row, column] = np.float32(code - zero) * scales[at, row]
        return values

    config = {"quant_method": method.removesuffix("_v2"), "bits": 4, "group_size": group}
    if is_awq:
        config |= {"zero_point": True, "version": "gemm"}
    else:
        config |= {"desc_act": is_ordered, "sym": False, "checkpoint_format": method}
    return Scheme(config, encode, decode)


# One of each form.
SCHEMES: Mapping[str, Scheme] = {
    "fp8": fp8(),
    "fp8_bf16": fp8((128, 128), "bf16"),
    "mxfp8": fp8((1, 32), "e8m0"),
    "channels": channels(),
    "int4": int4(),
    "int3": int4(3, 64),
    "int8": int4(8),
    "mxfp4": mxfp4(),
    "nvfp4": nvfp4(),
    "modelopt": nvfp4(divides=False),
    "awq": grouped("awq"),
    "gptq": grouped("gptq"),
    "gptq_v2": grouped("gptq_v2"),
    "gptq_ordered": grouped("gptq", is_ordered=True),
}
# Sizes that blocks of 32 divide.
WIDE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
}
QWEN3_MOE = replace(
    FAMILIES["qwen3_moe"], name="qwen3_moe_wide", settings={**tiny.QWEN3_MOE, **WIDE}
)
DEEPSEEK_V3 = replace(
    FAMILIES["deepseek_v3"], name="deepseek_v3_wide", settings={**tiny.DEEPSEEK_V3, **WIDE}
)
GLM4_MOE = replace(FAMILIES["glm4_moe"], name="glm4_moe_wide", settings={**tiny.GLM4_MOE, **WIDE})
QWEN2_MOE = replace(
    FAMILIES["qwen2_moe"],
    name="qwen2_moe_wide",
    settings={**tiny.QWEN2_MOE, **WIDE, "shared_expert_intermediate_size": 32},
)
NEMOTRON_H = replace(
    FAMILIES["nemotron_h"],
    name="nemotron_h_wide",
    settings={**tiny.NEMOTRON_H, "hidden_size": 64, "moe_intermediate_size": 32},
)
GPT_OSS = replace(
    FAMILIES["gpt_oss"], name="gpt_oss_wide", settings={**tiny.GPT_OSS, "intermediate_size": 64}
)


def write_quantized(family: Family, scheme: Scheme, directory: Path) -> tuple[Path, Path]:
    """Write a checkpoint as its publisher would, and the same weights in bfloat16.

    Returns
    -------
    (Path, Path)
        Directories of the quantized one, and of the plain one.
    """
    from safetensors.torch import load_file

    plain = write_checkpoint(family, directory / "plain", "bfloat16")
    published = shutil.copytree(plain, directory / "published")
    tensors = {name: _array(t) for name, t in load_file(plain / "model.safetensors").items()}
    quantized: Tensors = {}
    for name, array in tensors.items():
        if not re.search(scheme.chosen, name):
            quantized[name] = array
            continue
        made = scheme.encode(name, array.astype(np.float32))
        quantized |= made
        tensors[name] = scheme.decode(name, made).astype(ml_dtypes.bfloat16)
    save_tensors(tensors, plain)
    save_tensors(quantized, published)
    config = json.loads((published / "config.json").read_text())
    config["quantization_config"] = dict(scheme.config)
    (published / "config.json").write_text(json.dumps(config))
    return published, plain


def _array(tensor: Any) -> np.ndarray:
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def save_tensors(tensors: Tensors, directory: Path) -> None:
    """Write the one file of a checkpoint."""
    from safetensors.numpy import save_file

    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})


def write_experts(
    scheme: Scheme, directory: Path, *, num_layers: int = 2, num_experts: int = 4
) -> tuple[Tensors, Tensors]:
    """Write experts [64, 96] and a linear layer as a publisher would; no torch is needed.

    Returns
    -------
    (dict, dict)
        The tensors in the file, and what each weight means, float32.
    """
    key = id(scheme), num_layers, num_experts
    if key not in _made:
        _made[key] = scheme, *_make(scheme, num_layers, num_experts)
    _, made, values = _made[key]
    tensors = {name: array.copy() for name, array in made.items()}
    directory.mkdir(exist_ok=True)
    save_tensors(tensors, directory)
    config = {"num_experts_per_tok": 2, "quantization_config": dict(scheme.config)}
    (directory / "config.json").write_text(json.dumps(config))
    return tensors, dict(values)


# Reading a number at a time takes seconds: what was made, of a scheme that is kept with it.
_made: dict[tuple[int, int, int], tuple[Scheme, Tensors, Tensors]] = {}


def _make(scheme: Scheme, num_layers: int, num_experts: int) -> tuple[Tensors, Tensors]:
    rng = np.random.default_rng(7)
    is_stacked = "experts" in scheme.chosen
    shapes = {"gate_proj": (64, 96), "up_proj": (64, 96), "down_proj": (96, 64)}
    weights: Tensors = {}
    for layer in range(num_layers):
        path = f"model.layers.{layer}"
        weights[f"{path}.self_attn.q_proj.weight"] = rng.standard_normal((64, 96)) / 8
        if is_stacked:
            weights[f"{path}.mlp.experts.gate_up_proj"] = rng.standard_normal(
                (num_experts, 96, 128)
            )
            weights[f"{path}.mlp.experts.down_proj"] = rng.standard_normal((num_experts, 64, 96))
            continue
        for expert in range(num_experts):
            for piece, shape in shapes.items():
                name = f"{path}.mlp.experts.{expert}.{piece}.weight"
                weights[name] = rng.standard_normal(shape) / 8
    tensors: Tensors = {"model.norm.weight": np.ones(96, ml_dtypes.bfloat16)}
    values: Tensors = {}
    for name, weight in weights.items():
        if re.search(scheme.chosen, name):
            made = scheme.encode(name, weight.astype(np.float32))
            tensors |= made
            values[name] = scheme.decode(name, made)
        else:
            tensors[name] = weight.astype(ml_dtypes.bfloat16)
            values[name] = tensors[name].astype(np.float32)
    return tensors, values
