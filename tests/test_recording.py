"""Recording: a runtime's routing becomes a trace, and never costs the runtime."""

import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import moecache
from moecache.errors import ConfigError, MoeCacheError
from moecache.study import Trace


@pytest.fixture(autouse=True)
def _capture(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "moecache")


def opened(tiny_moe: Path, **options: Any) -> moecache.ExpertRuntime:
    """Open the tiny model with a small cache."""
    return moecache.open(tiny_moe, slots=40, dtype=np.float32, prefault="off", **options)


def step(runtime: moecache.ExpertRuntime, ids: Any, layers: range = range(8)) -> None:
    """Go through the layers with the same ids."""
    for layer in layers:
        for _ in runtime.waves(layer, np.array(ids)):
            pass


@pytest.mark.parametrize("policy", ["slru", "lfu"])
def test_a_recording_has_the_ids_the_router_chose(
    policy: str, tiny_moe: Path, numpy_loop: ModuleType, tmp_path: Path
) -> None:
    """Bit for bit, prompts included, over two sequences of a real loop."""
    chosen: list[tuple[int, np.ndarray]] = []
    with (
        moecache.open_store(tiny_moe) as store,
        opened(tiny_moe, policy=policy, record_trace=tmp_path / "run.npz") as runtime,
    ):
        through = numpy_loop.through_moecache(runtime)

        def routed(layer: int, hidden: Any, ids: np.ndarray, weights: Any) -> Any:
            chosen.append((layer, ids.copy()))
            return through(layer, hidden, ids, weights)

        model = numpy_loop.NumpyMoe(store, routed)
        for prompt in (b"def f(", b"class"):
            runtime.begin_sequence()
            model.num_tokens = 0
            for _ in numpy_loop.generate(model, prompt, 5, temperature=0.7, seed=1):
                pass
    trace = Trace.load(tmp_path / "run.npz")

    for layer in range(8):
        expected = np.concatenate([ids for at, ids in chosen if at == layer])
        assert np.array_equal(trace.experts[:, layer], expected)
    assert trace.phase.tolist() == [0] * 6 + [1] * 4 + [0] * 5 + [1] * 4
    assert trace.sequence.tolist() == [0] * 10 + [1] * 9
    assert trace.num_steps == 10
    assert trace.metadata == {
        "top_k": 4,
        "model": "tiny_moe",
        "expert_bytes": 49152,
        "policy": policy,
        "scope": "global",
        "capacity": 40,
    }


def test_a_recording_may_be_a_part_of_the_life(tiny_moe: Path, tmp_path: Path) -> None:
    """What is before and after is not in it; another may follow."""
    with opened(tiny_moe) as runtime:
        step(runtime, [[0, 1, 2, 3]])
        with runtime.record_trace(tmp_path / "one.npz") as recording:
            assert runtime.cache.route_log is recording.log
            step(runtime, [[4, 5, 6, 7]])
            step(runtime, [[1, 2, 3, 4], [9, 8, 7, 6]])
        step(runtime, [[8, 9, 10, 11]])
        second = runtime.record_trace(tmp_path / "two.npz")
        step(runtime, [[12, 13, 14, 15]], range(3))
        second.stop()
        assert runtime.cache.route_log is None

    assert recording.saved
    assert recording.closed
    assert recording.trace == Trace.load(tmp_path / "one.npz")
    assert recording.trace is not None
    assert recording.trace.experts[:, 3].tolist() == [[4, 5, 6, 7], [1, 2, 3, 4], [9, 8, 7, 6]]
    two = Trace.load(tmp_path / "two.npz")
    assert two.experts[0, :, 0].tolist() == [12] * 3 + [-1] * 5


def test_closing_the_runtime_ends_the_recording(tiny_moe: Path, tmp_path: Path) -> None:
    """Also in a loop that failed; nothing is left beside the file."""
    with pytest.raises(RuntimeError, match="the loop's"), opened(tiny_moe) as runtime:
        recording = runtime.record_trace(tmp_path / "run.npz")
        step(runtime, [[0, 1, 2, 3]])
        raise RuntimeError("the loop's own")

    assert recording.saved
    assert os.listdir(tmp_path) == ["run.npz"]
    assert len(Trace.load(tmp_path / "run.npz")) == 1
    with pytest.raises(MoeCacheError, match="closed"):
        runtime.record_trace(tmp_path / "late.npz")


def test_one_recording_at_a_time(tiny_moe: Path, tmp_path: Path) -> None:
    """A second is refused, and the first goes on."""
    with opened(tiny_moe, record_trace=tmp_path / "one.npz") as runtime:
        with pytest.raises(MoeCacheError, match="recorded already"):
            runtime.record_trace(tmp_path / "two.npz")
        step(runtime, [[0, 1, 2, 3]])

    assert os.listdir(tmp_path) == ["one.npz"]
    assert len(Trace.load(tmp_path / "one.npz")) == 1


def test_a_path_that_cannot_be_written_is_known_at_the_start(
    tiny_moe: Path, tmp_path: Path
) -> None:
    """No directory, or nothing but one; nothing is recorded then."""
    with opened(tiny_moe) as runtime:
        for path, message in ((tmp_path / "no" / "a.npz", "make it first"), (tmp_path, "is a dir")):
            with pytest.raises(ConfigError, match=message):
                runtime.record_trace(path)
        assert runtime.cache.route_log is None
    with pytest.raises(ConfigError, match="make it first"):
        opened(tiny_moe, record_trace=tmp_path / "no" / "a.npz")


