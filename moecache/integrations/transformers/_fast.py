"""`compute="fast"` in RAM: kernels of moecache's own for experts, routers and the trunk."""

import functools
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moecache import kernels
from moecache.errors import ConfigError
from moecache.integrations.transformers._attention import INTERFACE
from moecache.integrations.transformers._exchange import Exchange
from moecache.integrations.transformers._experts import become, become_again
from moecache.integrations.transformers._gates import gate_of
from moecache.integrations.transformers._operators import is_transformed, operator
from moecache.integrations.transformers._ranks import Ranks
from moecache.kernels import SlotKernel
from moecache.kernels._matrix import Matrix
from moecache.runtime.runtime import ExpertRuntime
from moecache.settings import COMPUTE

# With more rows torch's products are as fast: reading weights is no longer the main cost.
MAX_ROWS = 8
# A number of rows that no product has.
ANY_ROWS = 2**62
TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}


def check_compute(compute: object) -> str:
    """Return a way of computing; raise ConfigError if there is none of that name."""
    if compute not in tuple(COMPUTE):
        raise ConfigError(f"compute {compute!r} is not one of {', '.join(COMPUTE)}")
    return str(compute)


def kernel_of(
    module: nn.Module,
    runtime: ExpertRuntime,
    layer: int,
    compute: str,
    *,
    is_interleaved: bool = False,
) -> SlotKernel:
    """Return what computes the experts of a module in the runtime's slots.

    `is_interleaved`: rows of gate and of up alternate in the slots, not always in the module.

    Raises
    ------
    ConfigError
        If there is no kernel for them.
    """
    pool, family = runtime.pool, type(module).__name__
    try:
        gate = gate_of(module)
        return SlotKernel(
            lambda slot: runtime.expert(slot, layer),
            pool.num_slots,
            roles=runtime.layout.layers[layer],
            **gate,
            is_interleaved=is_interleaved,
        )
    except ConfigError as error:
        raise no_kernel(family, compute, str(error)) from error


def no_kernel(family: str, compute: str, problem: str, remedy: str = '"torch"') -> ConfigError:
    """Return the error that says why experts have no kernel, and what to ask for instead."""
    return ConfigError(
        f'{family} cannot be computed with compute="{compute}": {problem}; use {remedy}'
    )


def fast_rows(
    runtime: ExpertRuntime,
    layer: int,
    kernel: SlotKernel,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    ranks: Ranks | None = None,
    *,
    sequences: np.ndarray | None = None,
    rows: torch.Tensor | None = None,
    product_type: str | None = None,
) -> tuple[torch.Tensor, int]:
    """Return each (token, choice) pair's row, float32, and how many experts were computed.

    `sequences` names each token's, as `ExpertRuntime.waves` takes them. `rows`, float32
    [num_tokens * top_k, hidden_size], is where rows are written, if they come from here.
    `product_type` is what `Experts.inputs` takes.
    """
    num_tokens, top_k = ids.shape
    kind, width, chosen = TYPES[hidden.dtype], hidden.shape[1], ids.cpu().numpy()
    if ranks is None:
        exchange = None
        if rows is None:
            rows = torch.empty((num_tokens * top_k, width), dtype=torch.float32)
    else:
        exchange = Exchange(ranks, layer, chosen, width, torch.float32, hidden.device)
        rows = exchange.rows
    source = kernel.inputs_at(
        hidden.data_ptr(), kind, num_tokens, width * hidden.element_size(), product_type
    )
    target = rows.data_ptr(), "f32", width * 4
    num_experts = 0
    with nullcontext() if exchange is None else exchange:
        waves = runtime.waves(layer, chosen, sequences=sequences)
        try:
            for wave in waves:
                if not len(wave.slots):
                    continue  # all of it is other ranks'
                began = time.perf_counter_ns()
                kernel.compute_at(wave.slots, wave.offsets, wave.pairs, top_k, source, *target)
                if num_tokens == 1:
                    kernel.count(len(wave.slots), time.perf_counter_ns() - began)
                num_experts += len(wave.slots)
                if exchange is not None:
                    exchange.add(wave.pairs)
        finally:
            # A traceback that the caller keeps would keep the leases as well.
            waves.close()
    return rows, num_experts


