"""Attention of one new token a sequence: torch's products, in a shape that they are fast in.

torch multiplies one row by a matrix of bfloat16 many times slower than several rows, on
processors without AMX; and a query of one token is one row for each head. Where several heads
share keys and values, their queries are rows of one product. Where none do, the products are made
in float32.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

# Arguments that no query of one token needs; with one of them, attention is transformers' own.
_OTHERS = ("position_bias", "cache", "softcap", "output_attentions")
_HALVES = (torch.bfloat16, torch.float16)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return what `sdpa_attention_forward` does, quickly for one token a sequence on a CPU.

    Parameters
    ----------
    module : Module
    query : Tensor, shape [batch, num_heads, num_tokens, width]
    key : Tensor, shape [batch, num_kv_heads, length, width]
    value : Tensor, shape [batch, num_kv_heads, length, value_width]
    attention_mask : Tensor of bool or float, shape [batch, 1 or num_heads, num_tokens, length]
    dropout : float, default 0
    scaling : float, optional
        By default 1 / sqrt(width).

    Returns
    -------
    (Tensor, shape [batch, num_tokens, num_heads, value_width], None)
    """
    batch, num_heads, num_tokens, width = query.shape
    num_kv_heads = key.shape[1]
    if (
        num_tokens != 1
        or query.device.type != "cpu"
        or dropout
        or num_heads % num_kv_heads
        or (attention_mask is not None and attention_mask.dim() != 4)
        or not all(any(options.get(name) is no for no in (None, False)) for name in _OTHERS)
        or torch.compiler.is_compiling()
    ):
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **options,
        )
    if attention_mask is not None and attention_mask.shape[1] != 1:
        attention_mask = attention_mask.reshape(len(attention_mask), num_kv_heads, -1, key.shape[2])
    rows = query.reshape(batch, num_kv_heads, -1, width)
    product = _in_float32 if rows.shape[2] == 1 and query.dtype in _HALVES else _attention
    found = product(rows, key, value, attention_mask, scaling)
    return found.reshape(batch, 1, num_heads, value.shape[-1]), None


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)


def _in_float32(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query.float() * scale, key.float().transpose(2, 3))
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return torch.matmul(scores.softmax(-1), value.float()).to(query.dtype)


# Attention modules find this in place of transformers' own; it differs in one function.
INTERFACE = AttentionInterface()
INTERFACE["sdpa"] = attend
