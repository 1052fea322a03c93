"""What is found out about a disk: measured once, kept in a file, believed only where it is sane."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moecache
from moecache.profiles.disk import speed_of
from moecache.profiles.file import read_profile, update_profile
from moecache.reader import disk as reading
from moecache.reader._reader import Reader
from moecache.reader.disk import CANDIDATES, DiskSpeed, calibrate, default_queue, disk_of
from moecache.runtime import opening
from moecache.slots import HostSlots
from moecache.stores import open_store
from tests.helpers.checkpoints import Checkpoint, same_parts, write_checkpoint
from tests.helpers.pages import num_descriptors
from tests.helpers.readings import leased


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Checkpoint:
    model = write_checkpoint(tmp_path / "model", num_layers=2)
    with open_store(model.path) as store:
        reader = Reader([file.descriptor for file in store.files], direct=True)
        reader.close()
        if not reader.direct:
            pytest.skip("this file system takes no direct reads")
    return model


@pytest.fixture(name="measured")
def _measured(monkeypatch: pytest.MonkeyPatch) -> list[DiskSpeed]:
    """Return what was measured so far, by a calibration that takes no time."""
    found: list[DiskSpeed] = []

    def measure(reader: Reader, *_: object) -> DiskSpeed:
        found.append(DiskSpeed(reader.engine, 16, 256 * 1024, 1.5e9))
        reader.tune(depth=16, piece_bytes=1024 * 1024, staging_bytes=reader.staging_bytes)
        return found[-1]

    monkeypatch.setattr(opening, "calibrate", measure)
    return found


def open_direct(model: Checkpoint, **options: Any) -> moecache.ExpertRuntime:
    """Open a checkpoint as one too large for memory is opened."""
    return moecache.open(model.path, slots=4, read="direct", prefault="off", **options)


def test_a_calibration_tunes_the_reader_and_leaves_the_slots_free(model: Checkpoint) -> None:
    """With what it has read nothing is resident; one of the known pairs is chosen."""
    with open_direct(model) as runtime:
        speed, statistics = runtime.disk, runtime.stats()
        assert speed is not None
        pairs = set(CANDIDATES)
        assert (speed.depth, speed.piece_bytes) in pairs
        assert (statistics.reading.depth, statistics.reading.piece_bytes) == (
            speed.depth,
            speed.piece_bytes,
        )
        assert speed.bytes_per_s > 0
        assert statistics.num_resident == 0
        assert statistics.num_misses == 0
        assert same_parts(leased(runtime, 1, 1), model.experts[1][1])


def test_a_disk_is_measured_where_reads_go_to_it(
    model: Checkpoint, measured: list[DiskSpeed]
) -> None:
    """And never where the page cache reads."""
    with moecache.open(model.path, slots=4, read="buffered", prefault="off") as runtime:
        assert runtime.disk is None
    assert measured == []
    with open_direct(model) as runtime:
        assert runtime.disk == measured[0]
        assert runtime.stats().reading.depth == 16
    assert len(measured) == 1


def test_a_profile_is_written_and_spares_the_next_start_the_measuring(
    model: Checkpoint, measured: list[DiskSpeed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every disk its own entry; nothing else is left in the directory."""
    path = tmp_path / "kept" / "disks.profile"
    path.parent.mkdir()
    update_profile(path, disks={"77": {"engine": "threads"}})
    open_direct(model, profile=path).close()
    assert len(measured) == 1
    with open_store(model.path) as store:
        disk = disk_of(store)
    assert set(read_profile(path).disks) == {"77", disk}
    assert os.listdir(path.parent) == ["disks.profile"]

    def never(*_: object) -> None:
        pytest.fail("the disk was measured again")

    monkeypatch.setattr(opening, "calibrate", never)
    with open_direct(model, profile=path) as runtime:
        assert runtime.disk == measured[0]
        assert runtime.stats().reading.piece_bytes == 256 * 1024
        assert "of the disk's 1.40 GiB/s" in runtime.report()


def entry(**changes: object) -> dict[str, object]:
    """Return what a profile keeps of a disk, with changes."""
    kept = {"engine": "threads", "depth": 32, "piece_bytes": 2**19, "bytes_per_s": 1e9}
    return {**kept, **changes}


@pytest.mark.parametrize(
    "content",
    [
        entry(engine="magic"),
        entry(engine=["threads"]),
        entry(depth=33),
        entry(depth="32"),
        entry(depth=[32]),
        entry(piece_bytes=2**30),
        entry(bytes_per_s="fast"),
        entry(bytes_per_s=None),
        entry(bytes_per_s=10**400),
        entry(other=1),
        {"engine": "threads"},
        {},
        [],
        3,
    ],
    ids=ascii,
)
def test_a_calibration_that_cannot_be_is_a_warning(
    model: Checkpoint,
    measured: list[DiskSpeed],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    content: object,
) -> None:
    """The disk is measured, and what is kept is good afterwards."""
    path = tmp_path / "disks.profile"
    with open_store(model.path) as store:
        update_profile(path, disks={disk_of(store): content})

    with caplog.at_level(logging.WARNING), open_direct(model, profile=path) as runtime:
        assert same_parts(leased(runtime, 0, 7), model.experts[0][7])
    # What is no plain value damages the profile as a whole.
    ignored = [one for one in caplog.messages if one.startswith(("reading.cal", "profile.ignored"))]
    assert len(ignored) == 1
    assert len(measured) == 1
    with open_store(model.path) as store:
        assert speed_of(read_profile(path).disks, store) == measured[0]