def weighted_sum(rows: torch.Tensor, weights: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return each token's sum of its rows times the router's weights, of hidden's dtype."""
    weights = weights.contiguous() if weights.dtype in TYPES else weights.float()
    num_tokens, top_k = weights.shape
    width = rows.shape[1]
    out = torch.empty((num_tokens, width), dtype=hidden.dtype)
    kernels.combine(
        rows.data_ptr(),
        num_tokens,
        top_k,
        width,
        weights.data_ptr(),
        TYPES[weights.dtype],
        top_k * weights.element_size(),
        out.data_ptr(),
        TYPES[out.dtype],
        width * out.element_size(),
    )
    return out


def fast_experts(
    module: Any,
    runtime: ExpertRuntime,
    layer: int,
    kernel: SlotKernel,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    ranks: Ranks | None = None,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, int]:
    """Return the output of a module's experts, and how many experts were computed.

    `rows` is memory for the rows, as `fast_rows` takes it.
    """
    if hidden.shape != (len(ids), kernel.hidden_size) or weights.shape != ids.shape:
        raise ConfigError(
            f"hidden states {list(hidden.shape)}, ids {list(ids.shape)} and weights "
            f"{list(weights.shape)} are not [num_tokens, {kernel.hidden_size}] and twice "
            "[num_tokens, top_k]"
        )
    given = hidden.contiguous() if hidden.dtype in TYPES else hidden.float()
    rows, num_experts = fast_rows(runtime, layer, kernel, given, ids, ranks, rows=rows)
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows.to(hidden.dtype)).float().contiguous()
    return weighted_sum(rows, weights, given).to(hidden.dtype), num_experts


class FastLinear(nn.Module):
    """A linear layer that has products of as many rows as pays computed by the kernels."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """Return input @ weight.T + bias."""
        linear: Any = self
        return _product(input, linear.weight, linear.bias, any_rows=False)


@functools.lru_cache
def most_rows(dtype: torch.dtype) -> int:
    """Return how many rows the kernels multiply by a weight of a type, where torch could as well.

    All, where the processor multiplies bfloat16: in vectors (by the clock .95 to 1.4 times as fast
    as torch, with 256 rows), or in tiles where torch has them, too (.9 to 1.6 times, 8 to 512).
    """
    multiplies = dtype == torch.bfloat16 and (
        kernels.level() == "amx"
        or (
            kernels.level() == "avx512"
            and _has("_is_avx512_bf16_supported")
            and not _has("_is_amx_tile_supported")
        )
    )
    return ANY_ROWS if multiplies else MAX_ROWS


def _has(name: str) -> bool:
    """Return what torch knows of the processor; older releases know less."""
    look = getattr(torch.cpu, name, None)
    return look is not None and bool(look())


def _product(
    input: torch.Tensor,  # noqa: A002 - torch's own name
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    any_rows: bool = True,
) -> torch.Tensor:
    """Return input @ weight.T + bias, as torch.nn.functional.linear does.

    A router's has the same bits with any number of rows.
    """
    if not _is_for_kernels(input, weight, bias, any_rows=any_rows):
        return functional.linear(input, weight, bias)
    if torch.compiler.is_compiling():
        out: torch.Tensor = torch.ops.moecache.linear(input, weight, bias, any_rows)
        return out
    return _linear(input, weight, bias)


def _with(cls: type[nn.Module], **replaced: object) -> type[nn.Module]:
    """Return what is mixed into a class of modules: its forward, with other globals.

    Routers have a parameter of their own and no linear layer that could be replaced; torch takes
    0.2 ms for one row of 1024 by 128, a tenth of a token. Attention finds its function by a name.
    """
    forward: Any = cls.forward
    # A module with these in the place of others, for good: torch.compile looks names up in
    # modules. It has what the class's own module has now.
    name = f"{forward.__globals__['__name__']} of {cls.__name__} {id(cls):x}, with kernels"
    module = sys.modules.setdefault(name, ModuleType(name))
    module.__dict__.update({**forward.__globals__, "__name__": name, **replaced})
    if cls in _quickened:
        return _quickened[cls]
    quick = FunctionType(
        forward.__code__,
        module.__dict__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    quick.__kwdefaults__ = forward.__kwdefaults__
    _quickened[cls] = type(f"Fast{cls.__name__}", (nn.Module,), {"forward": quick})
    return _quickened[cls]


# Class of a router or of attention -> what is mixed into it.
_quickened: dict[type[nn.Module], type[nn.Module]] = {}


def _finds(module: nn.Module, name: str, value: object) -> bool:
    """Return whether a module's forward looks up a global that has this value."""
    forward = type(module).forward
    return (
        isinstance(forward, FunctionType)
        and forward.__globals__.get(name) is value
        and name in forward.__code__.co_names
    )


