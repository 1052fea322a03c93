"""What this process has mapped, and which file is behind an address."""

import itertools
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache._prefault import address_of, touch_pages
from moecache.prefault.mappings import Mapping, is_mapped_in, read_mappings, split
from tests.helpers.examples import num_examples
from tests.helpers.pages import NOWHERE, PAGE, anonymous, mapped, num_descriptors, write_file


@pytest.fixture(autouse=True)
def no_file_stays_open() -> Iterator[None]:
    """Check that what is not handed out is closed."""
    before = num_descriptors()
    yield
    assert num_descriptors() == before


def read_lines(directory: Path, *lines: bytes) -> list[Mapping]:
    """Read a list of mappings as if it were this process's."""
    (directory / "self").mkdir(exist_ok=True)
    (directory / "self/maps").write_bytes(b"".join(line + b"\n" for line in lines))
    mappings = read_mappings(directory)
    assert mappings is not None
    return mappings


@pytest.mark.parametrize(
    ("line", "mapping"),
    [
        (
            b"7f00-7f10 r--p 00001000 fe:00 42                          /models/a.bin",
            Mapping(0x7F00, 0x7F10, True, 0x1000, 42, "/models/a.bin"),
        ),
        (b"1000-2000 rw-p 00000000 00:00 0 ", Mapping(0x1000, 0x2000, True, 0, 0, "", True)),
        (
            b"1000-2000 rw-p 00000000 00:00 0                          [heap]",
            Mapping(0x1000, 0x2000, True, 0, 0, "", True),
        ),
        (
            b"1000-2000 ---p 00002000 fe:00 7  /lib/x.so",
            Mapping(0x1000, 0x2000, False, 0x2000, 7, "/lib/x.so"),
        ),
        (
            b"1000-2000 -w-s 00000000 00:01 9  /dev/zero (deleted)",
            Mapping(0x1000, 0x2000, False, 0, 9, "/dev/zero (deleted)", True),
        ),
        (b"1000-2000 r--p 0 fe:00 7   /a  b ", Mapping(0x1000, 0x2000, True, 0, 7, "/a  b ")),
        (b"1000-2000 r--p 0 fe:00 7   /a\\012b", Mapping(0x1000, 0x2000, True, 0, 7, "/a\nb")),
        (b"1000-2000 r--p 0 fe:00 7   /a\rb\r", Mapping(0x1000, 0x2000, True, 0, 7, "/a\rb\r")),
        (b"1000-2000 r--p 0 fe:00 7   /a\tb\t", Mapping(0x1000, 0x2000, True, 0, 7, "/a\tb\t")),
        (b"1000-2000 r--p 0 fe:00 7   /a\x0bb", Mapping(0x1000, 0x2000, True, 0, 7, "/a\x0bb")),
        (
            b"1000-2000 r--p 0 fe:00 7   /\xff",
            Mapping(0x1000, 0x2000, True, 0, 7, os.fsdecode(b"/\xff")),
        ),
        (
            b"ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0      [vsyscall]",
            Mapping(0xFFFFFFFFFF600000, 0xFFFFFFFFFF601000, False, 0, 0, ""),
        ),
    ],
)
def test_a_line_is_a_mapping(tmp_path: Path, line: bytes, mapping: Mapping) -> None:
    """Names may hold anything; only a line feed is written as an escape."""
    other = b"fff0-fff8 r--p 00000000 fe:00 3   /other"
    assert read_lines(tmp_path, line, other)[0] == mapping
    assert mapping.anonymous == (mapping.inode == 0 or mapping.path == "/dev/zero (deleted)")


def test_a_name_that_ends_in_blanks_keeps_them(tmp_path: Path) -> None:
    """It is another file than the one without."""
    (mapping,) = read_lines(tmp_path, b"1000-2000 r--p 0 fe:00 7   /a  ")

    assert mapping.path == "/a  "


def test_a_process_without_a_list_has_none(tmp_path: Path) -> None:
    """Other systems have no /proc; an empty list is a list."""
    assert read_mappings(tmp_path) is None
    assert read_lines(tmp_path) == []


@pytest.mark.parametrize("name", ["plain", "two  blanks ", "line\nfeed", "gone (deleted)", "ü"])
def test_a_file_mapped_here_is_found_and_opened(tmp_path: Path, name: str) -> None:
    """By address, with its offset."""
    path = write_file(tmp_path / name, 6 * PAGE)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, offset=2 * PAGE)
    address, nbytes = address_of(mapping)
    mappings = read_mappings()
    assert mappings is not None
    ((start, length, found),) = split(mappings, address, nbytes)
    mapping.close()

    assert (start, length) == (address, nbytes)
    assert found is not None
    assert (found.path, found.offset, found.inode) == (
        str(path),
        2 * PAGE + address - found.start,
        path.stat().st_ino,
    )
    descriptor = found.open_file()
    assert os.path.samestat(os.fstat(descriptor), path.stat())
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_the_list_is_sorted_and_its_ranges_do_not_overlap() -> None:
    """`split` relies on it."""
    mappings = read_mappings()

    assert mappings
    assert all(one.start < one.stop <= other.start for one, other in itertools.pairwise(mappings))


