"""Parameters of Kimi Linear and Ling 3 in files: Kimi's delta attention beside latents."""

from dataclasses import replace

import numpy as np

from moecache.decoding.gguf import _delta
from moecache.decoding.gguf._architecture import Source
from moecache.decoding.gguf._metadata import Metadata
from moecache.decoding.gguf._sigmoid import latent_source
from moecache.integrations.transformers.gguf._linear_sources import logarithms

_NAMES = {
    "self_attn.b_proj.weight": "ssm_beta.weight",
    "self_attn.o_norm.weight": "ssm_norm.weight",
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
}


def _source(leaf: str, layer: int, said: Metadata) -> Source | None:
    if leaf == "self_attn.conv1d.weight":
        parts = tuple(f"blk.{layer}.ssm_conv1d_{part}.weight" for part in "qkv")
        return Source(parts, undo=_join_kernels)
    return latent_source(leaf, layer, said)


def _kimi_source(leaf: str, layer: int, said: Metadata) -> Source | None:
    if leaf == "self_attn.forget_gate.A_log":
        name = f"blk.{layer}.ssm_a"
        return Source((name,), undo=lambda arrays: logarithms(arrays[0].reshape(1, 1, -1, 1)))
    return _source(leaf, layer, said)


def _bailing3_source(leaf: str, layer: int, said: Metadata) -> Source | None:
    if leaf == "self_attn.forget_gate.A_log":
        name = f"blk.{layer}.ssm_a"
        return Source((name,), undo=lambda arrays: logarithms(-arrays[0].reshape(-1)))
    if leaf == "self_attn.g_proj.weight":
        tensor = "ssm_g_a" if _delta.is_linear(said, layer) else "attn_gate"
        return Source((f"blk.{layer}.{tensor}.weight",))
    return _source(leaf, layer, said)


def _join_kernels(arrays: list[np.ndarray]) -> np.ndarray:
    """Return the convolutions of queries, keys and values as one."""
    width = arrays[0].shape[-1]
    return np.concatenate([array.reshape(-1, 1, width) for array in arrays])


KIMI_LINEAR = replace(
    _delta.KIMI_LINEAR,
    names={
        **_NAMES,
        "self_attn.forget_gate.f_a_proj.weight": "ssm_f_a.weight",
        "self_attn.forget_gate.f_b_proj.weight": "ssm_f_b.weight",
        "self_attn.g_a_proj.weight": "ssm_g_a.weight",
        "self_attn.g_b_proj.weight": "ssm_g_b.weight",
    },
    source=_kimi_source,
)
BAILING3 = replace(
    _delta.BAILING3,
    names={**_NAMES, "self_attn.forget_gate.f_proj.weight": "ssm_f_a.weight"},
    source=_bailing3_source,
)
