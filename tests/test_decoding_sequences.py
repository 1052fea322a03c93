"""Sequences with caches of their own that decode in one call: each row's bits are those alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from moecache import ExpertCache
from moecache.decoding._held import KeyValues
from moecache.decoding._program import MAX_ROWS, Program
from moecache.errors import ConfigError
from tests.helpers.decoding import HIDDEN, KINDS, angles, call, pages_of, recipe_of
from tests.helpers.kernels import LEVELS, computing

LENGTHS = (0, 3, 11, 6)


def program_of(kind: str) -> tuple[Any, Any]:
    """Return two layers of a kind of attention, and what computes them."""
    recipe = recipe_of(kind)
    return recipe, Program(recipe, ExpertCache(num_layers=1, num_experts=8, capacity=4))


def call_together(
    program: Any, caches: list[Any], embeddings: np.ndarray, lengths: Sequence[int]
) -> np.ndarray:
    """Return logits of a new token [num, HIDDEN] of each sequence, behind as many as it has."""
    program.hidden[: len(caches)] = embeddings
    turns = np.array([angles(length) for length in lengths])
    cos, sin = np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)
    program.begin_together(caches, np.array(lengths, np.int64), cos, sin)
    assert program.run() == -1
    found: np.ndarray = program.logits_of(1)[:, 0]
    return found


def tokens_of(num: int) -> np.ndarray:
    """Return embeddings, float32 [num, 16, HIDDEN]."""
    return np.random.default_rng(3).normal(size=(num, 16, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_any_lengths_decode_together(kind: str, level: str) -> None:
    """Each has its own room; in each of four calls a row has the bits that it has alone."""
    recipe, program = program_of(kind)
    tokens = tokens_of(len(LENGTHS))
    with computing(level, threads=2):
        caches, expected = [], []
        for own, length in zip(tokens, LENGTHS, strict=True):
            pages = pages_of(recipe, 1, 16)
            alone = [call(program, pages, own[None, i : i + 1], i)[0, 0] for i in range(length + 4)]
            expected.append(alone[length:])
            caches.append(pages_of(recipe, 1, length + 4 + length % 2))
            for i in range(length):
                call(program, caches[-1], own[None, i : i + 1], i)
        for i in range(4):
            now = [length + i for length in LENGTHS]
            new = np.stack([own[place] for own, place in zip(tokens, now, strict=True)])
            found = call_together(program, caches, new, now)
            assert np.array_equal(found, [alone[i] for alone in expected]), i


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_may_have_several_tokens_each(kind: str) -> None:
    """As many as they like: a row's bits, and what is kept of it, are those of a token alone."""
    recipe, program = program_of(kind)
    tokens, counts = tokens_of(len(LENGTHS)), (3, 1, 5, 7)
    caches, expected, pages = [], [], []
    for own, length, count in zip(tokens, LENGTHS, counts, strict=True):
        pages.append(pages_of(recipe, 1, length + count + 1))
        alone = [call(program, pages[-1], own[None, i : i + 1], i) for i in range(length + count)]
        expected.append(alone[-1][0, 0])
        caches.append(pages_of(recipe, 1, length + count + 1))
        for i in range(length):
            call(program, caches[-1], own[None, i : i + 1], i)
    ends = [length + count for length, count in zip(LENGTHS, counts, strict=True)]
    spans = [*zip(LENGTHS, ends, strict=True)]
    program.hidden[: sum(counts)] = np.concatenate(
        [own[begin:end] for own, (begin, end) in zip(tokens, spans, strict=True)]
    )
    turns = np.array([angles(place) for begin, end in spans for place in range(begin, end)])
    cos, sin = np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)
    program.begin_together(
        caches, np.array(LENGTHS, np.int64), cos, sin, counts=np.array(counts, np.int64)
    )
    assert program.run() == -1
    with pytest.raises(ConfigError, match="logits of 2 of 1 tokens"):
        program.logits_of(2)
    assert np.array_equal(program.logits_of(1)[:, 0], expected)
    # What was kept: one more token of each.
    more = tokens_of(len(LENGTHS))[:, 15]
    apart = [
        call(program, page, own[None, None], end)[0, 0]
        for page, own, end in zip(pages, more, ends, strict=True)
    ]
    assert np.array_equal(call_together(program, caches, more, ends), apart)


