"""What is compared when a model is larger than memory: a process for each, started by a parent.

    python -m bench.contestants JSON

The JSON says which checkpoint, trace, contestant and limit. The process joins the limit's cgroup
before it opens anything, replays the trace and prints what it measured, as JSON.
"""

import hashlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# Touches a layer's experts for one token and returns a number for each, [top_k].
Touch = Callable[[int, np.ndarray], np.ndarray]
SAMPLE = mmap.PAGESIZE // 4

CONTESTANTS = {
    "mmap": "mapped, paged in on demand",
    "mmap-huge": "mapped, in huge pages",
    "mmap-ahead": "mapped, the routed experts hinted (WILLNEED)",
    "mmap-ahead-random": "the same, no other read-ahead (RANDOM)",
    "own-mmap": 'own cache, read="mmap"',
    "own-buffered": 'own cache, read="buffered"',
    "own-direct": 'own cache, read="direct"',
    "own-direct-threads": "the same, threads instead of io_uring",
    "own-packed": 'packed, own cache, read="direct"',
}
BUFFERED = ("mmap-ahead", "mmap-ahead-random", "own-mmap", "own-buffered")


def main(text: str) -> None:
    """Run one contestant."""
    task = json.loads(text)
    if task["join"]:
        Path(task["join"]).write_text(str(os.getpid()))
    trace = np.load(task["trace"])
    compute = task["compute"]
    stats: Callable[[], dict[str, Any]]
    if task["contestant"].startswith("mmap"):
        touch, stats, close = mapped(task, compute=compute)
    else:
        touch, stats, close = cached(task, compute=compute)
    digest = hashlib.blake2b(digest_size=16)
    for token in trace[: task["num_warm"]]:
        run_token(touch, token, digest)
    before, read_before = stats(), bytes_from_disk()
    times = []
    start = time.perf_counter()
    for token in trace[task["num_warm"] :]:
        began = time.perf_counter_ns()
        run_token(touch, token, digest)
        times.append(time.perf_counter_ns() - began)
    seconds = time.perf_counter() - start
    result = {
        "seconds": seconds,
        "times_ns": times,
        "bytes_read": bytes_from_disk() - read_before,
        "digest": digest.hexdigest(),
        "before": before,
        "after": stats(),
    }
    close()
    print(json.dumps(result))


def run_token(touch: Touch, token: np.ndarray, digest: Any) -> None:
    """Run one token through all layers."""
    for layer, ids in enumerate(token):
        digest.update(touch(layer, ids).tobytes())


def use(weights: dict[str, np.ndarray], hidden: np.ndarray | None) -> float:
    """Use an expert: a number of every page of it or, with `hidden`, its two products."""
    if hidden is None:
        # The file itself may store the role gate_up in two pieces, "gate" and "up".
        return float(sum(a.reshape(-1)[::SAMPLE].sum(dtype=np.float64) for a in weights.values()))
    if "gate_up" not in weights:
        parts = {"gate_up": np.concatenate([weights["gate"], weights["up"]])}
        weights = parts | {"down": weights["down"]}
    both = weights["gate_up"] @ hidden
    width = len(both) // 2
    return float((weights["down"] @ (both[:width] * both[width:])).sum(dtype=np.float64))


def mapped(task: dict[str, Any], *, compute: bool) -> tuple[Touch, Any, Any]:
    """Return how to touch experts of the mapped files."""
    import moecache
    from moecache._prefault import advise_huge

    store = moecache.open_store(task["path"])
    kind = task["contestant"]
    hidden = hidden_of(store.layout) if compute else None
    for region in store.regions():
        if kind == "mmap-huge":
            advise_huge(region[0] // mmap.PAGESIZE * mmap.PAGESIZE, region[1])
        if kind == "mmap-ahead-random":
            region.owner.madvise(mmap.MADV_RANDOM)

    def touch(layer: int, ids: np.ndarray) -> np.ndarray:
        if "ahead" in kind:
            store.prefetch(layer, ids.tolist())
        return np.array([use(store.view(layer, expert), hidden) for expert in ids.tolist()])

    return touch, dict, store.close


def cached(task: dict[str, Any], *, compute: bool) -> tuple[Touch, Any, Any]:
    """Return how to touch experts through a runtime that finds out by itself what fits."""
    import moecache
    from moecache.reader import disk as reading

    kind = task["contestant"]
    if kind == "own-direct-threads":
        original = reading.open_reader
        moecache.runtime.opening.open_reader = lambda *a, **k: original(*a, **k, engine="threads")
    policy, _, prefetch = task["policy"].partition("+")
    runtime = moecache.open(
        task["path"],
        reserve=task["reserve"],
        policy=policy,
        prefetch=prefetch or "off",
        warmpin=0,
        read={"own-mmap": "mmap", "own-buffered": "buffered"}.get(kind, "direct"),
        prefault="off",
    )
    hidden = hidden_of(runtime.layout) if compute else None

    def touch(layer: int, ids: np.ndarray) -> np.ndarray:
        found = np.empty(len(ids))
        for wave in runtime.waves(layer, ids):
            for slot, pairs in wave:
                found[pairs] = use(runtime.expert(slot, layer), hidden)
        return found

    def stats() -> dict[str, Any]:
        seen = runtime.stats()
        facts: dict[str, Any] = {
            "num_hits": seen.num_hits,
            "num_misses": seen.num_misses,
            "stall_ns": seen.stall_ns,
            "capacity": seen.capacity,
            "total": seen.total_experts,
        }
        if seen.reading is not None:
            facts |= {
                "engine": seen.reading.engine,
                "depth": seen.reading.depth,
                "piece_bytes": seen.reading.piece_bytes,
                "busy_ns": seen.reading.busy_ns,
                "reader_bytes": seen.reading.bytes_read,
                "bytes_copied": seen.reading.bytes_copied,
            }
        return facts

    return touch, stats, runtime.close


def hidden_of(layout: Any) -> np.ndarray:
    """Return a vector that every expert is multiplied with."""
    size = next(role.shape[1] for role in layout.layers[0] if role.name == "gate_up")
    return np.random.default_rng(0).standard_normal(size, np.float32)


def bytes_from_disk() -> int:
    """Return what the kernel has read from disks for this process."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


if __name__ == "__main__":
    main(sys.argv[1])
