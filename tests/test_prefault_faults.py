"""warm: files cut short, deleted, replaced, oddly named; memory that cannot be read."""

import ctypes
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moecache import StoreError
from moecache._prefault import address_of, can_populate, resident_pages
from moecache.prefault import PrefaultReport, merge, sweep, warm
from tests.helpers.examples import num_examples
from tests.helpers.pages import (
    MIB,
    NOWHERE,
    PAGE,
    anonymous,
    mapped,
    mapped_in,
    num_cached,
    num_descriptors,
    pages_of,
    run_child,
    skip_under_sanitizer,
    undisturbed,
    write_cold,
    write_file,
)

# Safe whatever happens to the file: neither touches the mapping.
SAFE = [pytest.param("populate", marks=pytest.mark.skipif(not can_populate(), reason="5.14"))]
SAFE += [pytest.param("read")]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Check that failures give back their files too."""
    descriptors = num_descriptors()
    yield
    assert num_descriptors() == descriptors


def warm_to_failure(regions: object, **options: object) -> str:
    """Sweep, and return what the StoreError says."""
    try:
        warm(regions, mode="force", **options)
    except StoreError as error:
        return str(error)
    pytest.fail("the sweep did not fail")


@pytest.mark.parametrize("method", SAFE)
@pytest.mark.parametrize("keep_mapped", [True, False])
@pytest.mark.parametrize("size", [0, 1, 10 * PAGE, 10 * PAGE + 100])
@undisturbed
def test_a_file_cut_short_before_the_sweep_is_a_store_error(
    tmp_path: Path, method: str, keep_mapped: bool, size: int
) -> None:
    """With path and sizes; what is still there, and other files, come in."""
    path, other = write_cold(tmp_path / "cut", 64 * PAGE), write_cold(tmp_path / "whole", MIB)
    with mapped(path) as one, mapped(other) as two:
        os.truncate(path, size)
        message = warm_to_failure([one, two], method=method, keep_mapped=keep_mapped)
        assert resident_pages(*address_of(two)) == MIB // PAGE

    there = -(-size // PAGE) * PAGE
    assert f"{path}: {64 * PAGE - there} bytes at byte {there} are mapped" in message
    assert f"has only {size} now" in message
    assert num_cached(path) * PAGE == there


@pytest.mark.parametrize("method", SAFE)
@pytest.mark.parametrize("keep_mapped", [True, False])
@undisturbed
def test_a_file_cut_short_when_the_sweep_has_just_begun_is_a_store_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, keep_mapped: bool
) -> None:
    """After the sizes were looked at, before a page was read."""
    path, other = write_cold(tmp_path / "cut", 64 * PAGE), write_cold(tmp_path / "whole", MIB)
    run = sweep.Sweeper.run

    def cut_then_run(self: sweep.Sweeper, *arguments: object, **options: object) -> None:
        os.truncate(path, 10 * PAGE)
        run(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(sweep.Sweeper, "run", cut_then_run)
    with mapped(path) as one, mapped(other) as two:
        message = warm_to_failure([one, two], method=method, keep_mapped=keep_mapped)
        assert resident_pages(*address_of(two)) == MIB // PAGE

    assert str(path) in message
    assert f"the file has only {10 * PAGE} now" in message
    assert num_cached(path) == 10


def test_a_file_cut_short_while_it_is_looked_at_is_a_store_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its size was taken, before it was mapped a second time."""
    path = write_cold(tmp_path / "cut", 64 * PAGE)
    map_file = mmap.mmap

    def cut_then_map(*arguments: object, **options: object) -> mmap.mmap:
        os.truncate(path, 10 * PAGE)
        return map_file(*arguments, **options)  # type: ignore[arg-type]

    with mapped(path) as mapping:
        monkeypatch.setattr(mmap, "mmap", cut_then_map)
        message = warm_to_failure(mapping, keep_mapped=False)
        monkeypatch.undo()

    assert str(path) in message


def test_a_file_cut_short_after_the_sweep_is_a_store_error_next_time(tmp_path: Path) -> None:
    """The first report stays true; the second says what happened since."""
    path = write_cold(tmp_path / "cut", 64 * PAGE)
    with mapped(path) as mapping:
        assert warm(mapping, mode="force").done_bytes == 64 * PAGE
        os.truncate(path, PAGE)
        assert f"has only {PAGE} now" in warm_to_failure(mapping)
        os.truncate(path, 64 * PAGE)
        assert warm(mapping, mode="force").done_bytes == 64 * PAGE


