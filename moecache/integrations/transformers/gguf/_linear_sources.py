"""Parameters of Qwen3-Next and Qwen 3.5 in files: layers of linear attention between others."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from moecache.decoding.gguf import _linear
from moecache.decoding.gguf._architecture import Source
from moecache.decoding.gguf._metadata import Metadata

LINEAR_NAMES = {
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}


def _next_source(leaf: str, layer: int, said: Metadata) -> Source | None:
    if layer < 0:
        return _outside(leaf)
    prefix = f"blk.{layer}."
    if leaf == "linear_attn.in_proj_qkvz.weight":
        parts = (f"{prefix}attn_qkv.weight", f"{prefix}attn_gate.weight")
        # Files of older converters have the matrix as it is.
        return Source(parts, rows=_heads_together(said)) if parts[1] in said.tensors else None
    return _changed(leaf, prefix)


def _outside(name: str) -> Source | None:
    if name == "model.norm.weight":
        return Source(("output_norm.weight",), undo=less_one)
    return None


def _changed(leaf: str, prefix: str) -> Source | None:
    if leaf == "linear_attn.A_log":
        return Source((f"{prefix}ssm_a",), undo=lambda arrays: logarithms(arrays[0]))
    if leaf == "linear_attn.conv1d.weight":
        return Source((f"{prefix}ssm_conv1d.weight",), undo=lambda arrays: arrays[0][:, None])
    if leaf.endswith("norm.weight") and leaf != "linear_attn.norm.weight":
        name = _NORMS.get(leaf.removesuffix(".weight"))
        return Source((f"{prefix}{name}.weight",), undo=less_one) if name else None
    return None


_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def less_one(arrays: list[np.ndarray]) -> np.ndarray:
    """Return a norm's weights without the 1 that transformers adds itself."""
    return arrays[0] - np.float32(1)


def logarithms(decays: np.ndarray) -> np.ndarray:
    """Return the numbers whose exponentials, in torch's float32, are the decays, negative.

    The nearest logarithm may have an exponential that is one bit off: its neighbours are tried.
    """
    wanted = torch.from_numpy(-np.asarray(decays, np.float32))
    found = torch.from_numpy(np.log(-decays.astype(np.float64)).astype(np.float32))
    above = below = found
    for _ in range(4):
        above = torch.nextafter(above, torch.tensor(torch.inf))
        below = torch.nextafter(below, torch.tensor(-torch.inf))
        for candidate in (above, below):
            better = (candidate.exp() == wanted) & (found.exp() != wanted)
            found = torch.where(better, candidate, found)
    values: np.ndarray = found.numpy()
    return values


def _heads_together(said: Metadata) -> np.ndarray:
    """Return the rows of q, k, v and z, which are apart in the file, head of keys by head."""
    settings = _linear.linear_settings(said)
    heads = settings["linear_num_key_heads"]
    keys = np.arange(said.rows(heads, settings["linear_key_head_dim"])).reshape(heads, -1)
    count = said.rows(settings["linear_num_value_heads"], settings["linear_value_head_dim"])
    values = np.arange(count).reshape(heads, -1)
    parts = [keys, keys.size + keys, 2 * keys.size + values, 2 * keys.size + count + values]
    return np.concatenate(parts, axis=1).reshape(-1)


def dense_source(leaf: str, layer: int, said: Metadata) -> Source | None:
    """Return the same where heads of values are stored one of each head of keys after another."""
    if layer < 0:
        return _outside(leaf)
    prefix = f"blk.{layer}."
    plain = _changed(leaf, prefix)
    order = _value_heads(said)
    if order is None or leaf not in LINEAR_NAMES:
        return plain
    name = f"{prefix}{LINEAR_NAMES[leaf]}"
    if leaf.endswith("out_proj.weight"):
        columns = _spread(order, said.matrix(name)[1] // len(order))
        return Source((name,), undo=lambda arrays: np.take(arrays[0], columns, axis=1))
    rows = said.shape(name)[0]
    if leaf.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        first = 2 * said.rows(said.size("ssm.group_count"), said.size("ssm.state_size"))
        rest = first + _spread(order, (rows - first) // len(order))
        order = np.concatenate([np.arange(first), rest])
    else:
        order = _spread(order, rows // len(order))
    if plain is None or plain.undo is None:
        return Source((name,), rows=order)
    return Source((name,), undo=_then(plain.undo, order))


def _then(
    undo: Callable[[list[np.ndarray]], np.ndarray], order: np.ndarray
) -> Callable[[list[np.ndarray]], np.ndarray]:
    return lambda arrays: undo(arrays)[order]


def _value_heads(said: Metadata) -> np.ndarray | None:
    """Return where each head of values is; `None` if they are in order."""
    values, keys = said.size("ssm.time_step_rank", least=1), said.size("ssm.group_count", least=1)
    if values == keys:
        return None
    return np.arange(values).reshape(values // keys, keys).swapaxes(0, 1).reshape(-1)


def _spread(order: np.ndarray, width: int) -> np.ndarray:
    """Return the same for rows; each head has some of them."""
    return (order[:, None] * width + np.arange(width)).reshape(-1)


QWEN3NEXT = replace(_linear.QWEN3NEXT, names=LINEAR_NAMES, source=_next_source)
QWEN35MOE = replace(_linear.QWEN35MOE, names=LINEAR_NAMES, source=dense_source)
