"""The policies do what their plain-Python oracles do, whatever the order of calls."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moecache.errors import CapacityError
from moecache.policies._lfu import LfruCache, LfuCache
from moecache.policies._policy import LruCache, Policy
from moecache.policies.replayed._arc import ArcCache
from moecache.policies.replayed._fifo import FifoCache, S3FifoCache, SieveCache
from moecache.policies.replayed._lecar import LecarCache
from moecache.policies.replayed._lrfu import LrfuCache
from moecache.policies.replayed._stale import LeastStaleCache
from moecache.policies.replayed._tinylfu import WTinyLfuCache
from tests.helpers.examples import num_examples
from tests.helpers.oracle_ghosts import OracleArc, OracleLecar
from tests.helpers.oracle_policies import OracleLfru, OracleLfu, OracleLru
from tests.helpers.oracle_queues import OracleFifo, OracleS3Fifo, OracleSieve, OracleWTinyLfu
from tests.helpers.oracle_tokens import OracleLeastStale, OracleLrfu

KEYS = st.integers(0, 15)
PAIRS: list[tuple[Any, type[OracleLru]]] = [
    (ArcCache, OracleArc),
    (FifoCache, OracleFifo),
    (LeastStaleCache, OracleLeastStale),
    (LecarCache, OracleLecar),
    (LfruCache, OracleLfru),
    (LfuCache, OracleLfu),
    (LrfuCache, OracleLrfu),
    (LruCache, OracleLru),
    (S3FifoCache, OracleS3Fifo),
    (SieveCache, OracleSieve),
    (WTinyLfuCache, OracleWTinyLfu),
]


class PolicyMachine(RuleBasedStateMachine):
    """A compiled policy and its oracle side by side."""

    @initialize(
        pair=st.sampled_from(PAIRS),
        capacity=st.integers(1, 8),
        spare=st.sampled_from([0, 0, 1, 4, 8]),
    )
    def create(self, pair: tuple[Any, type[OracleLru]], capacity: int, spare: int) -> None:
        """Start empty; the cache may be large enough for every key."""
        self.num_keys = capacity + spare
        compiled_type, oracle_type = pair
        self.compiled: Policy = compiled_type(capacity, num_keys=self.num_keys)
        self.oracle = oracle_type(capacity)

    @rule(key=KEYS)
    def touch(self, key: int) -> None:
        """Record an access."""
        key %= self.num_keys
        assert self.compiled.touch(key) == self.oracle.touch(key)

    @rule(key=KEYS)
    def admit(self, key: int) -> None:
        """Admit, or fail alike when everything is pinned."""
        key %= self.num_keys
        try:
            expected = self.oracle.admit(key)
        except CapacityError:
            with pytest.raises(CapacityError):
                self.compiled.admit(key)
            return
        assert self.compiled.admit(key) == expected

    @rule(keys=st.lists(KEYS, max_size=20))
    def access_many(self, keys: list[int]) -> None:
        """Touch or admit a run of keys, so that counts and ages grow apart."""
        for key in keys:
            self.admit(key)

    @rule(key=KEYS)
    def discard(self, key: int) -> None:
        """Take a key out."""
        key %= self.num_keys
        self.compiled.discard(key)
        self.oracle.discard(key)

    @rule(key=KEYS)
    def pin(self, key: int) -> None:
        """Pin a key."""
        key %= self.num_keys
        assert self.compiled.pin(key) == self.oracle.pin(key)

    @rule(key=KEYS)
    def unpin(self, key: int) -> None:
        """Unpin a key."""
        key %= self.num_keys
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
        """Both hold the same keys in the same order, and the same pins."""
        if not hasattr(self, "compiled"):
            return
        assert self.compiled.keys() == self.oracle.keys()
        assert len(self.compiled) == len(self.oracle) <= self.compiled.capacity
        assert self.compiled.num_pinned == len(self.oracle.pinned)
        for key in range(self.num_keys):
            assert (key in self.compiled) == (key in self.oracle)
            assert self.compiled.is_pinned(key) == (key in self.oracle.pinned)


TestPolicy = PolicyMachine.TestCase
TestPolicy.settings = settings(max_examples=num_examples(150))
