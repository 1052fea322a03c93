"""Small recipes of every kind of attention, and calls of a program."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from moecache import kernels
from moecache.decoding._held import KeyValues, States
from moecache.decoding.attending import Stateful
from moecache.decoding.recipe import (
    Attending,
    Attention,
    DeltaAttention,
    FeedForward,
    LatentAttention,
    Layer,
    Linear,
    LinearAttention,
    Norm,
    Recipe,
    Rotation,
    ShortConvolution,
    StateSpace,
    Temperature,
)

HIDDEN, VOCABULARY, WIDE = 40, 50, 24
RANK, ROTARY, HEADS = 16, 6, 4
EPSILON = 1e-5


def drawn(*shape: int) -> np.ndarray:
    """Return weights that keep activations near 1."""
    generator = np.random.default_rng(math.prod(shape) + len(shape))
    return (generator.normal(size=shape) / math.sqrt(shape[-1])).astype(np.float32)


def linear(rows: int, columns: int, *, bias: bool = False) -> Linear:
    """Return a linear layer."""
    return Linear(kernels.matrix_of(drawn(rows, columns)), drawn(rows) if bias else None)


def norm(width: int, *, bias: bool = False) -> Norm:
    """Return a norm, or a layer norm."""
    return Norm(1 + 0.3 * drawn(width), EPSILON, drawn(width) if bias else None)


def grouped(**changes: Any) -> Attention:
    """Return attention of 4 heads over 2, of 10 numbers."""
    made = Attention(
        query=linear(HEADS * 10, HIDDEN, bias=True),
        key=linear(20, HIDDEN),
        value=linear(2 * 7, HIDDEN),
        out=linear(HIDDEN, HEADS * 7),
        num_heads=HEADS,
        num_kv_heads=2,
        width=10,
        value_width=7,
        scale=0.4,
        rotation=Rotation(ROTARY),
    )
    return replace(made, **changes)


def latent(heads: int = HEADS) -> LatentAttention:
    """Return attention to latents."""
    return LatentAttention(
        query=linear(heads * (9 + ROTARY), 12),
        compressed=linear(RANK + ROTARY, HIDDEN),
        norm=norm(RANK),
        expand=drawn(heads, 9 + 7, RANK),
        out=linear(HIDDEN, heads * 7),
        num_heads=heads,
        width=9,
        value_width=7,
        scale=0.4,
        rotation=Rotation(ROTARY, "neighbours to halves"),
        low=linear(12, HIDDEN),
        low_norm=norm(12),
    )


def recurrent(
    *, is_tiled: bool = False, is_joined: bool = False, kernel: int = 3
) -> LinearAttention:
    """Return linear attention of 4 heads over 2, of states [9, 21]."""
    channels = 2 * 2 * 9 + HEADS * 21
    return LinearAttention(
        mixed=linear(channels + is_joined * HEADS * 21, HIDDEN),
        gates=None if is_joined else linear(HEADS * 21, HIDDEN),
        decays=None if is_joined else linear(HEADS, HIDDEN),
        shares=linear(HEADS * (1 + is_joined), HIDDEN),
        conv=drawn(kernel, channels) * 9,
        rates=-np.exp(drawn(HEADS)),
        steps=drawn(HEADS),
        norm=norm(21),
        out=linear(HIDDEN, HEADS * 21),
        num_keys=2,
        num_heads=HEADS,
        width=9,
        value_width=21,
        is_tiled=is_tiled,
    )


def delta(*, bound: float | None = None, kernel: int = 3) -> DeltaAttention:
    """Return linear attention of 4 heads, of states [9, 21], whose rows have decays of their own.

    With a bound decays and gates are one product, and two without.
    """
    keys, values = HEADS * 9, HEADS * 21

    def chain(rows: int) -> tuple[Linear, ...]:
        # Not what keys, or values, are multiplied by.
        return (linear(rows, HIDDEN, bias=True),) if bound else (linear(5, HIDDEN), linear(rows, 5))

    return DeltaAttention(
        query=linear(keys, HIDDEN),
        key=linear(keys, HIDDEN),
        value=linear(values, HIDDEN),
        decays=chain(keys),
        shares=linear(HEADS, HIDDEN),
        gates=chain(values),
        conv=drawn(kernel, 2 * keys + values) * 9,
        rates=-np.exp(drawn(HEADS)),
        # Softplus is another formula above 20.
        steps=np.where(np.arange(keys) % 7, drawn(keys), 21 + drawn(keys)),
        norm=norm(21),
        out=linear(HIDDEN, values),
        num_heads=HEADS,
        width=9,
        value_width=21,
        bound=bound,
    )


def space(*, num_norms: int = 1, kernel: int = 3, bias: bool = True) -> StateSpace:
    """Return a state space of 4 heads over 2, of states [21, 9]."""
    values, channels = HEADS * 21, HEADS * 21 + 2 * 2 * 9
    return StateSpace(
        mixed=linear(values + channels + HEADS, HIDDEN),
        conv=drawn(kernel, channels) * 9,
        conv_bias=drawn(channels) if bias else None,
        rates=-np.exp(drawn(HEADS)),
        steps=drawn(HEADS),
        skips=drawn(1, HEADS)[0],
        norm=norm(values),
        out=linear(HIDDEN, values),
        num_keys=2,
        num_heads=HEADS,
        width=9,
        value_width=21,
        num_norms=num_norms,
    )


def short(*, kernel: int = 3, bias: bool = False) -> ShortConvolution:
    """Return a convolution between two gates."""
    mixed, out = linear(3 * HIDDEN, HIDDEN, bias=bias), linear(HIDDEN, HIDDEN, bias=bias)
    conv_bias = drawn(HIDDEN) if bias else None
    return ShortConvolution(mixed, drawn(kernel, HIDDEN) * 9, conv_bias, out)


FORWARD = FeedForward(
    linear(WIDE, HIDDEN), linear(WIDE, HIDDEN), linear(HIDDEN, WIDE), "silu", linear(1, HIDDEN)
)
KINDS = {
    "plain": grouped(),
    "window": grouped(window=4, sinks=drawn(HEADS), rotation=Rotation(ROTARY, "neighbours")),
    "norms": grouped(query_norm=norm(10), key_norm=norm(20), clip=0.7),
    "late norms": grouped(query_norm=norm(10), key_norm=norm(10), has_late_norms=True),
    "chunks": grouped(window=4, is_chunked=True),
    "temperature": grouped(temperature=Temperature(2.0, 0.7)),
    "latent": latent(),
    "latent temperature": replace(latent(), temperature=Temperature(2.0, 0.7, is_own=True)),
    "three latent heads": latent(3),
    "still latent": replace(latent(), rotation=Rotation(0), still_width=ROTARY),
    "gated latent": replace(latent(), gates=linear(HEADS, HIDDEN)),
    "gates": grouped(
        query=linear(2 * HEADS * 10, HIDDEN),
        value=linear(20, HIDDEN),
        out=linear(HIDDEN, HEADS * 10),
        value_width=10,
        is_gated=True,
    ),
    "gates apart": grouped(
        value=linear(20, HIDDEN),
        out=linear(HIDDEN, HEADS * 10),
        value_width=10,
        gates=linear(HEADS * 10, HIDDEN),
    ),
    "softplus gates": grouped(
        value=linear(20, HIDDEN),
        out=linear(HIDDEN, HEADS * 10),
        value_width=10,
        gates=linear(HEADS * 10, HIDDEN),
        gate_function="softplus",
    ),
    "gates of heads": grouped(
        value=linear(20, HIDDEN),
        out=linear(HIDDEN, HEADS * 10),
        value_width=10,
        gates=linear(HEADS, HIDDEN),
        gate_function="softplus",
        value_scale=0.7,
    ),
    "linear": recurrent(),
    "linear tiled": recurrent(is_tiled=True, kernel=1),
    "linear joined": recurrent(is_joined=True),
    "delta": delta(),
    "delta bounded": delta(bound=-2.0, kernel=1),
    "space": space(),
    "space in parts": space(num_norms=2, kernel=1, bias=False),
    "short": short(),
    "short biased": short(kernel=4, bias=True),
}
# A feed-forward without a gate.
UNGATED = FeedForward(None, linear(WIDE, HIDDEN), linear(HIDDEN, WIDE), "relu2")


def angles(position: int) -> np.ndarray:
    """Return a position's angles, one for each pair."""
    return position / 10.0 ** (np.arange(ROTARY // 2) + 0.5)


def recipe_of(kind: str) -> Recipe:
    """Return two layers of a kind of attention; some are attention alone, or none."""
    layer = Layer(norm(HIDDEN), KINDS[kind], norm(HIDDEN, bias=True), FORWARD, scale=0.7)
    layers: tuple[Layer, ...] = (layer, layer)
    if kind.startswith("space"):
        alone = replace(layer, forward_norm=None, forward=None)
        behind = Layer(None, None, norm(HIDDEN), UNGATED, scale=0.7)
        layers = (alone, behind, behind, alone, layer)
    if kind == "norms":
        bare = Layer(None, KINDS[kind], None, UNGATED, scale=0.7)
        layers = (layer, replace(bare, attention_out=norm(HIDDEN), forward_out=norm(HIDDEN)))
    return Recipe(HIDDEN, layers, norm(HIDDEN), linear(VOCABULARY, HIDDEN))


def states_of(a: Attending, batch: int, dtype: str = "f32") -> States:
    """Return what is held of no tokens, channel by channel, written over in place."""
    assert isinstance(a, Stateful)
    rows, channels = len(a.conv) - 1, a.conv.shape[1]
    seen = np.zeros((batch, channels, rows), np.float32 if dtype == "f32" else np.uint16)
    states = np.zeros((batch, *a.state), np.float32)
    size = seen.itemsize
    places, steps = (seen.ctypes.data,) * 2, (size * channels * rows, size, size * rows)
    return States(
        *places,
        0,
        dtype,
        (batch, rows, channels),
        steps,
        states.ctypes.data,
        states.ctypes.data,
        0,
        states.shape[1:],
        (seen, states),
    )


def pages_of(recipe: Recipe, batch: int, capacity: int) -> list[Any]:
    """Return empty keys and values, with exactly this room."""
    found: list[Any] = []
    for layer in recipe.layers:
        a = layer.attention
        if a is None:
            found.append(None)
            continue
        if isinstance(a, Stateful):
            found.append(states_of(a, batch))
            continue
        heads, width, value_width = 1, RANK, ROTARY
        if isinstance(a, Attention):
            heads, width, value_width = a.num_kv_heads, a.width, a.value_width
        keys = np.full((batch, heads, capacity, width), np.nan, np.float32)
        values = np.full((batch, heads, capacity, value_width), np.nan, np.float32)
        found.append(
            KeyValues(
                keys.ctypes.data, values.ctypes.data, "f32", keys.shape, value_width, (keys, values)
            )
        )
    return found


def call(program: Any, pages: list[Any], embeddings: np.ndarray, length: int) -> np.ndarray:
    """Return logits of new tokens [batch, each, HIDDEN] behind `length` others."""
    batch, each, _ = embeddings.shape
    program.hidden[: batch * each] = embeddings.reshape(-1, HIDDEN)
    turns = np.array([angles(length + i) for _ in range(batch) for i in range(each)])
    cos, sin = np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)
    program.begin(pages, length, each, np.zeros(batch, np.int64), cos, sin)
    assert program.run() == -1
    found: np.ndarray = program.logits_of(each)
    return found