@pytest.mark.parametrize("rate", [np.nan, np.inf, -np.inf, -5, 0, True, 1e308])
def test_an_odd_rate_in_a_profile_breaks_no_report(
    model: Checkpoint, measured: list[DiskSpeed], tmp_path: Path, rate: float
) -> None:
    """JSON has numbers that no disk has."""
    path = tmp_path / "disks.profile"
    with open_store(model.path) as store:
        update_profile(path, disks={disk_of(store): entry(bytes_per_s=rate)})
    with open_direct(model, profile=path) as runtime:
        leased(runtime, 0, 7)
        assert "nan" not in runtime.report()


def test_a_profile_of_another_engine_is_measured_again(
    model: Checkpoint, measured: list[DiskSpeed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is best for threads says nothing about io_uring."""
    path = tmp_path / "disks.profile"
    probe = Reader([])
    other = "threads" if probe.engine == "io_uring" else "io_uring"
    probe.close()
    with open_store(model.path) as store:
        update_profile(path, disks={disk_of(store): entry(engine=other)})
    with open_direct(model, profile=path) as runtime:
        assert runtime.disk == measured[0]


@pytest.mark.parametrize(
    "name",
    ["no/such/directory.profile", "directory", "file/below.profile", "n" * 250, "n" * 300, "."],
    ids=lambda name: f"{name[:30]}-{len(name)}",
)
def test_a_profile_that_cannot_be_written_is_a_warning(
    model: Checkpoint,
    measured: list[DiskSpeed],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Opening never fails because of it."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path))
    with caplog.at_level(logging.WARNING), open_direct(model, profile=name) as runtime:
        assert runtime.disk == measured[0]
        assert same_parts(leased(runtime, 0, 7), model.experts[0][7])
    assert "profile." in caplog.text
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("stage", ["submit", "wait", "take"])
def test_an_interrupted_calibration_stays_an_interrupt(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Everything is given back; nothing is written into the slots any more."""
    before = num_descriptors()

    class Broken:
        def __init__(self, inner: Reader) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            if name == stage:
                raise KeyboardInterrupt
            return getattr(self.inner, name)

    monkeypatch.setattr(
        opening, "calibrate", lambda reader, *rest: calibrate(Broken(reader), *rest)
    )
    with pytest.raises(KeyboardInterrupt):
        open_direct(model)
    assert num_descriptors() == before


@pytest.mark.parametrize("direct", [False, True])
def test_a_calibration_of_a_file_that_was_cut_is_a_warning(
    model: Checkpoint, caplog: pytest.LogCaptureFixture, direct: bool
) -> None:
    """The requests will say what is wrong; buffers and figures are as before."""
    with open_store(model.path) as store:
        pool = HostSlots(store.layout, 24, dtype=np.float32)
        reader = reading.open_reader(store, direct=direct)
        os.truncate(store.files[0].path, 100)
        with caplog.at_level(logging.WARNING):
            assert calibrate(reader, store, pool) is None
        assert "reading.calibration_failed" in caplog.text
        assert "model.safetensors" in caplog.text
        assert (reader.depth, reader.piece_bytes) == default_queue(reader, store)
        assert reader.num_in_flight == 0
        assert not pool._bounces._lent
        reader.close()


def test_what_is_read_to_measure_the_disk_is_no_request(model: Checkpoint) -> None:
    """The share of the disk's speed is that of requests, from the first one on."""
    with open_direct(model) as runtime:
        reading_stats = runtime.stats().reading
        assert reading_stats is not None
        assert (reading_stats.num_reads, reading_stats.bytes_read, reading_stats.busy_ns) == (
            0,
            0,
            0,
        )
        leased(runtime, 1, 1)
        assert 0 < runtime.stats().reading.bytes_read < 2**20


def test_the_queue_is_chosen_whose_experts_come_early(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the one with the highest rate: what is there first is computed while others come."""
    early, fast = (512 * 2**10, 4), (128 * 2**10, 16)

    def burst(reader: Reader, *_: object) -> tuple[float, float]:
        queue = reader.piece_bytes, reader.depth
        return (2e9 if queue == fast else 1e9), (1e-9 if queue == early else 2e-9)

    monkeypatch.setattr(reading, "_burst", burst)
    with open_store(model.path) as store:
        pool = HostSlots(store.layout, 24)
        reader = reading.open_reader(store, direct=True)
        speed = calibrate(reader, store, pool)
        reader.close()
    assert speed is not None
    assert (speed.piece_bytes, speed.depth) == early
    assert speed.bytes_per_s == 2e9
