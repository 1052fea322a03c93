"""PrefixCache: keys and values of prompts' pages, for prompts that begin alike."""

import hashlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moecache.decoding._page_files import PageFiles
from moecache.interrupts import uninterrupted

logger = logging.getLogger(__name__)

# Keys and values of each layer, [1, heads, positions, width], as arrays of bytes have no dtype of
# torch's: bfloat16 is uint16 here. Behind them there may be what layers with states hold
# where the page ends.
Page = tuple[tuple[np.ndarray, np.ndarray], ...]
# Positions of a page.
PAGE_TOKENS = 256
# Another number with each change of what is computed: pages in files may be older.
ARITHMETIC = 3
# A page is kept, and found, up to a multiple of these positions, where rows are apart.
PART_TOKENS = 16
_DIGEST_BYTES = 20
# Of a model's file at its beginning, middle and end: a vocabulary may be longer.
_SAMPLE_BYTES = 2**20


@dataclass(frozen=True)
class PrefixStats:
    """The counters of a prefix cache since it was made.

    Attributes
    ----------
    num_pages, nbytes : int
        In memory now.
    disk_bytes : int
        In files now.
    hit_tokens, asked_tokens : int
        Tokens of prompts that were found, and of all prompts.
    num_damaged : int
        Files that were not what was written; they were removed.
    """

    num_pages: int
    nbytes: int
    disk_bytes: int
    hit_tokens: int
    asked_tokens: int
    num_damaged: int


