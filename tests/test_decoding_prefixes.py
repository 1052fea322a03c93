"""PrefixCache: pages by the tokens that they end, bounded in memory and in files."""

import contextlib
import functools
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moecache.decoding import _page_files
from moecache.decoding.prefixes import Page, PrefixCache, num_positions
from moecache.errors import StoreError

TOKENS = 4
PAGE_BYTES = 2 * 2 * TOKENS * 3 * 4


def page(seed: int, dtype: type = np.float32) -> Page:
    """Return the keys and values of two layers of one head of three numbers."""
    random = np.random.default_rng(seed)
    return tuple(
        tuple(random.integers(0, 99, (1, 1, TOKENS, 3)).astype(dtype) for _ in "kv")
        for _ in range(2)
    )  # type: ignore[return-value]


def pages_of(tokens: list[int]) -> list[Page]:
    """Return the pages that a model would make of tokens."""
    ends = range(TOKENS, len(tokens) + 1, TOKENS)
    return [page(hash(tuple(tokens[:end])) % 2**32) for end in ends]


def keep(cache: PrefixCache, tokens: list[int]) -> None:
    """Keep all whole pages of tokens."""
    whole = tokens[: len(tokens) // TOKENS * TOKENS]
    cache.keep(whole, pages_of(whole))


def same(one: list[Page], other: list[Page]) -> bool:
    """Return whether pages are equal, bit for bit."""
    arrays = [[a for p in pages for layer in p for a in layer] for pages in (one, other)]
    return len(one) == len(other) and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(*arrays, strict=True)
    )


def test_the_longest_known_beginning_is_found() -> None:
    """Whole pages of the same tokens from the first on; the last token is left to be read."""
    cache = PrefixCache(b"model", TOKENS, 10**6)
    tokens = list(range(10))
    keep(cache, tokens)
    assert same(cache.find(tokens), pages_of(tokens))
    assert same(cache.find(tokens[:8]), pages_of(tokens[:4]))
    assert cache.find(tokens[:4]) == []
    assert same(cache.find([*tokens[:7], 99, 8, 9]), pages_of(tokens[:4]))
    assert cache.find([1, *tokens[1:]]) == []
    assert cache.find(tokens[4:]) == []
    stats = cache.stats()
    assert (stats.hit_tokens, stats.num_pages, stats.nbytes) == (16, 2, 2 * PAGE_BYTES)


def long_page(tokens: list[int]) -> Page:
    """Return the same as one page."""
    keys, values = (
        np.concatenate([page[0][place] for page in rows_of(tokens)], axis=2) for place in (0, 1)
    )
    return ((keys, values),)


def link(shorter: str, longer: str) -> bytes:
    """Return what a file has that leads from a page to a longer one."""
    name = longer.encode()
    return _page_files._LINK_LINE + _page_files._digest(shorter, name) + name


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=12),
    st.integers(0, 8),
)
def test_what_is_found_is_what_was_kept(prompts: list[list[int]], room: int) -> None:
    """Whatever was forgotten; memory is bounded, and a page is there only behind its beginning."""
    cache = PrefixCache(b"model", TOKENS, room * PAGE_BYTES)
    for tokens in prompts:
        found = cache.find(tokens)
        assert same(found, pages_of(tokens)[: len(found)])
        keep(cache, tokens)
        assert cache.stats().nbytes <= room * PAGE_BYTES
        whole = (len(tokens) - 1) // TOKENS
        assert len(cache.find(tokens)) == min(whole, room)


