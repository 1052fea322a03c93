"""Layers that hold states: their tensors, by GGUF's names, and their part of a recipe."""

import math

import numpy as np

from moecache.decoding._bound import MOST_HEAD, MOST_KERNEL
from moecache.decoding.attending import Stateful
from moecache.decoding.files._facts import Facts, LinearSizes, Shapes, Wanted
from moecache.decoding.files.known import NoTextModelError
from moecache.decoding.files.trunk import Trunk
from moecache.decoding.recipe import (
    DeltaAttention,
    Linear,
    LinearAttention,
    ShortConvolution,
    StateSpace,
)


def stateful_tensors(facts: Facts, at: str, found: Shapes) -> Wanted:
    """Yield the tensors of a layer that holds states, and their shapes.

    Raises
    ------
    NoTextModelError
        If it runs with torch.
    """
    sizes = _sizes(facts)
    is_short = _is_short(sizes)
    most = sizes.width if is_short else max(sizes.width, sizes.value_width)
    if most > MOST_HEAD or sizes.kernel > MOST_KERNEL:
        raise NoTextModelError(
            f"heads of {sizes.width} and {sizes.value_width} numbers behind a convolution over "
            f"{sizes.kernel} rows run with torch"
        )
    if is_short:
        return _short_tensors(facts, at)
    if sizes.by_channel:
        return _channel_tensors(facts, at, found)
    return _space_tensors(facts, at) if sizes.is_space else _delta_tensors(facts, at, found)


def read_stateful(facts: Facts, trunk: Trunk, at: str) -> Stateful:
    """Return the recipe of a layer that holds states."""
    sizes = _sizes(facts)
    if _is_short(sizes):
        return _short(trunk, at)
    if sizes.by_channel:
        return _channel(facts, trunk, at)
    return _space(facts, trunk, at) if sizes.is_space else _delta(facts, trunk, at)


def _sizes(facts: Facts) -> LinearSizes:
    assert facts.linear is not None
    return facts.linear


def _is_short(sizes: LinearSizes) -> bool:
    return sizes.num_keys == 0


def _delta_tensors(facts: Facts, at: str, found: Shapes) -> Wanted:
    hidden, sizes = facts.hidden_size, _sizes(facts)
    heads = sizes.num_heads
    if f"{at}.ssm_in.weight" in found:
        yield f"{at}.ssm_in.weight", (sizes.channels + sizes.values, hidden)
    else:
        yield f"{at}.attn_qkv.weight", (sizes.channels, hidden)
        yield f"{at}.attn_gate.weight", (sizes.values, hidden)
    if f"{at}.ssm_ba.weight" in found:
        yield f"{at}.ssm_ba.weight", (2 * heads, hidden)
    else:
        yield f"{at}.ssm_alpha.weight", (heads, hidden)
        yield f"{at}.ssm_beta.weight", (heads, hidden)
    yield f"{at}.ssm_conv1d.weight", (sizes.channels, sizes.kernel)
    yield f"{at}.ssm_a", (heads,)
    yield f"{at}.ssm_dt.bias", (heads,)
    yield f"{at}.ssm_norm.weight", (sizes.value_width,)
    yield f"{at}.ssm_out.weight", (hidden, sizes.values)


def _channel_tensors(facts: Facts, at: str, found: Shapes) -> Wanted:
    hidden, sizes, values = facts.hidden_size, _sizes(facts), _sizes(facts).values
    bound = _bound_of(facts)
    if bound is not None and not -math.inf < bound < 0:
        raise NoTextModelError(f"decays with a bound of {bound:g} run with torch")
    for part in "qkv":
        yield f"{at}.attn_{part}.weight", (values, hidden)
        name = f"{at}.ssm_conv1d_{part}.weight"
        yield name, _as_found(found, name, (values, sizes.kernel))
    # What is between two products is as wide as a head.
    is_factored = facts.known.is_factored
    shapes = [(sizes.width, hidden), (values, sizes.width)] if is_factored else [(values, hidden)]
    for part in "fg":
        names = _chain_names(facts, found, at, part)
        yield from ((f"{name}.weight", shape) for name, shape in zip(names, shapes, strict=True))
    yield f"{at}.ssm_beta.weight", (sizes.num_heads, hidden)
    yield f"{at}.ssm_a", _as_found(found, f"{at}.ssm_a", (sizes.num_heads,))
    yield f"{at}.ssm_dt.bias", (values,)
    yield f"{at}.ssm_norm.weight", (sizes.width,)
    yield f"{at}.attn_output.weight", (hidden, values)


def _chain_names(facts: Facts, known: Trunk | Shapes, at: str, part: str) -> list[str]:
    """Return the names of the products that make decays ("f") or gates ("g")."""
    if facts.known.is_factored:
        return [f"{at}.ssm_{part}_{one}" for one in "ab"]
    # Checkpoints have one name for gates of any layer.
    other = f"{at}.attn_gate"
    return [other if part == "g" and f"{other}.weight" in known else f"{at}.ssm_{part}_a"]


def _bound_of(facts: Facts) -> float | None:
    """Return the least logarithm of a decay, as float32 has it, if there is one."""
    said = facts.settings
    return float(np.float32(said["kda_lower_bound"])) if said.get("kda_safe_gate") else None


