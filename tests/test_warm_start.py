"""Warm start: the second run begins with what the first had learned and used."""

import logging
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import moecache
from moecache.commands.demo import resident_experts
from moecache.errors import StoreError
from moecache.profiles.file import ModelUsage, identity, read_profile, update_profile
from moecache.settings import POLICIES
from tests.helpers.checkpoints import Checkpoint, write_checkpoint
from tests.helpers.pages import wait_until
from tests.helpers.runtimes import drain, expected, make_runtime
from tests.helpers.stores import Gate, WrappedStore, nothing, numbered_store

# Layer and ids.
Step = tuple[int, np.ndarray]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "moecache")


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path / "model", num_layers=3)


def opened(path: Path, **options: Any) -> moecache.ExpertRuntime:
    """Open a checkpoint with 12 of its experts in memory."""
    return moecache.open(path, **{"slots": 12, "prefault": "off", **options})


def use(runtime: moecache.ExpertRuntime, num_tokens: int = 40, seed: int = 0) -> None:
    """Ask for skewed experts, token by token."""
    rng = np.random.default_rng(seed)
    layout = runtime.layout
    skew = 0.6 ** np.arange(layout.num_experts)
    for _ in range(num_tokens):
        for layer in range(layout.num_layers):
            ids = rng.choice(layout.num_experts, 2, replace=False, p=skew / skew.sum())
            for _ in runtime.waves(layer, ids):
                pass


def residents(runtime: moecache.ExpertRuntime) -> set[int]:
    """Return the keys of what is in the cache."""
    return set(np.flatnonzero(runtime.cache.slot_table.reshape(-1) >= 0).tolist())


def feed(runtime: moecache.ExpertRuntime, steps: list[Step]) -> float:
    """Ask for experts, as a sequence of its own; return how often they were there."""
    profiler = runtime.profiler
    runtime.begin_sequence()
    hits, misses = profiler.num_hits, profiler.num_misses
    for layer, ids in steps:
        for _wave in runtime.waves(layer, ids):
            pass
    hits, misses = profiler.num_hits - hits, profiler.num_misses - misses
    return hits / (hits + misses)


