"""Warm pin: how many experts stay, which ones, and when."""

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moecache
from moecache.cache.warmpin import WarmPin, auto_pins, choose_pins
from moecache.settings import POLICIES, Settings
from tests.helpers.runtimes import drain, expected, make_runtime


@pytest.fixture(autouse=True)
def info_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Keep lines that are no warnings."""
    caplog.set_level(logging.INFO, "moecache")


@pytest.mark.parametrize(
    ("num_layers", "num_experts", "top_k", "capacity", "n"),
    [
        (8, 4, 2, 32, 0),  # everything is there
        (8, 4, 2, 33, 0),
        (8, 64, 8, 16, 8),
        (8, 64, 0, 16, 1),  # a dense route
        (8, 64, 1, 16, 1),
        (8, 4, 9, 16, 4),  # no more than there are
        (1, 1, 1, 1, 0),
    ],
)
def test_as_many_are_pinned_as_a_token_uses(
    num_layers: int, num_experts: int, top_k: int, capacity: int, n: int
) -> None:
    """Unless everything fits: then nothing is ever evicted."""
    assert auto_pins(num_layers, num_experts, top_k, capacity) == n


def used(counts: list[list[int]]) -> moecache.AccessProfiler:
    """Return a profiler with so many accesses of each layer's experts."""
    profiler = moecache.AccessProfiler(len(counts), len(counts[0]))
    for layer, row in enumerate(counts):
        for expert, count in enumerate(row):
            for _ in range(count):
                profiler.record_miss(layer, expert)
    return profiler


def table(residents: list[list[int]], num_experts: int) -> np.ndarray:
    """Return a slot table in which these experts have slots."""
    slots = np.full((len(residents), num_experts), -1, np.int32)
    for layer, experts in enumerate(residents):
        slots[layer, experts] = 0
    return slots


def test_the_busiest_layer_comes_first_and_of_it_the_most_used() -> None:
    """Ties go to the lower layer and the lower expert."""
    profiler = used([[1, 2, 0, 0], [3, 3, 1, 2], [0, 1, 1, 1]])
    everything = table([[0, 1, 2, 3]] * 3, 4)

    chosen = choose_pins(profiler, everything, 2, max_pins=6)

    assert chosen == [(1, 0), (1, 1), (0, 1), (0, 0), (2, 1), (2, 2)]


def test_what_is_not_there_is_passed_over() -> None:
    """The next most used that is there is pinned instead; what was never used is not."""
    profiler = used([[5, 4, 3, 0]])

    assert choose_pins(profiler, table([[1, 2, 3]], 4), 2, max_pins=9) == [(0, 1), (0, 2)]
    assert choose_pins(profiler, table([[2, 3]], 4), 2, max_pins=9) == [(0, 2)]
    assert choose_pins(profiler, table([[3]], 4), 2, max_pins=9) == []


def test_it_stops_at_half_the_cache_and_at_the_first_unused_layer() -> None:
    """It may stop in the middle of a layer."""
    profiler = used([[1, 1], [0, 0], [2, 2]])
    everything = table([[0, 1]] * 3, 2)

    assert choose_pins(profiler, everything, 2, max_pins=3) == [(2, 0), (2, 1), (0, 0)]
    assert choose_pins(profiler, everything, 2, max_pins=0) == []
    assert choose_pins(profiler, everything, 2, max_pins=9) == [(2, 0), (2, 1), (0, 0), (0, 1)]
    assert choose_pins(profiler, everything, 2, max_pins=9, max_layer_pins=1) == [(2, 0), (0, 0)]


@given(
    counts=st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), min_size=1, max_size=4),
    resident=st.lists(st.booleans(), min_size=20, max_size=20),
    n=st.integers(0, 6),
    max_pins=st.integers(0, 12),
)
def test_whatever_was_used_the_rule_holds(
    counts: list[list[int]], resident: list[bool], n: int, max_pins: int
) -> None:
    """No more than allowed, only residents, none twice, none less used than one left out."""
    profiler = used(counts)
    there = np.array(resident[: 5 * len(counts)]).reshape(-1, 5)
    chosen = choose_pins(profiler, np.where(there, 0, -1), n, max_pins=max_pins)

    assert len(set(chosen)) == len(chosen) <= max_pins
    for layer, row in enumerate(counts):
        mine = [expert for at, expert in chosen if at == layer]
        assert len(mine) <= n
        assert all(there[layer, expert] and row[expert] for expert in mine)
        left = [row[e] for e in range(5) if there[layer, e] and e not in mine]
        if mine and left:
            assert min(row[expert] for expert in mine) >= max(left)


