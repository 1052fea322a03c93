"""Program beside its formulas in NumPy: attention of every kind, routers, many rows, any level."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moecache import ExpertCache, kernels
from moecache.decoding._held import KeyValues
from moecache.decoding._program import Program
from moecache.decoding.recipe import (
    Layer,
    Linear,
    Recipe,
    Rotation,
    Router,
    Temperature,
)
from moecache.errors import ConfigError
from tests.helpers.decoding import (
    FORWARD,
    HEADS,
    HIDDEN,
    KINDS,
    RANK,
    VOCABULARY,
    angles,
    call,
    delta,
    drawn,
    grouped,
    latent,
    linear,
    norm,
    pages_of,
    recipe_of,
    short,
    states_of,
)
from tests.helpers.kernels import LEVELS, computing
from tests.helpers.oracle_decoding import Oracle, normed, times


@pytest.mark.parametrize("cut", [1, 3, 9])
@pytest.mark.parametrize("kind", ["linear", "short"])
def test_rows_of_a_convolution_are_what_a_cache_would_keep(kind: str, cut: int) -> None:
    """In bfloat16: a token's bits depend on no cut."""
    recipe, num = recipe_of(kind), 9
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


@pytest.mark.parametrize("level", LEVELS)
def test_inputs_of_numbers_have_the_type_that_a_recipe_says(level: str) -> None:
    """Rounded where the processor multiplies bfloat16, and for weights of bfloat16 alone."""
    tokens = np.random.default_rng(3).normal(size=(1, 3, HIDDEN)).astype(np.float32)
    with computing(level):
        for dtype, is_rounded in (("float32", False), ("bfloat16", level in ("avx512", "amx"))):
            weights = drawn(VOCABULARY, HIDDEN).astype(dtype)
            head = Linear(kernels.matrix_of(weights))
            found = []
            for product_type in ("f32", "bf16"):
                recipe = Recipe(HIDDEN, (), norm(HIDDEN), head, product_type=product_type)
                program = Program(recipe, ExpertCache(num_layers=1, num_experts=8, capacity=4))
                found.append(call(program, [], tokens, 0)[0])
            assert np.array_equal(*found) != is_rounded, dtype
            rounded = normed(norm(HIDDEN), tokens[0].astype(np.float64)).astype("bfloat16")
            wanted = rounded.astype(np.float64) @ weights.astype(np.float64).T
            if is_rounded:
                np.testing.assert_allclose(found[1], wanted, rtol=1e-5, atol=1e-5)


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
    "sigmoid of capped logits": {"scores": "sigmoid", "cap": 0.5},
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
    if router.cap:
        logits = router.cap * np.tanh(logits / router.cap)
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
        ({"temperature": Temperature(0.0, 0.1)}, "have no temperature"),
        ({"out": linear(HIDDEN, HEADS * 6)}, "is not one of"),
        ({"gates": linear(HEADS * 10, HIDDEN)}, "gates of 10 numbers for values of 7"),
        ({"gates": linear(HEADS * 10, HIDDEN), "is_gated": True}, "and there is a matrix of gates"),
        ({"gate_function": "softplus"}, "have a matrix of their own"),
        ({"gates": linear(HEADS, HIDDEN), "gate_function": "tanh"}, "gates of 10 numbers"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    """Before anything is computed."""
    layer = Layer(norm(HIDDEN), grouped(**change), norm(HIDDEN), FORWARD)
    recipe = Recipe(HIDDEN, (layer,), norm(HIDDEN), linear(VOCABULARY, HIDDEN))
    with pytest.raises(ConfigError, match=message):
        Program(recipe, ExpertCache(num_layers=1, num_experts=8, capacity=4))
    narrow = replace(latent(), expand=drawn(HEADS, 9 + 7, RANK + 1))
    layer = replace(layer, attention=narrow)
    with pytest.raises(ConfigError, match="does not expand latents of 16"):
        Program(
            replace(recipe, layers=(layer,)), ExpertCache(num_layers=1, num_experts=8, capacity=4)
        )


@pytest.mark.parametrize("kind", ["plain", "linear"])
def test_a_layer_with_attention_has_a_page(kind: str) -> None:
    """`None` is for layers that hold nothing."""
    recipe = recipe_of(kind)
    program = Program(recipe, ExpertCache(num_layers=1, num_experts=8, capacity=4))
    pages = [pages_of(recipe, 1, 4)[0], None]
    with pytest.raises(ConfigError, match="layer 1 has attention, and no page"):
        call(program, pages, np.ones((1, 1, HIDDEN), np.float32), 0)


def test_nothing_is_resumed_before_a_call_and_behind_it() -> None:
    """No layer waits then."""
    recipe = recipe_of("plain")
    program = Program(recipe, ExpertCache(num_layers=1, num_experts=8, capacity=4))
    with pytest.raises(ValueError, match="no layer waits"):
        program.resume()
    call(program, pages_of(recipe, 1, 4), np.ones((1, 1, HIDDEN), np.float32), 0)
    with pytest.raises(ValueError, match="no layer waits"):
        program.resume()


def test_experts_of_all_layers_are_given_latents_or_of_none() -> None:
    """Also where a latent is as wide as a hidden state."""
    kernel = kernels.SlotKernel(
        lambda _: {"gate_up": drawn(16, HIDDEN), "down": drawn(HIDDEN, 8)}, 1
    )
    router = Router(linear(16, HIDDEN), 2, "softmax")
    layer = Layer(norm(HIDDEN), grouped(), norm(HIDDEN), None, router, kernel.experts, number=0)
    given = replace(layer, latents=(linear(HIDDEN, HIDDEN), linear(HIDDEN, HIDDEN)))
    cache = ExpertCache(num_layers=1, num_experts=16, capacity=4)
    with pytest.raises(ConfigError, match="given latents, or those of none"):
        Program(Recipe(HIDDEN, (layer, given), norm(HIDDEN), linear(VOCABULARY, HIDDEN)), cache)


@pytest.mark.parametrize("kind", ["linear", "delta", "delta bounded", "space"])
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_no_number_stays_none(kind: str, level: str) -> None:
    """A damaged weight is no text that looks well."""
    a: Any = KINDS[kind]
    layer = Layer(norm(HIDDEN), replace(a, steps=np.full_like(a.steps, np.nan)), None)
    recipe = Recipe(HIDDEN, (layer,), norm(HIDDEN), linear(VOCABULARY, HIDDEN))
    with computing(level=level):
        program = Program(recipe, ExpertCache(num_layers=1, num_experts=8, capacity=4))
        embeddings = np.ones((1, 1, HIDDEN), np.float32)
        assert np.isnan(call(program, pages_of(recipe, 1, 1), embeddings, 0)).all()


def test_bounds_of_decays_are_below_zero() -> None:
    """Nor what float32 makes zero, or infinite; a far one is a bound."""
    cache = ExpertCache(num_layers=1, num_experts=8, capacity=4)
    for bound in (-1e6, 0.0, -1e-46, 1.0, -1e39, float("nan")):
        layer = Layer(norm(HIDDEN), replace(delta(), bound=bound), norm(HIDDEN), FORWARD)
        recipe = Recipe(HIDDEN, (layer,), norm(HIDDEN), linear(VOCABULARY, HIDDEN))
        if bound == -1e6:
            Program(recipe, cache)
            continue
        with pytest.raises(ConfigError, match="a bound of decays is"):
            Program(recipe, cache)


def test_decays_are_a_product_or_two() -> None:
    """A third, or none, is refused."""
    cache = ExpertCache(num_layers=1, num_experts=8, capacity=4)
    for decays in ((), delta().decays + delta().decays):
        layer = Layer(norm(HIDDEN), replace(delta(), decays=decays), norm(HIDDEN), FORWARD)
        recipe = Recipe(HIDDEN, (layer,), norm(HIDDEN), linear(VOCABULARY, HIDDEN))
        with pytest.raises(ConfigError, match=f"{len(decays)} products are neither one nor two"):
            Program(recipe, cache)


def test_a_convolution_is_over_a_few_rows() -> None:
    """The message says over how many."""
    layer = Layer(norm(HIDDEN), short(kernel=9), norm(HIDDEN), FORWARD)
    recipe = Recipe(HIDDEN, (layer,), norm(HIDDEN), linear(VOCABULARY, HIDDEN))
    with pytest.raises(ConfigError, match="a program's are over 1 to 8 rows"):
        Program(recipe, ExpertCache(num_layers=1, num_experts=8, capacity=4))