def found_at(path: Path, inode: int | None = None) -> Mapping:
    """Return a mapping of what has this name."""
    number = os.stat(path).st_ino if inode is None else inode
    return Mapping(0, PAGE, True, 0, number, str(path))


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """Opening a device, a pipe or a socket can do something to it, or block."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), Path("/dev/null")):
        assert found_at(path).open_file() == -1


def test_another_file_of_the_same_name_is_not_opened(tmp_path: Path) -> None:
    """Nor one that is gone, or whose name cannot be one."""
    path = write_file(tmp_path / "file", PAGE)
    inode = path.stat().st_ino

    assert found_at(path, inode + 1).open_file() == -1
    path.unlink()
    assert found_at(path, inode).open_file() == -1
    assert Mapping(0, PAGE, True, 0, 5, "/nul\0byte").open_file() == -1
    assert Mapping(0, PAGE, True, 0, 5, "").open_file() == -1


def test_a_file_that_may_not_be_read_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may have mapped it before it gave up the right."""

    def refuse(*_: object) -> int:
        raise PermissionError(13, "refused")

    mapping = found_at(write_file(tmp_path / "file", PAGE))
    monkeypatch.setattr(os, "open", refuse)

    assert mapping.open_file() == -1


def test_anonymous_memory_has_no_file() -> None:
    """Whatever is written behind it."""
    assert Mapping(0, PAGE, True, 0, 0, "").open_file() == -1


@st.composite
def address_spaces(draw: st.DrawFn) -> list[Mapping]:
    """Return mappings with and without gaps between them, among the first 60 addresses."""
    cuts = sorted(draw(st.sets(st.integers(0, 60), max_size=14)))
    kept = draw(st.lists(st.booleans(), min_size=len(cuts), max_size=len(cuts)))
    spans = zip(cuts, cuts[1:], kept, strict=False)
    return [Mapping(one, two, True, 0, one + 1, f"/{one}") for one, two, keep in spans if keep]


@settings(max_examples=num_examples(500))
@given(address_spaces(), st.integers(0, 65), st.integers(0, 65))
def test_a_range_is_split_where_the_mapping_changes(
    mappings: list[Mapping], address: int, nbytes: int
) -> None:
    """The same as asking for every byte: parts in order, none of them empty."""
    parts = split(mappings, address, nbytes)

    flat = [
        (byte, mapping) for start, length, mapping in parts for byte in range(start, start + length)
    ]
    owners = {byte: mapping for mapping in mappings for byte in range(mapping.start, mapping.stop)}
    assert flat == [(byte, owners.get(byte)) for byte in range(address, address + nbytes)]
    assert all(length > 0 for _, length, _ in parts)
    assert all(one[2] is not other[2] for one, other in itertools.pairwise(parts))


def test_the_end_of_the_address_space_can_be_split() -> None:
    """Numbers do not overflow."""
    assert split([], 2**64 - PAGE, PAGE) == [(2**64 - PAGE, PAGE, None)]


def test_pages_are_mapped_in_once_they_are_touched() -> None:
    """Every one of them; nowhere is any."""
    with anonymous(20 * PAGE) as memory:
        address, nbytes = address_of(memory)
        assert not is_mapped_in(address, nbytes)
        for page in range(19):
            touch_pages(memoryview(memory)[page * PAGE : page * PAGE + 1])
        assert is_mapped_in(address, 19 * PAGE)
        assert not is_mapped_in(address, nbytes)
        assert not is_mapped_in(address + 18 * PAGE + 1, PAGE)
    assert not is_mapped_in(NOWHERE, PAGE)


@pytest.mark.parametrize("missing", [0, 1, 8191, 8192, 12_000, 16_384, 16_400])
def test_one_page_that_is_not_mapped_in_is_found(tmp_path: Path, missing: int) -> None:
    """The kernel's table is read in parts of 8192 pages."""
    with anonymous(16_401 * PAGE) as memory:
        address, nbytes = address_of(memory)
        touch_pages(memory)
        assert is_mapped_in(address, nbytes)
        memory.madvise(mmap.MADV_DONTNEED, missing * PAGE, PAGE)
        assert not is_mapped_in(address, nbytes)


def test_without_the_kernels_table_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be closed to this process, or not be there."""
    with mapped(write_file(tmp_path / "file", PAGE)) as mapping:
        touch_pages(mapping)
        address, nbytes = address_of(mapping)
        assert is_mapped_in(address, nbytes)

        def refuse(*_: object) -> int:
            raise PermissionError(13, "refused")

        monkeypatch.setattr(os, "open", refuse)
        assert not is_mapped_in(address, nbytes)
