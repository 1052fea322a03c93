"""The gate of a sweep, and the page-aligned ranges that are made of regions."""

import itertools
import mmap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache import ConfigError, StoreError, prefault
from moecache.prefault import Region, decide, merge, warm, warming
from moecache.sizing import host_memory
from moecache.sizing.host_memory import CgroupLimit
from tests.helpers.examples import num_examples
from tests.helpers.pages import GIB, MIB, NOWHERE, PAGE, anonymous, mapped_in, pages_of

TIB = 2**40
PIB = 2**50


@pytest.mark.parametrize(
    ("num_bytes", "room", "mode", "gate", "run", "reason"),
    [
        (0, 16 * GIB, "auto", "fits", False, "empty"),
        (0, 16 * GIB, "force", "always", False, "empty"),
        (0, None, "off", "fits", False, "empty"),
        (GIB, 16 * GIB, "off", "fits", False, "off"),
        (GIB, None, "off", "always", False, "off"),
        (GIB, 16 * GIB, 0, "fits", False, "off"),
        (GIB, 16 * GIB, False, "fits", False, "off"),
        (64 * GIB, 16 * GIB, "force", "fits", True, "forced"),
        (64 * GIB, 16 * GIB, 1, "fits", True, "forced"),
        (64 * GIB, 16 * GIB, True, "fits-free", True, "forced"),
        (64 * GIB, None, "force", "always", True, "forced"),
        (64 * GIB, 16 * GIB, "auto", "always", True, "always"),
        (64 * GIB, None, "auto", "always", True, "always"),
        (64 * GIB, None, "auto", "fits", True, "room unknown"),
        (64 * GIB, None, "auto", "fits-free", True, "room unknown"),
        (14 * GIB, 16 * GIB, "auto", "fits", False, "too large"),
        (4 * GIB, 16 * GIB, "auto", "fits", True, "fits"),
        (80 * MIB, 100 * MIB, "auto", "fits", True, "fits"),
        (80 * MIB + 1, 100 * MIB, "auto", "fits", False, "too large"),
        (80 * MIB, 100 * MIB - 1, "auto", "fits-free", False, "too large"),
        (1, 0, "auto", "fits", False, "too large"),
        (4 * 2**60 + 1, 5 * 2**60, "auto", "fits", False, "too large"),
        (4 * 2**60, 5 * 2**60, "auto", "fits", True, "fits"),
    ],
)
def test_the_first_rule_that_applies_decides(
    num_bytes: int, room: int | None, mode: object, gate: str, run: bool, reason: str
) -> None:
    """Nothing; off; forced; always; room unknown; more than 80 %; fits."""
    verdict = decide(num_bytes, room, mode=mode, gate=gate)

    assert (verdict.run, verdict.reason) == (run, reason)
    assert verdict.message


@pytest.mark.parametrize(("gate", "kind"), [("fits", "memory"), ("fits-free", "free")])
def test_a_skip_says_both_figures_and_the_remedy(gate: str, kind: str) -> None:
    """The reader sees what was asked for and what there is."""
    message = decide(14 * GIB, 16 * GIB, gate=gate).message

    assert f"14.0 GiB of 16.0 GiB {kind}" in message
    assert "80 %" in message
    assert "'force'" in message


@pytest.mark.parametrize("mode", ["fourse", "background", 2, None])
def test_an_unknown_mode_is_a_config_error(mode: object) -> None:
    """A sweep that was not asked for may take minutes."""
    for call in (lambda: decide(14 * GIB, 16 * GIB, mode=mode), lambda: warm([], mode=mode)):
        with pytest.raises(ConfigError, match=f"prefault {mode!r} is not one of auto, off, force"):
            call()


@pytest.mark.parametrize("call", [warm, prefault.evict, prefault.residency])
def test_a_path_is_no_memory(call: Callable[[object], object]) -> None:
    """Its letters are no regions."""
    for path in ("model.safetensors", Path("model.safetensors")):
        with pytest.raises(ConfigError, match=r"'model.safetensors' is a path; open it"):
            call(path)


@pytest.mark.parametrize("gate", ["", "FITS", "never", None])
def test_an_unknown_gate_is_a_config_error(gate: str) -> None:
    """The message names the ones there are."""
    with pytest.raises(ConfigError, match="not one of fits, fits-free, always"):
        decide(0, None, mode="off", gate=gate)
    with pytest.raises(ConfigError, match="not one of fits, fits-free, always"):
        warm([], gate=gate)


