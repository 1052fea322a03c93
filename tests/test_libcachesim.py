"""libCacheSim hits as often as the policies do, where both mean the same one.

Where they do not, an oracle of this project is changed into libCacheSim's variant and must hit
as often, so that the difference is known to be that variant and nothing else.

Not among the tests of the sanitizer build: AddressSanitizer stops libcachesim 0.3.5 itself, which
gives memory from `new` to `free`.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import libcachesim
import numpy as np
import numpy.typing as npt
import pytest

from bench.traces import write_oracle_general
from moecache.policies._lfu import LfuCache
from moecache.policies._policy import LruCache
from moecache.policies.replayed._arc import ArcCache
from moecache.policies.replayed._fifo import FifoCache, S3FifoCache, SieveCache
from moecache.policies.replayed._lecar import LecarCache
from moecache.policies.replayed._tinylfu import WTinyLfuCache
from moecache.study import Trace, replay
from tests.helpers.nightly import some
from tests.helpers.oracle_policies import OracleLfu
from tests.helpers.oracle_queues import OracleS3Fifo
from tests.test_traces import NUM_EXPERTS, load

NUM_ACCESSES = 20_000


def zipf(alpha: float, seed: int) -> npt.NDArray[np.int64]:
    """Return keys drawn by Zipf's law from a thousand, by rank."""
    weights = 1.0 / np.arange(1, 1001) ** alpha
    return np.random.default_rng(seed).choice(1000, NUM_ACCESSES, p=weights / weights.sum())


@cache
def trace(name: str) -> npt.NDArray[np.int64]:
    """Return one key per access."""
    if name == "zipf-0.7":
        return zipf(0.7, 1)
    if name == "zipf-1.0":
        return zipf(1.0, 2)
    if name == "loop":
        return np.arange(NUM_ACCESSES) % 150
    if name == "zipf-loops":
        keys = zipf(0.9, 3)
        keys[5000:6000] = 1000 + np.arange(1000) % 300
        keys[12000:12600] = 1000 + np.arange(600) % 300
        return keys
    experts = load(name)
    layers = np.arange(experts.shape[1])[None, :, None]
    return (experts.astype(np.int64) + layers * NUM_EXPERTS[name]).ravel()[:NUM_ACCESSES]


TRACES = ("zipf-0.7", "zipf-1.0", "loop", "zipf-loops", "nvmoe-olmoe", "bigmoe-gemma")
CAPACITIES = (20, 100, 300)
DAILY = ("zipf-loops", "bigmoe-gemma")
every_trace = pytest.mark.parametrize("name", some(TRACES, lambda name: name in DAILY))


def hits(policy: Any, keys: npt.NDArray[np.int64]) -> int:
    """Return how often a policy, compiled or not, has the key."""
    found = 0
    for key in keys.tolist():
        if policy.touch(key):
            found += 1
        else:
            policy.admit(key)
    return found


def libcachesim_hits(cache: Any, keys: npt.NDArray[np.int64]) -> int:
    """Return how often libCacheSim has the key; all are of size 1, and none is 0."""
    request = libcachesim.Request()
    request.obj_size = 1
    found = 0
    for key in keys.tolist():
        request.obj_id = key + 1
        found += cache.get(request)
    return found


def make(kind: Any, capacity: int) -> Any:
    """Return a cache of libCacheSim with a small table; the default's takes 128 MiB."""
    return kind(capacity, hashpower=12)


@pytest.mark.parametrize("capacity", CAPACITIES)
@every_trace
@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        (LruCache, libcachesim.LRU),
        (FifoCache, libcachesim.FIFO),
        (SieveCache, libcachesim.Sieve),
        (ArcCache, libcachesim.ARC),
    ],
    ids=["lru", "fifo", "sieve", "arc"],
)
def test_the_same_policy_hits_as_often(
    kind: Callable[..., Any], theirs: Any, name: str, capacity: int
) -> None:
    """To the last hit."""
    keys = trace(name)

    found = hits(kind(capacity, num_keys=int(keys.max()) + 1), keys)

    assert found == libcachesim_hits(make(theirs, capacity), keys)


