"""Program beside its formulas in NumPy: attention of every kind, routers, many rows, any level."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from moecache import ExpertCache, kernels
from moecache.decoding._held import KeyValues, States
from moecache.decoding._program import Program
from moecache.decoding.recipe import (
    Attention,
    FeedForward,
    LatentAttention,
    Layer,
    Linear,
    LinearAttention,
    Norm,
    Recipe,
    Rotation,
    Router,
)
from moecache.errors import ConfigError
from tests.helpers.kernels import LEVELS, computing

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


FORWARD = FeedForward(
    linear(WIDE, HIDDEN), linear(WIDE, HIDDEN), linear(HIDDEN, WIDE), "silu", linear(1, HIDDEN)
)
KINDS = {
    "plain": grouped(),
    "window": grouped(window=4, sinks=drawn(HEADS), rotation=Rotation(ROTARY, "neighbours")),
    "norms": grouped(query_norm=norm(10), key_norm=norm(20), clip=0.7),
    "late norms": grouped(query_norm=norm(10), key_norm=norm(10), has_late_norms=True),
    "chunks": grouped(window=4, is_chunked=True),
    "temperature": grouped(temperature=(2.0, 0.7)),
    "latent": latent(),
    "three latent heads": latent(3),
    "gates": grouped(
        query=linear(2 * HEADS * 10, HIDDEN),
        value=linear(20, HIDDEN),
        out=linear(HIDDEN, HEADS * 10),
        value_width=10,
        is_gated=True,
    ),
    "linear": recurrent(),
    "linear tiled": recurrent(is_tiled=True, kernel=1),
    "linear joined": recurrent(is_joined=True),
}


# The formulas, in float64. ------------------------------------------------------------------------


def times(layer: Linear, x: np.ndarray) -> np.ndarray:
    """Return a linear layer's result."""
    weight = drawn(layer.matrix.rows, layer.matrix.columns).astype(np.float64)
    return x @ weight.T + (0 if layer.bias is None else layer.bias)


def normed(made: Norm, x: np.ndarray) -> np.ndarray:
    """Return rows, normed in parts of the norm's width."""
    parts = x.reshape(-1, made.weight.size)
    if made.bias is not None:
        parts = parts - parts.mean(1, keepdims=True)
    found = parts / np.sqrt((parts**2).mean(1, keepdims=True) + EPSILON) * made.weight
    return (found + (0 if made.bias is None else made.bias)).reshape(x.shape)


