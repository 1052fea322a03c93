"""What runs live is what is replayed: a recorded run, replayed, hits as often to the last hit."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import moecache
from moecache.settings import POLICIES
from moecache.stores import open_store
from moecache.study import Trace
from moecache.study.replay import replay

PROMPTS = (0, 1, 40, 7)


def record(
    path: Path, numpy_loop: ModuleType, prompt: bytes, trace_path: Path, **options: object
) -> moecache.RuntimeStats:
    """Generate from several prompts, as sequences of their own; return what the cache counted."""
    with (
        open_store(path) as store,
        moecache.open(path, dtype=np.float32, record_trace=trace_path, **options) as runtime,
    ):
        model = numpy_loop.NumpyMoe(store, numpy_loop.through_moecache(runtime))
        for seed, length in enumerate(PROMPTS):
            if not length:
                continue
            runtime.begin_sequence()
            text = prompt[100 * seed : 100 * seed + length]
            for _ in numpy_loop.generate(model, text, 12, temperature=0.9, seed=seed):
                pass
        return runtime.stats()


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_recorded_run_replays_to_the_last_hit(
    tiny_moe: Path,
    numpy_loop: ModuleType,
    prompt: bytes,
    tmp_path: Path,
    policy: str,
    scope: str,
) -> None:
    """Prompts of one token and of many, decoding, and sequences: hits and misses are equal."""
    path = tmp_path / "trace.npz"
    live = record(tiny_moe, numpy_loop, prompt, path, slots=64, policy=policy, scope=scope)

    found = replay(Trace.load(path), policy, live.capacity, scope=scope)

    assert (found.num_hits, found.num_misses) == (live.num_hits, live.num_misses)
    assert live.num_hits > 0
    assert live.num_evictions > 0


@pytest.mark.parametrize("slots", [1, 8, 30, 255])
def test_at_every_capacity(
    tiny_moe: Path, numpy_loop: ModuleType, prompt: bytes, tmp_path: Path, slots: int
) -> None:
    """One slot, a token's cycle, and all experts but one."""
    path = tmp_path / "trace.npz"
    live = record(tiny_moe, numpy_loop, prompt, path, slots=slots)

    found = replay(Trace.load(path), "echo", slots)

    assert (found.num_hits, found.num_misses) == (live.num_hits, live.num_misses)