def test_what_cannot_be_written_at_the_end_is_a_warning(
    tiny_moe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory went away: close still closes, and the trace is still there."""
    (tmp_path / "gone").mkdir()
    with opened(tiny_moe) as runtime:
        recording = runtime.record_trace(tmp_path / "gone" / "a.npz")
        step(runtime, [[0, 1, 2, 3]])
        (tmp_path / "gone").rmdir()

    assert not recording.saved
    assert recording.trace is not None
    assert len(recording.trace) == 1
    (record,) = caplog.records
    assert "recording.lost path=" in record.getMessage()
    with pytest.raises(MoeCacheError, match="closed"):
        step(runtime, [[0, 1, 2, 3]])


def test_a_runtime_that_used_no_expert_replaces_no_trace(
    tiny_moe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is closed last, say, of two that MOECACHE_RECORD_TRACE is for."""
    path = tmp_path / "a.npz"
    with (
        opened(tiny_moe, record_trace=path) as runtime,
        opened(tiny_moe, record_trace=path) as idle,
    ):
        step(runtime, [[0, 1, 2, 3]])
        runtime.close()
        before = path.read_bytes()
        with caplog.at_level(logging.INFO, "moecache"):
            idle.close()

    assert path.read_bytes() == before
    assert any("recording.empty path=" in record.getMessage() for record in caplog.records)


def test_the_environment_may_ask_for_a_recording(
    tiny_moe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As an argument does; a path that cannot be written is a warning there."""
    monkeypatch.setenv("MOECACHE_RECORD_TRACE", str(tmp_path / "env.npz"))
    with opened(tiny_moe) as runtime:
        step(runtime, [[0, 1, 2, 3]])
    with opened(tiny_moe, record_trace=tmp_path / "argument.npz") as runtime:
        step(runtime, [[0, 1, 2, 3]])
    monkeypatch.setenv("MOECACHE_RECORD_TRACE", str(tmp_path / "no" / "env.npz"))
    with opened(tiny_moe) as runtime:
        assert runtime.cache.route_log is None

    assert len(Trace.load(tmp_path / "env.npz")) == 1
    assert len(Trace.load(tmp_path / "argument.npz")) == 1
    (record,) = caplog.records
    assert "settings.malformed MOECACHE_RECORD_TRACE: " in record.getMessage()


def test_a_full_log_is_a_warning_and_a_shorter_trace(
    tiny_moe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What fitted is written, with the number of steps that did not."""
    with opened(tiny_moe) as runtime:
        for wrong in (0, -1, "many"):
            with pytest.raises(ConfigError):
                runtime.record_trace(tmp_path / "a.npz", max_bytes=wrong)
        recording = runtime.record_trace(tmp_path / "a.npz", max_bytes=8 * 20)
        assert recording.log.max_bytes == 160
        for _ in range(3):
            step(runtime, [[0, 1, 2, 3]])

    trace = Trace.load(tmp_path / "a.npz")
    assert len(trace) == 1
    assert trace.metadata["num_dropped_steps"] == 16
    assert "recording.full steps=8 dropped=16 bytes=160 max_bytes=160; give" in caplog.text
    with opened(tiny_moe) as runtime:
        large = runtime.record_trace(tmp_path / "b.npz", max_bytes="1GiB")
        assert large.log.max_bytes == 2**30


def test_flat_ids_of_several_tokens_are_their_rows(tiny_moe: Path, tmp_path: Path) -> None:
    """A lease of 16 ids of a top-4 model is four tokens, not one with 16 choices."""
    with opened(tiny_moe, record_trace=tmp_path / "a.npz") as runtime:
        for ids in (np.arange(16), np.arange(16).reshape(4, 4)):
            for layer in range(8):
                with runtime.lease(layer, ids):
                    pass
    trace = Trace.load(tmp_path / "a.npz")

    assert trace.step.tolist() == [0] * 4 + [1] * 4
    assert trace.experts[:4, 7].tolist() == np.arange(16).reshape(4, 4).tolist()
    assert np.array_equal(trace.experts[:4], trace.experts[4:])


def test_steps_that_are_left_out_are_a_warning(
    tiny_moe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The trace is written without them, and says how many they were."""
    with opened(tiny_moe) as runtime:
        runtime.record_trace(tmp_path / "a.npz", max_bytes=200_000)
        with runtime.lease(0, np.arange(31)):
            pass
        for _ in range(800):
            runtime.cache.route_log.record(0, np.arange(4)[None])

    trace = Trace.load(tmp_path / "a.npz")
    assert trace.experts.shape == (800, 8, 4)
    assert trace.metadata["num_dropped_steps"] == 1
    assert "trace.cut left_out=1 of=801 steps" in caplog.text


def test_a_forked_child_writes_nothing(tiny_moe: Path, tmp_path: Path) -> None:
    """The file is the parent's."""
    with opened(tiny_moe) as runtime:
        recording = runtime.record_trace(tmp_path / "a.npz")
        step(runtime, [[0, 1, 2, 3]])
        recording._process = -1  # as it looks in a child
        recording.close()

    assert os.listdir(tmp_path) == []
