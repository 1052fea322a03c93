"""The policies do what their plain-Python oracles do, whatever the order of calls."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moecache.errors import CapacityError
from moecache.policies._arc import ArcCache
from moecache.policies._fifo import FifoCache, S3FifoCache, SieveCache
from moecache.policies._lecar import LecarCache
from moecache.policies._lfu import LfruCache, LfuCache
from moecache.policies._lrfu import LrfuCache
from moecache.policies._policy import LruCache, Policy
from moecache.policies._stale import LeastStaleCache
from moecache.policies._tinylfu import WTinyLfuCache
from tests.helpers.examples import num_examples
from tests.helpers.oracle_ghosts import OracleArc, OracleLecar
from tests.helpers.oracle_policies import OracleLfru, OracleLfu, OracleLru
from tests.helpers.oracle_queues import OracleFifo, OracleS3Fifo, OracleSieve, OracleWTinyLfu
from tests.helpers.oracle_tokens import OracleLeastStale, OracleLrfu

KEYS = st.integers(0, 15)
SETTINGS = settings(
    max_examples=num_examples(50),
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class PolicyMachine(RuleBasedStateMachine):
    """A compiled policy and its oracle side by side."""

    compiled_type: Any = LruCache
    oracle_type: type[OracleLru] = OracleLru

    @initialize(capacity=st.integers(1, 8), spare=st.sampled_from([0, 0, 1, 4, 8]))
    def create(self, capacity: int, spare: int) -> None:
        """Start empty; the cache may be large enough for every key."""
        self.num_keys = capacity + spare
        self.compiled: Policy = self.compiled_type(capacity, num_keys=self.num_keys)
        self.oracle = self.oracle_type(capacity)

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


class ArcMachine(PolicyMachine):
    """ARC against its oracle."""

    compiled_type = ArcCache
    oracle_type = OracleArc


class FifoMachine(PolicyMachine):
    """FIFO against its oracle."""

    compiled_type = FifoCache
    oracle_type = OracleFifo


class LeastStaleMachine(PolicyMachine):
    """Least-Stale against its oracle."""

    compiled_type = LeastStaleCache
    oracle_type = OracleLeastStale


class LecarMachine(PolicyMachine):
    """LeCaR against its oracle."""

    compiled_type = LecarCache
    oracle_type = OracleLecar


class LfruMachine(PolicyMachine):
    """LFRU against its oracle."""

    compiled_type = LfruCache
    oracle_type = OracleLfru


class LfuMachine(PolicyMachine):
    """LFU against its oracle."""

    compiled_type = LfuCache
    oracle_type = OracleLfu


class LrfuMachine(PolicyMachine):
    """LRFU against its oracle."""

    compiled_type = LrfuCache
    oracle_type = OracleLrfu


class S3FifoMachine(PolicyMachine):
    """S3-FIFO against its oracle."""

    compiled_type = S3FifoCache
    oracle_type = OracleS3Fifo


class SieveMachine(PolicyMachine):
    """SIEVE against its oracle."""

    compiled_type = SieveCache
    oracle_type = OracleSieve


class TinyLfuMachine(PolicyMachine):
    """W-TinyLFU against its oracle."""

    compiled_type = WTinyLfuCache
    oracle_type = OracleWTinyLfu


TestLru = PolicyMachine.TestCase
TestArc = ArcMachine.TestCase
TestFifo = FifoMachine.TestCase
TestLeastStale = LeastStaleMachine.TestCase
TestLecar = LecarMachine.TestCase
TestLfru = LfruMachine.TestCase
TestLfu = LfuMachine.TestCase
TestLrfu = LrfuMachine.TestCase
TestS3Fifo = S3FifoMachine.TestCase
TestSieve = SieveMachine.TestCase
TestTinyLfu = TinyLfuMachine.TestCase
for case in [value for name, value in vars().copy().items() if name.startswith("Test")]:
    case.settings = SETTINGS
del case
