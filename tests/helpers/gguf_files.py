"""GGUF files: true ones by the `gguf` package's writer, others field by field."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moecache.formats import FORMATS
from moecache.stores.gguf._types import ggml_types

NUM_EXPERTS = 3
TOP_K = 2
HIDDEN = 64
WIDTH = 96
# Whole blocks of every type.
WIDE = {"hidden": 256, "width": 512}
ARCHITECTURE = "qwen3moe"
# gate, up, down.
Types = tuple[str, str, str]


@dataclass(frozen=True)
class GgufFile:
    """A model in GGUF, and what is in it.

    Parameters
    ----------
    path : Path
        The file, or the first of a split.
    values : dict of str to ndarray
        Each tensor's, float32.
    """

    path: Path
    values: dict[str, np.ndarray]


def readable_types() -> list[str]:
    """Return ggml's names of the types that experts can be of here."""
    return [known.name for known in ggml_types().values() if known.format in FORMATS]


def write_gguf(
    path: Path,
    layers: Sequence[Types] = (("Q8_0", "Q8_0", "Q8_0"), ("Q4_0", "Q4_0", "Q4_0")),
    *,
    form: str = "stacked",
    biased: bool = False,
    trunk: str = "Q8_0",
    num_experts: int = NUM_EXPERTS,
    hidden: int = HIDDEN,
    width: int = WIDTH,
    num_parts: int = 1,
    metadata: Mapping[str, Any] | None = None,
    vocabulary: int = 20,
    seed: int = 0,
) -> GgufFile:
    """Write a model with the `gguf` package.

    Parameters
    ----------
    path : Path
        Of several parts, the name without "-00001-of-0000N".
    layers : sequence of (str, str, str)
        Types of gate, up and down, for each layer; all but the first of them have experts of their
        own in a layer that follows a dense one.
    form : {"stacked", "fused", "single"}
        As llama.cpp writes experts; with gate and up in one; each expert's for themselves.
    biased : bool
        With a bias for each.
    trunk : str
        Type of the trunk's matrices.
    num_parts : int
        Files.
    metadata : mapping of str to int or str, optional
        More, or other values; `None` leaves one out.
    """
    import gguf

    rng, values = np.random.default_rng(seed), {}
    said = {
        "general.architecture": ARCHITECTURE,
        "general.file_type": 15,
        f"{ARCHITECTURE}.block_count": len(layers) + 1,
        f"{ARCHITECTURE}.expert_count": num_experts,
        f"{ARCHITECTURE}.expert_used_count": TOP_K,
        "tokenizer.ggml.tokens": [f"token {n} \u00e9" for n in range(vocabulary)],
        "tokenizer.ggml.scores": [n / 2 for n in range(vocabulary)],
        **(metadata or {}),
    }
    tensors = _tensors(list(layers), form, trunk, num_experts, hidden, width, biased=biased)
    most = -(-len(tensors) // num_parts) if num_parts > 1 else 0
    writer = gguf.GGUFWriter(path, str(said.pop("general.architecture")), split_max_tensors=most)
    for key, value in said.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, (kind, shape) in tensors.items():
        raw, values[name] = random_tensor(rng, shape, kind)
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if num_parts > 1:
        path = path.with_name(f"{path.stem}-00001-of-{num_parts:05}.gguf")
    assert path.exists()
    return GgufFile(path, values)


def random_tensor(
    rng: np.random.Generator, shape: tuple[int, ...], kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return what a tensor of a type is stored as, and its values."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    try:
        values = rng.standard_normal(shape).astype(np.float32)
        raw = gguf.quants.quantize(values, number)
    except NotImplementedError:
        columns, nbytes = gguf.GGML_QUANT_SIZES[number]
        # Whatever is a scale in float16 is below 1, whatever is one of 8 bits not the largest.
        wide = (*shape[:-1], shape[-1] // columns * nbytes)
        raw = rng.integers(0, 0x3C, wide).astype(np.uint8)
    return raw, gguf.quants.dequantize(raw, number).reshape(shape)


def write_raw(
    path: Path,
    metadata: Sequence[tuple[str, int, Any]] = (),
    tensors: Sequence[tuple[str, Sequence[int], int, int]] = (),
    data: bytes = b"",
    *,
    head: tuple[bytes, int, int | None, int | None] = (b"GGUF", 3, None, None),
) -> Path:
    """Write a GGUF file from any fields, true or not.

    Parameters
    ----------
    path : Path
    metadata : sequence of (str, int, object)
        Key, number of the type, and value: bytes are written as they are.
    tensors : sequence of (name, sizes, type, offset)
        Sizes in ggml's order.
    data : bytes
        From the next multiple of 32 on.
    head : (bytes, int, int, int)
        Magic, version, and the numbers of tensors and of metadata; `None` for the true ones.
    """
    magic, version, num_tensors, num_keys = head
    num_tensors = len(tensors) if num_tensors is None else num_tensors
    num_keys = len(metadata) if num_keys is None else num_keys
    parts = [magic, struct.pack("<IQQ", version, num_tensors, num_keys)]
    for key, kind, value in metadata:
        parts += [string(key), struct.pack("<I", kind)]
        parts.append(string(value) if isinstance(value, str) else value)
    for name, reverse, kind, offset in tensors:
        sizes = struct.pack(f"<I{len(reverse)}Q", len(reverse), *reverse)
        parts += [string(name), sizes, struct.pack("<IQ", kind, offset)]
    text = b"".join(parts)
    path.write_bytes(text + bytes(-len(text) % 32) + data)
    return path


def string(text: str) -> bytes:
    """Return a string as GGUF has it."""
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def u32(key: str, value: int) -> tuple[str, int, bytes]:
    """Return a metadata entry of 32 bits."""
    return key, 4, struct.pack("<I", value)


def _tensors(
    layers: list[Types],
    form: str,
    trunk: str,
    num_experts: int,
    hidden: int,
    width: int,
    *,
    biased: bool,
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of every tensor; layer 0 is dense."""
    tensors = {
        "token_embd.weight": (trunk, (8, hidden)),
        "output_norm.weight": ("F32", (hidden,)),
        "blk.0.ffn_up.weight": (trunk, (width, hidden)),
    }
    for number, (gate, up, down) in enumerate(layers, 1):
        start = f"blk.{number}.ffn"
        tensors[f"{start}_gate_inp.weight"] = ("F32", (num_experts, hidden))
        tensors[f"{start}_up_shexp.weight"] = (trunk, (width, hidden))
        tensors[f"blk.{number}.exp_probs_b.bias"] = ("F32", (num_experts,))
        pieces = {"gate": (gate, (width, hidden)), "up": (up, (width, hidden))}
        if form == "fused":
            pieces = {"gate_up": (gate, (2 * width, hidden))}
        for piece, (kind, shape) in (pieces | {"down": (down, (hidden, width))}).items():
            if form == "single":
                names = [f"{start}_{piece}.{expert}.weight" for expert in range(num_experts)]
                tensors.update(dict.fromkeys(names, (kind, shape)))
                continue
            tensors[f"{start}_{piece}_exps.weight"] = (kind, (num_experts, *shape))
            if biased:
                tensors[f"{start}_{piece}_exps.bias"] = ("F32", (num_experts, shape[0]))
    return tensors
