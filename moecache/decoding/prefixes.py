"""PrefixCache: keys and values of prompts' pages, for prompts that begin alike."""

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moecache.decoding._page_files import PageFiles

logger = logging.getLogger(__name__)

# Keys and values of each layer, [1, heads, positions, width], as arrays of bytes have no dtype of
# torch's: bfloat16 is uint16 here.
Page = tuple[tuple[np.ndarray, np.ndarray], ...]


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

    Parameters
    ----------
    identity : bytes
        All that a page's bits depend on beside its tokens.
    page_tokens : int
    max_bytes : int
        Of memory.
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
        directory: Path | None = None,
        max_disk_bytes: int = 0,
    ) -> None:
        self.page_tokens = page_tokens
        self.max_bytes = max_bytes
        self._root = hashlib.blake2b(identity, digest_size=20).digest()
        self._files = None if directory is None else PageFiles(directory, max_disk_bytes)
        self._pages: OrderedDict[bytes, Page] = OrderedDict()
        self._nbytes = 0
        self._hit_tokens = self._asked_tokens = 0
        self._lock = threading.Lock()
        self._writing = None if self._files is None else ThreadPoolExecutor(1, "moecache-prefixes")
        self._writes: set[Future[None]] = set()
        self._closed = False

    def find(self, tokens: Sequence[int]) -> list[Page]:
        """Return the pages of the longest known beginning of a prompt.

        At least one token is left to be read: its logits are wanted.
        """
        found: list[Page] = []
        names = self._names(tokens, (len(tokens) - 1) // self.page_tokens)
        for name in names:
            page = self._get(name)
            if page is None:
                break
            found.append(page)
        with self._lock:
            # The last page is the first to be forgotten.
            for name in reversed(names[: len(found)]):
                if name in self._pages:
                    self._pages.move_to_end(name)
            self._hit_tokens += len(found) * self.page_tokens
            self._asked_tokens += len(tokens)
        return found

    def keep(self, tokens: Sequence[int], pages: Sequence[Page]) -> None:
        """Keep the last whole pages of the first tokens of a prompt.

        Parameters
        ----------
        tokens : sequence of int
            A multiple of `page_tokens`, from the beginning on.
        pages : sequence of Page
            Those of the last tokens. They are kept as they are, and must not change. A cache that
            is closed keeps nothing.
        """
        names = self._names(tokens, len(tokens) // self.page_tokens)
        new = list(zip(names[len(names) - len(pages) :], pages, strict=True))
        with self._lock:
            if self._closed:
                return
            for name, page in new:
                self._put(name, page)
            for name in reversed(names):
                if name in self._pages:
                    self._pages.move_to_end(name)
            self._forget()
            writes = (
                []
                if self._writing is None
                else [self._writing.submit(self._write, name, page) for name, page in new]
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
            self._nbytes = 0

    def _names(self, tokens: Sequence[int], num: int) -> list[bytes]:
        names, name = [], self._root
        for page in range(num):
            part = np.asarray(tokens[page * self.page_tokens : (page + 1) * self.page_tokens])
            digest = hashlib.blake2b(name, digest_size=20)
            digest.update(part.astype("<i8").tobytes())
            name = digest.digest()
            names.append(name)
        return names

    def _get(self, name: bytes) -> Page | None:
        with self._lock:
            page = self._pages.get(name)
        if page is not None or self._files is None:
            return page
        page = self._files.read(name.hex())
        if page is not None:
            with self._lock:
                self._put(name, page)
                self._forget()
        return page

    def _put(self, name: bytes, page: Page) -> None:
        if name not in self._pages:
            self._pages[name] = page
            self._nbytes += _nbytes(page)

    def _forget(self) -> None:
        while self._nbytes > self.max_bytes and self._pages:
            _, page = self._pages.popitem(last=False)
            self._nbytes -= _nbytes(page)

    def _write(self, name: bytes, page: Page) -> None:
        assert self._files is not None
        with suppress(OSError):
            self._files.write(name.hex(), page)


def _nbytes(page: Page) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in page)
