"""warm: what was asked for is in memory afterwards, and the report says what was done."""

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from moecache import ConfigError, StoreError
from moecache._prefault import METHODS, address_of, can_populate, resident_pages
from moecache.prefault import Region, extents, sweep, warm
from tests.helpers.leaks import nothing_left
from tests.helpers.pages import (
    MIB,
    PAGE,
    anonymous,
    came_in,
    evict,
    mapped,
    mapped_in,
    num_cached,
    pages_of,
    undisturbed,
    write_cold,
    write_file,
)
from tests.helpers.pairs import pairwise

OPTIONS = {"mode": "force"}


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Check that every sweep gives back its files and threads."""
    with nothing_left():
        yield


@pytest.mark.parametrize(
    ("method", "keep_mapped", "threads"), pairwise(METHODS, (True, False), (1, 2, 4, None))
)
@undisturbed
def test_all_that_was_asked_for_is_resident_afterwards(
    tmp_path: Path, method: str, keep_mapped: bool, threads: int | None
) -> None:
    """Of two files, in parts, with a last page that is not full."""
    first = write_cold(tmp_path / "first", 48 * MIB + 5)
    second = write_cold(tmp_path / "second", 3 * MIB)
    with mapped(first) as one, mapped(second) as two:
        start, nbytes = address_of(one)
        other, _ = address_of(two)
        regions = [(other + MIB + 7, MIB), (start, 40 * MIB), (start + 47 * MIB, MIB + 5)]
        expected = [MIB // PAGE + 1, 40 * MIB // PAGE, MIB // PAGE + 1]

        report = warm(regions, method=method, keep_mapped=keep_mapped, threads=threads)
        assert report.ran
        assert report.done_bytes == report.num_bytes == sum(expected) * PAGE
        # No more than there are chunks.
        assert 1 <= report.num_threads <= min(threads or 2, 2)
        table = mapped_in(start, nbytes)[: 40 * MIB // PAGE]
        # Under "read" nothing goes through the mapping.
        assert table.all() if keep_mapped and method != "read" else not table.any()
        found = [resident_pages(at - at % PAGE, size + at % PAGE) for at, size in regions]
        assert found == expected


def test_the_report_says_what_was_asked_for_and_done(tmp_path: Path) -> None:
    """Figures agree with one another, and with what was cold."""
    path = write_cold(tmp_path / "file", 8 * MIB)
    with mapped(path) as mapping:
        report = warm(memoryview(mapping)[: 4 * MIB], threads=2, **OPTIONS)

    assert (report.ran, report.reason) == (True, "forced")
    assert report.num_bytes == report.done_bytes == 4 * MIB
    assert report.num_pages == 4 * MIB // PAGE
    assert report.already_resident_bytes == 0
    assert report.seconds > 0
    assert report.gib_per_s == pytest.approx(4 * MIB / 2**30 / report.seconds)
    assert report.major_faults > 0
    assert report.num_threads == 1
    assert report.method == ("populate" if can_populate() else "read")
    assert report.message
    assert report.describe().startswith("4.00 MiB in ")


@undisturbed
def test_what_was_in_memory_before_is_in_the_report(tmp_path: Path) -> None:
    """A part of it, in pages."""
    path = write_cold(tmp_path / "file", 8 * MIB)
    os.truncate(path, 64 * MIB)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), 3 * PAGE, 5 * PAGE)
    before = num_cached(path) * PAGE
    with mapped(path) as mapping:
        report = warm(mapping, **OPTIONS)

    assert 0 < before < 64 * MIB
    assert report.already_resident_bytes == before
    assert "were in memory before" in report.describe()


@pytest.mark.parametrize("method", ["populate", "touch"])
@undisturbed
def test_a_file_that_is_resident_and_mapped_is_recognised(tmp_path: Path, method: str) -> None:
    """A second sweep does nothing; a file that is merely in the page cache is swept."""
    with mapped(write_file(tmp_path / "file", 3 * MIB + 1)) as mapping:
        mapping.madvise(mmap.MADV_RANDOM)
        first, second = (warm(mapping, method=method, **OPTIONS) for _ in range(2))

    assert (first.ran, first.already_resident_bytes) == (True, first.num_bytes)
    assert (second.ran, second.reason) == (False, "resident")
    assert (second.seconds, second.gib_per_s, second.done_bytes) == (0.0, 0.0, 0)
    assert second.already_resident_bytes == second.num_bytes
    assert "in memory already" in second.describe()


@pytest.mark.parametrize("page", [0, 100, 766])
@undisturbed
def test_one_page_that_is_not_mapped_is_reason_to_sweep(tmp_path: Path, page: int) -> None:
    """Wherever it is."""
    with mapped(write_file(tmp_path / "file", 3 * MIB)) as mapping:
        warm(mapping, **OPTIONS)
        mapping.madvise(mmap.MADV_DONTNEED, page * PAGE, PAGE)
        assert warm(mapping, method="touch", **OPTIONS).ran
        assert mapped_in(*address_of(mapping)).all()


@pytest.mark.parametrize("options", [{"keep_mapped": False}, {"method": "read"}])
@undisturbed
def test_for_the_page_cache_alone_resident_is_enough(
    tmp_path: Path, options: dict[str, object]
) -> None:
    """Nothing has to be in the page table."""
    with mapped(write_file(tmp_path / "file", 3 * MIB)) as mapping:
        report = warm(mapping, **options, **OPTIONS)

    assert (report.ran, report.reason) == (False, "resident")


@pytest.mark.parametrize("method", METHODS)
@undisturbed
def test_without_keep_mapped_nothing_counts_as_this_processs_memory(
    tmp_path: Path, method: str
) -> None:
    """The caller's mapping is not touched, and the sweep's own is gone."""
    path = write_cold(tmp_path / "file", 6 * MIB)
    with mapped(path) as mapping:
        report = warm(mapping, keep_mapped=False, method=method, **OPTIONS)
        lines = Path("/proc/self/smaps").read_text().splitlines()
        (at,) = [number for number, line in enumerate(lines) if line.endswith(str(path))]
        (rss,) = [line for line in lines[at : at + 8] if line.startswith("Rss:")]

    assert report.ran
    assert rss.split() == ["Rss:", "0", "kB"]
    assert came_in(path, 6 * MIB), report


@undisturbed
def test_pages_that_are_mapped_already_stay_so_without_keep_mapped(tmp_path: Path) -> None:
    """Pages that the caller had mapped stay mapped."""
    with mapped(write_cold(tmp_path / "file", 2 * MIB)) as mapping:
        warm(memoryview(mapping)[:MIB], **OPTIONS)
        before = mapped_in(*address_of(mapping))
        warm(mapping, keep_mapped=False, **OPTIONS)
        after = mapped_in(*address_of(mapping))

    assert before.any()
    assert (before == after).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keep_mapped", [True, False])
def test_anonymous_memory_is_swept(method: str, keep_mapped: bool) -> None:
    """It keeps what is written there."""
    with anonymous(70 * MIB, protection=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
        memory[33 * MIB] = 7
        report = warm(memory, method=method, keep_mapped=keep_mapped, threads=2, **OPTIONS)
        assert mapped_in(*address_of(memory)).all()
        assert memory[33 * MIB] == 7

    assert report.already_resident_bytes == PAGE
    assert report.done_bytes == 70 * MIB


def test_arrays_are_swept() -> None:
    """Weights in memory are regions too; the same array twice is one."""
    array = np.zeros((3, MIB), np.uint8)
    report = warm([array, array, array[1]], **OPTIONS)

    assert report.num_pages == len(pages_of(array.ctypes.data, array.nbytes))
    # Present may be the one page of zeros: asking for what is there costs little.
    assert warm([array], **OPTIONS).ran


def test_regions_may_come_from_a_generator(tmp_path: Path) -> None:
    """They are read once."""
    with mapped(write_cold(tmp_path / "file", 64 * PAGE)) as mapping:
        address, _ = address_of(mapping)
        report = warm((Region(address + page * PAGE, 1) for page in range(0, 64, 2)), **OPTIONS)

    assert report.num_pages == 32


def test_nothing_to_sweep_is_a_report() -> None:
    """No region, or none with a byte."""
    for regions in ([], [(PAGE, 0)], b""):
        report = warm(regions, mode="force")
        assert (report.ran, report.reason, report.num_bytes) == (False, "empty", 0)


@undisturbed
def test_two_mappings_of_one_file_are_both_swept(tmp_path: Path) -> None:
    """They share page cache, not page tables."""
    path = write_cold(tmp_path / "file", MIB)
    with mapped(path) as one, mapped(path) as other:
        report = warm([one, other], **OPTIONS)
        assert mapped_in(*address_of(one)).all()
        assert mapped_in(*address_of(other)).all()

    assert report.num_bytes == 2 * MIB


def test_progress_is_told_up_to_the_total(tmp_path: Path) -> None:
    """At least at the end; never beyond."""
    seen: list[tuple[int, int]] = []
    with mapped(write_cold(tmp_path / "file", 4 * MIB + 1)) as mapping:
        warm(mapping, progress=lambda *step: seen.append(step), keep_mapped=False, **OPTIONS)

    total = 4 * MIB + PAGE
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_what_progress_raises_ends_the_sweep_and_reaches_the_caller(tmp_path: Path) -> None:
    """A caller's own exception, unchanged; what is held open is closed."""

    def stop(done: int, total: int) -> None:
        raise LookupError("enough")

    with (
        mapped(write_cold(tmp_path / "file", 4 * MIB)) as mapping,
        pytest.raises(LookupError, match="enough"),
    ):
        warm(mapping, progress=stop, **OPTIONS)