_CUTTING = """
import mmap, os, random, threading
from moecache import StoreError
from moecache.prefault import warm
path, method, keep_mapped = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
rng, size = random.Random(5), 24 * 2**20
outcomes = {"failed": 0, "swept": 0}
with open(path, "r+b") as file:
    for step in range(int(sys.argv[4])):
        os.truncate(path, size)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        go = threading.Event()
        def cut():
            go.wait()
            for _ in range(rng.randrange(4)):
                os.truncate(path, rng.randrange(size))
                os.truncate(path, rng.randrange(2 * size))
            os.truncate(path, rng.randrange(size))
        cutter = threading.Thread(target=cut)
        cutter.start()
        go.set()
        try:
            warm(mapping, mode="force", method=method, keep_mapped=keep_mapped, threads=2)
            outcomes["swept"] += 1
        except StoreError:
            outcomes["failed"] += 1
        cutter.join()
        mapping.close()
print(outcomes["failed"], outcomes["swept"])
"""


@pytest.mark.parametrize("method", SAFE)
@pytest.mark.parametrize("keep_mapped", [True, False])
def test_a_file_cut_short_while_the_sweep_runs_never_kills(
    tmp_path: Path, method: str, keep_mapped: bool
) -> None:
    """A StoreError or a report, each time, and no other error; then the mapping closes."""
    path, times = write_file(tmp_path / "file", MIB), num_examples(25)
    done = run_child(_CUTTING, path, method, keep_mapped, times)

    assert (done.returncode, done.stderr) == (0, "")
    failed, swept = map(int, done.stdout.split())
    assert failed + swept == times


@pytest.mark.parametrize("past", [PAGE, 5 * PAGE])
def test_a_region_past_the_end_of_its_mapping_is_a_store_error(past: int) -> None:
    """Nothing is mapped behind it; the mapped part is swept."""
    skip_under_sanitizer("maps memory of its own into holes, for each thread")
    with anonymous(8 * PAGE) as memory:
        address, nbytes = address_of(memory)
        unmap(address + nbytes - past, past)
        message = warm_to_failure([(address, nbytes)])
        assert mapped_in(address, nbytes - past).all()
        mmap_again(address + nbytes - past, past)

    # A new thread may have put something of its own into a part of the hole.
    assert "nothing is mapped" in message


def test_memory_that_may_not_be_read_is_a_store_error_and_what_is_around_it_comes_in() -> None:
    """As where a library reserves addresses beside its data."""
    with anonymous(9 * PAGE) as memory:
        address, nbytes = address_of(memory)
        protect(address + 4 * PAGE, PAGE, 0)
        message = warm_to_failure(memory)
        table = mapped_in(address, nbytes)
        protect(address + 4 * PAGE, PAGE, mmap.PROT_READ)

    assert "it is not readable" in message
    assert [int(page) for page in np.flatnonzero(~table)] == [4]


def test_every_failed_part_is_counted_and_the_first_is_told() -> None:
    """A message of a thousand parts would be of no help."""
    regions = [(NOWHERE + 2 * number * PAGE, PAGE) for number in range(1000)]

    message = warm_to_failure(regions)
    assert message.startswith(f"{PAGE} bytes at address {NOWHERE:#x}: nothing is mapped there")
    assert message.endswith("(and 999 more)")
    assert "more" not in warm_to_failure(regions[:1])


@pytest.mark.parametrize("num_bytes", [2**40, 2**50, 2**63])
def test_claimed_sizes_fail_at_once(num_bytes: int) -> None:
    """Nothing is mapped there, and nothing is done piece by piece to find that out."""
    assert "nothing is mapped" in warm_to_failure([(NOWHERE, num_bytes)])


@pytest.mark.parametrize("keep_mapped", [True, False])
@pytest.mark.parametrize("fate", ["deleted", "replaced", "replaced by a pipe", "a directory"])
def test_a_file_that_lost_its_name_is_swept_through_the_mapping(
    tmp_path: Path, keep_mapped: bool, fate: str
) -> None:
    """Its pages are still those that are mapped; what has the name now is left alone."""
    path = write_cold(tmp_path / "file", 64 * PAGE)
    with mapped(path) as mapping:
        path.unlink()
        if fate == "replaced":
            write_cold(path, 2 * PAGE, seed=1)
        elif fate == "replaced by a pipe":
            os.mkfifo(path)
        elif fate == "a directory":
            path.mkdir()
        report = warm(mapping, mode="force", method="populate", keep_mapped=keep_mapped)
        assert resident_pages(*address_of(mapping)) == 64
        if fate == "replaced":
            assert num_cached(path) == 0
        failure = warm_to_failure(mapping, method="read")

    assert report.done_bytes == 64 * PAGE
    assert f"{path}" in failure
    assert "cannot be opened to be read" in failure


