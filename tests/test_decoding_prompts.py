"""A prompt's tokens, which meet their keys together: each has the bits that it has alone."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from moecache import ExpertCache
from moecache.decoding._held import KeyValues
from moecache.decoding._program import Program
from moecache.decoding.recipe import Recipe
from tests.helpers.decoding import HIDDEN, call, drawn, grouped, linear, recipe_of
from tests.helpers.kernels import LEVELS, computing

# More than a block of positions, and no multiple of it.
NUM = 150
# Four heads that share keys meet them together; if they are fewer, with those of the next tokens.
HEADS = {"alone": (3, 3), "two": (4, 2), "four": (4, 1), "six": (12, 2), "nine": (36, 4)}
# Widths of whole registers of every level and a rest, and of fewer than one.
WIDTHS = [(70, 134), (16, 3)]


def recipe_with(heads: tuple[int, int], widths: tuple[int, int], window: int) -> Recipe:
    """Return two layers of attention."""
    (num, num_kv), (width, value_width) = heads, widths
    recipe = recipe_of("plain")
    attention = grouped(
        query=linear(num * width, HIDDEN),
        key=linear(num_kv * width, HIDDEN),
        value=linear(num_kv * value_width, HIDDEN),
        out=linear(HIDDEN, num * value_width),
        num_heads=num,
        num_kv_heads=num_kv,
        width=width,
        value_width=value_width,
        window=window,
        sinks=drawn(num) if window else None,
    )
    layers = tuple(replace(layer, attention=attention) for layer in recipe.layers)
    return replace(recipe, layers=layers)


def pages_of(recipe: Recipe, dtype: str) -> list[Any]:
    """Return empty keys and values of a sequence."""
    found = []
    for layer in recipe.layers:
        a: Any = layer.attention
        keys, values = (
            np.full(
                (1, a.num_kv_heads, NUM, width),
                np.nan,
                ml_dtypes.bfloat16 if dtype == "bf16" else np.float32,
            )
            for width in (a.width, a.value_width)
        )
        found.append(
            KeyValues(
                keys.ctypes.data,
                values.ctypes.data,
                dtype,
                keys.shape,
                a.value_width,
                (keys, values),
            )
        )
    return found


@pytest.mark.parametrize("window", [0, 3, 67])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_token_has_the_bits_that_it_has_alone(level: str, heads: str, window: int) -> None:
    """Whatever stands beside it, in one call or in several."""
    tokens = np.random.default_rng(3).normal(size=(1, NUM, HIDDEN)).astype(np.float32)
    dtype, widths = ("bf16", WIDTHS[0]) if window != 3 else ("f32", WIDTHS[1])
    recipe = recipe_with(HEADS[heads], widths, window)
    with computing(level, threads=2):
        program = Program(recipe, ExpertCache(num_layers=1, num_experts=8, capacity=4), NUM)
        pages = pages_of(recipe, dtype)
        alone = [call(program, pages, tokens[:, i : i + 1], i)[0, 0] for i in range(NUM)]
        assert np.isfinite(alone).all()
        for begins in ([0], [0, 1, 18, 101]):
            pages = pages_of(recipe, dtype)
            for begin, end in zip(begins, [*begins[1:], NUM], strict=True):
                found = call(program, pages, tokens[:, begin:end], begin)[0]
                assert np.array_equal(found, alone[begin:end]), (begin, end)