@pytest.fixture(scope="module", name="texts")
def _texts(tiny_moe: Path, numpy_loop: ModuleType) -> list[list[Step]]:
    """Return what the demo's model asks for in 200 bytes, and in 32 from further below."""
    source = Path(numpy_loop.__file__ or "").read_bytes()
    found: list[list[Step]] = []

    def note(layer: int, hidden: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
        found[-1].append((layer, ids.copy()))
        return resident(layer, hidden, ids, weights)

    with moecache.open_store(tiny_moe) as store:
        resident = resident_experts(store)
        for text in (source[6125:6325], source[6925:6957]):
            found.append([])
            model = numpy_loop.NumpyMoe(store, note)
            for byte in text:
                model.forward(np.array([byte + numpy_loop.BYTE_OFFSET]))
    return found


@pytest.mark.parametrize("policy", ["echo", "lru", "slru"])
def test_the_second_run_hits_as_often_as_a_warm_one(
    tiny_moe: Path, texts: list[list[Step]], tmp_path: Path, policy: str
) -> None:
    """Its first 32 tokens against tokens 200 to 232 of the first run, with a quarter in memory.

    How often a text hits depends on the text, and on how much of it came before, far more
    than on anything else: both are the same 32 bytes, at the beginning of a sequence. The
    profile has seen none of them.
    """
    options: dict[str, Any] = {
        "prefetch": "off",
        "memory": "25%",
        "policy": policy,
        "prefault": "off",
        "warmpin": 0,
    }
    before, text = texts
    with moecache.open(tiny_moe, **options) as runtime:
        feed(runtime, before)
        runtime.usage.save(tmp_path / "p")
        first = feed(runtime, text)
    with moecache.open(tiny_moe, profile=tmp_path / "p", **options) as runtime:
        assert runtime.warm_start is not None
        assert runtime.warm_start.wait(30)
        assert feed(runtime, text) >= 0.95 * first
    if policy == "echo":
        with moecache.open(tiny_moe, **options) as runtime:
            assert feed(runtime, text) < 0.9 * first


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_there_at_the_end_is_there_at_the_beginning(
    model: Checkpoint, tmp_path: Path, policy: str, scope: str
) -> None:
    """Under every policy; no access, miss or eviction is counted."""
    path = tmp_path / "kept.profile"
    with opened(model.path, policy=policy, scope=scope, profile=path) as runtime:
        use(runtime)
        before = residents(runtime)
    with opened(model.path, policy=policy, scope=scope, profile=path) as runtime:
        assert runtime.warm_start is not None
        assert runtime.warm_start.wait(30)
        assert residents(runtime) == before
        assert runtime.warm_start.progress == (12, 12)
        stats = runtime.stats()
        assert (stats.num_hits, stats.num_misses, stats.num_steps) == (0, 0, 0)
        assert stats.num_evictions == 0
        assert not runtime.profiler.counts.any()
        runtime.cache.check()
        use(runtime, seed=1)
        runtime.cache.check()


@pytest.mark.parametrize("read", ["buffered", "direct", "mmap"])
def test_every_way_of_reading_fills_the_slots(model: Checkpoint, tmp_path: Path, read: str) -> None:
    """With what the file has."""
    path = tmp_path / "kept.profile"
    with opened(model.path, profile=path, read=read) as runtime:
        use(runtime)
    with opened(model.path, profile=path, read=read) as runtime:
        assert runtime.warm_start is not None
        assert runtime.warm_start.wait(30)
        assert len(residents(runtime)) == 12
        for key in residents(runtime):
            layer, expert = divmod(key, runtime.layout.num_experts)
            slot = int(runtime.cache.slot_table[layer, expert])
            for role, part in runtime.expert(slot, layer).items():
                assert part.tobytes() == model.experts[layer][expert][role].tobytes()


def test_echo_goes_on_where_it_was(model: Checkpoint, tmp_path: Path) -> None:
    """As at the beginning of a sequence: the first run's last tokens are over."""
    path = tmp_path / "kept.profile"
    with opened(model.path, profile=path) as runtime:
        use(runtime)
        assert runtime.cache.echo is not None
        runtime.begin_sequence()
        learned = runtime.cache.echo.state()
    with opened(model.path, profile=path) as runtime:
        assert runtime.cache.echo is not None
        found = runtime.cache.echo.state()
    assert all(found[name].tobytes() == array.tobytes() for name, array in learned.items())


@pytest.mark.parametrize(
    ("before", "after"), [("lru", "echo"), ("echo", "lru"), ("haz2", "echo"), ("echo", "haz2")]
)
def test_another_policy_takes_what_it_can(
    model: Checkpoint, tmp_path: Path, before: str, after: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What was there, at least; what ECHO had learned is not lost by a run without it."""
    path = tmp_path / "kept.profile"
    with opened(model.path, policy=before, profile=path) as runtime:
        use(runtime)
        expected_keys = residents(runtime)
    learned = read_profile(path).models[identity(runtime.layout)].echo
    with opened(model.path, policy=after, profile=path) as runtime:
        assert runtime.warm_start is not None
        assert runtime.warm_start.wait(30)
        assert residents(runtime) == expected_keys
        use(runtime, 2)
    kept = read_profile(path).models[identity(runtime.layout)]
    assert kept.policy == after
    if after == "lru":
        assert all(np.array_equal(kept.echo[name], array) for name, array in learned.items())
    assert not caplog.records


def with_profile(
    path: Path, runtime: moecache.ExpertRuntime, keys: list[int]
) -> moecache.ExpertRuntime:
    """Let a small runtime start from a profile in which these experts were there."""
    counts = np.zeros((3, 8), np.uint64)
    counts.flat[keys] = np.arange(len(keys), 0, -1)
    kept = ModelUsage("lru", counts, np.array(keys, np.int32))
    update_profile(path, models={identity(runtime.layout): kept})
    runtime.usage.use(path)
    return runtime


def test_open_does_not_wait_and_close_does_not_hang(tmp_path: Path) -> None:
    """A read that does not return is left behind; none is begun after it."""
    gate = Gate()
    store = WrappedStore(numbered_store(), gate)
    runtime = with_profile(tmp_path / "p", make_runtime(4, store=store), [1, 2, 3, 4])
    assert runtime.warm_start is not None
    assert gate.entered.acquire(timeout=30)
    assert not runtime.warm_start.done
    assert not runtime.warm_start.wait(0)

    runtime.close()
    gate.opened.set()

    assert runtime.warm_start.wait(30)
    assert len(store.reads) < 4


def test_a_request_gets_by_and_takes_what_slots_it_needs(tmp_path: Path) -> None:
    """While the warm start's read hangs; then the rest takes what is free, evicting nothing."""
    gate = Gate()
    hung = threading.Event()

    def before_read(layer: int, expert: int) -> None:
        if (layer, expert) == (0, 1):
            hung.set()
            gate(layer, expert)

    store = WrappedStore(numbered_store(), before_read)
    with make_runtime(4, store=store, loader_threads=2) as runtime:
        with_profile(tmp_path / "p", runtime, [1, 2, 3, 4])
        assert runtime.warm_start is not None
        assert hung.wait(30)
        ids = np.array([5, 6])
        assert drain(runtime, 2, ids) == expected(2, ids)
        gate.opened.set()
        assert runtime.warm_start.wait(30)
        assert residents(runtime) == {1, 2, 21, 22}
        assert runtime.stats().num_evictions == 0
        runtime.cache.check()


def test_a_request_joins_what_the_warm_start_reads(tmp_path: Path) -> None:
    """Instead of reading it again."""
    gate = Gate()
    store = WrappedStore(numbered_store(), gate)
    with make_runtime(4, store=store) as runtime:
        with_profile(tmp_path / "p", runtime, [1])
        assert gate.entered.acquire(timeout=30)
        opener = threading.Timer(0.05, gate.opened.set)
        opener.start()
        assert drain(runtime, 0, np.array([1])) == {0: 1}
        opener.join()
        assert store.reads == [(0, 1)]


def test_reads_that_fail_are_left_out_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are brought in; a request for one that failed tries again."""
    broken = {(0, 1), (0, 3)}

    def before_read(layer: int, expert: int) -> None:
        if (layer, expert) in broken:
            raise StoreError("the disk is gone")

    with make_runtime(6, store=WrappedStore(numbered_store(), before_read)) as runtime:
        with_profile(tmp_path / "p", runtime, [1, 2, 3, 4])
        assert runtime.warm_start is not None
        assert runtime.warm_start.wait(30)
        assert residents(runtime) == {2, 4}
        assert runtime.stats().num_failed_reads == 2
        (record,) = caplog.records
        assert "layer=0 expert=1 error=the disk is gone" in record.getMessage()
        broken.clear()
        assert drain(runtime, 0, np.array([1, 3])) == {0: 1, 1: 3}
        runtime.cache.check()


def test_it_can_be_cancelled(tmp_path: Path) -> None:
    """It ends with the read that it is in; what is there stays."""
    gate = Gate()
    store = WrappedStore(numbered_store(), gate)
    with make_runtime(20, store=store) as runtime:
        with_profile(tmp_path / "p", runtime, list(range(20)))
        warm = runtime.warm_start
        assert warm is not None
        assert gate.entered.acquire(timeout=30)
        assert not warm.cancel(0)
        gate.opened.set()
        assert warm.wait(30)
        assert warm.cancel()
        assert warm.progress == (1, 20)
        assert store.reads == [(0, 0)]
        assert drain(runtime, 2, np.array([0, 7])) == {0: 16, 1: 23}


def test_leaving_its_context_cancels_it(tmp_path: Path) -> None:
    """The first read lasts until that was asked for."""
    store = WrappedStore(numbered_store(), nothing)
    with make_runtime(20, store=store) as runtime:

        def wait_for_the_end(layer: int, expert: int) -> None:
            wait_until(lambda: runtime.warm_start is not None and runtime.warm_start._cancelled)

        store.before_read = wait_for_the_end
        with_profile(tmp_path / "p", runtime, list(range(20)))
        assert runtime.warm_start is not None
        with runtime.warm_start as warm:
            assert not warm.done
        assert warm.done
        assert warm.progress == (1, 20)


@pytest.mark.parametrize("second", ["the same", "none"])
def test_the_next_profile_cancels_the_warm_start_of_the_last(tmp_path: Path, second: str) -> None:
    """At most one runs, and it is the one that `close` cancels."""
    gate = Gate()
    store = WrappedStore(numbered_store(), gate)
    with make_runtime(20, store=store) as runtime:
        first = with_profile(tmp_path / "p", runtime, list(range(20))).warm_start
        assert first is not None
        assert gate.entered.acquire(timeout=30)
        with pytest.raises(moecache.ConfigError, match="profile must be a path"):
            runtime.usage.use(3)  # type: ignore[arg-type]
        assert runtime.warm_start is first
        assert not first.done

        def open_the_gate() -> None:
            wait_until(lambda: first._cancelled)
            gate.opened.set()

        # What is being read is waited for.
        opener = threading.Thread(target=open_the_gate)
        opener.start()
        runtime.usage.use(tmp_path / ("p" if second == "the same" else "nothing"))
        opener.join()

        assert first.done
        assert first.progress.num_done < 20
        if second == "the same":
            assert runtime.warm_start is not None
            assert runtime.warm_start is not first
            assert runtime.warm_start.wait(30)
        else:
            assert runtime.warm_start is None


def test_a_profile_cancels_what_fills_free_slots(tmp_path: Path) -> None:
    """Two would take each other's slots, and `close` would know the later one alone."""
    gate = Gate()
    with make_runtime(20, store=WrappedStore(numbered_store(), gate)) as runtime:
        first = runtime.usage.fill()
        assert gate.entered.acquire(timeout=30)
        opener = threading.Thread(
            target=lambda: (wait_until(lambda: first._cancelled), gate.opened.set())
        )
        opener.start()
        runtime.usage.use(tmp_path / "nothing")
        gate.opened.set()
        opener.join()

        assert first._cancelled
        assert first.done
        assert runtime.warm_start is None


def test_without_threads_it_starts_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning, no error."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with make_runtime(4) as runtime:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with_profile(tmp_path / "p", runtime, [1])
        assert runtime.warm_start is not None
        assert runtime.warm_start.wait(0)
    assert "warm_start.skipped" in caplog.text


def test_the_profile_of_another_model_is_one_warning(
    model: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What this run uses is kept beside it."""
    path = tmp_path / "kept.profile"
    other = write_checkpoint(tmp_path / "other", num_layers=2)
    with opened(other.path, profile=path) as runtime:
        use(runtime)
    with opened(model.path, profile=path) as runtime:
        assert runtime.warm_start is None
        use(runtime)
    assert len(read_profile(path).models) == 2
    (record,) = caplog.records
    assert f"profile.foreign path={path} has the experts of 1 other models" in record.getMessage()


def test_a_damaged_profile_is_one_warning_and_replaced(
    model: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run starts cold."""
    path = tmp_path / "kept.profile"
    with opened(model.path, profile=path) as runtime:
        use(runtime)
    path.write_bytes(path.read_bytes()[:-1])
    with opened(model.path, profile=path) as runtime:
        assert runtime.warm_start is None
        use(runtime)
    (record,) = caplog.records
    assert f"profile.ignored {path}: is damaged" in record.getMessage()
    assert list(read_profile(path).models) == [identity(runtime.layout)]


def test_an_echo_that_cannot_be_is_one_warning(
    model: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the right checksum; nothing of it is used."""
    path = tmp_path / "kept.profile"
    with opened(model.path, profile=path) as runtime:
        use(runtime)
    name = identity(runtime.layout)
    kept = read_profile(path).models[name]
    echo = {**kept.echo, "fast": np.full_like(kept.echo["fast"], -2)}
    update_profile(path, models={name: ModelUsage(kept.policy, kept.counts, kept.residents, echo)})
    with opened(model.path, profile=path) as runtime:
        assert runtime.warm_start is None
        assert runtime.cache.echo is not None
        assert runtime.cache.echo.num_tokens == 0
    (record,) = caplog.records
    assert f"profile.ignored {path}: no state of an Echo: fast must be" in record.getMessage()


@pytest.mark.parametrize("policy", ["echo", "lru"])
@pytest.mark.parametrize("kind", ["<i8", "<f4"])
def test_counts_of_another_kind_are_one_warning(
    model: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, policy: str
) -> None:
    """With the right checksum; the run starts cold, and is kept at its end."""
    path = tmp_path / "kept.profile"
    with opened(model.path, policy=policy, profile=path) as runtime:
        use(runtime)
    name = identity(runtime.layout)
    kept = read_profile(path).models[name]
    wrong = ModelUsage(kept.policy, kept.counts.astype(kind), kept.residents, kept.echo)
    update_profile(path, models={name: wrong})

    with opened(model.path, policy=policy, profile=path) as runtime:
        assert runtime.warm_start is None
        use(runtime)
        runtime.usage.save(tmp_path / "other")

    (record,) = caplog.records
    assert f"profile.ignored {path}: is damaged: its counts are" in record.getMessage()
    assert read_profile(path).models[name].counts.dtype == np.uint64


@pytest.mark.parametrize("content", [b"a thesis", b"moecache-profile 2 x\n{}"])
def test_a_file_that_is_no_profile_is_left_alone(
    model: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    """At the end, too; one warning."""
    path = tmp_path / "kept.profile"
    path.write_bytes(content)
    with opened(model.path, profile=path) as runtime:
        use(runtime)
        with pytest.raises(moecache.FormatError, match=str(path)):
            runtime.usage.save(path)
    assert path.read_bytes() == content
    assert len(caplog.records) == 1


def test_a_path_that_cannot_be_written_is_a_warning_on_close(
    model: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And an error of a call that asks for it."""
    path = tmp_path / "no" / "such" / "directory"
    with opened(model.path, profile=path) as runtime:
        use(runtime)
        with pytest.raises(StoreError, match="cannot be written"):
            runtime.usage.save(path)
    (record,) = caplog.records
    assert f"profile.not_written {path}: cannot be written" in record.getMessage()


def test_a_run_that_used_nothing_changes_nothing(model: Checkpoint, tmp_path: Path) -> None:
    """Opened and closed again."""
    path = tmp_path / "kept.profile"
    opened(model.path, profile=path).close()
    assert not path.exists()
    with opened(model.path, profile=path) as runtime:
        use(runtime)
    before = path.read_bytes()
    opened(model.path, profile=path).close()
    assert path.read_bytes() == before


def test_a_profile_is_saved_when_it_is_asked_for(model: Checkpoint, tmp_path: Path) -> None:
    """Anywhere, as often as wanted; not after the end."""
    with opened(model.path) as runtime:
        use(runtime)
        runtime.usage.save(tmp_path / "one")
        first = (tmp_path / "one").read_bytes()
        runtime.usage.save(tmp_path / "one")
        assert (tmp_path / "one").read_bytes() == first
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "one"]
    with pytest.raises(moecache.MoeCacheError, match="closed"):
        runtime.usage.save(tmp_path / "one")
    with pytest.raises(moecache.MoeCacheError, match="closed"):
        runtime.usage.use(tmp_path / "one")


def test_the_environment_names_a_profile_too(
    model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An argument beats it."""
    monkeypatch.setenv("MOECACHE_PROFILE", str(tmp_path / "environment"))
    with opened(model.path) as runtime:
        use(runtime)
    with opened(model.path, profile=tmp_path / "argument") as runtime:
        assert runtime.warm_start is None
        use(runtime)
    assert (tmp_path / "environment").read_bytes()[:17] == b"moecache-profile "
    assert (tmp_path / "argument").exists()


def test_the_output_of_a_warm_start_is_the_same(
    tiny_moe: Path,
    numpy_loop: ModuleType,
    prompt: bytes,
    resident_logits: dict[int, list[np.ndarray]],
    tmp_path: Path,
) -> None:
    """Bit for bit, also when tokens come while it goes on."""
    for _ in range(2):
        with (
            moecache.open_store(tiny_moe) as store,
            moecache.open(
                tiny_moe, "50%", dtype=np.float32, prefault="off", profile=tmp_path / "p"
            ) as runtime,
        ):
            model = numpy_loop.NumpyMoe(store, numpy_loop.through_moecache(runtime))
            steps = numpy_loop.generate(model, prompt[:64], 6, temperature=0.7, seed=64)
            for (_, logits), wanted in zip(steps, resident_logits[64], strict=True):
                assert logits.tobytes() == wanted.tobytes()
