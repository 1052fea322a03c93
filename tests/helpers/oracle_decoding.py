"""The formulas of recipes, in float64."""

import math
from dataclasses import dataclass, field

import numpy as np

from moecache.decoding.recipe import (
    DeltaAttention,
    FeedForward,
    LatentAttention,
    Linear,
    LinearAttention,
    Norm,
    Recipe,
    Rotation,
    ShortConvolution,
    StateSpace,
    Temperature,
)
from tests.helpers.decoding import EPSILON, RANK, angles, drawn


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
