"""SLRU does what its plain-Python oracle does: strict and elastic, with and without counts."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moecache._slru import SlruCache
from moecache.errors import CapacityError
from tests.helpers.examples import num_examples
from tests.helpers.oracles import OracleSlru

NUM_KEYS = 12
KEYS = st.integers(0, NUM_KEYS - 1)


class SlruMachine(RuleBasedStateMachine):
    """The compiled SLRU and its oracle side by side."""

    @initialize(
        probationary=st.integers(1, 5),
        protected=st.integers(1, 5),
        counted=st.booleans(),
        strict=st.booleans(),
    )
    def create(self, probationary: int, protected: int, counted: bool, strict: bool) -> None:
        """Start empty; the counts belong to the caller."""
        self.counts = np.zeros(NUM_KEYS, np.uint64)
        self.compiled = SlruCache(
            probationary,
            protected,
            num_keys=NUM_KEYS,
            counts=self.counts if counted else None,
            strict=strict,
        )
        self.oracle = OracleSlru(
            probationary,
            protected,
            count_of=(lambda key: int(self.counts[key])) if counted else None,
            strict=strict,
        )

    @rule(key=KEYS)
    def touch(self, key: int) -> None:
        """Record an access."""
        self.counts[key] += np.uint64(1)
        assert self.compiled.touch(key) == self.oracle.touch(key)

    @rule(key=KEYS)
    def admit(self, key: int) -> None:
        """Admit, or fail alike when everything is pinned."""
        self.counts[key] += np.uint64(1)
        try:
            expected = self.oracle.admit(key)
        except CapacityError:
            with pytest.raises(CapacityError):
                self.compiled.admit(key)
            return
        assert self.compiled.admit(key) == expected

    @rule(keys=st.lists(KEYS, max_size=20))
    def access_many(self, keys: list[int]) -> None:
        """Touch or admit a run of keys, so that both segments fill."""
        for key in keys:
            self.admit(key)

    @rule(key=KEYS, count=st.integers(0, 5))
    def change_count(self, key: int, count: int) -> None:
        """Change a count without an access: it is not read before the next one."""
        self.counts[key] = count

    @rule(key=KEYS)
    def discard(self, key: int) -> None:
        """Take a key out."""
        self.compiled.discard(key)
        self.oracle.discard(key)

    @rule(key=KEYS)
    def pin(self, key: int) -> None:
        """Pin a key, unless pins fill the protected segment."""
        assert self.compiled.pin(key) == self.oracle.pin(key)

    @rule()
    def pin_all(self) -> None:
        """Pin as many as can be."""
        for key in range(NUM_KEYS):
            self.pin(key)

    @rule(key=KEYS)
    def unpin(self, key: int) -> None:
        """Unpin a key."""
        self.compiled.unpin(key)
        self.oracle.unpin(key)

    @rule(dice=st.integers(0, 9))
    def clear(self, dice: int) -> None:
        """Forget everything, but seldom."""
        if dice == 0:
            self.compiled.clear()
            self.oracle.clear()

    @invariant()
    def agree(self) -> None:
        """Both segments hold the same keys in the same order."""
        if not hasattr(self, "compiled"):
            return
        assert self.compiled.probationary_keys() == self.oracle.probation
        assert self.compiled.protected_keys() == self.oracle.protected
        assert sorted(self.compiled.keys()) == sorted(self.oracle.keys())
        assert len(self.compiled) == len(self.oracle) <= self.compiled.capacity
        assert len(self.oracle.protected) <= self.compiled.protected
        assert self.compiled.num_pinned == len(self.oracle.pinned)
        for key in range(NUM_KEYS):
            assert (key in self.compiled) == (key in self.oracle)
            assert self.compiled.is_pinned(key) == (key in self.oracle.pinned)


TestSlru = SlruMachine.TestCase
TestSlru.settings = settings(max_examples=num_examples(80))