def rows_of(tokens: list[int]) -> list[Page]:
    """Return pages whose rows tell the tokens up to theirs, the last one as far as it goes."""
    rows = [float(hash((0, *tokens[: end + 1])) % 2**20) for end in range(len(tokens))]
    parts = [rows[begin : begin + TOKENS] for begin in range(0, len(rows), TOKENS)]
    arrays = [np.array(part, np.float32).reshape(1, 1, -1, 1) for part in parts]
    return [((array, array + 1),) for array in arrays]


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=12),
    st.integers(0, 8),
    st.booleans(),
    st.booleans(),
)
# Two pages have one beginning, and the one that had it last is forgotten.
@example([[1, 0, 1, 0], [1, 0, 0, 0], [1, 0, 1, *[0] * 11], [1, 0, 1, 0]], 4, False, False)
# A page comes back from its file, and is asked for its beginning.
@example([[0, 1, 0, 1], [0] * 14, [0, 1, 0, 1, 0], [0, 1, 0, 1]], 4, True, True)
def test_a_page_is_found_as_far_as_the_tokens_are_the_same(
    prompts: list[list[int]], room: int, in_files: bool, writes_first: bool
) -> None:
    """In steps of two positions, whatever was forgotten; two tokens are left to be read."""
    with contextlib.ExitStack() as stack:
        directory = None
        if in_files:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cache = PrefixCache(
            b"model",
            TOKENS,
            room * 8 * TOKENS,
            part_tokens=2,
            directory=directory,
            max_disk_bytes=10**6 * in_files,
        )
        stack.callback(cache.close)
        for tokens in prompts:
            found = cache.find(tokens, in_parts=True)
            num = sum(map(num_positions, found))
            assert num <= max(0, len(tokens) - 1)
            assert num % 2 == 0
            assert same(found, rows_of(tokens[:num]))
            cache.keep(tokens, rows_of(tokens), in_parts=True)
            if writes_first and cache._writing is not None:
                cache._writing.submit(int).result()
            stats = cache.stats()
            assert stats.nbytes <= room * 8 * TOKENS
            if room >= 4:
                whole = (len(tokens) - 1) // TOKENS * TOKENS
                more = max(0, len(tokens) - 2 - whole) // 2 * 2
                known = sum(map(num_positions, cache.find(tokens, in_parts=True)))
                assert known == whole + more
            # A beginning that is in a longer page is not kept beside it.
            held = [name for name in cache._pages if name in cache._longer]
            assert not held


def test_a_longer_page_takes_the_place_of_its_beginning(tmp_path: Path) -> None:
    """In memory and in files; without parts the last page is left out."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    cache = PrefixCache(
        b"m", TOKENS, 10**6, part_tokens=2, directory=tmp_path, max_disk_bytes=10**6
    )
    with contextlib.closing(cache):
        cache.keep(tokens[:7], rows_of(tokens[:7]), in_parts=True)
        assert cache.stats().num_pages == 2
        cache.keep(tokens, rows_of(tokens)[1:], in_parts=True)
        assert cache.stats().num_pages == 2
        assert cache.stats().nbytes == 2 * TOKENS * 8
        other = [*tokens[:6], 0, 0, 0]
        assert same(cache.find(other, in_parts=True), rows_of(other[:6]))
        assert same(cache.find(other), rows_of(other[:4]))
    # A link, by which another process finds the beginning alone.
    sizes = sorted(file.stat().st_size for file in tmp_path.glob("*.page"))
    assert len(sizes) == 3
    assert sizes[0] < 100
    again = PrefixCache(
        b"m", TOKENS, 10**6, part_tokens=2, directory=tmp_path, max_disk_bytes=10**6
    )
    assert same(again.find(other, in_parts=True), rows_of(other[:6]))
    assert again.stats().nbytes == 6 * 8
    plain = PrefixCache(b"m", TOKENS, 10**6)
    plain.keep(tokens[:7], rows_of(tokens[:7]))
    assert same(plain.find([*tokens, 9], in_parts=True), rows_of(tokens[:4]))


def test_a_page_from_a_file_is_found_by_its_beginnings(tmp_path: Path) -> None:
    """By those too that no file leads from, found or kept again."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    make = functools.partial(
        PrefixCache, b"m", TOKENS, 10**6, part_tokens=2, directory=tmp_path, max_disk_bytes=10**6
    )
    with contextlib.closing(make()) as cache:
        cache.keep(tokens, rows_of(tokens), in_parts=True)
    other = [*tokens[:6], 0, 0, 0]
    for again in (False, True):
        with contextlib.closing(make()) as cache:
            assert same(cache.find([*tokens, 9], in_parts=not again), rows_of(tokens))
            if again:
                cache.keep(tokens, rows_of(tokens), in_parts=True)
            assert same(cache.find(other, in_parts=True), rows_of(other[:6]))
            assert cache.stats().nbytes == 2 * TOKENS * 8


