"""What runs live is what is replayed: a recorded run, replayed, hits as often to the last hit."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import moecache
from moecache.commands.demo import resident_experts
from moecache.policies.making import SCOPES
from moecache.policies.registry import Part, maker, policy_names
from moecache.stores import open_store
from moecache.study import Trace
from moecache.study._arguments import POLICIES
from moecache.study.replay import replay
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.pairs import pairwise

PROMPTS = (1, 40, 7)
# Layer and ids.
Step = tuple[int, np.ndarray]


def texts(prompt: bytes) -> list[bytes]:
    """Return prompts of one token and of many."""
    return [prompt[100 * at : 100 * at + length] for at, length in enumerate(PROMPTS)]


def record(
    path: Path, numpy_loop: ModuleType, prompt: bytes, trace_path: Path, **options: object
) -> moecache.RuntimeStats:
    """Generate from several prompts, as sequences of their own; return what the cache counted."""
    with (
        open_store(path) as store,
        # A replay knows no pins and no reads ahead.
        moecache.open(
            path, dtype=np.float32, record_trace=trace_path, warmpin=0, prefetch="off", **options
        ) as runtime,
    ):
        model = numpy_loop.NumpyMoe(store, numpy_loop.through_moecache(runtime))
        for seed, text in enumerate(texts(prompt)):
            runtime.begin_sequence()
            for _ in numpy_loop.generate(model, text, 8, temperature=0.9, seed=seed):
                pass
        return runtime.stats()


@pytest.mark.parametrize("slots", [1, 8, 30, 255])
def test_a_recorded_run_replays_to_the_last_hit(
    tiny_moe: Path, numpy_loop: ModuleType, prompt: bytes, tmp_path: Path, slots: int
) -> None:
    """Prompts of one token and of many, decoding, sequences; one slot to all experts but one."""
    path = tmp_path / "trace.npz"
    live = record(tiny_moe, numpy_loop, prompt, path, slots=slots)

    found = replay(Trace.load(path), "echo", slots)

    assert (found.num_hits, found.num_misses) == (live.num_hits, live.num_misses)


@pytest.fixture(scope="module", name="routed_prompts")
def _routed_prompts(tiny_moe: Path, numpy_loop: ModuleType, prompt: bytes) -> list[list[Step]]:
    """Return what the model's router asks for, prompt by prompt."""
    prompts: list[list[Step]] = []

    def note(layer: int, hidden: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
        prompts[-1].append((layer, ids.copy()))
        return resident(layer, hidden, ids, weights)

    with open_store(tiny_moe) as store:
        resident, model = resident_experts(store), numpy_loop.NumpyMoe(store, note)
        for seed, text in enumerate(texts(prompt)):
            prompts.append([])
            for _ in numpy_loop.generate(model, text, 8, temperature=0.9, seed=seed):
                pass
    return prompts


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_replays_to_the_last_hit(
    small_moe: Path, routed_prompts: list[list[Step]], tmp_path: Path, policy: str, scope: str
) -> None:
    """What the model asked for, prompts and decoding: hits and misses are equal."""
    path = tmp_path / "trace.npz"
    runtime = opened(small_moe, path, slots=64, policy=policy, scope=scope)
    for steps in routed_prompts:
        runtime.begin_sequence()
        for layer, ids in steps:
            for _wave in runtime.waves(layer, ids):
                pass
    assert runtime.stats().num_hits > 0
    assert runtime.stats().num_evictions > 0

    live, replayed = live_and_replayed(runtime, path)

    assert replayed == live


def live_and_replayed(runtime: moecache.ExpertRuntime, path: Path) -> tuple[object, object]:
    """Return what the cache counted, and what a replay of its recording does."""
    live = runtime.stats()
    runtime.close()
    found = replay(Trace.load(path), live.policy, live.capacity, scope=live.scope)
    return (live.num_hits, live.num_misses), (found.num_hits, found.num_misses)


@pytest.fixture(scope="module")
def small_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of the tiny model's layers and experts, of 192 bytes each."""
    config = {"num_experts_per_tok": 4}
    path = tmp_path_factory.mktemp("small") / "model"
    return write_checkpoint(path, num_layers=8, num_experts=32, config=config).path


def opened(
    small_moe: Path, path: Path, *, policy: str = "echo", **options: object
) -> moecache.ExpertRuntime:
    """Open 8 layers of 32 experts, top-4, and record; policies for replays come as functions."""

    def make(capacity: int, *, num_keys: int) -> object:
        return maker(policy)(Part(capacity, num_keys, 8, 32, None, np.zeros(num_keys), {}))

    make.__name__ = policy
    return moecache.open(
        small_moe,
        policy=policy if policy in policy_names() else make,
        prefault="off",
        record_trace=path,
        warmpin=0,
        prefetch="off",
        **options,
    )


def routed(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Return a skewed router's choices, [rows, 4]."""
    scores = rng.gumbel(size=(rows, 32)) - 1.5 * np.log(1 + np.arange(32))
    return np.argsort(-scores, axis=1)[:, :4]


WAYS = ["lease", "acquire", "waves", "mixed"]


@pytest.mark.parametrize(
    ("way", "policy", "scope"), pairwise(WAYS, ("lru", "echo", "s3-fifo"), SCOPES)
)
def test_steps_of_several_rows_replay_as_they_were_admitted(
    small_moe: Path, tmp_path: Path, policy: str, way: str, scope: str
) -> None:
    """Leases and bare acquires admit everything, waves their fair share, in one run too."""
    path, rng = tmp_path / "trace.npz", np.random.default_rng(8)
    # A fair share of 8: more rows of four would not fit into a layer of its own.
    runtime = opened(small_moe, path, slots=64, policy=policy, scope=scope)
    for _ in range(30):
        rows = int(rng.choice([1, 2] if scope == "layer" else [1, 1, 3, 4]))
        for layer in range(8):
            ids = routed(rng, rows)
            chosen = WAYS[rng.integers(3)] if way == "mixed" else way
            if chosen == "waves":
                for _wave in runtime.waves(layer, ids):
                    pass
            elif chosen == "lease":
                runtime.lease(layer, ids).close()
            else:
                slots = np.empty(ids.size, np.int32)
                misses = np.empty(ids.size, np.int32)
                count = runtime.cache.acquire(layer, ids, slots, misses)
                for index in misses[:count]:
                    runtime.cache.publish(slots[index])
                runtime.cache.release(slots)

    live, replayed = live_and_replayed(runtime, path)

    assert replayed == live


@pytest.mark.parametrize(
    ("way", "policy", "scope"), pairwise(["waves", "lease"], ("lru", "echo", "haz2"), SCOPES)
)
def test_batches_replay_to_the_last_hit(
    small_moe: Path, tmp_path: Path, policy: str, way: str, scope: str
) -> None:
    """Sequences join and leave, prompts come in between, and rows without a name as well."""
    path, rng = tmp_path / "trace.npz", np.random.default_rng(11)
    # Leases admit everything: 4 rows of 4 in a layer's own 16.
    runtime = opened(small_moe, path, slots=128, policy=policy, scope=scope)
    batch = [0, 1, 2]
    for number in range(60):
        names: list[int] | None = batch
        if number % 7 == 6:
            batch = [*batch[1:], number]  # one leaves, another comes
            names = [number] * int(rng.integers(1, 4))  # with a prompt of its own
        elif number % 11 == 10:
            runtime.begin_sequence()
            names = None
        elif number % 13 == 12:
            names = [batch[1]]
        for layer in range(8):
            ids = routed(rng, 1 if names is None else len(names))
            if way == "lease":
                runtime.lease(layer, ids, sequences=names).close()
                continue
            for _wave in runtime.waves(layer, ids, sequences=names):
                pass

    live, replayed = live_and_replayed(runtime, path)

    trace = Trace.load(path)
    assert replayed == live
    assert len(np.unique(trace.sequence[trace.step == 0])) == 3
    assert not trace.phase.all()


def test_a_batch_that_keeps_its_places_replays_to_the_last_hit(
    small_moe: Path, tmp_path: Path
) -> None:
    """Its prompts are rows of one sequence each, side by side; the next batch is another."""
    path, rng = tmp_path / "trace.npz", np.random.default_rng(12)
    runtime = opened(small_moe, path, slots=64, policy="echo")
    for size in (4, 1, 2):
        runtime.begin_sequence(batch=size)
        for rows in (3 * size, *[size] * 20):
            for layer in range(8):
                for _wave in runtime.waves(layer, routed(rng, rows)):
                    pass

    live, replayed = live_and_replayed(runtime, path)

    trace = Trace.load(path)
    assert replayed == live
    assert trace.sequence[:12].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert sorted(np.unique(trace.sequence)) == [0, 1, 2, 3, 4, 5, 6]
    assert trace.phase[:12].tolist() == [0] * 12
    assert trace.phase[12:16].tolist() == [1] * 4


@pytest.mark.parametrize("policy", ["lru", "echo", "haz2", "least-stale", "lrfu"])
def test_layers_that_a_pass_leaves_out_are_not_visited(
    small_moe: Path, tmp_path: Path, policy: str
) -> None:
    """Early exits, skipped layers, and steps that have nothing but the experts of others."""
    path, rng = tmp_path / "trace.npz", np.random.default_rng(9)
    runtime = opened(small_moe, path, slots=40, policy=policy)
    for token in range(150):
        if token % 25 == 0:
            runtime.begin_sequence()
        rows = int(rng.choice([1, 1, 1, 3]))
        exit_after = rng.integers(1, 9)
        for layer in range(exit_after):
            if rng.random() < 0.2:
                continue
            ids = routed(rng, rows)
            if rng.random() < 0.2:
                ids += 32
            for _wave in runtime.waves(layer, ids, ignore_out_of_range=True):
                pass

    live, replayed = live_and_replayed(runtime, path)

    assert replayed == live


@pytest.mark.parametrize("policy", ["lru", "echo", "s3-fifo"])
def test_an_expert_twice_in_a_row_is_asked_for_once(
    small_moe: Path, tmp_path: Path, policy: str
) -> None:
    """Padded rows repeat an id: neither live nor replayed does that make it more wanted."""
    path, rng = tmp_path / "trace.npz", np.random.default_rng(10)
    runtime = opened(small_moe, path, slots=64, policy=policy)
    for _ in range(60):
        rows = int(rng.choice([1, 2, 6]))
        for layer in range(8):
            ids = routed(rng, rows)
            ids[:, 2:] = ids[:, rng.integers(4, size=2)]
            for _wave in runtime.waves(layer, ids):
                pass

    live, replayed = live_and_replayed(runtime, path)

    assert replayed == live