def turned(rotation: Rotation, x: np.ndarray, position: int) -> np.ndarray:
    """Return heads [num, width] whose first numbers are turned."""
    half = rotation.width // 2
    cos, sin = np.cos(angles(position)), np.sin(angles(position))
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
        a, past = self.recipe.layers[number].attention, self.held[number]
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
        past.append((mixed, x))
        rows = [row for row, _ in past[-len(a.conv) :]]
        mixed = sum(row * weight for row, weight in zip(rows[::-1], a.conv[::-1], strict=False))
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

    def attention(self, number: int, x: np.ndarray, position: int) -> np.ndarray:
        """Return a layer's attention, of a token's normed hidden state."""
        a = self.recipe.layers[number].attention
        past = self.held[number]
        if isinstance(a, LinearAttention):
            return self.recurrence(number, x)
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
                out.append(attended(keys @ whole * a.scale, expanded[:, a.width :]))
            return times(a.out, np.concatenate(out))
        q, k, v = times(a.query, x), times(a.key, x), times(a.value, x)
        if a.is_gated:
            q, gates = q.reshape(a.num_heads, 2, -1).swapaxes(0, 1).reshape(2, -1)
        if a.query_norm is not None and not a.has_late_norms:
            q, k = normed(a.query_norm, q), normed(a.key_norm, k)
        if a.clip is not None:
            q, k, v = (np.clip(one, -a.clip, a.clip) for one in (q, k, v))
        q = turned(a.rotation, q.reshape(a.num_heads, -1), position)
        k = turned(a.rotation, k.reshape(a.num_kv_heads, -1), position)
        if a.has_late_norms:
            q, k = normed(a.query_norm, q), normed(a.key_norm, k)
        past.append((k, v.reshape(a.num_kv_heads, -1)))
        seen = past[-a.window :] if a.window else past
        if a.is_chunked and a.window:
            seen = past[position // a.window * a.window :]
        if a.temperature is not None:
            q = q * (1 + a.temperature[1] * np.log1p((position + 1) // a.temperature[0]))
        out = []
        for head in range(a.num_heads):
            shared = head // (a.num_heads // a.num_kv_heads)
            keys, values = (np.array([pair[i][shared] for pair in seen]) for i in (0, 1))
            sink = -np.inf if a.sinks is None else float(a.sinks[head])
            out.append(attended(keys @ q[head] * a.scale, values, sink))
        mixed = np.concatenate(out)
        return times(a.out, mixed * sigmoid(gates) if a.is_gated else mixed)

    def logits(self, embedding: np.ndarray, position: int) -> np.ndarray:
        """Return a token's logits."""
        x = embedding.astype(np.float64)
        for number, layer in enumerate(self.recipe.layers):
            given = normed(layer.attention_norm, x)
            x = x + layer.scale * self.attention(number, given, position)
            given, forward = normed(layer.forward_norm, x), layer.forward
            assert forward is not None
            gate = times(forward.gate, given)
            wide = gate / (1 + np.exp(-gate)) * times(forward.up, given)
            weight = 1 / (1 + np.exp(-times(forward.weight, given)))
            x = x + layer.scale * weight * times(forward.down, wide)
        return times(self.recipe.head, normed(self.recipe.norm, x))


# The program. -------------------------------------------------------------------------------------


def recipe_of(kind: str) -> Recipe:
    """Return two layers of a kind of attention."""
    layer = Layer(norm(HIDDEN), KINDS[kind], norm(HIDDEN, bias=True), FORWARD, scale=0.7)
    return Recipe(HIDDEN, (layer, layer), norm(HIDDEN), linear(VOCABULARY, HIDDEN))


def states_of(a: LinearAttention, batch: int, dtype: str = "f32") -> States:
    """Return what is held of no tokens, channel by channel, written over in place."""
    rows, channels = len(a.conv) - 1, a.conv.shape[1]
    seen = np.zeros((batch, channels, rows), np.float32 if dtype == "f32" else np.uint16)
    states = np.zeros((batch, a.num_heads, a.width, a.value_width), np.float32)
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
    found = []
    for layer in recipe.layers:
        a = layer.attention
        if isinstance(a, LinearAttention):
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


@pytest.mark.parametrize("cut", [1, 3, 9])
def test_rows_of_a_convolution_are_what_a_cache_would_keep(cut: int) -> None:
    """In bfloat16: a token's bits depend on no cut."""
    recipe, num = recipe_of("linear"), 9
    tokens = np.random.default_rng(3).normal(size=(1, num, HIDDEN)).astype(np.float32)
    program = Program(recipe, ExpertCache(num_layers=1, num_experts=8, capacity=4))
    found = []
    for each in (1, cut):
        pages: list[Any] = [states_of(layer.attention, 1, "bf16") for layer in recipe.layers]  # type: ignore[arg-type]
        parts = range(0, num, each)
        rows = [call(program, pages, tokens[:, i : i + each], i)[0] for i in parts]
        found.append(np.concatenate(rows))
    assert np.array_equal(*found)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_computes_the_formulas(kind: str, level: str) -> None:
    """Token by token, several at once and two sequences: near them, and the same bits."""
    recipe, num = recipe_of(kind), 9
    tokens = np.random.default_rng(3).normal(size=(2, num, HIDDEN)).astype(np.float32)
    with computing(level, threads=2):
        program = Program(recipe, ExpertCache(num_layers=1, num_experts=8, capacity=4))
        pages = pages_of(recipe, 1, num)
        alone = [call(program, pages, tokens[:1, i : i + 1], i)[0, 0] for i in range(num)]
        pages = pages_of(recipe, 1, num)
        together = [call(program, pages, tokens[:1, i : i + 3], i)[0] for i in range(0, num, 3)]
        pages = pages_of(recipe, 2, num)
        both = [call(program, pages, tokens[:, i : i + 3], i) for i in range(0, num, 3)]
    assert np.array_equal(np.concatenate(together), alone)
    assert np.array_equal(np.concatenate(both, 1)[0], alone)
    oracle = Oracle(recipe, [[] for _ in recipe.layers])
    expected = [oracle.logits(tokens[0, i], i) for i in range(num)]
    np.testing.assert_allclose(alone, expected, rtol=2e-4, atol=2e-4)


def test_what_a_window_has_passed_need_not_be_there() -> None:
    """Positions before it may be dropped, and no others."""
    recipe = recipe_of("window")
    program = Program(recipe, ExpertCache(num_layers=1, num_experts=8, capacity=4))
    tokens = np.random.default_rng(3).normal(size=(1, 8, HIDDEN)).astype(np.float32)
    pages = pages_of(recipe, 1, 8)
    expected = [call(program, pages, tokens[:, i : i + 1], i) for i in range(8)][-1]
    cut = []
    for dropped in (4, 5):
        cut = []
        for page in pages:
            keys, values = (part[:, :, dropped:].copy() for part in page.owner)
            keys[:, :, -1:] = values[:, :, -1:] = np.nan
            cut.append(
                KeyValues(
                    keys.ctypes.data,
                    values.ctypes.data,
                    "f32",
                    keys.shape,
                    7,
                    (keys, values),
                    dropped,
                )
            )
        if dropped == 4:
            assert np.array_equal(call(program, cut, tokens[:, 7:], 7), expected)
    with pytest.raises(ConfigError, match="have no room for 1 tokens after 7"):
        call(program, cut, tokens[:, 7:], 7)


ROUTERS = {
    "softmax": {"scores": "softmax", "is_normalized": True, "scale": 1.5},
    "of the chosen": {"scores": "softmax of the chosen"},
    "sigmoid groups": {
        "scores": "sigmoid",
        "num_groups": 4,
        "num_kept_groups": 2,
        "correction": drawn(16),
        "is_normalized": True,
        "least": 1e-20,
    },
    "best of a group": {"scores": "softmax", "num_groups": 4, "num_kept_groups": 3, "num_best": 1},
    "sigmoid of the chosen": {"scores": "sigmoid of the chosen"},
    "floor": {"scores": "softmax", "is_normalized": True, "floor": 0.9},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_chooses_by_its_formula(name: str) -> None:
    """Experts in the order of their scores, and weights that make the sum of their rows."""
    options: dict[str, Any] = ROUTERS[name]
    experts, top_k, width = 16, 3, 8
    stack = {"gate_up": drawn(2 * width, HIDDEN), "down": drawn(HIDDEN, width)}
    kernel = kernels.SlotKernel(lambda _: stack, 1)
    router = Router(linear(experts, HIDDEN), top_k, **options)
    layer = Layer(norm(HIDDEN), grouped(), norm(HIDDEN), None, router, kernel.experts, number=0)
    recipe = Recipe(HIDDEN, (layer,), norm(HIDDEN), linear(VOCABULARY, HIDDEN))
    program = Program(recipe, ExpertCache(num_layers=1, num_experts=experts, capacity=4))
    token = np.random.default_rng(5).normal(size=(1, 1, HIDDEN)).astype(np.float32)
    pages = pages_of(recipe, 1, 4)
    program.hidden[:1] = token[0]
    zero = angles(0)[None].astype(np.float32)
    program.begin(pages, 0, 1, np.zeros(1, np.int64), np.cos(zero), np.sin(zero))
    assert program.run() == 0
    slots = np.zeros(top_k, np.int32)
    program.rows[:top_k] = np.nan
    for part in ([2], [0, 1]):
        assert program.compute(slots, part) > 0
    apart = program.rows[:top_k].copy()
    program.compute(slots, [0, 1, 2])
    assert np.array_equal(program.rows[:top_k], apart)
    for wrong in ([3], [-1], [0, 1, 2, 0]):
        with pytest.raises(ValueError, match=r"has no slot|are none of"):
            program.compute(slots, wrong)
    with pytest.raises(ValueError, match="has no slot"):
        program.compute(slots - 1, [0])
    logits = times(router.linear, program.normed[0].astype(np.float64))
    scores = 1 / (1 + np.exp(-logits)) if "sigmoid" in name else np.exp(logits)
    scores = scores if "sigmoid" in name else scores / scores.sum()
    choice = (logits if name.endswith("of the chosen") else scores).copy()
    if router.correction is not None:
        choice += router.correction
    if router.num_groups > 1:
        size = experts // router.num_groups
        best = np.sort(choice.reshape(-1, size), 1)[:, -router.num_best :].sum(1)
        dropped = np.argsort(best)[: router.num_groups - router.num_kept_groups]
        choice.reshape(-1, size)[dropped] = -np.inf
    chosen = np.argsort(-choice, kind="stable")[:top_k]
    assert program.ids[0].tolist() == chosen.tolist()
    weights = scores[chosen]
    if name == "of the chosen":
        weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
    if router.is_normalized:
        weights = weights / max(weights.sum() + router.least, router.floor)
    # One number of each row: the sum's are then the weights.
    program.rows[:top_k] = 0
    program.rows[np.arange(top_k), np.arange(top_k)] = 1000
    before = program.hidden[0].copy()
    program.resume()
    added = (program.hidden[0] - before)[:top_k] / 1000
    np.testing.assert_allclose(added, weights * router.scale, rtol=1e-3)
    assert program.run() == -1
    assert program.logits_of(1).shape == (1, 1, VOCABULARY)


def test_a_score_may_be_on_the_input_of_the_only_expert() -> None:
    """Its result then counts whole; the shared feed-forward gets the input as it is."""
    kernel = kernels.SlotKernel(
        lambda _: {"gate_up": drawn(16, HIDDEN), "down": drawn(HIDDEN, 8)}, 1
    )
    router = Router(linear(16, HIDDEN), 1, "sigmoid of the chosen", scales_input=True)
    layer = Layer(norm(HIDDEN), grouped(), norm(HIDDEN), FORWARD, router, kernel.experts, number=0)
    plain = replace(layer, router=replace(router, scales_input=False))
    found = []
    for one in (layer, plain):
        recipe = Recipe(HIDDEN, (one,), norm(HIDDEN), linear(VOCABULARY, HIDDEN))
        program = Program(recipe, ExpertCache(num_layers=1, num_experts=16, capacity=4))
        tokens = np.random.default_rng(5).normal(size=(1, 2, HIDDEN)).astype(np.float32)
        program.hidden[:2] = tokens[0]
        turns = np.array([angles(0), angles(1)], np.float32)
        pages = pages_of(recipe, 1, 2)
        program.begin(pages, 0, 2, np.zeros(1, np.int64), np.cos(turns), np.sin(turns))
        assert program.run() == 0
        given, ids = program.normed[:2].copy(), program.ids[:2].copy()
        program.rows[:2] = 0
        program.resume()
        assert program.run() == -1
        found.append((given, ids, program.logits_of(2)))
    (scaled, chosen, logits), (given, ids, others) = found
    assert np.array_equal(chosen, ids)
    all_scores = 1 / (1 + np.exp(-times(router.linear, given.astype(np.float64))))
    scores = np.take_along_axis(all_scores, ids.astype(np.int64), 1)
    np.testing.assert_allclose(scaled, given * scores, rtol=1e-5)
    # Of experts that add nothing, the rest is the same.
    assert np.array_equal(logits, others)
    with pytest.raises(ConfigError, match="does not fit its experts"):
        two = replace(layer, router=replace(router, top_k=2))
        Program(
            Recipe(HIDDEN, (two,), norm(HIDDEN), linear(VOCABULARY, HIDDEN)),
            ExpertCache(num_layers=1, num_experts=16, capacity=4),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "do not share"),
        ({"rotation": Rotation(7)}, "cannot be turned"),
        ({"rotation": Rotation(12)}, "cannot be turned"),
        ({"sinks": drawn(3)}, "3 float32 are not 4"),
        ({"query_norm": norm(9)}, "does not fit"),
        ({"window": -1}, "do not share"),
        ({"temperature": (0.0, 0.1)}, "have no temperature"),
        ({"out": linear(HIDDEN, HEADS * 6)}, "is not one of"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    """Before anything is computed."""
    layer = Layer(norm(HIDDEN), grouped(**change), norm(HIDDEN), FORWARD)
    recipe = Recipe(HIDDEN, (layer,), norm(HIDDEN), linear(VOCABULARY, HIDDEN))
    with pytest.raises(ConfigError, match=message):
        Program(recipe, ExpertCache(num_layers=1, num_experts=8, capacity=4))
    short = replace(latent(), expand=drawn(HEADS, 9 + 7, RANK + 1))
    layer = replace(layer, attention=short)
    with pytest.raises(ConfigError, match="does not expand latents of 16"):
        Program(
            replace(recipe, layers=(layer,)), ExpertCache(num_layers=1, num_experts=8, capacity=4)
        )
