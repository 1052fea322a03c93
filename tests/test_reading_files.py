"""Files that are cut, restored, replaced or closed while a runtime reads them."""

import gc
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import moecache
from moecache.runtime import opening
from tests.helpers.checkpoints import Checkpoint, same_parts, write_checkpoint
from tests.helpers.leaks import nothing_left
from tests.helpers.nightly import some
from tests.helpers.pairs import pairwise
from tests.helpers.readings import (
    all_experts,
    force_engine,
    leased,
    same_converted,
)

PLACES = list(itertools.product(range(2), range(12)))


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measure no disk; check that runtimes give back files and threads."""
    monkeypatch.setattr(opening, "calibrate", lambda *_: None)
    with nothing_left():
        yield


@pytest.fixture(name="engine", params=["io_uring", "threads"], autouse=True)
def _engine(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    nothing_is_left_behind: None,
) -> str:
    return force_engine(monkeypatch, request.param)


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path / "model", num_layers=2)


@pytest.fixture(name="runtime", params=["direct", "buffered"])
def _runtime(
    request: pytest.FixtureRequest, model: Checkpoint, engine: str
) -> Iterator[moecache.ExpertRuntime]:
    """Return a runtime with fewer slots than a layer has experts."""
    with moecache.open(model.path, slots=4, read=request.param, prefault="off") as runtime:
        yield runtime


def weights(model: Checkpoint) -> Path:
    """Return the file that the experts are in."""
    return model.path / "model.safetensors"


def range_of(runtime: moecache.ExpertRuntime, layer: int, expert: int) -> tuple[int, int]:
    """Return where an expert begins and ends, in a file that has it in one range."""
    ((_, offset, spans),) = runtime.store.runs(layer, expert)
    return offset, offset + sum(stop - start for _, start, stop in spans)


def assert_all_right(runtime: moecache.ExpertRuntime, model: Checkpoint) -> None:
    """Read every expert, have every slot, find nothing claimed."""
    for layer, experts in enumerate(all_experts(runtime)):
        for expert, parts in enumerate(experts):
            assert same_parts(parts, model.experts[layer][expert])
    with runtime.lease(0, np.arange(4)):
        pass
    runtime.cache.check()


def test_a_file_cut_while_decoding_is_an_error_of_the_experts_that_are_gone(
    runtime: moecache.ExpertRuntime, model: Checkpoint
) -> None:
    """With file, expert, place and size; the others are read; restored, all are."""
    content = weights(model).read_bytes()
    leased(runtime, 0, 0)
    begin, end = range_of(runtime, 1, 3)
    cut = (begin + end) // 2
    os.truncate(weights(model), cut)
    failed = 0
    for layer, expert in PLACES * 2:
        begin, end = range_of(runtime, layer, expert)
        if end <= cut:
            assert same_parts(leased(runtime, layer, expert), model.experts[layer][expert])
            continue
        failed += 1
        with pytest.raises(moecache.StoreError) as caught:
            leased(runtime, layer, expert)
        message = str(caught.value)
        assert str(weights(model)) in message
        assert f"expert {expert} of layer {layer} needs" in message
        assert f"has only {cut} now" in message
        if begin < cut:
            assert f"at byte {cut}" in message
        runtime.cache.check()
    assert failed > 0
    assert runtime.stats().num_failed_reads == failed

    weights(model).write_bytes(content)
    assert_all_right(runtime, model)


def test_a_request_with_one_lost_expert_leaves_the_others_usable(
    runtime: moecache.ExpertRuntime, model: Checkpoint
) -> None:
    """Read together, in one go: the lost one is named, the rest is there the next time."""
    cut, _ = range_of(runtime, 1, 2)
    os.truncate(weights(model), cut)
    for _ in range(3):
        with pytest.raises(moecache.StoreError, match="expert 2 of layer 1"):
            runtime.lease(1, np.array([0, 1, 2]))
        with pytest.raises(moecache.StoreError, match="expert 2 of layer 1"):
            list(runtime.waves(1, np.array([[0, 1, 2]])))
        for expert in (0, 1):
            assert same_parts(leased(runtime, 1, expert), model.experts[1][expert])
    runtime.cache.check()


def test_a_file_replaced_while_decoding_is_not_looked_at(
    runtime: moecache.ExpertRuntime, model: Checkpoint, tmp_path: Path
) -> None:
    """What was opened is what is read: never half of each."""
    other = write_checkpoint(tmp_path / "other", num_layers=2, seed=1)
    leased(runtime, 0, 0)
    os.replace(weights(other), weights(model))

    assert_all_right(runtime, model)
    weights(model).unlink()
    assert_all_right(runtime, model)


@pytest.mark.parametrize(
    ("read", "loader_threads", "dtype"),
    pairwise(["direct", "buffered"], [0, 2], [None, np.float32]),
)
@pytest.mark.parametrize("rounds", some([4, 20], lambda rounds: rounds == 4))
def test_a_runtime_closed_while_others_step_ends_their_steps_with_an_error(
    model: Checkpoint, read: str, loader_threads: int, dtype: type | None, rounds: int
) -> None:
    """No hang, no crash, no wrong expert; a step that comes too late gets an error."""
    problems: list[object] = []

    def step(runtime: moecache.ExpertRuntime, seed: int, started: threading.Barrier) -> None:
        rng = np.random.default_rng(seed)
        started.wait()
        try:
            while True:
                layer = int(rng.integers(2))
                ids = np.argsort(rng.random((int(rng.integers(1, 4)), 12)), axis=1)[:, :3]
                for wave in runtime.waves(layer, ids):
                    for slot, pairs in wave:
                        expert = int(ids.reshape(-1)[pairs[0]])
                        found = {role: runtime.slab(role)[slot] for role in ("gate_up", "down")}
                        if not same_converted(found, model.experts[layer][expert]):
                            problems.append((layer, expert))
        except moecache.MoeCacheError as error:
            if "closed" not in str(error):
                problems.append(error)
        except BaseException as error:  # noqa: BLE001 - the main thread reports it
            problems.append(error)

    for round_ in range(rounds):
        runtime = moecache.open(
            model.path,
            slots=4,
            read=read,
            prefault="off",
            loader_threads=loader_threads,
            dtype=dtype,
        )
        started = threading.Barrier(4)
        threads = [
            threading.Thread(target=step, args=(runtime, seed, started), daemon=True)
            for seed in range(3)
        ]
        for thread in threads:
            thread.start()
        started.wait()
        threading.Event().wait(0.01 * round_ / rounds)
        runtime.close()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    assert problems == []


def test_a_runtime_closes_with_steps_unfinished(
    runtime: moecache.ExpertRuntime, model: Checkpoint
) -> None:
    """Reads in flight or not begun: they are dropped or taken in, nothing hangs."""
    steps = [runtime.waves(layer, np.arange(12).reshape(4, 3)) for layer in range(2)]
    for step in steps:
        next(step)
    runtime.close()
    for step in steps:
        with pytest.raises(moecache.MoeCacheError):
            for _ in step:
                pass
        step.close()


def test_a_forked_child_is_refused_and_the_parents_reads_go_on(
    runtime: moecache.ExpertRuntime, model: Checkpoint
) -> None:
    """In the middle of a step; the child drops what it inherited."""
    step = runtime.waves(0, np.arange(12).reshape(4, 3))
    next(step)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            next(runtime.waves(1, np.array([[1, 2]])))
        except moecache.MoeCacheError as error:
            step.close()
            runtime.close()
            gc.collect()
            os._exit(0 if "fork" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    for _ in step:
        pass
    assert_all_right(runtime, model)


class Closing:
    """A predictor that closes the runtime when a step's reads are under way."""

    runtime: moecache.ExpertRuntime

    def observe(self, layer: int, ids: np.ndarray) -> None:
        """Close it."""
        self.runtime.close()

    def predict(self, layer: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Name no expert."""
        return np.empty(0, np.int64), np.empty(0)

    def begin_sequence(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("read", ["direct", "buffered", "mmap"])
def test_a_step_beside_close_is_told_that_the_runtime_was_closed(
    model: Checkpoint, read: str
) -> None:
    """Reads that are dropped then are no failures of the disk."""
    closing = Closing()
    with moecache.open(
        model.path, slots=12, read=read, prefault="off", prefetch=closing, loader_threads=0
    ) as runtime:
        closing.runtime = runtime
        with pytest.raises(moecache.MoeCacheError, match=r"^the runtime was closed$"):
            runtime.lease(0, np.arange(12))