class PrefixCache:
    """Keeps pages by the tokens that they end, in memory and, if asked, in files.

    A page holds the keys and values of `page_tokens` positions. Its name is a digest of the model's
    identity and of all tokens up to its end, so that only the same tokens find it. What was used
    longest ago is forgotten first, the end of a prompt before its beginning. Any thread may call.

    Where rows do not depend on how many there are, the last page of a prompt is kept as far as it
    goes, and a page in memory is found as far as tokens are the same: in steps of `part_tokens`.

    Parameters
    ----------
    identity : bytes
        All that a page's bits depend on beside its tokens.
    page_tokens : int
    max_bytes : int
        Of memory.
    part_tokens : int, optional
        A divisor of `page_tokens`, which it is by default.
    way : str, default ""
        What makes the pages, where there are several ways.
    num_plain : int, optional
        Layers of pages that have no states, if a text goes on only behind a page that has some.
    directory : Path, optional
        Where pages are written to as well; made if it is not there.
    max_disk_bytes : int, default 0
        Of files in it.

    Raises
    ------
    StoreError
        If the directory cannot be used.
    """

    def __init__(
        self,
        identity: bytes,
        page_tokens: int,
        max_bytes: int,
        *,
        part_tokens: int | None = None,
        way: str = "",
        num_plain: int | None = None,
        directory: Path | None = None,
        max_disk_bytes: int = 0,
    ) -> None:
        self.page_tokens = page_tokens
        self.part_tokens = part_tokens or page_tokens
        self.max_bytes, self.way = max_bytes, way
        self._num_plain = num_plain
        self._root = hashlib.blake2b(identity, digest_size=_DIGEST_BYTES).digest()
        self._files = None if directory is None else PageFiles(directory, max_disk_bytes)
        self._pages: OrderedDict[bytes, Page] = OrderedDict()
        # The name of a page's beginning -> the names of the pages in memory that have it.
        self._longer: dict[bytes, list[bytes]] = {}
        self._parts: dict[bytes, list[bytes]] = {}
        self._nbytes = 0
        self._hit_tokens = self._asked_tokens = 0
        self._lock = threading.Lock()
        self._writing = None if self._files is None else ThreadPoolExecutor(1, "moecache-prefixes")
        self._writes: set[Future[None]] = set()
        self._closed = False

    def find(self, tokens: Sequence[int], *, in_parts: bool = False) -> list[Page]:
        """Return the pages of the longest known beginning of a prompt.

        At least one token is left to be read: its logits are wanted. Of a page that is not whole
        two are left, as a token alone is not read but decoded.

        Parameters
        ----------
        tokens : sequence of int
        in_parts : bool, default False
            Whether the last page may be the beginning of one.
        """
        found: list[Page] = []
        names = self._names(tokens, (len(tokens) - 1) // self.page_tokens)
        for name in names:
            page = self._get(name)
            if page is None:
                break
            found.append(page)
        while self._num_plain is not None and found and len(found[-1]) <= self._num_plain:
            found.pop()
        del names[len(found) :]
        if in_parts:
            self._know_parts(names, tokens)
            begin = len(found) * self.page_tokens
            part = tokens[begin : min(len(tokens) - 2, begin + self.page_tokens - 1)]
            for name, num in reversed(self._part_names(names, part)):
                page = self._get(name, num)
                if page is not None:
                    found.append(page)
                    names.append(name)
                    break
        with self._lock:
            # The last page is the first to be forgotten.
            for name in map(self._longest, reversed(names)):
                if name in self._pages:
                    self._pages.move_to_end(name)
            self._hit_tokens += sum(map(num_positions, found))
            self._asked_tokens += len(tokens)
        return found

    def keep(self, tokens: Sequence[int], pages: Sequence[Page], *, in_parts: bool = False) -> None:
        """Keep the last pages of the first tokens of a prompt.

        Parameters
        ----------
        tokens : sequence of int
            From the beginning of the prompt to the end of the pages.
        pages : sequence of Page
            Each from the first position of a page on. They are kept as they are, and must not
            change. A cache that is closed keeps nothing.
        in_parts : bool, default False
            Whether the beginnings of a page are worth keeping; else those that are not whole are
            left out.
        """
        num, rest = divmod(len(tokens), self.page_tokens)
        names = self._names(tokens, num)
        if rest and len(pages) > 0:
            pages, last = pages[:-1], pages[-1]
        new = list(zip(names[len(names) - len(pages) :], pages, strict=True))
        parts: dict[bytes, list[bytes]] = {}
        if in_parts:
            for place in range(num - len(pages), num):
                parts[names[place]] = self._parts_of(names, place, tokens)
            if rest and (known := self._part_names(names, tokens[num * self.page_tokens :])):
                name, num_kept = known.pop()
                names.append(name)
                new.append((name, _copy(_beginning(last, num_kept))))
                parts[name] = [one for one, _ in known]
        # An interrupt would leave a page that is half known.
        with uninterrupted(), self._lock:
            if self._closed:
                return
            for name, page in new:
                self._put(name, page, parts.get(name, ()))
            for name in reversed(names):
                if name in self._pages:
                    self._pages.move_to_end(name)
            self._forget()
            writes = (
                []
                if self._writing is None
                else [
                    self._writing.submit(self._write, name, page, parts.get(name, ()))
                    for name, page in new
                ]
            )
            self._writes.update(writes)
        for write in writes:
            write.add_done_callback(self._writes.discard)

    def stats(self) -> PrefixStats:
        """Return the counters."""
        files = self._files
        with self._lock:
            return PrefixStats(
                num_pages=len(self._pages),
                nbytes=self._nbytes,
                disk_bytes=0 if files is None else files.nbytes,
                hit_tokens=self._hit_tokens,
                asked_tokens=self._asked_tokens,
                num_damaged=0 if files is None else files.num_damaged,
            )

    def close(self) -> None:
        """Forget all pages, once those on their way to files are written; may be called twice."""
        with self._lock:
            self._closed = True
        if self._writing is not None:
            self._writing.shutdown()
        with self._lock:
            self._pages.clear()
            self._longer.clear()
            self._parts.clear()
            self._nbytes = 0

    def _names(self, tokens: Sequence[int], num: int) -> list[bytes]:
        """Return the names of the first pages."""
        names, name = [], self._root
        for page in range(num):
            name = _digest(name, tokens[page * self.page_tokens : (page + 1) * self.page_tokens])
            names.append(name)
        return names

    def _part_names(self, names: list[bytes], tokens: Sequence[int]) -> list[tuple[bytes, int]]:
        """Return the names of beginnings of a page behind others, and the positions of each."""
        before, step = names[-1] if names else self._root, self.part_tokens
        nums = range(step, len(tokens) + 1, step)
        return [(_digest(before, tokens[:num]), num) for num in nums if num < self.page_tokens]

    def _parts_of(self, names: list[bytes], place: int, tokens: Sequence[int]) -> list[bytes]:
        """Return the names of the beginnings of a whole page."""
        begin = place * self.page_tokens
        part = tokens[begin : begin + self.page_tokens - 1]
        return [name for name, _ in self._part_names(names[:place], part)]

    def _know_parts(self, names: list[bytes], tokens: Sequence[int]) -> None:
        """Have whole pages that were read from files found by their beginnings."""
        with self._lock:
            places = [place for place, name in enumerate(names) if self._parts.get(name) == []]
        parts = {names[place]: self._parts_of(names, place, tokens) for place in places}
        with uninterrupted(), self._lock:
            for name, beginnings in parts.items():
                self._lead_to(name, beginnings)

    def _get(self, name: bytes, num: int | None = None) -> Page | None:
        """Return a page, or the beginning of one, of so many positions."""
        with self._lock:
            page = self._pages.get(self._longest(name))
        if page is None and self._files is not None:
            page = self._files.read(name.hex())
            if page is not None:
                if num is not None and num_positions(page) > num:
                    # Not a view: the whole of it would stay in memory.
                    page = _copy(_beginning(page, num))
                with uninterrupted(), self._lock:
                    self._put(name, page, ())
                    self._forget()
        return page if page is None or num is None else _beginning(page, num)

    def _put(self, name: bytes, page: Page, parts: Sequence[bytes]) -> None:
        """Take in a page, in the place of what is known of its beginning."""
        known = self._pages.get(name)
        if known is not None and _nbytes(known) < _nbytes(page):
            self._remove(name)  # it was without states
        if name not in self._pages and name not in self._longer:
            self._pages[name] = page
            self._nbytes += _nbytes(page)
            self._parts[name] = []
        self._lead_to(name, parts)

    def _lead_to(self, name: bytes, parts: Sequence[bytes]) -> None:
        """Have a page found by its beginnings, unless it has some, and remove these; locked."""
        if self._parts.get(name) != []:
            return
        self._parts[name] = [*parts]
        for part in parts:
            self._remove(part)
            self._longer.setdefault(part, []).append(name)

    def _longest(self, name: bytes) -> bytes:
        """Return the name of a page in memory that begins with this one, else its own; locked."""
        return self._longer.get(name, [name])[-1]

    def _remove(self, name: bytes) -> None:
        page = self._pages.pop(name, None)
        if page is None:
            return
        self._nbytes -= _nbytes(page)
        for part in self._parts.pop(name):
            others = self._longer.get(part, [])
            if name in others:
                others.remove(name)
                if not others:
                    del self._longer[part]

    def _forget(self) -> None:
        while self._nbytes > self.max_bytes and self._pages:
            self._remove(next(iter(self._pages)))

    def _write(self, name: bytes, page: Page, parts: Sequence[bytes]) -> None:
        assert self._files is not None
        with suppress(OSError):
            self._files.write(name.hex(), page, [part.hex() for part in parts])


def describe_files(store: object) -> list[list[object]]:
    """Return what tells the files of a model's store from those of another model.

    Times alone may be those of an archive, the same for two models of one shape.
    """
    files: list[list[object]] = []
    for file in getattr(store, "files", ()):
        # Of the file that is open, whatever is at its path by now.
        nbytes, descriptor = file.version.nbytes, file.descriptor
        content = hashlib.blake2b()
        for place in (0, nbytes // 2, max(0, nbytes - _SAMPLE_BYTES)):
            content.update(os.pread(descriptor, _SAMPLE_BYTES, place))
        name = Path(file.version.path).name
        files.append([name, nbytes, file.version.modified_ns, content.hexdigest()])
    return sorted(files, key=str)


def num_positions(page: Page) -> int:
    """Return how many positions a page has."""
    return page[0][0].shape[2] if page else 0


def _digest(name: bytes, tokens: Sequence[int]) -> bytes:
    digest = hashlib.blake2b(name, digest_size=_DIGEST_BYTES)
    digest.update(np.asarray(tokens).astype("<i8").tobytes())
    return digest.digest()


def _beginning(page: Page, num: int) -> Page:
    """Return the first positions of a page."""
    return tuple((keys[:, :, :num], values[:, :, :num]) for keys, values in page)


def _copy(page: Page) -> Page:
    return tuple((keys.copy(), values.copy()) for keys, values in page)


def _nbytes(page: Page) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in page)
