"""Architectures whose texts run without torch, and what a recipe has to know of their files."""

from collections.abc import Mapping

from moecache.decoding.files.known import Known
from moecache.decoding.gguf import (
    _delta,
    _factored,
    _gemma4,
    _lfm2,
    _linear,
    _mamba,
    _sigmoid,
    _softmax,
    _windows,
)

KNOWN: Mapping[str, Known] = {
    "afmoe": Known(
        _windows.AFMOE, head_norms="each", part_norms=("post_attention_norm", "post_ffw_norm")
    ),
    "bailingmoe3": Known(_delta.BAILING3),
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
    "kimi-linear": Known(_delta.KIMI_LINEAR, is_factored=True),
    "lfm2moe": Known(_lfm2.LFM2MOE, out_norm="token_embd_norm", head_norms="each"),
    "llama": Known(_softmax.MIXTRAL),
    "llama4": Known(_factored.LLAMA4, head_norms="plain"),
    "mimo2": Known(_windows.MIMO2),
    "mistral4": Known(_sigmoid.MISTRAL4),
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
