"""LRU, LFU and LFRU do what their plain-Python oracles do, whatever the order of calls."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moecache._lfu import LfruCache, LfuCache
from moecache._policy import LruCache, Policy
from moecache.errors import CapacityError
from tests.helpers.oracles import OracleLfru, OracleLfu, OracleLru

KEYS = st.integers(0, 15)
SETTINGS = settings(
    max_examples=50,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class PolicyMachine(RuleBasedStateMachine):
    """A compiled policy and its oracle side by side."""

    compiled_type: type[LruCache | LfuCache] = LruCache
    oracle_type = OracleLru

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


class LfuMachine(PolicyMachine):
    """LFU against its oracle."""

    compiled_type = LfuCache
    oracle_type = OracleLfu


class LfruMachine(PolicyMachine):
    """LFRU against its oracle."""

    compiled_type = LfruCache
    oracle_type = OracleLfru


TestLru = PolicyMachine.TestCase
TestLfu = LfuMachine.TestCase
TestLfru = LfruMachine.TestCase
for case in (TestLru, TestLfu, TestLfru):
    case.settings = SETTINGS
del case
