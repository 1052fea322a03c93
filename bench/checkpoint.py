"""Random experts: checkpoints of any size, files of experts alone, stacks of layers in memory."""

import functools
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bench.random_parts import joined, random_parts
from moecache.formats import find_format
from moecache.layout import ExpertLayout
from moecache.prefault.regions import Region
from moecache.slots._memory import aligned_rows
from moecache.stores import MemoryStore

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


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
    # Beside the library: a machine with a GPU may lack it.
    from safetensors.numpy import save_file

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


def write_experts(path: Path, num_layers: int, num_experts: int, hidden: int, width: int) -> None:
    """Write a checkpoint of experts alone, gate, up and down side by side as in real ones."""
    shapes = [
        (f"model.layers.{layer}.mlp.experts.{expert}.{piece}_proj.weight", shape)
        for layer in range(num_layers)
        for expert in range(num_experts)
        for piece, shape in (
            ("gate", (width, hidden)),
            ("up", (width, hidden)),
            ("down", (hidden, width)),
        )
    ]
    one = np.frombuffer(np.random.default_rng(0).bytes(6 * hidden * width), np.uint8)
    write_shard(path, shapes, itertools.repeat(one, num_layers * num_experts))


def write_shard(
    path: Path, shapes: Sequence[tuple[str, tuple[int, ...]]], pieces: Iterable[np.ndarray]
) -> None:
    """Write tensors in bfloat16 whose values are those of some arrays, one behind the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes:
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 4096 - 8 % 4096)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            file.write(memoryview(piece.reshape(-1).view(np.uint8)))


def memory_store(
    num_layers: int, num_experts: int, hidden: int, width: int, *, top_k: int
) -> MemoryStore:
    """Return as many experts in memory."""
    shape = (num_layers, num_experts)
    gate_up = np.full((*shape, 2 * width, hidden), 0x3C01, np.uint16).view(BFLOAT16)
    down = np.full((*shape, hidden, width), 0x3C02, np.uint16).view(BFLOAT16)
    return MemoryStore({"gate_up": gate_up, "down": down}, top_k=top_k)


@dataclass(frozen=True)
class StackSize:
    """What the stack looks like.

    Experts are in "bf16" or a format that kernels read. gpt-oss's have biases, and rows of gate and
    up in turns.
    """

    num_layers: int = 48
    num_experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    width: int = 768
    format: str = "bf16"
    is_gpt_oss: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of an expert's matrices."""
        return {"gate_up": (2 * self.width, self.hidden), "down": (self.hidden, self.width)}

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        if self.format == "bf16":
            return 6 * self.hidden * self.width
        known = find_format(self.format)
        biases = 2 * sum(rows for rows, _ in self.shapes.values()) if self.is_gpt_oss else 0
        return biases + sum(known.nbytes(*shape) for shape in self.shapes.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all experts."""
        return self.num_layers * self.num_experts * self.expert_bytes

    @property
    def gate(self) -> dict[str, Any]:
        """What `compute.on_device` takes."""
        if not self.is_gpt_oss:
            return {}
        return {"activation": "swiglu", "is_interleaved": True, "alpha": 1.702, "limit": 7.0}

    def describe(self) -> str:
        """Return it as text."""
        return (
            f"{self.num_layers} layers x {self.num_experts} experts, top-{self.top_k}, "
            f"hidden {self.hidden}, width {self.width}, {self.format}"
        )


class SharedStore(MemoryStore):
    """The experts of one layer, in memory, which stand for those of all layers.

    Expert e of layer l has the bytes of expert (e + 17 l) mod num_experts: no two layers have the
    same one at the same place. A store of all layers would take 48 times the memory. Formats other
    than MXFP4 have 8 experts in all.

    Parameters
    ----------
    size : StackSize
    seed : int, default 0
    """

    def __init__(self, size: StackSize, seed: int = 0) -> None:
        # Drawn once in a process: a benchmark opens the same experts a dozen times.
        arrays, formats = _experts_of(replace(size, num_layers=1), seed)
        super().__init__(arrays, top_k=size.top_k, formats=formats)
        (roles,) = self._layout.layers
        self._num_drawn = self._layout.num_experts
        self._layout = ExpertLayout(size.num_experts, size.top_k, [roles] * size.num_layers)

    def view(self, layer: int, expert: int) -> dict[str, np.ndarray]:
        """Return one expert without copying, read-only."""
        self._layout.check(layer, expert)
        return super().view(0, (expert + 17 * layer) % self._num_drawn)

    def regions(self, layers: Iterable[int] | None = None) -> list[Region]:
        """Return where all of them lie, whichever layers are asked for."""
        del layers
        return super().regions([0])


@functools.lru_cache(maxsize=1)
def _experts_of(size: StackSize, seed: int) -> tuple[dict[str, np.ndarray], Any]:
    """Return a layer's experts, as stacks by role, and the formats of those that have one."""
    rng = np.random.default_rng(seed)
    stack, formats = (1, size.num_experts), None
    if size.format == "bf16":
        arrays = {
            name: random_weights(rng, (*stack, *shape)) for name, shape in size.shapes.items()
        }
    else:
        formats = {name: (size.format, shape) for name, shape in size.shapes.items()}
        arrays = {}
        for name, shape in size.shapes.items():
            if size.format == "mxfp4":
                arrays[name] = random_mxfp4(rng, size.num_experts, *shape)
            else:
                drawn = [joined(random_parts(size.format, *shape, seed + e)) for e in range(8)]
                arrays[name] = np.stack(drawn)[None]
            if size.is_gpt_oss:
                arrays[f"{name}_bias"] = random_weights(rng, (*stack, shape[0]))
    return arrays, formats


def random_weights(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return bfloat16 weights whose products with a hidden state are about as large as it is.

    Drawn as bits, at a gigabyte per second: any sign and mantissa, one exponent.
    """
    exponent = 127 - round(np.log2(1.5 * shape[-1] ** 0.5))
    num_bytes = 2 * int(np.prod(shape))
    # A mapping of its own: what is pinned shares no page with anything else.
    weights = aligned_rows(1, num_bytes)[0]
    weights[:] = np.frombuffer(rng.bytes(num_bytes), np.uint8)
    bits = weights.view(np.uint16)
    bits &= 0x807F
    bits |= exponent << 7
    return bits.view(BFLOAT16).reshape(shape)


def random_mxfp4(rng: np.random.Generator, num_experts: int, rows: int, columns: int) -> np.ndarray:
    """Return MXFP4 matrices [1, num_experts, bytes] as `random_weights` does: one scale for all."""
    num_bytes = find_format("mxfp4").nbytes(rows, columns)
    weights = aligned_rows(1, num_experts * num_bytes)[0].reshape(1, num_experts, num_bytes)
    # The values of random codes are 2.9 in the root of the mean square.
    scale = 127 - round(np.log2(2.9 * columns**0.5))
    codes = rows * columns // 2
    weights[..., :codes] = np.frombuffer(rng.bytes(num_experts * codes), np.uint8).reshape(
        1, num_experts, codes
    )
    weights[..., codes:] = scale
    return weights