@undisturbed
def test_a_thread_that_cannot_be_started_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calling thread sweeps that part itself."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "moecache-sweep":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with mapped(write_cold(tmp_path / "file", 70 * MIB)) as mapping:
        report = warm(mapping, threads=3, **OPTIONS)
        assert resident_pages(*address_of(mapping)) == report.num_pages

    assert report.done_bytes == 70 * MIB


def test_a_mapping_can_be_closed_while_an_error_is_handled(tmp_path: Path) -> None:
    """Else `with mmap.mmap(...)` around a sweep turns its StoreError into a BufferError."""
    path = write_file(tmp_path / "file", 4 * PAGE)
    with mapped(path) as mapping:
        os.truncate(path, PAGE)
        try:
            warm(mapping, **OPTIONS)
        except StoreError:
            mapping.close()

    assert mapping.closed


def test_an_error_in_a_thread_is_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as no memory for a scratch buffer; the others are stopped."""

    def fail(self: object, part: object) -> None:
        raise MemoryError("no memory for a scratch buffer")

    monkeypatch.setattr(sweep.Sweeper, "_sweep_part", fail)
    with (
        mapped(write_cold(tmp_path / "file", 70 * MIB)) as mapping,
        pytest.raises(MemoryError, match="scratch"),
    ):
        warm(mapping, threads=3, **OPTIONS)


def _refuse_with(number: int) -> Callable[..., int]:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


def test_of_a_file_of_somebody_else_nothing_is_known_and_it_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cachestat refuses such a file; mincore would claim that all of it is there."""
    monkeypatch.setattr(extents, "cached_pages", _refuse_with(errno.EPERM))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with mapped(write_file(tmp_path / "file", MIB)) as mapping:
        warm(mapping, **OPTIONS)
        report = warm(mapping, **OPTIONS)

    assert (report.ran, report.already_resident_bytes) == (True, 0)