def test_sequences_may_have_dropped_what_their_windows_have_passed() -> None:
    """Each as many positions as it likes."""
    recipe, program = program_of("window")
    tokens = tokens_of(2)
    caches, expected = [], []
    for own, dropped in zip(tokens, (0, 4), strict=True):
        pages = pages_of(recipe, 1, 8)
        for i in range(7):
            call(program, pages, own[None, i : i + 1], i)
        caches.append([cut(page, dropped) for page in pages])
        expected.append(call(program, pages, own[None, 7:8], 7)[0, 0])
    assert np.array_equal(call_together(program, caches, tokens[:, 7], [7, 7]), expected)


def cut(page: Any, dropped: int) -> KeyValues:
    """Return a copy without the first positions."""
    keys, values = (part[:, :, dropped:].copy() for part in page.owner)
    return KeyValues(
        keys.ctypes.data,
        values.ctypes.data,
        "f32",
        keys.shape,
        values.shape[3],
        (keys, values),
        dropped,
    )


def test_a_call_of_sequences_that_do_not_fit_is_refused() -> None:
    """A cache twice, no room, too many, lengths or angles of others; the next call is as ever."""
    recipe, program = program_of("plain")
    tokens = tokens_of(3)
    caches = [pages_of(recipe, 1, 2) for _ in range(MAX_ROWS + 1)]
    with pytest.raises(ConfigError, match="two sequences have one cache"):
        call_together(program, [caches[0], caches[1], caches[0]], tokens[:, 0], [0, 0, 0])
    with pytest.raises(ConfigError, match="no room for 1 tokens after 2"):
        call_together(program, caches[:2], tokens[:2, 0], [0, 2])
    zeros = np.zeros((MAX_ROWS + 1, 3), np.float32)
    for num, lengths in ((0, 0), (2, 3), (MAX_ROWS + 1, MAX_ROWS + 1)):
        with pytest.raises(ConfigError):
            program.begin_together(caches[:num], np.zeros(lengths, np.int64), zeros, zeros)
    with pytest.raises(ConfigError, match="angles"):
        program.begin_together(caches[:2], np.zeros(2, np.int64), zeros[:3], zeros[:3])
    with pytest.raises(ConfigError, match="a cache of -1"):
        program.begin_together(caches[:1], np.full(1, -1), zeros[:1], zeros[:1])
    lengths = np.zeros(2, np.int64)
    for counts in ([1], [1, 0], [1, -1], [1, MAX_ROWS], [2**62, 2**62], [1.0, 1.0]):
        with pytest.raises(ConfigError):
            program.begin_together(
                caches[:2], lengths, zeros[:2], zeros[:2], counts=np.array(counts)
            )
    with pytest.raises(ConfigError, match="no room for 3 tokens"):
        program.begin_together(
            caches[:2], lengths, zeros[:4], zeros[:4], counts=np.array([1, 3], np.int64)
        )
    with pytest.raises(ConfigError, match="logits of 1 of 0 tokens"):
        program_of("plain")[1].logits_of(1)
    pair = pages_of(recipe, 2, 2)
    with pytest.raises(ConfigError, match="of 1 sequences"):
        call_together(program, [pair], tokens[:1, 0], [0])
    found = call_together(program, caches[:3], tokens[:, 0], [0, 0, 0])
    alone = call(program, pages_of(recipe, 1, 1), tokens[1:2, :1], 0)[0]
    assert np.array_equal(found[1:2], alone)
