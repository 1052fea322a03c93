"""Parameters of MiMo V2 in files: queries, keys and values may be in one tensor."""

from dataclasses import replace

import numpy as np

from moecache.decoding.gguf import _windows
from moecache.decoding.gguf._architecture import Source
from moecache.decoding.gguf._common import correction
from moecache.decoding.gguf._metadata import Metadata


def _mimo2_source(leaf: str, layer: int, said: Metadata) -> Source | None:
    fused = f"blk.{layer}.attn_qkv.weight"
    if fused not in said.tensors or not leaf.startswith("self_attn."):
        return correction(leaf, layer, said)
    # Values are narrower than keys, and each layer has heads of its own.
    keys = said.sizes("attention.head_count_kv")[layer]
    sizes = (
        ("q", said.size("attention.head_count"), said.size("attention.key_length")),
        ("k", keys, said.size("attention.key_length")),
        ("v", keys, said.size("attention.value_length")),
    )
    start = 0
    for part, heads, width in sizes:
        rows = said.rows(heads, width)
        if leaf == f"self_attn.{part}_proj.weight":
            return Source((fused,), rows=np.arange(start, start + rows))
        start += rows
    return None


MIMO2 = replace(
    _windows.MIMO2, names={"self_attn.sinks": "attn_sinks.weight"}, source=_mimo2_source
)