@pytest.mark.parametrize("writable", [True, False])
@undisturbed
def test_without_cachestat_mincore_is_believed_of_own_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    """Before Linux 6.5; a file that may be written counts as an own one."""
    monkeypatch.setattr(extents, "cached_pages", _refuse_with(errno.ENOSYS))
    with mapped(write_file(tmp_path / "file", MIB)) as mapping:
        assert warm(mapping, **OPTIONS).already_resident_bytes == MIB
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        monkeypatch.setattr(os, "access", lambda *_, **__: writable)
        report = warm(mapping, **OPTIONS)

    assert report.already_resident_bytes == (MIB if writable else 0)
    assert report.ran is not writable


@undisturbed
def test_without_populate_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 5.14; asking for it is an error then."""
    monkeypatch.setattr(sweep, "can_populate", lambda: False)
    path = write_cold(tmp_path / "file", 3 * MIB + 1)
    with mapped(path) as mapping, anonymous(MIB) as memory:
        report = warm([mapping, memory], **OPTIONS)
        assert mapped_in(*address_of(memory)).all()
        assert not mapped_in(*address_of(mapping)).any()
        with pytest.raises(ConfigError, match=r"5\.14.*\"read\""):
            warm(mapping, method="populate")

    assert report.method == "read"
    assert came_in(path, 3 * MIB + 1)


@undisturbed
def test_without_a_list_of_mappings_they_are_populated_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No /proc: which file is behind an address is not needed for that."""
    monkeypatch.setattr(extents, "read_mappings", lambda: None)
    path = write_cold(tmp_path / "file", MIB)
    with mapped(path) as mapping:
        assert warm(mapping, method="populate", **OPTIONS).done_bytes == MIB

    assert came_in(path, MIB)


@undisturbed
def test_what_page_cache_the_kernel_dropped_meanwhile_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may drop pages that no process maps; what is gone is swept once more."""
    path = write_cold(tmp_path / "file", 40 * MIB)
    sweep_part, calls = sweep.Sweeper._sweep_part, []

    def sweep_then_lose(self: sweep.Sweeper, part: list[extents.Extent]) -> None:
        sweep_part(self, part)
        calls.append(part)
        if len(calls) == 1:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 36 * MIB, 4 * MIB, os.POSIX_FADV_DONTNEED)

    monkeypatch.setattr(sweep.Sweeper, "_sweep_part", sweep_then_lose)
    with mapped(path) as mapping:
        report = warm(mapping, threads=1, keep_mapped=False, **OPTIONS)

    assert len(calls) == 2
    assert report.done_bytes == 40 * MIB
    assert came_in(path, 40 * MIB)


def test_what_was_done_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the figures: the verdict, and what was done."""
    with caplog.at_level(logging.INFO), anonymous(MIB) as memory:
        warm(memory, **OPTIONS)
        warm(memory, room_bytes=MIB)

    forced, ended, gate, skipped = (record.getMessage() for record in caplog.records)
    assert forced.startswith("prefault.gate forced: 1.00 MiB")
    assert ended.startswith("prefault.ended 1.00 MiB in ")
    assert gate.startswith("prefault.gate too large")
    assert "not swept" in skipped


def test_a_file_dropped_from_memory_is_swept_again(tmp_path: Path) -> None:
    """What is resident is asked each time."""
    path = write_cold(tmp_path / "file", MIB)
    for _ in range(2):
        with mapped(path) as mapping:
            assert warm(mapping, **OPTIONS).already_resident_bytes == 0
        evict(path)
