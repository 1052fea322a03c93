r"""What the first request waits for: a real decode, cold, pre-faulted and warm.

    python -m bench.bench_first_request --dir=/on/the/disk --read-ahead 8MiB 128KiB \
        --json bench/results/first_request.json

A random model of 2.25 GiB of experts, a prompt of 16 tokens and the first 32 tokens, greedily, by
the NumPy host loop of examples/. Experts come from the mapped file (as hosts that map their weights
have them) or through a runtime with half of them in memory. Before each run a request without
experts warms everything else, and the page cache is dropped, which is verified; "warm" then runs
the request once before. Free memory is the guest's own: another process has touched it a moment
before. "foreground" sweeps before the request, "background" while it goes on.
Runs take turns, in another order each round; what is compared is compared within a round, and the
medians of that are shown. All runs give the same tokens, or no figure is shown. With --read-ahead
the model is on a loop device that has it (root).
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moecache
from bench.checkpoint import Size, write_checkpoint
from bench.disks import describe_read_ahead, disk_with
from bench.held_memory import back
from bench.machine import describe_machine
from examples import numpy_loop
from moecache import experts, prefault
from moecache.units import parse_bytes

Table = Callable[[str, list[str]], None]

PROMPT = b"The first token."
NUM_TOKENS = 32
SMALL = Size(num_layers=2, num_experts=8, top_k=2, hidden=64, width=32)
FULL = Size(num_layers=16, num_experts=48, top_k=8, hidden=1024, width=256)
# What is done before the request, by whoever holds the experts.
PREPARED = {
    "offloaded": {"cold": "off", "background": "background", "foreground": "force", "warm": "off"},
    "mapped": {"cold": "off", "foreground": "force", "warm": "off"},
}


@dataclass(frozen=True)
class Request:
    """How one request went."""

    before_s: float
    first_s: float
    rest_s: float
    tokens: tuple[int, ...]

    @property
    def tokens_per_s(self) -> float:
        """Rate over all tokens, the wait for the first one included."""
        return len(self.tokens) / (self.first_s + self.rest_s)


@pytest.mark.parametrize("how", PREPARED)
def test_first_request(disk: Path, small: bool, table: Table, how: str) -> None:
    """Time to first token and tokens/s of the first 32 tokens, by what was done before."""
    write_checkpoint(disk, SMALL if small else FULL)
    requests = take_turns(disk, how, rounds=1 if small else 5)
    table(f"first request, {how}", describe(requests, disk))


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.bench_first_request")
    parser.add_argument("--dir", type=Path, default=Path(), help="on the disk to be measured")
    parser.add_argument("--read-ahead", type=parse_bytes, nargs="*", default=[None])
    parser.add_argument("--how", choices=PREPARED, nargs="*", default=list(PREPARED))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="to see whether it runs")
    arguments = parser.parse_args(argv)
    size = SMALL if arguments.small else FULL
    runs: list[dict[str, Any]] = []
    for read_ahead in arguments.read_ahead or [None]:
        with disk_with(read_ahead, arguments.dir, 2 * size.expert_bytes) as disk:
            print(f"{describe_machine()}, {describe_read_ahead(disk)}", flush=True)
            write_checkpoint(disk, size)
            for how in arguments.how:
                requests = take_turns(disk, how, rounds=arguments.rounds)
                print(*describe(requests, disk), sep="\n", flush=True)
                runs.append(
                    {
                        "machine": describe_machine(),
                        "read_ahead": describe_read_ahead(disk),
                        "experts": how,
                        "experts_bytes": size.expert_bytes,
                        "num_tokens": NUM_TOKENS,
                        "compared": {name: compare(requests, name) for name in requests},
                        "requests": {
                            name: [asdict(one) | {"tokens": None} for one in found]
                            for name, found in requests.items()
                        },
                    }
                )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(runs, indent=1) + "\n")
    return 0


def take_turns(checkpoint: Path, how: str, *, rounds: int) -> dict[str, list[Request]]:
    """Return the requests by what was done before; one a round of each."""
    requests: dict[str, list[Request]] = {name: [] for name in PREPARED[how]}
    for number in range(rounds):
        names = list(requests)
        random.Random(number).shuffle(names)
        for name in names:
            requests[name].append(measure(checkpoint, how, name))
    assert len({one.tokens for found in requests.values() for one in found}) == 1
    return requests


def compare(requests: dict[str, list[Request]], name: str) -> dict[str, float]:
    """Return medians of seconds, and of what they are of the same round's cold request."""
    found, cold = requests[name], requests["cold"]
    return {
        "before_s": statistics.median(one.before_s for one in found),
        "first_s": statistics.median(one.first_s for one in found),
        "rest_s": statistics.median(one.rest_s for one in found),
        "first_of_cold": statistics.median(
            one.first_s / other.first_s for one, other in zip(found, cold, strict=True)
        ),
        "rest_of_cold": statistics.median(
            one.rest_s / other.rest_s for one, other in zip(found, cold, strict=True)
        ),
    }


