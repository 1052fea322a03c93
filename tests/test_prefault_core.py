"""The compiled sweep: counts, errors, cancellation, and other threads meanwhile."""

import errno
import mmap
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import moecache.prefault
from moecache._prefault import (
    CHUNK_BYTES,
    METHODS,
    PAGE_SIZE,
    Sweep,
    address_of,
    advise_huge,
    advise_willneed,
    cached_pages,
    can_populate,
    resident_pages,
    touch_pages,
)
from tests.helpers.pages import (
    MIB,
    NOWHERE,
    PAGE,
    anonymous,
    evict,
    mapped,
    mapped_in,
    wait_until,
    write_cold,
    write_file,
)

NO_FILE = -1
# Reading /dev/zero is a sweep that takes no memory and never ends by itself.
ENDLESS = 2**50

needs_populate = pytest.mark.skipif(not can_populate(), reason="needs Linux 5.14")


@pytest.fixture(name="zero")
def _zero() -> Iterator[int]:
    """Return a descriptor of /dev/zero."""
    descriptor = os.open("/dev/zero", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_the_page_size_is_the_systems() -> None:
    """Not 4096 everywhere; a chunk is whole pages."""
    assert resource.getpagesize() == PAGE_SIZE
    assert CHUNK_BYTES % PAGE_SIZE == 0
    assert moecache.prefault.touch_pages is touch_pages


@pytest.mark.parametrize(
    ("nbytes", "page_size", "pages"),
    [
        (0, 4096, 0),
        (0, 1, 0),
        (1, 4096, 1),
        (4096, 4096, 1),
        (4097, 4096, 2),
        (10_000, 4096, 3),
        (10_000, 1, 10_000),
        (10_000, 3, 3334),
        (10_000, 9999, 2),
        (10_000, 10_000, 1),
        (10_000, 10_001, 1),
        (10_000, 2**63 - 1, 1),
        (10_000, 2**63, 1),
        (10_000, 2**64 - 1, 1),
    ],
)
def test_a_touch_counts_pages_rounded_up(nbytes: int, page_size: int, pages: int) -> None:
    """Whatever the size of a page; huge ones do not overflow."""
    assert touch_pages(np.zeros(nbytes, np.uint8), page_size=page_size) == pages


def test_a_touch_is_by_the_systems_pages_unless_said_otherwise() -> None:
    """The default is what is sensible."""
    region = np.zeros(5 * PAGE + 1, np.uint8)

    assert touch_pages(region) == 6
    assert touch_pages(region, page_size=None) == 6


@pytest.mark.parametrize("page_size", [0, -1, -(2**70)])
def test_a_page_size_that_is_not_positive_is_a_value_error(page_size: int) -> None:
    """The message has it."""
    with pytest.raises(ValueError, match=f"positive, got {page_size}"):
        touch_pages(b"abc", page_size=page_size)


@pytest.mark.parametrize("page_size", [1.5, "4096"])
def test_a_page_size_that_is_no_number_is_a_type_error(page_size: object) -> None:
    """Nothing is rounded."""
    with pytest.raises(TypeError):
        touch_pages(b"abc", page_size=page_size)


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.float64, np.complex128, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)
def test_a_touch_takes_arrays_of_any_type_and_shape(dtype: type) -> None:
    """Bytes count, not items."""
    region = np.zeros((3, PAGE), dtype)
    region.flags.writeable = False

    assert touch_pages(region) == 3 * np.dtype(dtype).itemsize


@pytest.mark.parametrize("region", [b"x" * 5000, bytearray(5000), memoryview(b"x" * 5000)])
def test_a_touch_takes_buffers_of_any_kind(region: object) -> None:
    """Those that can be written and those that cannot."""
    assert touch_pages(region, page_size=4096) == 2


def test_a_touch_reads_every_page_of_a_mapping(tmp_path: Path) -> None:
    """All of them are in the page table afterwards, the last one too."""
    with mapped(write_cold(tmp_path / "file", 40 * PAGE + 5)) as mapping:
        assert touch_pages(mapping) == 41
        address, nbytes = address_of(mapping)
        assert mapped_in(address, nbytes).all()


def test_a_touch_of_large_steps_still_reads_the_last_byte() -> None:
    """The region's last page would be left out."""
    with anonymous(64 * PAGE) as memory:
        assert touch_pages(memory, page_size=48 * PAGE) == 2
        pages = mapped_in(*address_of(memory))

    assert pages[[0, 48, 63]].all()


@pytest.mark.parametrize("function", [touch_pages, address_of])
def test_what_is_no_contiguous_buffer_is_refused(function: object) -> None:
    """As the docstring says: BufferError or TypeError."""
    for region in (None, 5, [1, 2]):
        with pytest.raises(TypeError):
            function(region)  # type: ignore[operator]
    with pytest.raises(BufferError):
        function(memoryview(np.zeros(100, np.uint8))[::2])  # type: ignore[operator]
    with pytest.raises((BufferError, ValueError), match="contiguous"):
        function(np.zeros(100)[::2])  # type: ignore[operator]


