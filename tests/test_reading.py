"""Reading through a runtime: every way, every engine, the same bytes and the same logits."""

import bisect
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import moecache
from moecache.reader import disk as reading
from moecache.reader._reader import ENGINES, Reader
from moecache.runtime import opening
from moecache.settings import READ_MODES
from moecache.sizing.headroom import spare_bytes
from moecache.slots import host
from moecache.stores import open_store
from tests.helpers.checkpoints import FAMILIES, Checkpoint, same_parts, write_checkpoint
from tests.helpers.pairs import pairwise
from tests.helpers.readings import (
    all_experts,
    force_engine,
    leased,
    same_converted,
)
from tests.test_exactness import assert_same, generate


@pytest.fixture(name="engine", params=ENGINES)
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return force_engine(monkeypatch, request.param)


@pytest.fixture(name="quick")
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measure no disk: a third of a second each time."""
    monkeypatch.setattr(opening, "calibrate", lambda *_: None)
    return None


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path / "model", num_layers=2)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("family", "read", "engine", "num_shards"),
    pairwise(FAMILIES, READ_MODES, ENGINES, (1, 3)),
    indirect=["engine"],
)
def test_every_expert_is_the_files_in_every_way(
    tmp_path: Path, engine: str, read: str, family: str, num_shards: int
) -> None:
    """Bit by bit, of every form of checkpoint, experts split over shards too."""
    model = write_checkpoint(tmp_path / "model", family, num_layers=2, num_shards=num_shards)
    with moecache.open(model.path, slots=5, read=read, prefault="off", top_k=3) as runtime:
        found = all_experts(runtime)
        runtime.cache.check()
        statistics = runtime.stats()

    for layer, experts in enumerate(model.experts):
        for expert, parts in enumerate(experts):
            assert same_parts(found[layer][expert], parts)
    assert statistics.num_failed_reads == 0
    if read == "mmap":
        assert statistics.reading is None
    else:
        assert statistics.reading is not None
        assert statistics.reading.engine == engine


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("read", "capacity", "engine", "dtype", "length"),
    pairwise(READ_MODES, (1, 8, 64), ENGINES, (None, np.float32), (7, 64)),
    indirect=["engine"],
)
def test_logits_are_those_of_resident_experts(
    tiny_moe: Path,
    numpy_loop: ModuleType,
    prompt: bytes,
    resident_logits: dict[int, list[np.ndarray]],
    engine: str,
    read: str,
    capacity: int,
    dtype: type | None,
    length: int,
) -> None:
    """Prompt and decoding, every bit of them, converted when read or when used."""
    with moecache.open(tiny_moe, slots=capacity, read=read, dtype=dtype, prefault="off") as runtime:
        logits = generate(numpy_loop, tiny_moe, runtime, prompt[:length])
        runtime.cache.check()
    assert_same(logits, resident_logits[length])


@pytest.mark.usefixtures("quick", "engine")
@pytest.mark.parametrize("read", ["direct", "buffered"])
@pytest.mark.parametrize("loader_threads", [0, 1, 4])
def test_conversion_takes_few_buffers_however_much_is_asked_for(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch, read: str, loader_threads: int
) -> None:
    """What does not fit waits for its turn, and everything comes in."""
    nbytes = 3 * open_store(model.path).layout.expert_bytes(0)
    monkeypatch.setattr(host, "MAX_CONVERTED_BYTES", nbytes)
    most = []
    buffers = host.HostSlots.buffers

    def count(self: host.HostSlots, slot: int, layer: int) -> Any:
        most.append(runtime._loader._table.num_reading)
        return buffers(self, slot, layer)

    monkeypatch.setattr(host.HostSlots, "buffers", count)
    with moecache.open(
        model.path,
        slots=24,
        read=read,
        dtype=np.float32,
        prefault="off",
        loader_threads=loader_threads,
    ) as runtime:
        for layer in range(2):
            with runtime.lease(layer, np.arange(12)) as lease:
                for expert, slot in enumerate(lease.slots.tolist()):
                    found = runtime.expert(slot, layer)
                    assert found["down"].dtype == np.float32
                    assert same_converted(found, model.experts[layer][expert])
        assert max(most) <= 3
        assert len(runtime.pool._bounces._free) <= 3
        assert not runtime.pool._bounces._lent


@pytest.mark.usefixtures("quick")
def test_auto_reads_through_the_page_cache_what_fits_beside_everything_else(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots, trunk, KV cache and a reserve are taken off first; a byte less, and it is direct."""
    with moecache.open(model.path, slots=4, read="auto", prefault="off") as runtime:
        assert runtime.stats().reading.way == "buffered"
        slots_bytes, layout = runtime.stats().pool_bytes, runtime.layout
    room = moecache.plan(model.path, slots=4, read="auto").headroom
    wanted = slots_bytes + room.nbytes - room.spare_bytes + layout.total_bytes
    needed = bisect.bisect_left(range(2**30), wanted, key=lambda free: free - spare_bytes(free))
    for free, way in ((needed, "buffered"), (needed - 1, "direct")):
        monkeypatch.setattr("moecache.runtime.plan.free_host_bytes", lambda free=free: free)
        with moecache.open(model.path, slots=4, prefault="off") as runtime:
            assert runtime.stats().reading.way == way
            assert same_parts(leased(runtime, 1, 5), model.experts[1][5])