class InCacheLfu(OracleLfu):
    """LFU that forgets the count of a key that it evicts; ties to the least recently used."""

    def remove(self, key: int) -> None:
        """Take out a key, its count too."""
        super().remove(key)
        del self.counts[key]


class FillingS3Fifo(OracleS3Fifo):
    """S3-FIFO that fills its main queue before it evicts a key."""

    filled = False

    def insert(self, key: int, *, accessed: bool) -> None:
        """Put a key into the main queue if the small one has its share."""
        super().insert(key, accessed=accessed)
        if not self.filled and len(self.small) > self.room_small:
            self.main.append(self.small.pop())

    def evict(self, key: int) -> None:
        """Take out the victim; from now on it is S3-FIFO."""
        super().evict(key)
        self.filled = True

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self.filled = False


@pytest.mark.parametrize("capacity", CAPACITIES)
@every_trace
@pytest.mark.parametrize(
    ("variant", "theirs"),
    [(InCacheLfu, libcachesim.LFU), (FillingS3Fifo, libcachesim.S3FIFO)],
    ids=["lfu", "s3-fifo"],
)
def test_the_oracle_of_their_variant_hits_as_often(
    variant: Callable[[int], Any], theirs: Any, name: str, capacity: int
) -> None:
    """To the last hit; the other oracles agree with the compiled policies."""
    keys = trace(name)[: NUM_ACCESSES // 4]

    assert hits(variant(capacity), keys) == libcachesim_hits(make(theirs, capacity), keys)


# The largest differences, in shares of the accesses, over the Zipf traces. Loops are left out:
# there the details decide about all or nothing.
# lfu: LfuCache keeps the counts of evicted keys and so hits more often.
# s3-fifo: only the first keys go elsewhere.
# lecar: they keep no counts of evicted keys, have one history as large as the cache, bound no
# weight, and draw other numbers.
# tinylfu: theirs has a sketch, counts what is in the main cache only, and halves every
# 32 * capacity; at 20 keys its window of 1 % holds nothing and it has no hits at all.
NEAR = {
    "lfu": (LfuCache, libcachesim.LFU, 0.055, CAPACITIES),
    "s3-fifo": (S3FifoCache, libcachesim.S3FIFO, 0.004, CAPACITIES),
    "lecar": (LecarCache, libcachesim.LeCaR, 0.07, CAPACITIES),
    "w-tinylfu": (WTinyLfuCache, libcachesim.WTinyLFU, 0.008, CAPACITIES[1:]),
}


@pytest.mark.parametrize("name", ["zipf-0.7", "zipf-1.0", "zipf-loops"])
@pytest.mark.parametrize("policy", NEAR)
def test_other_variants_hit_nearly_as_often(policy: str, name: str) -> None:
    """Within the differences that their details make."""
    kind, theirs, tolerance, capacities = NEAR[policy]
    keys = trace(name)

    for capacity in capacities:
        found = hits(kind(capacity, num_keys=int(keys.max()) + 1), keys)
        expected = libcachesim_hits(make(theirs, capacity), keys)

        assert abs(found - expected) <= tolerance * keys.size, (capacity, found, expected)


@pytest.mark.parametrize("capacity", CAPACITIES)
@every_trace
def test_belady_hits_as_often(name: str, capacity: int, tmp_path: Path) -> None:
    """To the last hit, from a trace that says when each key comes again."""
    keys = trace(name)
    path = tmp_path / "trace.oracleGeneral"
    write_oracle_general(path, keys)
    reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
    missed, _ = make(libcachesim.Belady, capacity).process_trace(reader)
    single = Trace(keys.reshape(-1, 1, 1), num_experts=int(keys.max()) + 1)

    found = replay(single, "belady", capacity)

    assert found.num_misses == round(missed * keys.size)
