"""Replay beside libCacheSim: the same 1.2 million accesses, in one run.

libCacheSim is given its fastest form, a binary trace with next accesses (oracleGeneral),
one access after the other. moecache replays the same accesses in two ways: one by one, where
LRU, FIFO, SIEVE, ARC and Belady must agree to the last hit, and as what they are, requests of
eight experts, none of which may push out another.
"""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import libcachesim
import numpy as np
import pytest

from bench.conftest import Table
from bench.traces import NUM_EXPERTS, NUM_LAYERS, TOP_K, routing_trace, write_oracle_general
from moecache.study import Trace
from moecache.study.replay import replay

CAPACITY = NUM_LAYERS * NUM_EXPERTS // 4
# moecache's name, libCacheSim's class, whether both are the same policy to the last hit.
PAIRS = (
    ("lru", "LRU", True),
    ("fifo", "FIFO", True),
    ("sieve", "Sieve", True),
    ("arc", "ARC", True),
    ("belady", "Belady", True),
    ("slru", "SLRU", False),
    ("lfu", "LFU", False),
    ("s3-fifo", "S3FIFO", False),
    ("w-tinylfu", "WTinyLFU", False),
    ("lecar", "LeCaR", False),
)
ALONE = ("slru-lfu", "lfru", "lrfu", "least-stale", "haz2", "echo")
THREE_TIMES = ("lru", "slru", "lfu", "sieve", "s3-fifo", "belady")


def timed(run: Callable[[], float]) -> tuple[float, float]:
    """Return what a run returned, and its seconds."""
    gc.collect()
    start = time.perf_counter()
    found = run()
    return found, time.perf_counter() - start


@pytest.mark.benchmark(group="replay")
def test_replay_against_libcachesim(small: bool, table: Table, tmp_path: Path) -> None:
    """Hits agree where the policies do; then the speeds."""
    routing = routing_trace(25 if small else 3125)
    requests = Trace(routing, num_experts=NUM_EXPERTS)
    keys = (routing + np.arange(NUM_LAYERS)[:, None] * NUM_EXPERTS).ravel()
    singles = Trace(keys.reshape(-1, 1, 1), num_experts=NUM_LAYERS * NUM_EXPERTS)
    path = tmp_path / "trace.oracleGeneral"
    write_oracle_general(path, keys)

    def theirs(name: str) -> float:
        reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        missed, _ = getattr(libcachesim, name)(CAPACITY).process_trace(reader)
        return 1 - missed

    rounds = 1 if small else 7
    lines = [
        f"{keys.size:,} accesses, room for a quarter of the keys, medians of {rounds}",
        f"{'':12} {'million accesses/s':^36} {'ratio':^17} {'hit rate':^26}",
        "".join(
            f"{title:>{width}}"
            for title, width in (
                ("", 12),
                ("requests", 12),
                ("one by one", 12),
                ("libCacheSim", 13),
                ("requests", 10),
                ("one", 8),
                ("requests", 10),
                ("one", 8),
                ("theirs", 9),
            )
        ),
    ]
    ratios = {}
    for name, their_name, same in PAIRS:
        runs = {
            "requests": lambda name=name: replay(requests, name, CAPACITY).hit_rate,
            "one": lambda name=name: replay(singles, name, CAPACITY).hit_rate,
            "theirs": lambda their_name=their_name: theirs(their_name),
        }
        found: dict[str, float] = {}
        seconds: dict[str, list[float]] = {key: [] for key in runs}
        for _ in range(rounds):
            for key, run in runs.items():
                found[key], spent = timed(run)
                seconds[key].append(spent)
        if same:
            assert round(found["one"] * keys.size) == round(found["theirs"] * keys.size), name
        speed = {key: keys.size / median(values) / 1e6 for key, values in seconds.items()}
        ratios[name] = speed["requests"] / speed["theirs"]
        lines.append(
            f"{name:12} {speed['requests']:11.1f} {speed['one']:11.1f} {speed['theirs']:12.1f} "
            f"{ratios[name]:8.1f}x {speed['one'] / speed['theirs']:6.1f}x "
            f"{found['requests']:9.4f} {found['one']:7.4f} {found['theirs']:8.4f}"
        )
    for name in ALONE:
        results = [
            timed(lambda name=name: replay(requests, name, CAPACITY).hit_rate)
            for _ in range(rounds)
        ]
        speed_alone = keys.size / median([spent for _, spent in results]) / 1e6
        assert len({rate for rate, _ in results}) == 1
        lines.append(
            f"{name:12} {speed_alone:11.1f} {'':11} {'':12} {'':9} {'':7} {results[0][0]:9.4f}"
            f"   {1e3 * TOP_K / speed_alone:.0f} ns per layer"
        )
    table("replay", lines)
    if not small:
        assert all(ratios[name] >= 3 for name in THREE_TIMES), ratios