def pinned_of(runtime: moecache.ExpertRuntime) -> list[tuple[int, int]]:
    """Return what is pinned, as the cache has it."""
    layout = runtime.layout
    return [
        (layer, expert)
        for layer in range(layout.num_layers)
        for expert in range(layout.num_experts)
        if runtime.cache.is_pinned(layer, expert)
    ]


def with_pins(
    capacity: int, *, warmpin: int | str, after: int = 12, policy: str = "lru", **options: Any
) -> moecache.ExpertRuntime:
    """Return a small runtime that pins; 3 layers of 8 experts."""
    made = make_runtime(capacity, policy=policy, **options)
    return moecache.ExpertRuntime(
        made.store, made.pool, made.cache, warmpin=warmpin, warmpin_after=after
    )


@pytest.mark.parametrize("through", ["waves", "lease"])
def test_it_happens_once_after_so_many_accesses(through: str) -> None:
    """And splits the hit rates in the report; hits count as well."""
    with with_pins(8, warmpin=1, after=12) as runtime:
        ids = np.array([1, 2])
        for token in range(6):
            if through == "waves":
                drain(runtime, 0, ids)
            else:
                runtime.lease(0, ids).close()
            if token < 5:
                assert pinned_of(runtime) == []
        runtime.lease(0, ids).close()
        assert runtime.profiler.warm_pinned == ((0, 1),)
        drain(runtime, 1, np.array([5, 6]))
        drain(runtime, 1, np.array([5, 6]))
        assert pinned_of(runtime) == [(0, 1)]
        assert "warm pin: 1 experts, hit rate" in runtime.report()
        assert "layer 0 pinned: 1" in runtime.report()


def test_what_is_pinned_stays_and_every_step_still_finds_room() -> None:
    """Half of the cache is left to the others, whatever was asked for."""
    with with_pins(4, warmpin=8, after=8) as runtime:
        for _ in range(4):
            drain(runtime, 0, np.array([1, 2]))
        assert pinned_of(runtime) == [(0, 1), (0, 2)]
        for layer in (1, 2, 0):
            for expert in range(8):
                ids = np.array([expert, (expert + 3) % 8])
                assert drain(runtime, layer, ids) == expected(layer, ids)
        assert pinned_of(runtime) == [(0, 1), (0, 2)]
        hits = runtime.stats().num_hits
        drain(runtime, 0, np.array([1, 2]))
        assert runtime.stats().num_hits == hits + 2
        runtime.cache.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_its_pins(policy: str) -> None:
    """An explicit number is honoured under ECHO, too."""
    with with_pins(8, warmpin=2, after=24, policy=policy) as runtime:
        rng = np.random.default_rng(0)
        for _ in range(30):
            for layer in range(3):
                drain(runtime, layer, rng.choice(4, 2, replace=False))
        pinned = pinned_of(runtime)
        for _ in range(30):
            for layer in range(3):
                drain(runtime, layer, rng.choice(8, 2, replace=False))
        assert 0 < len(pinned) <= 4
        assert pinned_of(runtime) == pinned == sorted(runtime.profiler.warm_pinned)
        runtime.cache.check()


def test_with_slots_of_their_own_half_of_each_layers_is_the_limit() -> None:
    """Or a layer would have no slot left for anything new."""
    cache = moecache.ExpertCache(2, 8, 8, policy="lru", scope="layer")
    slots, misses = np.empty(3, np.int32), np.empty(3, np.int32)
    for layer in (0, 1):
        cache.acquire(layer, np.arange(3), slots, misses)
        for slot in slots.tolist():
            cache.publish(slot)
        cache.release(slots)

    assert WarmPin(cache, 3, "auto", 6).look()

    assert cache.profiler.warm_pinned == ((0, 0), (0, 1), (1, 0), (1, 1))


