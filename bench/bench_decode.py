"""What a policy costs and saves live: the demo's model decodes with a quarter of its experts.

Each round generates the same text with every contestant by turns; the tokens must be equal.
The model's file is in the page cache, so that a miss costs microseconds, not a disk's: the least
that a policy with more hits can gain.
"""

import time
from pathlib import Path
from statistics import median
from types import ModuleType

import numpy as np
import pytest

import moecache
from bench.conftest import Table
from moecache.commands.example import find_example
from moecache.stores import open_store

POLICIES = ("lru", "echo", "haz2", "lfru", "slru")
PROMPT = b'class Cache:\n    """'


def decode(
    loop: ModuleType, model_path: Path, policy: str, num_tokens: int
) -> tuple[float, list[int], moecache.RuntimeStats]:
    """Return the seconds per token after the first, the tokens, and what the cache counted."""
    with (
        open_store(model_path) as store,
        moecache.open(
            model_path, "25%", policy=policy, prefetch="off", warmpin=0, dtype=np.float32
        ) as runtime,
    ):
        model = loop.NumpyMoe(store, loop.through_moecache(runtime))
        tokens = []
        start = 0.0
        for token, _ in loop.generate(model, PROMPT, num_tokens, temperature=0.7, seed=0):
            start = start or time.perf_counter()
            tokens.append(token)
        seconds = (time.perf_counter() - start) / max(1, len(tokens) - 1)
        return seconds, tokens, runtime.stats()


@pytest.mark.benchmark(group="decode")
def test_decode(small: bool, table: Table) -> None:
    """ECHO is not slower than LRU end to end: what it costs it saves."""
    loop, model_path = find_example(None)
    rounds, num_tokens = (1, 20) if small else (9, 300)
    seconds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    counted = {}
    expected = None
    for _ in range(rounds):
        for policy in POLICIES:
            spent, tokens, counted[policy] = decode(loop, model_path, policy, num_tokens)
            expected = expected or tokens
            assert tokens == expected
            seconds[policy].append(spent)
    lines = [
        f"{num_tokens} tokens, medians of {rounds}",
        f"{'':6} {'ms per token':>13} {'of lru':>7} {'hit rate':>9} {'MiB read':>9} {'wait ms':>7}",
    ]
    ratios = {}
    for policy, spent in seconds.items():
        # Round by round: both sides had the same machine.
        ratios[policy] = median(one / lru for one, lru in zip(spent, seconds["lru"], strict=True))
        stats = counted[policy]
        lines.append(
            f"{policy:6} {1e3 * median(spent):13.3f} {ratios[policy]:7.3f} {stats.hit_rate:9.4f} "
            f"{stats.bytes_read / 2**20:9.1f} {stats.stall_ns / 1e6:7.1f}"
        )
    table("decode with a quarter of the experts in memory", lines)
    if not small:
        assert ratios["echo"] <= 1.0, ratios