@pytest.mark.usefixtures("quick")
def test_where_direct_reads_are_not_taken_it_goes_on_without(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log."""

    def refused(descriptors: list[int], *, direct: bool, **options: object) -> Reader:
        return Reader(descriptors, direct=False, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(reading, "Reader", refused)
    with (
        caplog.at_level(logging.INFO),
        moecache.open(model.path, slots=4, read="direct", prefault="off") as runtime,
    ):
        assert runtime.stats().reading.way == "buffered"
        assert same_parts(leased(runtime, 0, 0), model.experts[0][0])
    assert caplog.text.count("reading.buffered") == 1
    assert "takes no direct reads" in caplog.text


@pytest.mark.usefixtures("quick")
def test_the_report_has_a_line_on_reading(model: Checkpoint, engine: str) -> None:
    """Way, engine, depth and rate; none where the file is mapped."""
    with moecache.open(model.path, slots=4, read="buffered", prefault="off") as runtime:
        leased(runtime, 0, 3)
        statistics = runtime.stats()
        (line,) = (line for line in runtime.report().splitlines() if line.startswith("reading"))
    assert line.startswith(f"reading buffered by {engine}, up to 32 reads of 1.00 MiB at once; ")
    assert statistics.reading.num_reads >= 1
    assert statistics.reading.bytes_read == statistics.bytes_read
    with moecache.open(model.path, slots=4, read="mmap", prefault="off") as runtime:
        assert "reading" not in runtime.report()


@pytest.mark.usefixtures("quick")
def test_experts_of_one_request_that_adjoin_are_one_read(model: Checkpoint, engine: str) -> None:
    """A layer's experts lie side by side."""
    with moecache.open(model.path, slots=24, read="buffered", prefault="off") as runtime:
        before = runtime.stats().reading.num_reads
        with runtime.lease(0, np.arange(12)):
            pass
        assert runtime.stats().reading.num_reads - before <= 2
        assert runtime.stats().num_reads == 12


@pytest.mark.usefixtures("quick", "engine")
@pytest.mark.parametrize("read", ["direct", "buffered"])
def test_threads_whose_steps_share_experts_all_get_them(model: Checkpoint, read: str) -> None:
    """Loads that one began and another waits for, few slots, bulk steps among them."""
    problems: list[object] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(60):
                layer, tokens = int(rng.integers(2)), int(rng.choice([1, 1, 4]))
                ids = np.argsort(rng.random((tokens, 12)), axis=1)[:, :3]
                seen = set()
                for wave in runtime.waves(layer, ids):
                    for slot, pairs in wave:
                        expert = int(ids.reshape(-1)[pairs[0]])
                        seen.update(pairs.tolist())
                        if not same_parts(
                            runtime.expert(slot, layer), model.experts[layer][expert]
                        ):
                            problems.append((layer, expert))
                assert seen == set(range(ids.size))
        except BaseException as error:  # noqa: BLE001 - the main thread reports it
            problems.append(error)

    with moecache.open(model.path, slots=9, read=read, prefault="off") as runtime:
        threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert problems == []
        runtime.cache.check()
        with runtime.lease(0, np.arange(9)):  # every slot can be had
            pass
