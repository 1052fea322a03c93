"""What a sweep does to memory: pages of its own, huge-page advice, what is read once more."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from moecache import _prefault
from moecache._prefault import OWN_MEMORY, Sweep, address_of, can_populate
from moecache.prefault import warm
from tests.helpers.pages import (
    MIB,
    PAGE,
    anonymous,
    came_in,
    mapped,
    mapped_in,
    undisturbed,
    write_cold,
)

WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE


def smaps(address: int) -> dict[str, list[str]]:
    """Return what the kernel says of the mapping at an address, by name."""
    found: dict[str, list[str]] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name and ":" not in name:
            start, stop = (int(number, 16) for number in name.split("-"))
            inside = start <= address < stop
        elif inside:
            found[name.rstrip(":")] = values
    return found


def vm_flags(address: int) -> set[str]:
    """Return the kernel's flags of the mapping at an address."""
    return set(smaps(address).get("VmFlags", []))


def rss_bytes(mapping: mmap.mmap) -> int:
    """Return how much memory a mapping has: not the process, whose other parts come and go."""
    return int(smaps(address_of(mapping)[0])["Rss"][0]) * 1024


@pytest.mark.skipif(not can_populate(), reason="needs MADV_POPULATE_WRITE, Linux 5.14")
def test_memory_that_may_be_written_gets_pages_of_its_own() -> None:
    """Not the one page of zeros that a read gives: the first write would wait for another."""
    with anonymous(8 * MIB, protection=WRITABLE) as mapping:
        before = rss_bytes(mapping)
        warm(mapping)
        assert rss_bytes(mapping) - before >= 7 * MIB
        assert mapped_in(*address_of(mapping)).all()
        assert not np.frombuffer(mapping, np.uint8).any()


def test_memory_keeps_what_was_written() -> None:
    """Whatever the method, and half of it untouched before."""
    for method in _prefault.METHODS:
        with anonymous(4 * MIB, protection=WRITABLE) as mapping:
            mapping[MIB : 2 * MIB] = bytes(range(256)) * (MIB // 256)
            warm(mapping, method=method, keep_mapped=False)
            assert mapping[MIB : 2 * MIB] == bytes(range(256)) * (MIB // 256)
            assert not any(mapping[:MIB])


def test_a_private_mapping_keeps_what_was_written_over_its_file(tmp_path: Path) -> None:
    """Copied pages are not the file's, and are not dropped with them."""
    path = write_cold(tmp_path / "file", 4 * MIB)
    for keep_mapped in (True, False):
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapping[:5] = b"dirty"
        mapping[3 * MIB : 3 * MIB + 5] = b"dirty"
        warm(mapping, keep_mapped=keep_mapped)
        assert mapping[:5] == mapping[3 * MIB : 3 * MIB + 5] == b"dirty"
        mapping.close()


def test_written_pages_are_populated_for_writing_only_where_that_is_asked_for() -> None:
    """A piece without a file gets the page of zeros, one of own memory its own."""
    sizes = []
    for kind in (_prefault.NO_FILE, OWN_MEMORY):
        with anonymous(8 * MIB, protection=WRITABLE) as mapping:
            before = rss_bytes(mapping)
            assert Sweep().run([(*address_of(mapping), kind, 0)], "populate") == []
            sizes.append(rss_bytes(mapping) - before)
    assert sizes[0] < MIB
    assert sizes[1] > 7 * MIB


def test_huge_pages_are_asked_for_files_alone(tmp_path: Path) -> None:
    """How much memory an array takes is its owner's business."""
    with mapped(write_cold(tmp_path / "file", 4 * MIB)) as file:
        warm([np.frombuffer(file, np.uint8)[MIB : 2 * MIB]])
        assert "hg" in vm_flags(address_of(file)[0])
    with anonymous(4 * MIB, protection=WRITABLE) as mapping:
        warm(mapping)
        assert "hg" not in vm_flags(address_of(mapping)[0])


def test_advice_does_not_split_a_mapping(tmp_path: Path) -> None:
    """A process may have 65,530 mappings; a thousand regions must not become a thousand."""
    with mapped(write_cold(tmp_path / "file", 16 * MIB)) as file:
        address, _ = address_of(file)
        before = len(Path("/proc/self/maps").read_text().splitlines())
        warm([(address + 4 * PAGE * number, PAGE) for number in range(1000)])
        after = len(Path("/proc/self/maps").read_text().splitlines())
    # Threads come with stacks of their own.
    assert after - before < 20


@pytest.mark.parametrize("method", _prefault.METHODS)
@undisturbed
def test_what_is_read_once_more_is_counted_and_can_be_switched_off(
    tmp_path: Path, method: str
) -> None:
    """Never more than was swept; only after a populate; nothing if it was there before."""
    path = write_cold(tmp_path / "file", 8 * MIB)
    with mapped(path) as file:
        report = warm(file, method=method, read_back=False)
    assert report.ran
    assert report.read_back_bytes == 0
    assert came_in(path, 8 * MIB)

    with mapped(path) as file:
        assert warm(file, method=method).read_back_bytes == 0

    path = write_cold(tmp_path / "other", 8 * MIB)
    with mapped(path) as file:
        report = warm(file, method=method)
    assert 0 <= report.read_back_bytes <= (8 * MIB if method == "populate" else 0)
