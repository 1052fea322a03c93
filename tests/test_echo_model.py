"""EchoCache evicts what a search through all its keys finds, whatever the order of calls.

ExpertCache, whose leases and prefetches hold keys, is compared in the same way in
tests/test_cache_model.py.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moecache.errors import CapacityError
from moecache.policies._echo import Echo
from moecache.policies._echo_cache import EchoCache
from tests.helpers.examples import num_examples
from tests.helpers.oracle_echo import EchoValues, OracleEchoCache

KEYS = st.integers(0, 400)
LAYERS = st.integers(0, 3)


class EchoMachine(RuleBasedStateMachine):
    """Caches that share an Echo, and oracles that share another one which sees the same."""

    @initialize(
        ring=st.booleans(),
        num_layers=st.integers(1, 4),
        num_experts=st.sampled_from([1, 2, 4, 8, 100]),
        capacity=st.sampled_from([1, 2, 3, 4, 6, 9, 15]),
        is_global=st.booleans(),
    )
    def create(
        self, ring: bool, num_layers: int, num_experts: int, capacity: int, is_global: bool
    ) -> None:
        """Start empty: a cache for all layers, or one for each."""
        self.num_layers, self.num_experts = num_layers, num_experts
        self.echo = Echo(num_layers, num_experts, ring=ring)
        self.values = EchoValues(Echo(num_layers, num_experts, ring=ring))
        self.num_keys = num_experts * (num_layers if is_global else 1)
        self.caches, self.oracles = [], []
        for layer in [None] if is_global else range(num_layers):
            self.caches.append(
                EchoCache(capacity, num_keys=self.num_keys, echo=self.echo, layer=layer)
            )
            self.oracles.append(OracleEchoCache(capacity, self.values, layer=layer))

    def pick(self, which: int, key: int) -> tuple[EchoCache, OracleEchoCache, int]:
        """Return a cache, its oracle and a key of theirs."""
        which %= len(self.caches)
        return self.caches[which], self.oracles[which], key % self.num_keys

    @rule(
        layer=LAYERS,
        rows=st.lists(st.lists(st.integers(-1, 8), min_size=2, max_size=2), max_size=3),
    )
    def observe(self, layer: int, rows: list[list[int]]) -> None:
        """Let both see a request; no key is accessed."""
        ids = np.array(rows, np.int64).reshape(-1, 2)
        self.echo.observe(layer % self.num_layers, ids)
        self.values.observe(layer % self.num_layers, ids)

    @rule(token=st.lists(st.integers(0, 7), min_size=1, max_size=3))
    def serve(self, token: list[int]) -> None:
        """See and admit the same experts at every layer, in order."""
        ids = [expert % self.num_experts for expert in token]
        for layer in range(self.num_layers):
            self.echo.observe(layer, ids)
            self.values.observe(layer, ids)
            base = 0 if len(self.caches) > 1 else layer * self.num_experts
            for expert in ids:
                self.admit(layer, base + expert)

    @rule(which=LAYERS, key=KEYS)
    def touch(self, which: int, key: int) -> None:
        """Record an access."""
        cache, oracle, key = self.pick(which, key)
        assert cache.touch(key) == oracle.touch(key)

    @rule(which=LAYERS, key=KEYS)
    def admit(self, which: int, key: int) -> None:
        """Evict the same key, or fail alike when everything is pinned."""
        cache, oracle, key = self.pick(which, key)
        try:
            expected = oracle.admit(key)
        except CapacityError:
            with pytest.raises(CapacityError):
                cache.admit(key)
            return
        assert cache.admit(key) == expected

    @rule(which=LAYERS, keys=st.lists(KEYS, max_size=12))
    def admit_many(self, which: int, keys: list[int]) -> None:
        """Evict one after the other while no value changes."""
        for key in keys:
            self.admit(which, key)

    @rule(which=LAYERS, place=KEYS)
    def discard(self, which: int, place: int) -> None:
        """Take out a key that is likely there."""
        cache, oracle, key = self.resident(which, place)
        cache.discard(key)
        oracle.discard(key)

    @rule(which=LAYERS, place=KEYS)
    def discard_victim(self, which: int, place: int) -> None:
        """Take out the key that would leave next."""
        cache, oracle, _ = self.pick(which, place)
        key = oracle.victim()
        if key >= 0:
            cache.discard(key)
            oracle.discard(key)

    @rule(which=LAYERS, key=KEYS)
    def pin(self, which: int, key: int) -> None:
        """Pin any key."""
        cache, oracle, key = self.pick(which, key)
        assert cache.pin(key) == oracle.pin(key)

    @rule(which=LAYERS, times=st.integers(1, 3))
    def pin_victim(self, which: int, times: int) -> None:
        """Pin the key that would leave next."""
        cache, oracle, _ = self.pick(which, 0)
        for _ in range(times):
            key = oracle.victim()
            if key >= 0:
                assert cache.pin(key)
                assert oracle.pin(key)

    @rule(which=LAYERS, place=KEYS)
    def unpin(self, which: int, place: int) -> None:
        """Unpin a key that is pinned, or else any."""
        cache, oracle, key = self.pick(which, place)
        pinned = sorted(oracle.pinned)
        key = pinned[place % len(pinned)] if pinned else key
        cache.unpin(key)
        oracle.unpin(key)

    @rule()
    def begin_sequence(self) -> None:
        """Let the averages fall back."""
        self.echo.begin_sequence()
        self.values.begin_sequence()

    @rule(dice=st.integers(0, 19), which=LAYERS)
    def forget(self, dice: int, which: int) -> None:
        """Forget keys and pins, or what was learned, but seldom."""
        cache, oracle, _ = self.pick(which, 0)
        if dice == 0:
            cache.clear()
            oracle.clear()
        elif dice == 1:
            self.echo.reset()
            self.values.reset()

    def resident(self, which: int, place: int) -> tuple[EchoCache, OracleEchoCache, int]:
        """Return a cache, its oracle and a key that is there, if any is."""
        cache, oracle, key = self.pick(which, place)
        keys = oracle.keys()
        return cache, oracle, keys[place % len(keys)] if keys else key

    @invariant()
    def agree(self) -> None:
        """Both have the same keys and pins; values are probabilities, taught by nothing else."""
        if not hasattr(self, "caches"):
            return
        reuse = self.echo.reuse
        assert np.array_equal(reuse, self.values.echo.reuse)
        assert ((reuse >= 0) & (reuse <= 1)).all()
        for cache, oracle in zip(self.caches, self.oracles, strict=True):
            assert cache.keys() == oracle.keys()
            assert len(cache) == len(oracle) <= cache.capacity
            assert cache.num_pinned == len(oracle.pinned)
            assert all(cache.is_pinned(key) for key in oracle.pinned)


TestEcho = EchoMachine.TestCase
TestEcho.settings = settings(max_examples=num_examples(80))