def describe(requests: dict[str, list[Request]], checkpoint: Path) -> list[str]:
    """Return the figures as lines."""
    with moecache.open_store(checkpoint) as store:
        size = sum(nbytes for _, nbytes in store.regions())
    lines = [
        f"{size / 2**30:.2f} GiB of experts, {describe_read_ahead(checkpoint)}, medians",
        f"{'':12} before, s  first token, s  of cold  tokens 2-{NUM_TOKENS}, s  of cold  tokens/s",
    ]
    for name, found in requests.items():
        figures = compare(requests, name)
        rate = statistics.median(request.tokens_per_s for request in found)
        lines.append(
            f"{name:12} {figures['before_s']:9.2f}  {figures['first_s']:14.3f}  "
            f"{figures['first_of_cold']:7.2f}  {figures['rest_s']:14.3f}  "
            f"{figures['rest_of_cold']:7.2f}  {rate:8.2f}"
        )
    return lines


def measure(checkpoint: Path, how: str, name: str) -> Request:
    """Run one request."""
    with moecache.open_store(checkpoint) as store:
        trunk = numpy_loop.NumpyMoe(store, lambda *_: np.empty(0))
        # Everything but the experts is warm in all runs: trunk, KV cache, BLAS.
        ask(trunk, lambda _layer, hidden, *_: np.zeros_like(hidden))
        assert prefault.evict(store.regions()) < max(2**20, store.layout.total_bytes / 1000)
        # Pages of the file, and slots, twice over.
        back(3 * store.layout.total_bytes)
        if name == "warm":
            with opened(store, how, "off") as routed:
                ask(trunk, routed)
        start = time.perf_counter()
        with opened(store, how, PREPARED[how][name]) as routed:
            before_s = time.perf_counter() - start
            first_s, rest_s, tokens = ask(trunk, routed)
            return Request(before_s, first_s, rest_s, tokens)


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


def ask(
    model: numpy_loop.NumpyMoe, routed: numpy_loop.RoutedExperts
) -> tuple[float, float, tuple[int, ...]]:
    """Generate greedily from an empty KV cache; return seconds to the first token, and of the rest.

    Also the tokens.
    """
    model.routed_experts = routed
    model.num_tokens = 0
    prompt = np.frombuffer(PROMPT, np.uint8).astype(np.int64) + numpy_loop.BYTE_OFFSET
    start = time.perf_counter()
    tokens = [int(model.forward(prompt).argmax())]
    first_s = time.perf_counter() - start
    while len(tokens) < NUM_TOKENS:
        tokens.append(int(model.forward(np.array(tokens[-1:])).argmax()))
    return first_s, time.perf_counter() - start - first_s, tuple(tokens)


if __name__ == "__main__":
    raise SystemExit(main())