def _as_found(found: Shapes, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tensor's shape with those dimensions of 1 that a file has for it."""
    own = tuple(found.get(name, shape))
    return own if [n for n in own if n != 1] == [n for n in shape if n != 1] else shape


def _space_tensors(facts: Facts, at: str) -> Wanted:
    hidden, sizes, said = facts.hidden_size, _sizes(facts), facts.settings
    heads, values = sizes.num_heads, sizes.values
    rows = values + sizes.channels + heads
    for name, shape in {"ssm_in": (rows, hidden), "ssm_out": (hidden, values)}.items():
        yield f"{at}.{name}.weight", shape
        if said["mamba_proj_bias"]:
            yield f"{at}.{name}.bias", shape[:1]
    yield f"{at}.ssm_conv1d.weight", (sizes.channels, sizes.kernel)
    if said.get("use_conv_bias", said.get("mamba_conv_bias")):
        yield f"{at}.ssm_conv1d.bias", (sizes.channels,)
    yield f"{at}.ssm_a", (heads, 1)
    yield f"{at}.ssm_d", (heads, 1)
    yield f"{at}.ssm_dt.bias", (heads,)
    yield f"{at}.ssm_norm.weight", (sizes.num_keys, values // sizes.num_keys)


def _short_tensors(facts: Facts, at: str) -> Wanted:
    hidden, at = facts.hidden_size, f"{at}.shortconv"
    for name, shape in {
        "in_proj": (3 * hidden, hidden),
        "conv": (hidden, _sizes(facts).kernel),
        "out_proj": (hidden, hidden),
    }.items():
        yield f"{at}.{name}.weight", shape
        if facts.settings["conv_bias"]:
            yield f"{at}.{name}.bias", shape[:1]


def _delta(facts: Facts, trunk: Trunk, at: str) -> LinearAttention:
    num_keys, num_heads, width, value_width, *_ = _sizes(facts)
    # Matrices of two may be one.
    mixed, gates = ("attn_qkv", "attn_gate")
    if f"{at}.ssm_in.weight" in trunk:
        mixed, gates = ("ssm_in", "")
    shares, decays = ("ssm_beta", "ssm_alpha")
    if f"{at}.ssm_ba.weight" in trunk:
        shares, decays = ("ssm_ba", "")
    return LinearAttention(
        trunk.linear(f"{at}.{mixed}"),
        trunk.linear(f"{at}.{gates}") if gates else None,
        trunk.linear(f"{at}.{decays}") if decays else None,
        trunk.linear(f"{at}.{shares}"),
        trunk.transposed(f"{at}.ssm_conv1d.weight"),
        trunk.numbers(f"{at}.ssm_a"),
        trunk.numbers(f"{at}.ssm_dt.bias"),
        trunk.norm(f"{at}.ssm_norm.weight", facts.epsilon),
        trunk.linear(f"{at}.ssm_out"),
        num_keys=num_keys,
        num_heads=num_heads,
        width=width,
        value_width=value_width,
        is_tiled=facts.known.is_tiled,
    )


def _channel(facts: Facts, trunk: Trunk, at: str) -> DeltaAttention:
    sizes = _sizes(facts)

    def chain(part: str) -> tuple[Linear, ...]:
        return tuple(trunk.linear(name) for name in _chain_names(facts, trunk, at, part))

    kernels = [trunk.flat(f"{at}.ssm_conv1d_{part}.weight") for part in "qkv"]
    conv = np.concatenate(kernels).reshape(-1, sizes.kernel).T
    query, key, value = (trunk.linear(f"{at}.attn_{part}") for part in "qkv")
    return DeltaAttention(
        query,
        key,
        value,
        chain("f"),
        trunk.linear(f"{at}.ssm_beta"),
        chain("g"),
        np.ascontiguousarray(conv),
        # Ling's files have them positive.
        -np.abs(trunk.flat(f"{at}.ssm_a")),
        trunk.numbers(f"{at}.ssm_dt.bias"),
        trunk.norm(f"{at}.ssm_norm.weight", facts.epsilon),
        trunk.linear(f"{at}.attn_output"),
        num_heads=sizes.num_heads,
        width=sizes.width,
        value_width=sizes.width,
        bound=_bound_of(facts),
    )


def _space(facts: Facts, trunk: Trunk, at: str) -> StateSpace:
    sizes, bias = _sizes(facts), f"{at}.ssm_conv1d.bias"
    return StateSpace(
        trunk.linear(f"{at}.ssm_in"),
        trunk.transposed(f"{at}.ssm_conv1d.weight"),
        trunk.numbers(bias) if bias in trunk else None,
        trunk.flat(f"{at}.ssm_a"),
        trunk.numbers(f"{at}.ssm_dt.bias"),
        trunk.flat(f"{at}.ssm_d"),
        trunk.norm(f"{at}.ssm_norm.weight", facts.epsilon),
        trunk.linear(f"{at}.ssm_out"),
        num_keys=sizes.num_keys,
        num_heads=sizes.num_heads,
        width=sizes.width,
        value_width=sizes.value_width,
        num_norms=sizes.num_keys,
    )


def _short(trunk: Trunk, at: str) -> ShortConvolution:
    at, bias = f"{at}.shortconv", f"{at}.shortconv.conv.bias"
    return ShortConvolution(
        trunk.linear(f"{at}.in_proj"),
        trunk.transposed(f"{at}.conv.weight"),
        trunk.numbers(bias) if bias in trunk else None,
        trunk.linear(f"{at}.out_proj"),
    )
