"""What the first request waits for: a real decode, cold, pre-faulted and warm.

    pytest bench/bench_first_request.py --bench-dir=/on/the/disk

A random model of 2.25 GiB of experts, a prompt of 16 tokens and the first 32 tokens, greedily, by
the NumPy host loop of examples/. Experts come from the mapped file (as hosts that map their weights
have them) or through a runtime with half of them in memory. Before each run a request without
experts warms everything else, and the page cache is dropped, which is verified; "warm" then runs
the request once before. All runs give the same tokens, or no figure is shown.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import moecache
from bench.checkpoint import Size, write_checkpoint
from examples import numpy_loop
from moecache import experts, prefault

Table = Callable[[str, list[str]], None]

PROMPT = b"The first token."
NUM_TOKENS = 32
SMALL = Size(num_layers=2, num_experts=8, top_k=2, hidden=64, width=32)
FULL = Size(num_layers=16, num_experts=48, top_k=8, hidden=1024, width=256)


@dataclass(frozen=True)
class Request:
    """How one request went."""

    tokens: list[int]
    first_s: float
    rest_s: float

    @property
    def tokens_per_s(self) -> float:
        """Rate over all tokens, the wait for the first one included."""
        return len(self.tokens) / (self.first_s + self.rest_s)


@pytest.fixture
def checkpoint(disk: Path, small: bool) -> Path:
    """Return a random checkpoint."""
    write_checkpoint(disk, SMALL if small else FULL)
    return disk


@pytest.mark.parametrize("how", ["mapped", "offloaded"])
def test_first_request(checkpoint: Path, small: bool, table: Table, how: str) -> None:
    """Time to first token and tokens/s of the first 32 tokens, by what was done before."""
    prepare = {
        "cold": [],
        "pre-faulted": ["force"],
        "background": ["background"],
        "warm": ["request"],
    }
    if how == "mapped":
        del prepare["background"]
    requests: dict[str, list[Request]] = {name: [] for name in prepare}
    waits: dict[str, list[float]] = {name: [] for name in prepare}
    for _ in range(1 if small else 5):
        for name, steps in prepare.items():
            wait, request = measure(checkpoint, how, steps)
            waits[name].append(wait)
            requests[name].append(request)
    assert len({tuple(one.tokens) for runs in requests.values() for one in runs}) == 1

    lines = [f"{'':12} before, s  first token, s  first {NUM_TOKENS} tokens, tokens/s  of warm"]
    warm_rate = statistics.median(request.tokens_per_s for request in requests["warm"])
    for name, runs in requests.items():
        rate = statistics.median(request.tokens_per_s for request in runs)
        first = statistics.median(request.first_s for request in runs)
        before = f"{statistics.median(waits[name]):9.2f}" if name != "warm" else f"{'':9}"
        lines.append(f"{name:12} {before}  {first:14.3f}  {rate:25.2f}  {rate / warm_rate:7.2f}")
    size = sum(nbytes for _, nbytes in moecache.open_store(checkpoint).regions())
    table(f"first request, {size / 2**30:.2f} GiB of experts, {how} (medians)", lines)


def measure(checkpoint: Path, how: str, steps: list[str]) -> tuple[float, Request]:
    """Run one request; return the seconds spent before it, and how it went."""
    with moecache.open_store(checkpoint) as store:
        trunk = numpy_loop.NumpyMoe(store, lambda *_: np.empty(0))
        # Everything but the experts is warm in all runs: trunk, KV cache, BLAS.
        ask(trunk, lambda _layer, hidden, *_: np.zeros_like(hidden))
        assert prefault.evict(store.regions()) < 2**20
        start = time.perf_counter()
        if "request" in steps:
            with opened(store, how, "off") as routed:
                ask(trunk, routed)
        mode = next((step for step in steps if step != "request"), "off")
        with opened(store, how, mode) as routed:
            wait = time.perf_counter() - start
            return wait, ask(trunk, routed)


@contextmanager
def opened(
    store: moecache.SafetensorsStore, how: str, mode: str
) -> Iterator[numpy_loop.RoutedExperts]:
    """Yield routed experts that use the mapped file, or go through a runtime."""
    if how == "mapped":
        if mode == "force":
            prefault.warm(store.regions(), mode="force")
        yield through_views(store)
        return
    with moecache.open(
        store.path, memory="50%", policy="lru", prefetch="off", warmpin=0, prefault=mode
    ) as runtime:
        yield numpy_loop.through_moecache(runtime)


def through_views(store: moecache.SafetensorsStore) -> numpy_loop.RoutedExperts:
    """Return routed experts that compute with the mapped file itself."""

    def routed_experts(
        layer: int, hidden: np.ndarray, ids: np.ndarray, weights: np.ndarray
    ) -> np.ndarray:
        flat = ids.reshape(-1)
        rows = np.empty((flat.size, hidden.shape[1]), hidden.dtype)
        for expert in np.unique(flat):
            (pairs,) = np.nonzero(flat == expert)
            views = store.view(layer, int(expert))
            rows[pairs] = experts.gated_rows(hidden[pairs // ids.shape[1]], views)
        return experts.combine(rows, weights)

    return routed_experts


def ask(model: numpy_loop.NumpyMoe, routed: numpy_loop.RoutedExperts) -> Request:
    """Generate greedily from an empty KV cache."""
    model.routed_experts = routed
    model.num_tokens = 0
    prompt = np.frombuffer(PROMPT, np.uint8).astype(np.int64) + numpy_loop.BYTE_OFFSET
    start = time.perf_counter()
    tokens = [int(model.forward(prompt).argmax())]
    first_s = time.perf_counter() - start
    while len(tokens) < NUM_TOKENS:
        tokens.append(int(model.forward(np.array(tokens[-1:])).argmax()))
    return Request(tokens, first_s, time.perf_counter() - start - first_s)
