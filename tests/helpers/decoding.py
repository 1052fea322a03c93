"""Small recipes of every kind of attention, their formulas in float64, and calls of a program."""

import math
from dataclasses import dataclass, field, replace
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
        return (linear(rows, HIDDEN),) if bound else (linear(5, HIDDEN), linear(rows, 5))

    return DeltaAttention(
        query=linear(keys, HIDDEN),
        key=linear(keys, HIDDEN, bias=True),
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


# The formulas, in float64. ------------------------------------------------------------------------


def times(layer: Linear, x: np.ndarray) -> np.ndarray:
    """Return a linear layer's result."""
    weight = drawn(layer.matrix.rows, layer.matrix.columns).astype(np.float64)
    return x @ weight.T + (0 if layer.bias is None else layer.bias)


def normed(made: Norm | None, x: np.ndarray) -> np.ndarray:
    """Return rows, normed in parts of the norm's width; as they are if there is no norm."""
    if made is None:
        return x
    parts = x.reshape(-1, made.weight.size)
    if made.bias is not None:
        parts = parts - parts.mean(1, keepdims=True)
    found = parts / np.sqrt((parts**2).mean(1, keepdims=True) + EPSILON) * made.weight
    return (found + (0 if made.bias is None else made.bias)).reshape(x.shape)


def turned(rotation: Rotation, x: np.ndarray, position: int) -> np.ndarray:
    """Return heads [num, width] whose first numbers are turned."""
    half = rotation.width // 2
    cos, sin = np.cos(angles(position))[:half], np.sin(angles(position))[:half]
    rest = x[:, rotation.width :]
    if rotation.pairs == "halves":
        a, b = x[:, :half], x[:, half : 2 * half]
    else:
        a, b = x[:, 0 : 2 * half : 2], x[:, 1 : 2 * half : 2]
    low, high = a * cos - b * sin, b * cos + a * sin
    if rotation.pairs == "neighbours":
        both = np.stack([low, high], 2).reshape(len(x), -1)
    else:
        both = np.concatenate([low, high], 1)
    return np.concatenate([both, rest], 1)


def angles(position: int) -> np.ndarray:
    """Return a position's angles, one for each pair."""
    return position / 10.0 ** (np.arange(ROTARY // 2) + 0.5)


def heated(temperature: Temperature, position: int) -> float:
    """Return what multiplies the queries of a position."""
    first = 0 if temperature.is_own else 1
    return float(1 + temperature.scale * np.log1p((position + first) // temperature.floor))


def attended(scores: np.ndarray, values: np.ndarray, sink: float = -np.inf) -> np.ndarray:
    """Return the values' mean, weighted by the softmax of scores and a sink."""
    shares = np.exp(scores - max(scores.max(), sink))
    return shares @ values / (shares.sum() + np.exp(sink - max(scores.max(), sink)))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


@dataclass
class Oracle:
    """One sequence: keys and values of each layer, as the cache holds them."""

    recipe: Recipe
    held: list[list[tuple[np.ndarray, np.ndarray]]]
    states: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def recurrence(self, number: int, x: np.ndarray) -> np.ndarray:
        """Return a layer's linear attention."""
        a = self.recipe.layers[number].attention
        assert isinstance(a, LinearAttention)
        mixed, shares = times(a.mixed, x), times(a.shares, x)
        if a.gates is None or a.decays is None:
            # Key by key: its query, itself, values and their gates; shares, then decays.
            each = a.num_heads // a.num_keys * a.value_width
            ends = [a.width, 2 * a.width, 2 * a.width + each]
            parts = np.split(mixed.reshape(a.num_keys, -1), ends, axis=1)
            mixed = np.concatenate([part.reshape(-1) for part in parts[:3]])
            gates = parts[3].reshape(-1)
            shares, decays = shares.reshape(a.num_keys, 2, -1).swapaxes(0, 1).reshape(2, -1)
        else:
            gates, decays = times(a.gates, x), times(a.decays, x)
        mixed = self.convolved(number, mixed, a.conv, None)
        mixed = mixed * sigmoid(mixed)
        q, k, v = np.split(mixed, [a.num_keys * a.width, 2 * a.num_keys * a.width])
        q, k = (part.reshape(a.num_keys, -1) for part in (q, k))
        q, k = (part / np.sqrt((part**2).sum(1, keepdims=True) + 1e-6) for part in (q, k))
        decays = np.exp(a.rates * np.log1p(np.exp(decays + a.steps)))
        shares, out = sigmoid(shares), []
        for head, value in enumerate(v.reshape(a.num_heads, -1)):
            key = head % a.num_keys if a.is_tiled else head // (a.num_heads // a.num_keys)
            state = self.states.get((number, head), np.zeros((a.width, a.value_width)))
            state = state * decays[head]
            state = state + np.outer(k[key], (value - k[key] @ state) * shares[head])
            self.states[number, head] = state
            out.append(normed(a.norm, q[key] @ state / math.sqrt(a.width)))
        return times(a.out, np.concatenate(out) * gates * sigmoid(gates))

    def channel_decays(self, number: int, a: DeltaAttention, x: np.ndarray) -> np.ndarray:
        """Return a layer's linear attention, whose keys' numbers have decays of their own."""

        def chain(products: tuple[Linear, ...]) -> np.ndarray:
            found = x
            for one in products:
                found = times(one, found)
            return found

        mixed = np.concatenate([times(one, x) for one in (a.query, a.key, a.value)])
        mixed = self.convolved(number, mixed, a.conv, None)
        mixed = mixed * sigmoid(mixed)
        parts = np.split(mixed, [a.num_heads * a.width, 2 * a.num_heads * a.width])
        q, k, v = (part.reshape(a.num_heads, -1) for part in parts)
        q, k = (part / np.sqrt((part**2).sum(1, keepdims=True) + 1e-6) for part in (q, k))
        rates, decays = a.rates[:, None], (chain(a.decays) + a.steps).reshape(a.num_heads, -1)
        powers = rates * np.log1p(np.exp(decays))
        if a.bound is not None:
            powers = a.bound * sigmoid(-rates * decays)
        shares, out = sigmoid(times(a.shares, x)), []
        for head in range(a.num_heads):
            state = self.states.get((number, head), np.zeros((a.width, a.value_width)))
            state = state * np.exp(powers[head])[:, None]
            state = state + np.outer(k[head], (v[head] - k[head] @ state) * shares[head])
            self.states[number, head] = state
            out.append(normed(a.norm, q[head] @ state / math.sqrt(a.width)))
        return times(a.out, np.concatenate(out) * sigmoid(chain(a.gates)))

    def convolved(
        self, number: int, row: np.ndarray, conv: np.ndarray, bias: np.ndarray | None
    ) -> np.ndarray:
        """Return the convolution of a row and of those before it."""
        past = self.held[number]
        past.append((row, row))
        rows = [row for row, _ in past[-len(conv) :]]
        found: np.ndarray = sum(
            (row * weight for row, weight in zip(rows[::-1], conv[::-1], strict=False)),
            np.zeros(row.size) if bias is None else bias.astype(np.float64),
        )
        return found

    def state_space(self, number: int, a: StateSpace, x: np.ndarray) -> np.ndarray:
        """Return a layer's state space."""
        values, keys = a.num_heads * a.value_width, a.num_keys * a.width
        gates, mixed, steps = np.split(times(a.mixed, x), [values, 2 * (values + keys)])
        mixed = self.convolved(number, mixed, a.conv, a.conv_bias)
        mixed = mixed * sigmoid(mixed)
        v, k, q = np.split(mixed, [values, values + keys])
        steps, out = np.log1p(np.exp(steps + a.steps)), []
        for head, value in enumerate(v.reshape(a.num_heads, -1)):
            part = slice(head // 2 * a.width, (head // 2 + 1) * a.width)
            state = self.states.get((number, head), np.zeros((a.value_width, a.width)))
            state = state * np.exp(a.rates[head] * steps[head])
            state = state + np.outer(value * steps[head], k[part])
            self.states[number, head] = state
            out.append(state @ q[part] + a.skips[head] * value)
        parts = np.split(np.concatenate(out) * gates * sigmoid(gates), a.num_norms)
        weights = np.split(a.norm.weight, a.num_norms)
        normal = [normed(Norm(w, EPSILON), part) for w, part in zip(weights, parts, strict=True)]
        return times(a.out, np.concatenate(normal))

    def attention(self, number: int, x: np.ndarray, position: int) -> np.ndarray:
        """Return a layer's attention, of a token's normed hidden state."""
        a = self.recipe.layers[number].attention
        past = self.held[number]
        if isinstance(a, LinearAttention):
            return self.recurrence(number, x)
        if isinstance(a, DeltaAttention):
            return self.channel_decays(number, a, x)
        if isinstance(a, StateSpace):
            return self.state_space(number, a, x)
        if isinstance(a, ShortConvolution):
            before, behind, row = np.split(times(a.mixed, x), 3)
            return times(a.out, behind * self.convolved(number, before * row, a.conv, a.conv_bias))
        if isinstance(a, LatentAttention):
            compressed = times(a.compressed, x)
            latent_now = normed(a.norm, compressed[:RANK])
            past.append((latent_now, turned(a.rotation, compressed[None, RANK:], position)[0]))
            query = times(a.query, normed(a.low_norm, times(a.low, x))).reshape(a.num_heads, -1)
            content, moving = query[:, : a.width], turned(a.rotation, query[:, a.width :], position)
            out = []
            for head in range(a.num_heads):
                expanded = np.array([a.expand[head] @ one for one, _ in past])
                keys = np.concatenate([expanded[:, : a.width], np.array([k for _, k in past])], 1)
                whole = np.concatenate([content[head], moving[head]])
                if a.temperature is not None:
                    whole = whole * heated(a.temperature, position)
                out.append(attended(keys @ whole * a.scale, expanded[:, a.width :]))
            if a.gates is not None:
                out = [
                    one * gate for one, gate in zip(out, sigmoid(times(a.gates, x)), strict=True)
                ]
            return times(a.out, np.concatenate(out))
        q, k, v = times(a.query, x), times(a.key, x), times(a.value, x)
        if a.is_gated:
            q, gates = q.reshape(a.num_heads, 2, -1).swapaxes(0, 1).reshape(2, -1)
        elif a.gates is not None:
            gates = times(a.gates, x)
        if a.query_norm is not None and not a.has_late_norms:
            q, k = normed(a.query_norm, q), normed(a.key_norm, k)
        if a.clip is not None:
            q, k, v = (np.clip(one, -a.clip, a.clip) for one in (q, k, v))
        v = v * a.value_scale
        q = turned(a.rotation, q.reshape(a.num_heads, -1), position)
        k = turned(a.rotation, k.reshape(a.num_kv_heads, -1), position)
        if a.has_late_norms:
            q, k = normed(a.query_norm, q), normed(a.key_norm, k)
        past.append((k, v.reshape(a.num_kv_heads, -1)))
        seen = past[-a.window :] if a.window else past
        if a.is_chunked and a.window:
            seen = past[position // a.window * a.window :]
        if a.temperature is not None:
            q = q * heated(a.temperature, position)
        out = []
        for head in range(a.num_heads):
            shared = head // (a.num_heads // a.num_kv_heads)
            keys, values = (np.array([pair[i][shared] for pair in seen]) for i in (0, 1))
            sink = -np.inf if a.sinks is None else float(a.sinks[head])
            out.append(attended(keys @ q[head] * a.scale, values, sink))
        mixed = np.concatenate(out)
        if a.is_gated or a.gates is not None:
            gates = np.log1p(np.exp(gates)) if a.gate_function == "softplus" else sigmoid(gates)
            mixed = (mixed.reshape(gates.size, -1) * gates[:, None]).reshape(-1)
        return times(a.out, mixed)

    def forward(self, forward: FeedForward, x: np.ndarray) -> np.ndarray:
        """Return a feed-forward's result."""
        wide = times(forward.up, x)
        if forward.gate is None:
            return times(forward.down, np.maximum(wide, 0) ** 2)
        assert forward.weight is not None
        gate = times(forward.gate, x)
        return sigmoid(times(forward.weight, x)) * times(forward.down, gate * sigmoid(gate) * wide)

    def logits(self, embedding: np.ndarray, position: int) -> np.ndarray:
        """Return a token's logits."""
        x = embedding.astype(np.float64)
        for number, layer in enumerate(self.recipe.layers):
            if layer.attention is not None:
                given = normed(layer.attention_norm, x)
                added = self.attention(number, given, position)
                x = x + layer.scale * normed(layer.attention_out, added)
            if layer.forward is not None:
                forward = self.forward(layer.forward, normed(layer.forward_norm, x))
                x = x + layer.scale * normed(layer.forward_out, forward)
        return times(self.recipe.head, normed(self.recipe.norm, x))


# The program. -------------------------------------------------------------------------------------


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
