"""Ctrl-C at every stage of a read: the step is over, and nothing is lost or left claimed."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moecache
from moecache.reader._reader import ENGINES
from moecache.runtime import opening
from tests.helpers.checkpoints import Checkpoint, write_checkpoint
from tests.helpers.nightly import some
from tests.helpers.pairs import pairwise
from tests.helpers.readings import all_experts, force_engine, same_converted


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path / "model", num_layers=2)


@pytest.fixture(name="runtime")
def _runtime(
    request: pytest.FixtureRequest, model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> Iterator[moecache.ExpertRuntime]:
    """Return a runtime that reads only while a step waits; with conversion or without."""
    engine, converts = request.param
    force_engine(monkeypatch, engine)
    monkeypatch.setattr(opening, "calibrate", lambda *_: None)
    with moecache.open(
        model.path,
        slots=6,
        read="direct",
        prefault="off",
        loader_threads=0,
        dtype=np.float32 if converts else None,
    ) as runtime:
        yield runtime


class Interrupted:
    """Any object, of which one method is interrupted: before its nth call, or right after."""

    def __init__(self, inner: object, name: str, nth: int, *, after: bool) -> None:
        self._inner = inner
        self._name = name
        self._left = nth
        self._after = after
        self.happened = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name != self._name:
            return found

        def call(*arguments: object, **options: object) -> object:
            self._left -= 1
            if self._left == 0 and not self._after:
                self.happened = True
                raise KeyboardInterrupt
            result = found(*arguments, **options)
            if self._left == 0:
                self.happened = True
                raise KeyboardInterrupt
            return result

        return call


def assert_nothing_lost(runtime: moecache.ExpertRuntime, model: Checkpoint) -> None:
    """Read every expert right, twice; have every slot, and every buffer back."""
    runtime.cache.check()
    for _ in range(2):
        for layer, experts in enumerate(all_experts(runtime)):
            for expert, parts in enumerate(experts):
                assert same_converted(parts, model.experts[layer][expert])
    with runtime.lease(1, np.arange(6)):
        pass
    runtime.cache.check()
    assert not runtime.pool._bounces._lent
    assert not runtime._loader._table.by_slot
    assert not runtime._loader._table.num_queued
    assert not runtime._loader._table.num_reading


READS = list(itertools.product(ENGINES, (False, True)))
STAGES = [
    ("pool", "buffers", False),
    ("pool", "buffers", True),
    ("_store", "runs", False),
    ("_store", "runs", True),
    ("_reader", "submit", False),
    ("_reader", "submit", True),
    ("_reader", "wait", False),
    ("_reader", "wait", True),
    ("_reader", "take", False),
    ("_reader", "take", True),
    ("pool", "upload", False),
    ("pool", "upload", True),
]
WAYS = ("waves", "lease", "bulk")


@pytest.mark.parametrize(
    ("stage", "nth", "way", "runtime"),
    some(
        pairwise(STAGES, (1, 2), WAYS, READS),
        # Each stage in two of the four ways to read.
        lambda case: (STAGES.index(case[0]) + READS.index(case[3])) % 2 == 0,
    ),
    indirect=["runtime"],
    ids=str,
)
def test_an_interrupt_at_any_stage_loses_nothing(
    runtime: moecache.ExpertRuntime,
    model: Checkpoint,
    stage: tuple[str, str, bool],
    nth: int,
    way: str,
) -> None:
    """It reaches the caller; the next step reads what this one did not."""
    part, method, after = stage
    holder = runtime._loader if part == "pool" else runtime._loader.engine
    real = getattr(holder, part)
    ids = np.array([[7, 1, 4]])
    broken = Interrupted(real, method, nth, after=after)
    setattr(holder, part, broken)
    try:
        for _ in range(2000):  # until it had to wait, say
            if way == "lease":
                runtime.lease(0, ids).close()
            else:
                list(runtime.waves(0, ids if way == "waves" else np.arange(12).reshape(4, 3)))
            runtime.lease(1, np.arange(6)).close()  # evict, and read again
    except KeyboardInterrupt:
        assert broken.happened
    finally:
        setattr(holder, part, real)
    assert broken.happened
    assert_nothing_lost(runtime, model)
