"""Over thousands of accesses every policy evicts what its plain-Python oracle does."""

import random
from typing import Any

import pytest

from moecache.policies.replayed._arc import ArcCache
from moecache.policies.replayed._fifo import FifoCache, S3FifoCache, SieveCache
from moecache.policies.replayed._lecar import LecarCache
from moecache.policies.replayed._lrfu import LrfuCache
from moecache.policies.replayed._stale import LeastStaleCache
from moecache.policies.replayed._tinylfu import WTinyLfuCache
from tests.helpers.nightly import some
from tests.helpers.oracle_ghosts import OracleArc, OracleLecar
from tests.helpers.oracle_policies import OracleLru
from tests.helpers.oracle_queues import OracleFifo, OracleS3Fifo, OracleSieve, OracleWTinyLfu
from tests.helpers.oracle_tokens import OracleLeastStale, OracleLrfu

PAIRS = {
    "arc": (ArcCache, OracleArc),
    "fifo": (FifoCache, OracleFifo),
    "least-stale": (LeastStaleCache, OracleLeastStale),
    "lecar": (LecarCache, OracleLecar),
    "lrfu": (LrfuCache, OracleLrfu),
    "s3-fifo": (S3FifoCache, OracleS3Fifo),
    "sieve": (SieveCache, OracleSieve),
    "w-tinylfu": (WTinyLfuCache, OracleWTinyLfu),
}


@pytest.mark.parametrize("capacity", some([1, 2, 12, 60, 230], lambda capacity: capacity == 12))
@pytest.mark.parametrize("name", PAIRS)
def test_compiled_and_oracle_evict_the_same(name: str, capacity: int) -> None:
    """Skewed accesses, scans and a few pins and discards; segments of more than one key."""
    rng = random.Random(11)
    num_keys = 2 * capacity + 40
    compiled_type, oracle_type = PAIRS[name]
    compiled: Any = compiled_type(capacity, num_keys=num_keys)
    oracle: OracleLru = oracle_type(capacity)
    pinned: list[int] = []

    for turn in range(6000):
        key = int(num_keys * rng.random() ** 3) if turn // 500 % 3 else turn % num_keys
        evicted = compiled.admit(key)
        assert evicted == oracle.admit(key), turn
        if turn % 97 == 0:
            compiled.discard(key)
            oracle.discard(key)
        elif turn % 41 == 0 and len(oracle.pinned) < capacity // 3:
            assert compiled.pin(key) == oracle.pin(key)
            pinned.append(key)
        elif turn % 53 == 0 and pinned:
            compiled.unpin(pinned[0])
            oracle.unpin(pinned.pop(0))

    assert compiled.keys() == oracle.keys()


@pytest.mark.parametrize("name", PAIRS)
def test_one_key_and_one_place_are_enough(name: str) -> None:
    """The only place changes hands at every miss, and the only key never leaves."""
    kind: Any = PAIRS[name][0]
    narrow, single = kind(1, num_keys=4), kind(1, num_keys=1)

    assert [narrow.admit(key) for key in (0, 1, 1, 1, 2, 0)] == [-1, 0, -1, -1, 1, 2]
    assert [single.admit(0) for _ in range(5)] == [-1] * 5
    single.discard(0)
    assert single.admit(0) == -1


@pytest.mark.parametrize("name", PAIRS)
def test_the_room_and_the_keys_are_at_least_one(name: str) -> None:
    """The message names the figure."""
    kind: Any = PAIRS[name][0]

    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        kind(0, num_keys=8)
    with pytest.raises(ValueError, match="num_keys must be at least 1, got 0"):
        kind(1, num_keys=0)


@pytest.mark.parametrize("name", PAIRS)
def test_clear_forgets_everything(name: str) -> None:
    """A cleared policy decides like a new one, ghosts, counts and hands included."""
    rng = random.Random(2)
    trace = [int(60 * rng.random() ** 2) for _ in range(1500)]
    policy: Any = PAIRS[name][0](12, num_keys=60)
    first = [policy.admit(key) for key in trace]
    policy.pin(trace[-1])

    policy.clear()

    assert (policy.keys(), policy.num_pinned) == ([], 0)
    assert [policy.admit(key) for key in trace] == first
