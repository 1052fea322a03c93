"""Attention of `compute="fast"` in RAM: a prompt's page by a kernel, one new token by torch.

A page's queries go through the kernel of moecache's own (`kernels._page`): heads that share keys
share them there, too, where torch copies them for each, and products of bfloat16 are the
processor's own where it has some.

Of one new token a sequence, torch makes the products, in a shape that they are fast in. torch
multiplies one row by a matrix of bfloat16 many times slower than several rows, on processors
without AMX; and a query of one token is one row for each head. Where several heads share keys and
values, their queries are rows of one product. Where none do, the products are made in float32.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from moecache import kernels
from moecache.integrations.transformers._operators import is_transformed
from moecache.kernels import _page

# Arguments that no query of one token needs; with one of them, attention is transformers' own.
_OTHERS = ("position_bias", "cache", "softcap", "output_attentions")
_HALVES = (torch.bfloat16, torch.float16)
# As the kernel names them.
_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}


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
    """Return what `sdpa_attention_forward` does, quickly on a CPU.

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
    if num_tokens > 1 and _is_page(module, query, key, value, attention_mask, dropout, options):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return _attend_page(query, key, value, attention_mask, scale), None
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


def _is_page(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> bool:
    """Return whether the kernel computes the attention of these."""
    parts = query, key, value
    length = key.shape[2]
    if mask is None:
        # torch's own causal mask begins with the first key, whatever there was before.
        asked = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if asked is None else asked
        fits = bool(is_causal) and length == query.shape[2]
    else:
        fits = (
            mask.dtype == torch.bool
            and mask.shape == (mask.shape[0], 1, query.shape[2], length)
            and mask.shape[0] in (1, len(query))
            and mask.stride(3) == 1
        )
    return (
        fits
        and query.numel() > 0
        and query.dtype in _TYPES
        and all(part.dtype == query.dtype and part.device.type == "cpu" for part in parts)
        and all(part.stride(3) == 1 and 0 < part.shape[3] <= _page.MOST_WIDTH for part in parts)
        and query.shape[1] % key.shape[1] == 0
        and not dropout
        and all(any(options.get(name) is no for no in (None, False)) for name in _OTHERS)
        and not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and any(part.requires_grad for part in parts))
        and not is_transformed()
        # Plain C is slower than torch is.
        and kernels.level() != "generic"
    )


def _attend_page(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    batch, num_heads, num_tokens, width = query.shape
    out = torch.empty((batch, num_tokens, num_heads, value.shape[3]), dtype=query.dtype)
    for number in range(batch):
        seen = None if mask is None else mask[number % len(mask), 0]
        _page.attend(
            queries=_places(query[number]),
            keys=_places(key[number]),
            values=_places(value[number]),
            out=(out[number].data_ptr(), out.stride(1) * out.element_size()),
            mask=None if seen is None else (seen.data_ptr(), seen.stride(0)),
            num_queries=num_tokens,
            num_keys=key.shape[2],
            num_heads=num_heads,
            num_kv_heads=key.shape[1],
            width=width,
            value_width=value.shape[3],
            kind=_TYPES[query.dtype],
            scale=scale,
        )
    return out


def _places(heads: torch.Tensor) -> tuple[int, int, int]:
    """Return the address of [heads, length, width], and bytes to the next position and head."""
    size = heads.element_size()
    return heads.data_ptr(), heads.stride(1) * size, heads.stride(0) * size


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
