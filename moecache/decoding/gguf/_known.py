"""Architectures whose texts run without torch, and what a recipe has to know of their files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moecache.decoding.families import FAMILIES, Family
from moecache.decoding.gguf import (
    _factored,
    _gemma4,
    _lfm2,
    _linear,
    _mamba,
    _sigmoid,
    _softmax,
    _windows,
)
from moecache.decoding.gguf._architecture import Architecture
from moecache.decoding.gguf._metadata import Metadata


@dataclass(frozen=True)
class Known:
    """An architecture, and its files' ways that its row in `FAMILIES` does not say.

    Tensors are the model's own, name by name; where rows of heads are in another order than
    transformers', pairs that are turned together are neighbours.

    Parameters
    ----------
    architecture : Architecture, or callable (Metadata)
        Which returns one.
    forward_norm, out_norm : str
        Tensors of the norms before a feed-forward, and before the head.
    part_norms : (str, str), optional
        Tensors of the norms of what a layer's attention, and what its feed-forward, gives.
    has_layer_norms : bool
        Whether norms take the mean off, and have biases.
    head_norms : {"", "each", "all", "plain"}
        Whether queries and keys have norms: of each head, of all of them at once, or of each head
        that is turned, without weights.
    has_out_bias : bool
        Whether what attention gives has a bias if queries have.
    gate : mapping
        How experts' gates are computed: options of `SlotKernel`.
    has_gates : bool
        Whether feed-forwards have gates; else they are down(act(up(x))).
    has_correction : bool
        Whether scores of experts have a correction; else zeros stand for one that a file lacks.
    has_expert_biases : bool
        Whether experts and their router have biases.
    scale : float, optional
        What multiplies products of queries and keys; by default 1 / sqrt(width).
    is_tiled : bool
        As `LinearAttention` has it.
    """

    architecture: Architecture | Callable[[Metadata], Architecture]
    forward_norm: str = "ffn_norm"
    out_norm: str = "output_norm"
    part_norms: tuple[str, str] | None = None
    has_layer_norms: bool = False
    head_norms: str = ""
    has_out_bias: bool = True
    gate: Mapping[str, Any] = field(default_factory=dict)
    has_gates: bool = True
    has_correction: bool = False
    has_expert_biases: bool = False
    scale: float | None = None
    is_tiled: bool = False

    def find(self, said: Metadata) -> Architecture:
        """Return the architecture that a file is of."""
        found = self.architecture
        return found if isinstance(found, Architecture) else found(said)


KNOWN: Mapping[str, Known] = {
    "afmoe": Known(
        _windows.AFMOE, head_norms="each", part_norms=("post_attention_norm", "post_ffw_norm")
    ),
    "deepseek2": Known(_sigmoid.deepseek2),
    "dots1": Known(_sigmoid.DOTS1, head_norms="each"),
    "ernie4_5-moe": Known(_sigmoid.ERNIE4_5_MOE),
    "exaone-moe": Known(_windows.EXAONE_MOE, head_norms="each"),
    "gemma4": Known(
        _gemma4.GEMMA4,
        head_norms="each",
        gate={"activation": "gelu_tanh"},
        scale=1.0,
    ),
    "glm4moe": Known(
        _sigmoid.GLM4_MOE,
        forward_norm="post_attention_norm",
        head_norms="each",
        has_out_bias=False,
    ),
    "gpt-oss": Known(
        _softmax.GPT_OSS,
        forward_norm="post_attention_norm",
        gate={"activation": "swiglu"},
        has_expert_biases=True,
    ),
    "granitehybrid": Known(_mamba.GRANITE_HYBRID),
    "granitemoe": Known(_softmax.granitemoe),
    "hunyuan-moe": Known(_softmax.HUNYUAN_MOE, head_norms="each"),
    "hy_v3": Known(_sigmoid.HY_V3, head_norms="each"),
    "lfm2moe": Known(_lfm2.LFM2MOE, out_norm="token_embd_norm", head_norms="each"),
    "llama": Known(_softmax.MIXTRAL),
    "llama4": Known(_factored.LLAMA4, head_norms="plain"),
    "minimax-m2": Known(_sigmoid.MINIMAX_M2, head_norms="all"),
    "nemotron_h_moe": Known(
        _mamba.NEMOTRON_H_MOE,
        gate={"activation": "relu2"},
        has_gates=False,
        has_correction=True,
    ),
    "olmoe": Known(_softmax.OLMOE, head_norms="all"),
    "phimoe": Known(_factored.PHIMOE, has_layer_norms=True),
    "qwen2moe": Known(_softmax.QWEN2MOE, has_out_bias=False),
    "qwen35moe": Known(
        _linear.QWEN35MOE, forward_norm="post_attention_norm", head_norms="each", is_tiled=True
    ),
    "qwen3moe": Known(_softmax.QWEN3MOE, head_norms="each"),
    "qwen3next": Known(_linear.QWEN3NEXT, forward_norm="post_attention_norm", head_norms="each"),
    "qwen3vlmoe": Known(_softmax.QWEN3VLMOE, head_norms="each"),
}


def family_of(prefix: str) -> Family | None:
    """Return the row of the attention of transformers' classes; `None` if there is none."""
    wanted = {f"{prefix}{part}Attention" for part in ("", "Text")}
    return next((row for (_, kind, _), row in FAMILIES.items() if kind in wanted), None)
