"""Tokens, graphs, other steps and failures in any order: always the bits of resident steps."""

import contextlib
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from moecache.errors import CapacityError, MoeCacheError
from moecache.settings import POLICIES
from tests.helpers.cuda_tokens import (
    EXPERTS,
    LAYERS,
    TOP_K,
    Model,
    expected,
    inputs,
    make_runtime,
)
from tests.helpers.examples import num_examples
from tests.helpers.fake_device import FakeDevice

TOKENS = inputs(5)
WANTED: list[np.ndarray] = []
WHICH = st.integers(0, len(TOKENS) - 1)
SMALL = st.integers(0, 40)


class TokenMachine(RuleBasedStateMachine):
    """A runtime, a model in it, and a graph of the model's layers."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        capacity=st.sampled_from([2, 3, 7, 12, LAYERS * EXPERTS]),
        eager=st.booleans(),
        seed=SMALL,
    )
    def create(self, policy: str, capacity: int, eager: bool, seed: int) -> None:
        """Open with nothing resident."""
        if not WANTED:
            WANTED.extend(expected(TOKENS))
        self.device = FakeDevice(eager=eager, seed=seed)
        self.runtime = make_runtime(self.device, capacity, policy=policy)
        self.model = Model(self.runtime)
        self.other = self.device.create_stream()
        self.replay: Any = None

    def check(self, which: int, found: np.ndarray) -> None:
        """Compare with the bits of resident steps."""
        assert np.array_equal(found.view(np.uint32), WANTED[which].view(np.uint32))

    @rule(which=WHICH)
    def token(self, which: int) -> None:
        """Step by step."""
        self.check(which, self.model.token(TOKENS[which]))

    @rule(which=WHICH)
    def plain(self, which: int) -> None:
        """With the host."""
        self.check(which, self.model.plain(TOKENS[which]))

    @precondition(lambda self: self.replay is None)
    @rule()
    def capture(self) -> None:
        """All layers in a graph."""
        self.model.compute.begin_token()
        self.replay = self.model.capture()
        assert self.model.compute.end_token() is None

    @precondition(lambda self: self.replay is not None)
    @rule(which=WHICH)
    def replayed(self, which: int) -> None:
        """From the graph."""
        self.check(which, self.model.replayed(TOKENS[which], self.replay))

    @precondition(lambda self: self.replay is not None)
    @rule()
    def astray(self) -> None:
        """Run a graph outside of a token, which the next one tells."""
        self.replay()
        self.device.run()
        with contextlib.suppress(MoeCacheError):
            self.model.compute.begin_token()
            raise AssertionError("nobody was told")

    @rule(which=WHICH, layers=st.integers(0, LAYERS))
    def give_up(self, which: int, layers: int) -> None:
        """Leave a token open; what follows in it is another token."""
        self.model.begin(TOKENS[which])
        self.model.compute.begin_token()
        for layer in range(layers):
            self.model.layer(layer)
        self.check(which, self.model.token(TOKENS[which]))

    @rule(layer=st.integers(0, LAYERS - 1), seed=SMALL, which=WHICH)
    def lease_within(self, layer: int, seed: int, which: int) -> None:
        """Experts for another stream, while a token's steps are under way."""
        ids = np.random.default_rng(seed).permutation(EXPERTS)[:TOP_K]
        self.model.begin(TOKENS[which])
        first: int | None = self.model.compute.begin_token()
        while first is not None:
            for one in range(first, LAYERS):
                self.model.layer(one)
                if one == layer:
                    with self.device.using(self.other), contextlib.suppress(CapacityError):
                        self.runtime.lease(layer, ids).close()
            first = self.model.compute.end_token()
        self.check(which, self.model.result())

    @rule(layer=st.integers(0, LAYERS - 1), seed=SMALL)
    def lease(self, layer: int, seed: int) -> None:
        """Experts for another stream, whose copies may be under way."""
        ids = np.random.default_rng(seed).permutation(EXPERTS)[:TOP_K]
        with self.device.using(self.other):
            self.runtime.lease(layer, ids).close()

    @rule(which=WHICH, call=SMALL, graph=st.booleans())
    def fail(self, which: int, call: int, graph: bool) -> None:
        """Have a call of the device fail in a token, if it comes so far."""
        self.device.fail_at = call
        try:
            if graph and self.replay is not None:
                found = self.model.replayed(TOKENS[which], self.replay)
            else:
                found = self.model.token(TOKENS[which])
        except MemoryError:
            pass
        else:
            self.check(which, found)
        self.device.fail_at = -1
        # One that was left open is given up.
        self.model.compute.begin_token()
        assert self.model.compute.end_token() is None

    @rule(moves=SMALL)
    def run(self, moves: int) -> None:
        """Let the device go on."""
        self.device.run(moves)

    @invariant()
    def holds(self) -> None:
        """Audit the cache; outside of a token it may evict."""
        if hasattr(self, "runtime"):
            self.runtime.cache.check()
            assert self.runtime.cache.evicts

    def teardown(self) -> None:
        """Close; nothing is left."""
        if hasattr(self, "runtime"):
            self.device.synchronize(self.other)
            self.runtime.close()
            device = self.device
            assert device.used_bytes == device.pinned_bytes == device.num_events == 0


TestTokens = TokenMachine.TestCase
TestTokens.settings = settings(max_examples=num_examples(12), stateful_step_count=12, deadline=None)
