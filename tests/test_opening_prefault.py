"""moecache.open with a pre-fault, and the regions that a store gives for it."""

import gc
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import moecache
from moecache._prefault import address_of, resident_pages
from moecache.prefault import BackgroundSweep, Region, merge, warm
from moecache.prefault.sweep import Sweeper
from moecache.runtime import head_start, opening, plan
from moecache.runtime.opening import _cut_to
from moecache.runtime.steps import reading
from moecache.slots import HostSlots
from moecache.stores import ExpertStore, MemoryStore, SafetensorsStore, open_store
from tests.helpers.checkpoints import Checkpoint, write_checkpoint
from tests.helpers.leaks import nothing_left
from tests.helpers.pages import (
    PAGE,
    evict,
    mapped_in,
    num_cached,
    undisturbed,
    wait_until,
)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Check that a closed runtime holds no file and no thread."""
    with nothing_left():
        yield


@pytest.fixture(name="model")
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """Return a checkpoint whose weights are not in memory when `open` gets to the pre-fault."""
    model = write_checkpoint(tmp_path / "model", num_layers=4, num_experts=64, num_shards=2)

    def open_cold(*arguments: object, **options: object) -> ExpertStore:
        store = open_store(*arguments, **options)  # type: ignore[arg-type]
        # The header's read brought everything in: the files are small.
        for path in files_of(model):
            evict(path)
        return store

    monkeypatch.setattr(plan, "open_store", open_cold)
    return model


def files_of(model: Checkpoint) -> list[Path]:
    """Return a checkpoint's weight files."""
    return sorted(model.path.glob("*.safetensors"))


def all_cached(runtime: moecache.ExpertRuntime) -> bool:
    """Return whether every expert's pages are in memory."""
    ranges, owners = merge(runtime.store.regions())
    assert owners
    return all(resident_pages(*span) * PAGE == span[1] for span in ranges)


@undisturbed
def test_by_default_a_model_that_fits_is_read_before_open_returns(model: Checkpoint) -> None:
    """Everything has a slot; nothing of the mapping counts as this process's memory."""
    with moecache.open(model.path) as runtime:
        assert runtime.prefault is not None
        report = runtime.prefault.wait(0)
        assert not any(mapped_in(*region).any() for region in runtime.store.regions())
        assert all_cached(runtime)

    assert report.ran
    assert report.done_bytes == report.num_bytes