def test_a_refused_touch_leaves_the_buffer_free() -> None:
    """Nothing stays exported after an error, nor after a success."""
    memory = mmap.mmap(-1, PAGE)
    touch_pages(memory)
    address_of(memory)
    with pytest.raises(ValueError, match="positive"):
        touch_pages(memory, page_size=0)

    memory.close()


def test_an_address_is_where_the_bytes_are() -> None:
    """Of a slice, where that begins."""
    array = np.zeros(100, np.int32)

    assert address_of(array) == (array.ctypes.data, 400)
    assert address_of(array[3:5]) == (array.ctypes.data + 12, 8)
    assert address_of(memoryview(array).cast("B")[7:]) == (array.ctypes.data + 7, 393)


def test_resident_pages_are_those_in_memory() -> None:
    """Untouched memory has none; partial pages count as pages."""
    with anonymous(8 * PAGE) as memory:
        address, nbytes = address_of(memory)
        assert resident_pages(address, nbytes) == 0
        touch_pages(memoryview(memory)[: 3 * PAGE])
        assert resident_pages(address, nbytes) == 3
        assert resident_pages(address + 2 * PAGE, PAGE + 1) == 1
        assert resident_pages(address, 1) == 1
        assert resident_pages(address, 0) == 0


def test_resident_pages_are_counted_over_more_than_one_call_of_the_kernel() -> None:
    """Its answer comes in parts of 65,536 pages."""
    pages = CHUNK_BYTES // 512
    with anonymous((2 * pages + 3) * PAGE) as memory:
        address, nbytes = address_of(memory)
        for page in (0, pages - 1, pages, 2 * pages + 2):
            touch_pages(memoryview(memory)[page * PAGE : page * PAGE + 1])
        assert resident_pages(address, nbytes) == 4


def test_resident_pages_of_what_is_not_mapped_are_an_os_error() -> None:
    """With its number; an odd address is one too."""
    with pytest.raises(OSError, match="memory") as caught:
        resident_pages(NOWHERE, PAGE)
    assert caught.value.errno == errno.ENOMEM
    with anonymous(PAGE) as memory, pytest.raises(OSError, match="Invalid") as caught:
        resident_pages(address_of(memory)[0] + 1, 5)
    assert caught.value.errno == errno.EINVAL


def test_cached_pages_are_those_of_the_bytes_asked_for(tmp_path: Path) -> None:
    """From an offset on, rounded to pages; beyond the end there are none."""
    path = write_file(tmp_path / "file", 10 * PAGE + 1)
    with path.open("rb") as file:
        try:
            assert cached_pages(file.fileno(), 0, 11 * PAGE) == 11
        except OSError as error:
            assert error.errno in {errno.ENOSYS, errno.EPERM}  # noqa: PT017
            pytest.skip("needs cachestat, Linux 6.5")
        assert cached_pages(file.fileno(), 4 * PAGE, 2 * PAGE) == 2
        assert cached_pages(file.fileno(), 40 * PAGE, 2 * PAGE) == 0
    evict(path)
    with path.open("rb") as file:
        assert cached_pages(file.fileno(), 0, 11 * PAGE) == 0
    with pytest.raises(OSError, match="descriptor"):
        cached_pages(-1, 0, PAGE)


def test_advice_is_never_an_error() -> None:
    """It is taken or not."""
    assert advise_willneed(NOWHERE, PAGE) is False
    assert advise_huge(NOWHERE, PAGE) is False
    with anonymous(PAGE) as memory:
        assert advise_willneed(*address_of(memory)) in {True, False}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keep_mapped", [True, False])
def test_a_sweep_makes_its_pieces_resident_and_counts_them(
    tmp_path: Path, method: str, keep_mapped: bool
) -> None:
    """Pages outside of them do not count; only what is kept stays in the page table."""
    path = write_cold(tmp_path / "file", 64 * PAGE)
    sweep = Sweep()
    with mapped(path) as mapping, path.open("rb") as file:
        address, nbytes = address_of(mapping)
        pieces = [
            (address + first * PAGE, count * PAGE, file.fileno(), first * PAGE)
            for first, count in ((40, 24), (3, 1), (8, 0), (9, 20))
        ]
        assert sweep.run(pieces, method, keep_mapped=keep_mapped) == []
        for start, length, _, _ in pieces:
            assert resident_pages(start, length) * PAGE == length
        table = mapped_in(address, nbytes)

    assert sweep.done_bytes == 45 * PAGE
    # Not page 3: what is mapped around a page that faults is the kernel's choice.
    kept = method != "read" and keep_mapped
    assert (table[9:29] == kept).all()
    assert (table[40:] == kept).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keep_mapped", [True, False])