def _calls_linear(module: nn.Module) -> bool:
    """Return whether a module's forward multiplies by `F.linear`."""
    return _finds(module, "F", functional) and "linear" in type(module).forward.__code__.co_names


def multiplies_any_rows(module: nn.Module) -> bool:
    """Return whether the kernels compute a module's product, of any number of rows."""
    forward: Any = type(module).forward
    if forward is FastLinear.forward:
        weight: Any = module.weight
        return most_rows(weight.dtype) == ANY_ROWS
    return getattr(getattr(forward, "__globals__", {}).get("F"), "linear", None) is _product


def finds_torch_attention(module: nn.Module) -> bool:
    """Return whether a module has its attention computed by transformers' own functions."""
    return _finds(module, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)


def _torch_functions() -> ModuleType:
    """Return torch.nn.functional with another `linear`."""
    shown = ModuleType("torch.nn.functional, with kernels")
    shown.__dict__.update({**functional.__dict__, "linear": _product})
    return shown


def _is_for_kernels(
    given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, any_rows: bool
) -> bool:
    """Return whether these are rows that kernels take, and no gradient is asked.

    Torch itself refuses tensors that do not fit together.
    """
    shape, columns = weight.shape, given.shape[-1] if given.dim() else 0
    return (
        len(shape) == 2
        and 0 < columns == shape[1]
        and given.numel() > 0
        and weight.dtype == given.dtype in TYPES
        and weight.device.type == given.device.type == "cpu"
        and weight.is_contiguous()
        # A graph takes any number of rows; the operator in it looks again.
        and (
            any_rows
            or torch.compiler.is_compiling()
            or given.numel() <= most_rows(weight.dtype) * columns
        )
        and (bias is None or _fits(bias, shape[0]))
        and not torch.is_autocast_enabled("cpu")
        and (torch.compiler.is_compiling() or not is_transformed())
        and not (
            torch.is_grad_enabled()
            and (
                given.requires_grad
                or weight.requires_grad
                or (bias is not None and bias.requires_grad)
            )
        )
    )


def _fits(bias: torch.Tensor, rows: int) -> bool:
    return (
        bias.shape == (rows,)
        and bias.dtype in TYPES
        and bias.device.type == "cpu"
        and bias.is_contiguous()
    )


def _linear(
    input: torch.Tensor,  # noqa: A002 - torch's own name
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return what the kernels make of a few rows."""
    kind, size = TYPES[input.dtype], input.element_size()
    rows, columns = weight.shape
    given = input.contiguous()
    result = torch.empty((*input.shape[:-1], rows), dtype=input.dtype)
    terms = (0, kind) if bias is None else (bias.data_ptr(), TYPES[bias.dtype])
    # Made for each call, as a weight may change between two; it takes a microsecond.
    Matrix(weight.data_ptr(), kind, rows, columns, columns * size).multiply(
        given.data_ptr(),
        kind,
        input.numel() // columns,
        columns * size,
        result.data_ptr(),
        kind,
        rows * size,
        *terms,
    )
    return result


@operator(
    "linear(Tensor input, Tensor weight, Tensor? bias, bool any_rows=False) -> Tensor",
    lambda input, weight, *_: input.new_empty((*input.shape[:-1], weight.shape[0])),  # noqa: A006
)
def _operator(
    input: torch.Tensor,  # noqa: A002 - torch's own name
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    any_rows: bool = False,
) -> torch.Tensor:
    if not _is_for_kernels(input, weight, bias, any_rows=any_rows):
        return functional.linear(input, weight, bias)
    return _linear(input, weight, bias)


def quicken(model: nn.Module, routers: Iterable[nn.Module | None]) -> list[nn.Module]:
    """Have the kernels compute a model's plain linear layers and its routers; return these.

    Attention of single tokens gets another shape, see `_attention`.
    """
    modules = list(model.modules())
    found: list[nn.Module] = [m for m in modules if type(m) is nn.Linear]
    for linear in found:
        become(linear, FastLinear)
    for attention in modules:
        if finds_torch_attention(attention):
            become(attention, _with(type(attention), ALL_ATTENTION_FUNCTIONS=INTERFACE))
            found.append(attention)
    for router in routers:
        if router is not None and _calls_linear(router):
            become(router, _with(type(router), F=_torch_functions()))
            found.append(router)
    return found


def slow_down(modules: list[nn.Module]) -> None:
    """Give modules their own products back."""
    for module in modules:
        become_again(module)