@undisturbed
def test_with_fewer_slots_than_experts_it_goes_on_in_the_background(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host computes meanwhile."""
    hold = threading.Event()
    run = Sweeper.run

    def run_later(self: Sweeper, *arguments: object, **options: object) -> None:
        assert hold.wait(30)
        run(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Sweeper, "run", run_later)
    with moecache.open(model.path, slots=9) as runtime:
        assert runtime.prefault is not None
        assert not runtime.prefault.done
        hold.set()
        assert runtime.prefault.wait(30).ran
        assert all_cached(runtime)


@pytest.mark.parametrize("mode", ["background", "force"])
@undisturbed
def test_the_mode_says_whether_open_waits(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Forced it does, even with few slots; in the background never."""
    waits = []
    join = BackgroundSweep.join

    def join_and_tell(self: BackgroundSweep, timeout: float | None = None) -> bool:
        waits.append(timeout)
        return join(self, timeout)

    monkeypatch.setattr(BackgroundSweep, "join", join_and_tell)
    slots = {"background": 10_000, "force": 9}[mode]
    with moecache.open(model.path, slots=slots, prefault=mode) as runtime:
        assert waits == ([None] if mode == "force" else [])
        assert runtime.prefault is not None
        assert runtime.prefault.wait().reason == ("forced" if mode == "force" else "always")
        assert all_cached(runtime)


def test_slots_are_backed_before_they_are_filled(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every page of them is in the page table; their contents are as before."""
    made: list[HostSlots] = []
    regions = HostSlots.regions

    def regions_and_keep(self: HostSlots) -> list[Region]:
        made.append(self)
        return regions(self)

    monkeypatch.setattr(HostSlots, "regions", regions_and_keep)
    with moecache.open(model.path, slots=100, prefault="force") as runtime:
        for address, nbytes in made[0].regions():
            assert mapped_in(address, nbytes).all()
        assert not runtime.slab("down").any()


def test_more_slots_than_memory_are_not_backed(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would kill the process at once, and may never all be filled."""
    monkeypatch.setattr(opening, "free_host_bytes", lambda: 4096)
    with moecache.open(model.path, slots=100) as runtime:
        assert runtime.prefault is None


@pytest.mark.parametrize("mode", ["off", "no", 0, False])
def test_switched_off_nothing_is_read(model: Checkpoint, mode: object) -> None:
    """No thread, no mapping, no page of an expert."""
    with moecache.open(model.path, prefault=mode) as runtime:  # type: ignore[arg-type]
        assert runtime.prefault is None
        assert not any(num_cached(path) for path in files_of(model))


def test_the_environment_switches_it_off_and_an_argument_beats_it(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Argument beats environment beats default."""
    monkeypatch.setenv("MOECACHE_PREFAULT", "off")
    with moecache.open(model.path) as runtime:
        assert runtime.prefault is None
    with moecache.open(model.path, prefault="force") as runtime:
        assert runtime.prefault is not None
        assert runtime.prefault.done
    monkeypatch.setenv("MOECACHE_PREFAULT", "1")
    with moecache.open(model.path) as runtime:
        assert runtime.prefault is not None
        assert runtime.prefault.wait(0).reason in {"forced", "resident"}
    with moecache.open(model.path, prefault="off") as runtime:
        assert runtime.prefault is None


def test_an_unknown_mode_of_the_environment_is_one_warning_and_auto(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It names the value and what happens instead."""
    monkeypatch.setenv("MOECACHE_PREFAULT", "sometimes")
    with caplog.at_level(logging.WARNING), moecache.open(model.path) as runtime:
        assert runtime.prefault is not None
        assert runtime.prefault.done

    (record,) = caplog.records
    assert "'sometimes'" in record.getMessage()
    assert "using the default, auto" in record.getMessage()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("mode", ["auto", "background"])
def test_with_little_room_only_the_first_regions_are_read(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch, share: float, mode: str
) -> None:
    """At most 80 % of what is free beside the slots: never a thrash."""
    with SafetensorsStore(model.path) as store:
        total = sum(nbytes for _, nbytes in merge(store.regions())[0])
        pool = 11 * store.layout.slot_bytes
    free = pool + int(total * share) * 5 // 4
    monkeypatch.setattr(opening, "free_host_bytes", lambda: free)
    # The slots are backed in any case; here it is about the file.
    monkeypatch.setattr(HostSlots, "regions", lambda _: [])
    with moecache.open(model.path, slots=9, prefault=mode, read="buffered") as runtime:
        assert runtime.stats().pool_bytes <= pool
        num_bytes = 0 if runtime.prefault is None else runtime.prefault.wait(30).num_bytes

    assert num_bytes <= (free - runtime.stats().pool_bytes) * 4 // 5
    assert num_bytes < total
    assert (num_bytes > 0) == (share > 0)


@undisturbed
def test_forced_it_does_not_ask_for_room(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, whatever is free."""
    monkeypatch.setattr(opening, "free_host_bytes", lambda: 0)
    with moecache.open(model.path, slots=9, prefault="force", read="buffered") as runtime:
        assert runtime.prefault is not None
        assert runtime.prefault.wait(0).ran
        assert all_cached(runtime)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (-5, []),
        (PAGE - 1, []),
        (PAGE, [(0, 1)]),
        (3 * PAGE, [(0, 1), (PAGE - 1, 2)]),
        (6 * PAGE - 1, [(0, 1), (PAGE - 1, 2), (9 * PAGE + 7, 2 * PAGE - 7)]),
        (100 * PAGE, [(0, 1), (PAGE - 1, 2), (9 * PAGE + 7, 5 * PAGE), (0, 1)]),
    ],
)
def test_regions_are_chosen_from_the_first_and_the_last_is_cut(
    num_bytes: int, expected: list[tuple[int, int]]
) -> None:
    """In whole pages: one large region is not left out because it does not fit whole."""
    regions = [Region(0, 1), Region(PAGE - 1, 2), Region(9 * PAGE + 7, 5 * PAGE), Region(0, 1)]

    assert _cut_to(regions, num_bytes) == expected


@pytest.mark.parametrize(
    "error",
    [
        moecache.StoreError("bad sector"),
        OSError(5, "input/output error"),
        RuntimeError("can't start new thread"),
        ValueError("mmap closed or invalid"),
        MemoryError(),
        ImportError("no psutil"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_model_whose_regions_cannot_be_had_still_opens(
    model: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """A warning; reads go on as if nothing had been tried."""

    def fail(self: SafetensorsStore, layers: object = None, held: object = None) -> list[Region]:
        raise error

    monkeypatch.setattr(SafetensorsStore, "regions", fail)
    with caplog.at_level(logging.WARNING), moecache.open(model.path) as runtime:
        assert runtime.prefault is None
        with runtime.lease(0, np.array([3])):
            pass

    assert caplog.text.count("prefault.failed") == 1


@pytest.mark.parametrize("mode", ["auto", "background", "force"])
def test_a_model_whose_file_was_cut_meanwhile_still_opens(
    model: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
) -> None:
    """What is missing fails where it is read; the rest is in memory."""
    path = max(model.path.glob("*.safetensors"))

    regions_of = SafetensorsStore.regions

    def map_then_cut(
        self: SafetensorsStore, layers: object = None, held: object = None
    ) -> list[Region]:
        regions = regions_of(self, layers, held=held)  # type: ignore[arg-type]
        os.truncate(path, path.stat().st_size // 2)
        return regions

    monkeypatch.setattr(SafetensorsStore, "regions", map_then_cut)
    with caplog.at_level(logging.WARNING), moecache.open(model.path, prefault=mode) as runtime:
        assert runtime.prefault is not None
        with pytest.raises(moecache.StoreError, match="cut short"):
            runtime.prefault.wait(30)
        with runtime.lease(0, np.array([3])):
            pass
        with pytest.raises(moecache.StoreError), runtime.lease(3, np.array([63])):
            pass

    assert caplog.text.count("prefault.failed") == 1
    caplog.clear()  # the records hold the errors, and these what the sweep had open


def test_closing_the_runtime_cancels_the_sweep(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has stopped when close returns."""
    # Its thread yields to all others: on a busy machine it may have to wait for a core.
    monkeypatch.setattr("moecache.runtime._closing.CLOSE_TIMEOUT_S", 60)
    with open("/dev/zero", "rb") as zero:

        def read_on(self: Sweeper, part: object) -> None:
            self.sweep.run([(0, 2**50, zero.fileno(), 0)], "read")

        monkeypatch.setattr(Sweeper, "_sweep_part", read_on)
        runtime = moecache.open(model.path, slots=9)
        sweep = runtime.prefault
        assert sweep is not None
        wait_until(lambda: sweep.progress.done_bytes)
        runtime.close()

    assert sweep.done
    assert sweep.wait(0).reason == "cancelled"


def test_progress_is_told(model: Checkpoint) -> None:
    """Up to the total."""
    seen = []
    with moecache.open(model.path, progress=lambda *step: seen.append(step)):
        assert seen
        assert seen[-1][0] == seen[-1][1] > 0


def test_a_store_gives_the_regions_of_its_experts_alone(model: Checkpoint) -> None:
    """By layer, within a layer in file order, adjoining experts as one."""
    with SafetensorsStore(model.path) as store:
        regions = store.regions()
        by_layer = [store.regions([layer]) for layer in range(store.layout.num_layers)]
        experts = sum(
            piece.nbytes
            for layer, row in enumerate(model.experts)
            for number, _ in enumerate(row)
            for piece in store.view(layer, number).values()
        )
        data = [bytes(memoryview(_bytes_at(region))) for region in regions]

    assert [region for layer in by_layer for region in layer] == regions
    assert sum(nbytes for _, nbytes in regions) == experts
    for layer in by_layer:
        per_file = {}
        for region in layer:
            per_file.setdefault(id(region.owner), []).append(region)
        for found in per_file.values():
            assert all(sum(one) < other[0] for one, other in itertools.pairwise(found))
    joined = b"".join(data)
    assert all(piece[:1].tobytes() in joined for row in model.experts for piece in row[0].values())


def _bytes_at(region: Region) -> np.ndarray:
    address, nbytes = region
    start, _ = address_of(region.owner)  # type: ignore[arg-type]
    return np.frombuffer(region.owner, np.uint8, nbytes, address - start)  # type: ignore[call-overload]


def test_a_region_outlives_its_store(model: Checkpoint) -> None:
    """After close it alone keeps the file mapped."""
    store = SafetensorsStore(model.path)
    regions = store.regions([0])
    owner = weakref.ref(regions[0].owner)
    store.close()
    del store
    gc.collect()

    assert warm(regions, mode="force").done_bytes == merge(regions)[0][0][1]
    del regions
    gc.collect()
    assert owner() is None


def test_asked_twice_a_store_gives_the_same_regions(model: Checkpoint) -> None:
    """One mapping per file, so that pages are counted once."""
    with SafetensorsStore(model.path) as store:
        one, other = store.regions(), store.regions()
        ranges = merge(one + other)[0]

        assert one == other
        assert ranges == merge(one)[0]


def test_a_layer_that_is_not_there_is_refused(model: Checkpoint) -> None:
    """As in every other call; so is a closed store."""
    store = open_store(model.path)
    with pytest.raises(ValueError, match="layer 99"):
        store.regions([99])
    store.close()
    with pytest.raises(moecache.StoreError, match="closed"):
        store.regions()


def test_a_store_in_memory_gives_regions_within_its_arrays() -> None:
    """Also of arrays that repeat one value, which are smaller than they seem."""
    real = np.zeros((2, 3, 5, 7), np.float32)
    repeated = np.broadcast_to(np.zeros((2, 3, 1, 1), np.float32), (2, 3, 500, 700))
    with MemoryStore({"gate_up": real, "down": repeated}, top_k=1) as store:
        regions = store.regions()
        low, high = np.lib.array_utils.byte_bounds(repeated)

        assert (real.ctypes.data, real[0].nbytes) in regions
        for address, nbytes in regions:
            if low <= address < high:
                assert address + nbytes <= high


def test_a_sweep_waits_for_reads_under_way_and_has_what_was_left_taken_in() -> None:
    """The sweep keeps no loader alive: a runtime that is dropped can go."""

    class Loader:
        num_in_flight = 1
        num_looks = 0

        def look(self) -> None:
            self.num_looks += 1
            self.num_in_flight = 0

    loader = Loader()
    is_reading = reading(loader)  # type: ignore[arg-type]
    answers = [is_reading() for _ in range(150)]
    loader.num_in_flight = 1
    again = is_reading()
    del loader

    assert answers == [True] * 100 + [False] * 50
    assert again
    assert not is_reading()


@pytest.fixture(name="yielding")
def _yielding(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return whether each sweep that `open` begins yields to reads."""
    asked: list[bool] = []

    def warm_and_note(*arguments: object, **options: object) -> object:
        asked.append(bool(options["yielding"]))
        return warm(*arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(opening, "warm", warm_and_note)
    return asked


@pytest.mark.parametrize(("mode", "wanted"), [("background", True), ("force", False)])
def test_only_what_open_does_not_wait_for_yields(
    model: Checkpoint, yielding: list[bool], mode: str, wanted: bool
) -> None:
    """A sweep beside requests begins nothing while they read; one before them uses threads."""
    with moecache.open(model.path, slots=9, prefault=mode, read="buffered"):
        assert yielding == [wanted]


@pytest.mark.parametrize(("read", "wanted"), [("direct", False), ("buffered", True)])
def test_memory_that_was_given_back_is_taken_at_once_but_no_file(
    model: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    yielding: list[bool],
    read: str,
    wanted: bool,
) -> None:
    """A host has it again in two seconds."""
    monkeypatch.setattr(head_start, "has_given", lambda _: True)
    with moecache.open(model.path, slots=9, read=read):
        assert yielding == [wanted]