@pytest.mark.parametrize(
    "options", [{"threads": 0}, {"threads": 65}, {"threads": "2"}, {"method": "sendfile"}]
)
def test_an_argument_that_cannot_be_used_is_a_config_error(options: dict[str, object]) -> None:
    """Even if there is nothing to sweep."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        warm([], mode="off", **options)


@pytest.fixture(name="small_group")
def _small_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a 2 GiB cgroup, half a GiB of it in use, on a machine of 24 GiB."""
    memory = SimpleNamespace(total=24 * GIB, available=23 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    group = CgroupLimit(limit_bytes=2 * GIB, room_bytes=3 * GIB // 2)
    monkeypatch.setattr(host_memory, "cgroup_limits", lambda: [group])


@pytest.mark.parametrize(
    ("gate", "fitting", "figure"),
    [("fits", 8 * GIB // 5, "2.00 GiB memory"), ("fits-free", 6 * GIB // 5, "1.50 GiB free")],
)
@pytest.mark.usefixtures("small_group")
def test_a_2_gib_group_on_a_24_gib_machine_counts_as_2_gib(
    gate: str, fitting: int, figure: str
) -> None:
    """The limit, or what is free of it: 80 % of that is swept, a page more is not."""
    fitting -= fitting % PAGE
    report = warm([(NOWHERE, fitting + PAGE)], gate=gate)

    assert (report.ran, report.reason) == (False, "too large")
    assert figure in report.message
    assert report.describe() == f"not swept: {report.message}"
    with pytest.raises(StoreError, match="nothing is mapped"):
        warm([(NOWHERE, fitting)], gate=gate)


def test_memory_that_cannot_be_found_out_is_no_reason_to_skip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without psutil, or with a /proc that fails, the sweep runs."""
    for kind in (ImportError, OSError):

        def fail(kind: type[Exception] = kind) -> int:
            raise kind("there is no such thing here")

        monkeypatch.setattr(warming, "total_host_bytes", fail)
        with anonymous(PAGE) as memory:
            assert warm(memory).reason == "room unknown"


def test_a_given_room_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller who knows better decides."""
    monkeypatch.setattr(warming, "total_host_bytes", lambda: pytest.fail("asked"))
    with anonymous(10 * PAGE) as memory:
        assert warm(memory, room_bytes=12 * PAGE).reason == "too large"
        assert warm(memory, room_bytes=10 * PAGE * 5 // 4).reason == "fits"


@pytest.mark.parametrize("num_bytes", [TIB, PIB])
@pytest.mark.parametrize("background", [False, True])
def test_switched_off_nothing_is_read(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, background: bool
) -> None:
    """Not the memory, not the mappings, not the files: claimed sizes return at once."""
    for name in ("_job.Sweeper", "warming.free_host_bytes", "warming.total_host_bytes"):
        monkeypatch.setattr(
            f"moecache.prefault.{name}", lambda *_, **__: pytest.fail("something was read")
        )
    result = warm([(NOWHERE, num_bytes)], mode="off", background=background)
    report = result if isinstance(result, prefault.PrefaultReport) else result.wait(30)

    assert (report.ran, report.reason, report.num_bytes) == (False, "off", num_bytes)
    assert (report.seconds, report.done_bytes, report.num_pages) == (0.0, 0, num_bytes // PAGE)


@pytest.mark.parametrize(("mode", "reason"), [("off", "off"), ("auto", "too large")])
def test_a_terabyte_that_is_mapped_is_not_touched(mode: str, reason: str) -> None:
    """If it is switched off, or the gate refuses, no page comes in."""
    with anonymous(TIB) as memory:
        report = warm(memory, mode=mode)
        address, _ = merge([memory])[0][0]
        assert not mapped_in(address, 64 * MIB).any()

    assert (report.ran, report.reason, report.num_bytes) == (False, reason, TIB)


@pytest.mark.parametrize(
    ("regions", "merged"),
    [
        ([], []),
        ([(0, 0)], []),
        ([(5 * PAGE + 3, 0)], []),
        ([(0, 1)], [(0, 1)]),
        ([(PAGE - 1, 2)], [(0, 2)]),
        ([(PAGE, PAGE)], [(1, 1)]),
        ([(PAGE, PAGE), (PAGE, PAGE)], [(1, 1)]),
        ([(PAGE + 1, 5), (PAGE + 9, 5), (PAGE, PAGE)], [(1, 1)]),
        ([(PAGE, PAGE), (2 * PAGE, PAGE)], [(1, 2)]),
        # In the order of the first region of each.
        ([(3 * PAGE, PAGE), (PAGE, PAGE)], [(3, 1), (1, 1)]),
        ([(5 * PAGE, 1), (9, 1), (3 * PAGE, 1), (4 * PAGE, 1)], [(3, 3), (0, 1)]),
        ([(0, 9 * PAGE), (2 * PAGE, PAGE), (8 * PAGE, 2 * PAGE)], [(0, 10)]),
        ([(0, 9 * PAGE), (2 * PAGE, PAGE), (10 * PAGE, 1)], [(0, 9), (10, 1)]),
        ([(2**64 - 2 * PAGE, PAGE)], [(2**52 * 4096 // PAGE - 2, 1)]),
    ],
)
def test_ranges_are_aligned_sorted_and_hold_each_page_once(
    regions: list[tuple[int, int]], merged: list[tuple[int, int]]
) -> None:
    """Tied weights count once; what adjoins is one range."""
    assert merge(regions)[0] == [(first * PAGE, pages * PAGE) for first, pages in merged]


def _region(number: int) -> tuple[int, int]:
    """Return one of the regions within 32 pages; half of their ends are on a page's border."""
    ends = []
    for _ in range(2):
        number, page = divmod(number, 32)
        number, byte = divmod(number, 8)
        ends.append(page * PAGE + (0, 0, 0, 0, 1, 9, PAGE // 2, PAGE - 1)[byte])
    return min(ends), max(ends) - min(ends)


@settings(max_examples=num_examples(1000), deadline=None)
@given(st.lists(st.integers(0, 2**16 - 1), max_size=6))
def test_ranges_are_the_set_of_pages_asked_for(numbers: list[int]) -> None:
    """Whatever the order: the same pages as one by one, no two ranges touching."""
    regions = [_region(number) for number in numbers]
    ranges, _ = merge(regions)

    expected = set().union(*(pages_of(*region) for region in regions))
    assert sum(nbytes for _, nbytes in ranges) == len(expected) * PAGE
    assert set().union(*(pages_of(*span) for span in ranges)) == expected
    assert all(sum(one) < other[0] for one, other in itertools.pairwise(sorted(ranges)))
    assert sorted(merge(reversed(regions))[0]) == merge(sorted(regions))[0] == sorted(ranges)
    firsts = [
        next(
            number for number, (at, size) in enumerate(regions) if size and start <= at < start + n
        )
        for start, n in ranges
    ]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize(
    "region",
    [
        (-1, 5),
        (5, -1),
        (2**64, 0),
        (2**64 - PAGE, 1),
        (1, 2**64),
        (2**63, 2**63),
        (0, 2**64 - PAGE + 1),
        (2**200, 2**200),
        (1, 2, 3),
        (1,),
        (1.0, 2),
        (0, "4096"),
        "ab",
        None,
        7,
        {1: 2},
        object(),
    ],
)
def test_what_is_no_region_is_a_config_error_with_its_number(region: object) -> None:
    """Never an OverflowError from below, never a sweep of something else."""
    with pytest.raises(ConfigError, match=r"region 1 "):
        merge([(0, 1), region])


@pytest.mark.parametrize("regions", [None, 7, (PAGE, PAGE)])
def test_what_is_no_list_of_regions_is_a_config_error(regions: object) -> None:
    """A single pair has to be in a list."""
    with pytest.raises(ConfigError):
        warm(regions, mode="off")


def test_a_buffer_is_the_region_it_occupies() -> None:
    """Arrays of any type, mappings, bytes; integers of NumPy count as integers."""
    array = np.zeros(3 * PAGE, np.int16)
    expected = merge([(array.ctypes.data, array.nbytes)])[0]

    assert merge([array])[0] == expected
    assert merge([memoryview(array)])[0] == expected
    assert merge([(np.uint64(array.ctypes.data), np.int32(array.nbytes))])[0] == expected
    assert merge([b""])[0] == []


def test_arrays_of_bfloat16_are_buffers() -> None:
    """NumPy exports no format of such a type, and none is needed."""
    array = np.zeros(3 * PAGE, ml_dtypes.bfloat16)

    assert merge([array])[0] == merge([(array.ctypes.data, array.nbytes)])[0]
    assert warm(array).num_bytes == merge([array])[0][0][1]


def test_a_single_buffer_needs_no_list() -> None:
    """An array is a region, not a list of them."""
    array = np.zeros((4, PAGE), np.uint8)

    assert warm(array, mode="off").num_bytes == merge([array])[0][0][1]


def test_memory_that_is_not_contiguous_is_a_config_error() -> None:
    """Its bytes are not those between two addresses."""
    with pytest.raises(ConfigError, match=r"region 0 .*not C-contiguous"):
        merge([np.zeros((8, 8))[:, ::2]])


def test_a_buffer_that_is_closed_is_a_config_error() -> None:
    """A mapping closed too early, a view released."""
    mapping = mmap.mmap(-1, PAGE)
    mapping.close()
    view = memoryview(b"abc")
    view.release()

    for region in (mapping, view):
        with pytest.raises(ConfigError, match="region 0"):
            merge([region])


def test_buffers_stay_open_as_long_as_their_owners_are_held() -> None:
    """What `merge` returns beside the ranges keeps them mapped."""
    mapping, owner = mmap.mmap(-1, PAGE), object()
    _, owners = merge([mapping, Region(0, 5, owner), (0, 5)])

    assert owners[1:] == [owner]
    with pytest.raises(BufferError):
        mapping.close()
    del owners
    mapping.close()


def test_a_region_is_a_pair() -> None:
    """Code that knows nothing of owners can unpack it."""
    region = Region(3, 4, owner="me")
    address, nbytes = region

    assert (address, nbytes, region) == (3, 4, (3, 4))
    assert region.owner == "me"
    assert Region(3, 4).owner is None
