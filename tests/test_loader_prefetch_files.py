"""SlotLoader.prefetch where a reader reads files: the order of what it has been given."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from moecache.cache._cache import ExpertCache
from moecache.errors import StoreError
from moecache.loading._loader import SlotLoader
from moecache.loading._reader_engine import ReaderEngine
from moecache.loading._step import Step
from moecache.reader.disk import open_reader
from moecache.runtime import steps
from moecache.slots import HostSlots
from moecache.stores import FileStore, open_store
from tests.helpers.checkpoints import Checkpoint, same_parts, write_checkpoint


class JoiningSlots(HostSlots):
    """Slots that call `hook` once, before a read into one begins."""

    hook: Callable[[], object] | None = None

    def buffers(self, slot: int, layer: int) -> dict[str, np.ndarray]:
        """Return where to read to."""
        hook, self.hook = self.hook, None
        if hook is not None:
            hook()
        return super().buffers(slot, layer)


class FileBench:
    """A loader over a checkpoint's files, read by callers only, one piece after the other."""

    def __init__(self, model: Checkpoint, capacity: int) -> None:
        store = open_store(model.path)
        assert isinstance(store, FileStore)
        self.model = model
        self.store = store
        layout = store.layout
        self.cache = ExpertCache(layout.num_layers, layout.num_experts, capacity, policy="lru")
        self.pool = JoiningSlots(layout, capacity)
        reader = open_reader(store, direct=False, engine="threads")
        reader.tune(depth=1, piece_bytes=4096, staging_bytes=0)
        self.loader = SlotLoader(store, self.pool, self.cache, ReaderEngine(reader, store, 0))
        self.done: list[int] = []  # experts that were prefetched
        self.loader.prefetch_done = lambda load: self.done.append(load.expert)

    def lease(self, layer: int, *experts: int) -> None:
        """Lease experts and check what stands in their slots."""
        with steps.lease(self.loader, self.cache, layer, np.array(experts)) as lease:
            for slot, expert in zip(lease.slots.tolist(), experts, strict=True):
                found = self.pool.expert(slot, layer)
                assert same_parts(found, self.model.experts[layer][expert])

    def demand(self, layer: int, expert: int) -> None:
        """Ask for an expert, and do not wait for it."""
        step = Step(layer, np.array([expert]), self.cache.num_experts)
        self.loader.acquire(step)
        self.loader.release(step.slots)

    def close(self) -> None:
        """Check that nothing is left over, and close everything."""
        self.loader.close()
        self.cache.check()
        assert self.loader.counts.prefetch_bytes_in_flight == 0
        self.pool.close()
        self.store.close()


@pytest.fixture(name="files")
def _files(tmp_path: Path) -> Iterator[FileBench]:
    bench = FileBench(write_checkpoint(tmp_path / "model", num_layers=2), 10)
    yield bench
    bench.close()


def test_a_demand_overtakes_prefetches_that_a_reader_has(files: FileBench) -> None:
    """When the demand has arrived, prefetches that were begun before it are still to come."""
    for expert in (0, 1, 2):
        assert files.loader.prefetch(0, expert)
    assert files.loader.counts.prefetch_bytes_in_flight == 3 * files.store.layout.expert_bytes(0)
    files.lease(1, 5)

    assert files.done == []
    assert files.loader.num_in_flight == 3
    files.lease(0, 2)
    assert sorted(files.done) == [0, 1, 2]
    files.lease(0, 0, 1, 2)
    assert files.loader.counts.num_reads == 4
    assert files.loader.engine.quantum_bytes == 4096


def test_a_prefetch_that_is_joined_goes_before_later_demands(files: FileBench) -> None:
    """A step waits for it, too."""
    assert files.loader.prefetch(0, 0)
    files.demand(0, 0)
    files.lease(1, 5)
    assert files.done == [0]


def test_a_prefetch_that_is_joined_before_the_reader_has_it_goes_before_later_demands(
    files: FileBench,
) -> None:
    """The moment between its claim and its submission is no worse than any other."""
    files.pool.hook = lambda: files.demand(0, 0)
    assert files.loader.prefetch(0, 0)
    files.lease(1, 5)
    assert files.done == [0]


def test_the_layer_takes_back_what_it_came_without(files: FileBench) -> None:
    """One of four is joined, and hastened alone; what has not begun of the others is dropped."""
    for expert in (0, 1, 2, 3):
        assert files.loader.prefetch(0, expert)
    files.lease(0, 2, 9)
    files.lease(1, 5)
    counts = files.loader.counts
    # The reader may have begun the first one.
    assert counts.num_cancelled_prefetches >= 2
    assert counts.num_prefetches == 4
    resident = set(np.flatnonzero(files.cache.slot_table[0] >= 0).tolist())
    assert {2, 9} <= resident
    assert len(resident) == 2 + 3 - counts.num_cancelled_prefetches
    assert counts.num_prefetches_in_flight == counts.prefetch_bytes_in_flight == 0
    assert (files.cache.num_foreseen_late, counts.num_failed_prefetches) == (1, 0)
    files.cache.check()


def test_what_is_taken_back_before_the_reader_has_it_is_dropped(files: FileBench) -> None:
    """The moment between its claim and its submission is no worse than any other."""
    files.pool.hook = lambda: files.demand(0, 7)
    assert files.loader.prefetch(0, 0)
    files.lease(1, 5)
    assert files.loader.counts.num_cancelled_prefetches == 1
    assert files.cache.slot_table[0, 0] == -1


def test_close_drops_prefetches_that_a_reader_has(
    files: FileBench, caplog: pytest.LogCaptureFixture
) -> None:
    """Their slots are free again, without a warning."""
    for expert in (0, 1, 2):
        assert files.loader.prefetch(0, expert)
    with caplog.at_level(logging.WARNING):
        files.loader.close()
    assert (files.loader.num_in_flight, files.cache.num_free) == (0, 10)
    assert files.loader.counts.num_failed_prefetches == 0
    assert not caplog.records


def test_a_prefetch_that_meets_close_is_dropped(files: FileBench) -> None:
    """It was claimed before, and submitted after."""
    files.pool.hook = files.loader.close
    assert files.loader.prefetch(0, 0)
    assert (files.loader.num_in_flight, files.cache.num_free) == (0, 10)


def test_a_file_that_was_cut_short_is_read_again_for_who_joined(files: FileBench) -> None:
    """And it is the demand's error if it is short still."""
    path = next(files.model.path.glob("*.safetensors"))
    content = path.read_bytes()
    assert files.loader.prefetch(1, 11)
    with path.open("r+b") as file:
        file.truncate(len(content) // 8)
    with pytest.raises(StoreError, match="expert 11 of layer 1"):
        files.lease(1, 11)
    assert (files.loader.counts.num_failed_prefetches, files.loader.counts.num_failed_reads) == (
        0,
        1,
    )
    assert files.cache.num_free == 10