def test_links_are_followed_as_far_as_they_lead(tmp_path: Path) -> None:
    """Over several; what leads nowhere, in a circle, or is damaged, is a miss, and goes."""
    tokens = list(range(1, 9))
    make = functools.partial(
        PrefixCache, b"m", 8, 10**6, part_tokens=2, directory=tmp_path, max_disk_bytes=10**6
    )
    known: dict[int, Path] = {}
    with contextlib.closing(make()) as cache:
        for num in (2, 4, 6, 8):
            cache.keep(tokens[:num], [long_page(tokens[:num])], in_parts=True)
            cache._writing.submit(lambda: None).result()  # type: ignore[union-attr]
            new = set(tmp_path.glob("*.page")) - set(known.values())
            known[num] = new.pop()
    two = [*tokens[:2], 0, 0]

    def found() -> list[Page]:
        with contextlib.closing(make()) as cache:
            return cache.find(two, in_parts=True)

    assert same(found(), [long_page(tokens[:2])])
    kept = {num: path.read_bytes() for num, path in known.items()}
    assert len(kept[8]) > 100 > max(len(kept[num]) for num in (2, 4, 6))
    known[2].write_bytes(kept[2][:-1] + bytes([kept[2][-1] ^ 1]))
    assert found() == []
    assert not known[2].exists()
    # By another link.
    known[2].write_bytes(link(known[2].stem, known[4].stem))
    assert same(found(), [long_page(tokens[:2])])
    # A circle, as nobody writes it.
    for one, other in ((2, 4), (4, 2)):
        known[one].write_bytes(link(known[one].stem, known[other].stem))
    assert found() == []
    for num in (2, 4, 6):
        known[num].write_bytes(kept[num])
    assert same(found(), [long_page(tokens[:2])])
    known[8].unlink()
    assert found() == []
    assert not known[2].exists()


def test_files_outlive_the_process_and_are_bounded(tmp_path: Path) -> None:
    """Pages of every type come back bit for bit; another model's and damaged ones are misses."""
    tokens = list(range(9))
    for dtype in (np.float32, np.uint16, np.float16):
        directory = tmp_path / np.dtype(dtype).name
        first = PrefixCache(b"one", TOKENS, 0, directory=directory, max_disk_bytes=10**6)
        kept = [page(1, dtype), page(2, dtype)]
        first.keep(tokens[:8], kept)
        first.close()
        again = PrefixCache(b"one", TOKENS, 10**6, directory=directory, max_disk_bytes=10**6)
        assert same(again.find(tokens), kept)
        other = PrefixCache(b"other", TOKENS, 10**6, directory=directory, max_disk_bytes=10**6)
        assert other.find(tokens) == []
    size = next(directory.iterdir()).stat().st_size
    small = PrefixCache(b"one", TOKENS, 0, directory=directory, max_disk_bytes=size)
    assert small.stats().disk_bytes == size
    assert len(list(directory.iterdir())) == 1