def test_anonymous_memory_is_swept_and_keeps_its_contents(method: str, keep_mapped: bool) -> None:
    """There is no file to fetch it from again."""
    with anonymous(8 * PAGE, protection=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
        memory[5 * PAGE] = 7
        address, nbytes = address_of(memory)
        piece = (address, nbytes, NO_FILE, 0)

        assert Sweep().run([piece], method, keep_mapped=keep_mapped) == []
        assert mapped_in(address, nbytes).all()
        assert memory[5 * PAGE] == 7


def test_counts_add_up_over_runs() -> None:
    """Several threads, and several parts, share one counter."""
    sweep = Sweep()
    with anonymous(4 * PAGE) as memory:
        piece = (*address_of(memory), NO_FILE, 0)
        threads = [threading.Thread(target=sweep.run, args=([piece] * 50, "touch")) for _ in "1234"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert sweep.done_bytes == 4 * 50 * 4 * PAGE
    assert sweep.run([], "touch") == []
    assert sweep.cancelled is False


def test_the_counter_rises_while_a_sweep_runs_and_a_cancel_ends_it(zero: int) -> None:
    """Chunk by chunk; it stops before the next one."""
    sweep = Sweep()
    thread = threading.Thread(target=sweep.run, args=([(0, ENDLESS, zero, 0)], "read"))
    thread.start()
    seen = [0]
    for _ in range(3):
        wait_until(lambda: sweep.done_bytes > seen[-1])
        seen.append(sweep.done_bytes)
    sweep.cancel()
    thread.join(30)

    assert not thread.is_alive()
    assert sweep.cancelled
    assert seen[-1] <= sweep.done_bytes < ENDLESS
    assert all(done % CHUNK_BYTES == 0 for done in (*seen, sweep.done_bytes))


@pytest.mark.parametrize("method", METHODS)
def test_a_cancelled_sweep_does_nothing_more(method: str) -> None:
    """A cancel that comes before the start counts."""
    sweep = Sweep()
    sweep.cancel()
    sweep.cancel()
    with anonymous(8 * PAGE) as memory:
        address, nbytes = address_of(memory)
        assert sweep.run([(address, nbytes, NO_FILE, 0)], method) == []
        assert not mapped_in(address, nbytes).any()

    assert sweep.done_bytes == 0


def test_other_threads_run_during_a_sweep(zero: int) -> None:
    """With the GIL held this thread could cancel only when all is done."""
    sweep, total = Sweep(), 2**34
    thread = threading.Thread(target=sweep.run, args=([(0, total, zero, 0)], "read"))
    thread.start()
    wait_until(lambda: sweep.done_bytes)
    sweep.cancel()
    thread.join()

    assert 0 < sweep.done_bytes < total


def test_other_threads_run_during_a_touch() -> None:
    """The longest silence of this thread stays well below the touch's duration."""
    durations = []

    def touch() -> None:
        start = time.perf_counter()
        touch_pages(memory, page_size=1)
        durations.append(time.perf_counter() - start)

    with anonymous(256 * MIB) as memory:
        silences = []
        for _ in range(3):  # a busy machine can silence a thread as well
            thread = threading.Thread(target=touch)
            # From before the start: with the GIL held that takes as long as the touch.
            last, longest, last_look = time.perf_counter(), 0.0, False
            thread.start()
            while not last_look:
                last_look = not thread.is_alive()
                now = time.perf_counter()
                last, longest = now, max(longest, now - last)
            thread.join()
            silences.append(longest / durations[-1])

    assert min(silences) < 0.5


@pytest.mark.parametrize("function", ["resident_pages", "advise_willneed"])
def test_an_unknown_address_does_not_crash(function: str) -> None:
    """Every function asks the kernel, which refuses."""
    if function == "resident_pages":
        with pytest.raises(OSError, match="memory"):
            resident_pages(NOWHERE, 2**62)
    else:
        assert not advise_willneed(NOWHERE, 2**62)


def test_an_unknown_method_is_a_value_error() -> None:
    """The message names the ones there are."""
    with pytest.raises(ValueError, match="'mlock' is not one of populate, read, touch"):
        Sweep().run([], "mlock")


@pytest.mark.parametrize("piece", [(0, 1, 2), (0, 1, 2, 3, 4), (0, -1, -1, 0), 5, (2**64, 0, 0, 0)])
def test_a_piece_that_is_none_is_an_error_before_anything_is_done(piece: object) -> None:
    """The pieces before it have not been swept either."""
    sweep = Sweep()
    with anonymous(PAGE) as memory:
        address, nbytes = address_of(memory)
        with pytest.raises((TypeError, ValueError, OverflowError)):
            sweep.run([(address, nbytes, NO_FILE, 0), piece], "touch")  # type: ignore[list-item]
        assert not mapped_in(address, nbytes).any()

    assert sweep.done_bytes == 0