@pytest.mark.parametrize(
    ("policy", "warmpin", "n"),
    [
        ("lru", "auto", 3),
        ("slru", "auto", 3),
        ("echo", "auto", 0),
        ("haz2", "auto", 0),
        ("echo", 2, 2),
        ("haz2", 1, 1),
        ("lru", 0, 0),
        ("lru", 99, 99),
    ],
)
def test_echo_pins_only_if_told_to(policy: str, warmpin: int | str, n: int) -> None:
    """What it values less than others should leave."""
    cache = moecache.ExpertCache(2, 8, 8, policy=policy)
    assert WarmPin(cache, 3, warmpin).n == n


@pytest.mark.parametrize("value", [-1, 1.5, True, "lots", "", None])
def test_what_is_no_number_is_refused(value: Any) -> None:
    """By its name, with what was given."""
    cache = moecache.ExpertCache(2, 8, 8)
    with pytest.raises(moecache.ConfigError, match=f'warmpin must .*"auto", got {value!r}'):
        WarmPin(cache, 3, value)
    with pytest.raises(moecache.ConfigError, match=f"warmpin_after must .*on, got {value!r}"):
        WarmPin(cache, 3, 1, value)


@pytest.mark.parametrize(
    ("text", "warmpin"),
    [("0", 0), ("12", 12), ("AUTO", "auto"), ("off", 0), ("No", 0), ("false", 0)],
)
def test_the_environment_may_say_it(
    text: str, warmpin: int | str, caplog: pytest.LogCaptureFixture
) -> None:
    """In numbers and words."""
    found = Settings.from_environ({"MOECACHE_WARMPIN": text, "MOECACHE_WARMPIN_AFTER": "77"})
    assert (found.warmpin, found.warmpin_after) == (warmpin, 77)
    assert not caplog.records


@pytest.mark.parametrize("text", ["-1", "some", "1.5", "on", "9" * 5000])
def test_nonsense_in_the_environment_is_a_warning(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The default is used."""
    found = Settings.from_environ({"MOECACHE_WARMPIN": text, "MOECACHE_WARMPIN_AFTER": text})
    assert found == Settings()
    assert "is not a number of experts, auto or off; using the default, auto" in caplog.text
    assert "is not a number of accesses; using the default, 512" in caplog.text


def test_an_opened_runtime_pins_as_argument_and_environment_say(
    tiny_moe: Path, numpy_loop: ModuleType, prompt: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 512 accesses: with LRU by default 4 of each of its 8 layers, with ECHO none."""

    def pins(**options: Any) -> int:
        with (
            moecache.open_store(tiny_moe) as store,
            moecache.open(
                tiny_moe, slots=80, dtype=np.float32, prefault="off", **options
            ) as runtime,
        ):
            model = numpy_loop.NumpyMoe(store, numpy_loop.through_moecache(runtime))
            for _ in numpy_loop.generate(model, prompt[:9], 16, temperature=0.7, seed=0):
                pass
            return len(runtime.profiler.warm_pinned)

    assert pins(policy="lru") == 32
    assert pins(policy="echo") == 0
    assert pins(policy="echo", warmpin=2) == 16
    assert pins(policy="lru", warmpin=99) == 40
    assert pins(policy="lru", warmpin_after=10**6) == 0
    monkeypatch.setenv("MOECACHE_WARMPIN", "1")
    assert pins(policy="lru") == 8
    assert pins(policy="lru", warmpin=0) == 0
    monkeypatch.setenv("MOECACHE_WARMPIN_AFTER", "1000000")
    assert pins(policy="lru") == 0


def test_a_negative_number_fails_before_anything_is_kept(tiny_moe: Path) -> None:
    """The file is closed again."""
    with pytest.raises(moecache.ConfigError, match="warmpin must be a whole number from 0 on"):
        moecache.open(tiny_moe, slots=80, warmpin=-1)
