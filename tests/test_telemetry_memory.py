"""What counting costs in memory: nothing, however long it goes on."""

import gc
import sys
import time

import numpy as np
import pytest

from tests.helpers.runtimes import drain, make_runtime
from tests.helpers.stores import WrappedStore, nothing, numbered_store


@pytest.mark.parametrize(("prefetch", "policy"), [("off", "lru"), ("echo", "echo")])
def test_steps_add_no_memory(prefetch: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With hits and misses, and no snapshot: one block per step would be 20,000.

    Also where the prefetcher reads, whatever became of the guesses before.
    """
    monkeypatch.setattr("moecache.prefetch.break_even._MAX_LIKELIHOOD", 0.0)
    store = WrappedStore(numbered_store(), nothing)
    usual, others = np.array([[1, 2]]), [np.array([[first, first + 1]]) for first in range(7)]
    with make_runtime(
        6, store=store, loader_threads=0, policy=policy, prefetch=prefetch
    ) as runtime:
        prefetcher = runtime._prefetcher

        def run(num_steps: int) -> None:
            for step in range(num_steps):
                asked = runtime.waves(0, usual) if step % 10 else runtime.waves(1, others[step % 7])
                for _ in asked:
                    pass
                while step % 10 == 9 and prefetcher is not None and prefetcher.queue:
                    time.sleep(0)
            store.reads.clear()
            gc.collect()

        run(5000)
        before, bytes_before = sys.getallocatedblocks(), _rss_bytes()
        run(20_000)
        grown, grown_bytes = sys.getallocatedblocks() - before, _rss_bytes() - bytes_before
        stats = runtime.stats()

    assert stats.num_steps == 25_000
    assert stats.num_resident_steps >= 18_000
    if prefetch == "off":
        assert stats.num_misses >= 2_000
    else:
        assert stats.prefetch is not None
        assert stats.prefetch.num_issued >= 2_000
        assert stats.num_evictions >= 2_000
    assert stats.num_sequences == 0
    assert grown < 1000
    assert grown_bytes < 2**19


def test_snapshots_leave_nothing_behind() -> None:
    """A scrape per second for years is no leak."""
    with make_runtime(6) as runtime:
        drain(runtime, 0, np.array([[1, 2]]))

        def ask(num_times: int) -> int:
            for _ in range(num_times):
                last = runtime.stats()
                (runtime.stats() - last)._repr_html_()
            gc.collect()
            return sys.getallocatedblocks()

        before = ask(500)

        assert ask(1000) - before < 500


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
