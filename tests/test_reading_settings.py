"""Reading by the environment: MOECACHE_READ, RESERVE, LOCK, PROFILE; locked slots; what fits."""

import bisect
import gc
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import moecache
from moecache.reader.disk import STAGING_BYTES, DiskSpeed
from moecache.runtime import opening
from moecache.sizing.headroom import spare_bytes
from moecache.slots import HostSlots
from moecache.stores import open_store
from tests.helpers.checkpoints import Checkpoint, write_checkpoint
from tests.helpers.pages import num_descriptors, run_child


@pytest.fixture(autouse=True)
def no_disk_is_measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a figure for any disk; check that files are given back."""
    monkeypatch.setattr(
        opening, "calibrate", lambda reader, *_: DiskSpeed(reader.engine, 32, 2**19, 1e9)
    )
    gc.collect()
    descriptors = num_descriptors()
    yield
    gc.collect()
    assert num_descriptors() == descriptors


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path / "model", num_layers=2)


def way(model: Checkpoint, **options: object) -> str | None:
    """Return how a runtime reads."""
    with moecache.open(model.path, slots=4, prefault="off", **options) as runtime:
        reading = runtime.stats().reading
        return None if reading is None else reading.way


def locked_bytes() -> int:
    """Return how much of this process's memory is locked."""
    found = re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def test_the_environment_says_how_to_read(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An argument beats it; nonsense is a warning and the default."""
    found = {}
    for mode in ("direct", "buffered", "mmap", "auto", "fast"):
        monkeypatch.setenv("MOECACHE_READ", mode)
        found[mode] = way(model)
    assert found == {
        "direct": "direct",
        "buffered": "buffered",
        "mmap": None,
        "auto": "buffered",
        "fast": "buffered",
    }
    assert "MOECACHE_READ='fast' is not one of auto, buffered, direct, mmap" in caplog.text
    monkeypatch.setenv("MOECACHE_READ", "mmap")
    assert way(model, read="buffered") == "buffered"


@pytest.mark.parametrize("read", ["fast", "", 1, "DIRECT"])
def test_a_way_that_is_none_is_refused(model: Checkpoint, read: object) -> None:
    """With those that there are."""
    with pytest.raises(moecache.ConfigError, match="is not one of auto, buffered, direct, mmap"):
        way(model, read=read)


def test_a_plan_leaves_free_what_it_is_told_to(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By argument, by environment, else trunk, KV cache, staging and a part of what is free."""
    with open_store(model.path) as store:
        slot = HostSlots.bytes_per_slot(store.layout)
        trunk = store.trunk_bytes

    def free_for(nbytes: int) -> int:
        """Return the least that has to be free for a plan to use so much of it."""
        wanted = trunk + STAGING_BYTES + nbytes
        return bisect.bisect_left(range(2**30), wanted, key=lambda free: free - spare_bytes(free))

    def capacity(free: int, **options: object) -> int:
        monkeypatch.setattr("moecache.runtime.plan.free_host_bytes", lambda: free)
        with moecache.open(model.path, prefault="off", read="buffered", **options) as runtime:
            return runtime.cache.capacity + runtime.stats().staging_slots

    assert capacity(free_for(8 * slot)) == 8
    assert capacity(free_for(8 * slot) - 1) == 7
    assert capacity(1000 + 8 * slot, reserve=1000) == 8
    assert capacity(1000 + 9 * slot - 1, reserve="1000") == 8
    monkeypatch.setenv("MOECACHE_RESERVE", "2MiB")
    assert capacity(2**21 + 7 * slot) == 7
    assert capacity(1000 + 8 * slot, reserve=1000) == 8
    monkeypatch.setenv("MOECACHE_RESERVE", "half")
    assert capacity(free_for(6 * slot)) == 6
    with pytest.raises(moecache.CapacityError, match="stay reserved"):
        capacity(free_for(0))
    with pytest.raises(moecache.ConfigError):
        capacity(2**30, reserve="half")
    with pytest.raises(moecache.ConfigError):
        capacity(2**30, reserve=-1)


@pytest.mark.parametrize(
    ("text", "argument", "locks"),
    [
        ("on", None, True),
        ("1", None, True),
        ("off", None, False),
        (None, None, False),
        ("on", False, False),
        ("off", True, True),
        ("maybe", None, False),
    ],
)
def test_the_environment_says_whether_slots_are_locked(
    model: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    argument: bool | None,
    locks: bool,
) -> None:
    """An argument beats it."""
    calls: list[HostSlots] = []

    def lock(pool: HostSlots) -> None:
        calls.append(pool)

    monkeypatch.setattr(HostSlots, "lock", lock)
    if text is not None:
        monkeypatch.setenv("MOECACHE_LOCK", text)
    way(model, lock=argument)
    assert len(calls) == locks


def test_locked_slots_are_locked_until_the_runtime_closes(model: Checkpoint) -> None:
    """As the kernel counts it."""
    before = locked_bytes()
    with moecache.open(model.path, slots=24, prefault="off", lock=True) as runtime:
        nbytes = runtime.stats().pool_bytes
        assert locked_bytes() - before >= nbytes
    runtime = None  # nor is anything that referred to them there
    gc.collect()
    assert locked_bytes() <= before


_LOCKING = """
import ctypes, resource
import psutil, ml_dtypes
import moecache
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
libc = ctypes.CDLL(None, use_errno=True)
# Root may lock whatever the limit says: give the capabilities up.
libc.capset(ctypes.create_string_buffer((0x20080522).to_bytes(4, "little") + bytes(4)),
            ctypes.create_string_buffer(24))
try:
    moecache.open(sys.argv[1], slots=24, prefault="off", lock=True)
    print("locked")
except moecache.CapacityError as error:
    print("refused", error)
with moecache.open(sys.argv[1], slots=24, prefault="off") as runtime:
    print(runtime.cache.capacity)
"""


def test_slots_that_may_not_be_locked_are_a_capacity_error(model: Checkpoint) -> None:
    """With size, limit and remedy; unlocked they work."""
    done = run_child(_LOCKING, model.path)

    assert done.returncode == 0, done.stderr
    refusal, capacity = done.stdout.splitlines()
    assert re.match(r"refused slots of [\d.]+ KiB cannot be locked: ", refusal)
    assert "the limit is 0 B" in refusal
    assert "ulimit -l" in refusal
    assert capacity == "24"


def test_the_environment_says_where_a_profile_is(
    model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An argument beats it."""
    monkeypatch.setenv("MOECACHE_PROFILE", str(tmp_path / "environment.json"))
    if way(model, read="direct") != "direct":
        pytest.skip("this file system takes no direct reads")
    assert (tmp_path / "environment.json").is_file()
    way(model, read="direct", profile=tmp_path / "argument.json")
    assert (tmp_path / "argument.json").is_file()


@pytest.mark.parametrize("read", ["direct", "buffered", "mmap"])
def test_slots_that_do_not_fit_are_refused_before_they_are_made(
    model: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    read: str,
) -> None:
    """With what they need and what is free; nothing stays open."""
    monkeypatch.setattr("moecache.sizing.headroom.free_host_bytes", lambda: 1000)
    monkeypatch.setattr("moecache.sizing.headroom.tightest_limit", lambda: None)

    def never(*_: object, **__: object) -> None:
        pytest.fail("slots were made")

    monkeypatch.setattr(opening, "HostSlots", type("Never", (HostSlots,), {"__init__": never}))
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(moecache.CapacityError, match=r"than the 1000 B that this machine has"),
    ):
        moecache.open(model.path, slots=24, prefault="off", read=read)
    assert "runtime.opened" not in caplog.text


@pytest.mark.parametrize("read", ["mmap", "direct"])
def test_no_thread_to_be_had_is_a_clear_error(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """With the limit that is in the way, and what to do without one; nothing stays open."""
    descriptors = num_descriptors()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(moecache.MoeCacheError, match=r"ulimit -u.*or open with loader_threads"):
            moecache.open(model.path, slots=6, read=read, prefault="off", loader_threads=2)
    gc.collect()
    assert num_descriptors() == descriptors