def test_a_damaged_file_is_a_miss_and_goes(tmp_path: Path) -> None:
    """A flipped bit anywhere, a file cut short, one that is empty or longer."""
    tokens = list(range(5))
    for change in ("flip", "cut", "empty", "longer"):
        cache = PrefixCache(b"one", TOKENS, 0, directory=tmp_path, max_disk_bytes=10**6)
        keep(cache, tokens)
        cache.close()
        (file,) = tmp_path.iterdir()
        whole = file.read_bytes()
        places = range(0, len(whole), 7) if change == "flip" else [len(whole) // 2]
        for place in places:
            flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
            damaged = {"cut": whole[:place], "empty": b"", "longer": whole + b"x"}
            file.write_bytes(damaged.get(change, flipped))
            again = PrefixCache(b"one", TOKENS, 10**6, directory=tmp_path, max_disk_bytes=10**6)
            assert again.find(tokens) == [], (change, place)
            assert again.stats().num_damaged == 1
            assert not file.exists()


def test_a_file_under_another_name_is_a_miss(tmp_path: Path) -> None:
    """Copied or swapped files would give a wrong text."""
    first, second = [1, 2, 3, 4, 0], [5, 6, 7, 8, 0]
    with contextlib.closing(
        PrefixCache(b"m", TOKENS, 0, directory=tmp_path, max_disk_bytes=10**6)
    ) as cache:
        keep(cache, first)
        keep(cache, second)
    one, other = tmp_path.glob("*.page")
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    cache = PrefixCache(b"m", TOKENS, 0, directory=tmp_path, max_disk_bytes=10**6)
    assert cache.find(first) == cache.find(second) == []
    assert cache.stats().num_damaged == 2
    assert not list(tmp_path.glob("*.page"))


def test_processes_share_a_directory_and_its_bound(tmp_path: Path) -> None:
    """Each sees what the others wrote, read and removed."""
    size = 2 * PAGE_BYTES + 500
    made = [
        PrefixCache(b"m", TOKENS, 0, directory=tmp_path, max_disk_bytes=3 * size) for _ in range(2)
    ]
    for number in range(8):
        for cache in made:
            keep(cache, [number, number, id(cache) % 97, 1])
            assert cache._writing is not None
            cache._writing.submit(int).result()
            assert cache.find([0, 0, 0, 0, 0]) == []
    files = list(tmp_path.glob("*.page"))
    assert len(files) >= 1
    assert sum(file.stat().st_size for file in files) <= 3 * size
    # A page that somebody has removed is written again.
    last = [7, 7, id(made[1]) % 97, 1]
    for file in files:
        file.unlink()
    assert made[1].find([*last, 0]) == []
    keep(made[1], last)
    made[1].close()
    assert len(list(tmp_path.glob("*.page"))) == 1
    made[0].close()


def test_what_is_left_of_others_does_not_keep_it_from_starting(tmp_path: Path) -> None:
    """A link to nothing; the part of a page whose process was killed, which is removed."""
    (tmp_path / "0.page").symlink_to(tmp_path / "nowhere")
    old, new = (tmp_path / f".{name}.page.1-ab" for name in "ab")
    for part in (old, new):
        part.write_bytes(b"part")
    os.utime(old, (0, 0))
    cache = PrefixCache(b"m", TOKENS, 0, directory=tmp_path, max_disk_bytes=10**6)
    keep(cache, [1, 2, 3, 4])
    cache.close()
    assert not old.exists()
    assert new.exists()
    # A text that still reads its prompt may keep pages later: there is nothing to keep them in.
    keep(cache, [1, 2, 3, 4])
    assert cache.stats().num_pages == 0


def test_a_directory_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    """With its path."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="file"):
        PrefixCache(b"one", TOKENS, 0, directory=tmp_path / "file" / "x", max_disk_bytes=1)


def test_a_full_disk_loses_pages_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt goes on; no file is left behind."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    cache = PrefixCache(b"one", TOKENS, 10**6, directory=tmp_path, max_disk_bytes=10**6)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", refuse)
        keep(cache, list(range(5)))
        cache.close()
    assert os.listdir(tmp_path) == []