@pytest.mark.parametrize(
    "name",
    [
        " two  blanks ",
        "line\nfeed",
        "carriage\rreturn",
        "tab\t",
        "gone (deleted)",
        "ünïcode",
        "\x85\u2028",
        os.fsdecode(b"not\xffutf8"),
    ],
)
@pytest.mark.parametrize("method", SAFE)
@undisturbed
def test_files_of_any_name_are_found(tmp_path: Path, name: str, method: str) -> None:
    """Read through their descriptor, so found by the name in the kernel's list."""
    path = write_cold(tmp_path / name, 64 * PAGE)
    with mapped(path) as mapping:
        report = warm(mapping, mode="force", method=method, keep_mapped=False)

    assert report.done_bytes == 64 * PAGE
    assert num_cached(path) == 64


def test_a_name_that_ends_like_a_deleted_files_is_not_taken_for_another(tmp_path: Path) -> None:
    """`file` is deleted and mapped, `file (deleted)` is another file."""
    path = write_cold(tmp_path / "file", 64 * PAGE)
    with mapped(path) as mapping:
        path.unlink()
        decoy = write_cold(tmp_path / "file (deleted)", 64 * PAGE)
        report = warm(mapping, mode="force", method="populate", keep_mapped=False)
        assert resident_pages(*address_of(mapping)) == 64

    assert report.done_bytes == 64 * PAGE
    assert num_cached(decoy) == 0


@pytest.mark.parametrize("kind", ["memfd", "shared"])
def test_memory_that_several_processes_share_is_swept(kind: str) -> None:
    """It has a file that no name leads to, and so nothing to be read from."""
    descriptor = os.memfd_create("a b") if kind == "memfd" else -1
    try:
        if kind == "memfd":
            os.truncate(descriptor, 8 * PAGE)
        mapping = mmap.mmap(descriptor, 8 * PAGE)
        report = warm(mapping, mode="force", method="populate", keep_mapped=False)
        assert resident_pages(*address_of(mapping)) == 8
        mapping.close()
    finally:
        if kind == "memfd":
            os.close(descriptor)

    assert report.done_bytes == 8 * PAGE


def test_a_memfd_cut_short_is_a_store_error() -> None:
    """The kernel says so, where the file cannot be asked."""
    descriptor = os.memfd_create("weights")
    try:
        os.truncate(descriptor, 8 * PAGE)
        with mmap.mmap(descriptor, 8 * PAGE) as mapping:
            os.truncate(descriptor, PAGE)
            assert "memfd:weights" in warm_to_failure(mapping, method="populate")
    finally:
        os.close(descriptor)


@undisturbed
def test_random_regions_are_swept_or_a_clear_error(tmp_path: Path) -> None:
    """Thousands of a mapping whose file was cut: unaligned, overlapping, empty, past its end."""
    rng, total, there = random.Random(3), 512 * PAGE, 300 * PAGE
    steps = num_examples(150)
    path = write_cold(tmp_path / "file", total)
    outcomes = {"failed": 0, "swept": 0}
    with mapped(path) as mapping:
        os.truncate(path, there - 100)
        address, _ = address_of(mapping)
        for step in range(steps):
            regions = []
            for _ in range(10):
                start = rng.randrange(total if step % 3 == 0 else there)
                limit = total if step % 3 == 0 else there
                size = rng.choice([0, 1, PAGE, rng.randrange(8 * PAGE)])
                regions.append((address + start, min(size, limit - start)))
            pages = set().union(*(pages_of(*region) for region in regions))
            missing = sorted(page for page in pages if page * PAGE >= address + there)
            options = {"keep_mapped": step % 2 == 0, "method": ("populate", "read")[step % 5 == 0]}
            if missing:
                message = warm_to_failure(regions, **options)
                assert any(
                    f"at byte {page * PAGE - address} are mapped" in message for page in missing
                )
                outcomes["failed"] += 1
            else:
                report = warm(regions, mode="force", **options)
                assert isinstance(report, PrefaultReport)
                assert report.num_pages == len(pages)
                assert report.done_bytes in {0, len(pages) * PAGE}
                outcomes["swept"] += 1
            for start, size in merge(regions)[0]:
                size = min(size, address + there - start)
                if size > 0:
                    assert resident_pages(start, size) * PAGE == size

    assert min(outcomes.values()) > steps // 8


def _libc(name: str, address: int, nbytes: int, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    function = getattr(libc, name)
    function.restype = ctypes.c_ssize_t
    result = function(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), *arguments)
    assert result != -1, os.strerror(ctypes.get_errno())


def protect(address: int, nbytes: int, protection: int) -> None:
    """Change what may be done with a range of memory."""
    _libc("mprotect", address, nbytes, protection)


def unmap(address: int, nbytes: int) -> None:
    """Take away part of a mapping."""
    _libc("munmap", address, nbytes)


def mmap_again(address: int, nbytes: int) -> None:
    """Fill a gap, so that the owner of the mapping can unmap all of it."""
    fixed = 0x10
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
    _libc("mmap", address, nbytes, mmap.PROT_READ, flags, -1, 0)
