"""PageFiles: pages of keys and values as files, bounded and checked."""

import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from moecache.errors import StoreError
from moecache.files import whole_file

logger = logging.getLogger(__name__)

_SUFFIX = ".page"
_FIRST_LINE = b"moecache page 2\n"
_LINK_LINE = b"moecache link 1\n"
_DIGEST_BYTES = 32
# A link leads to the longest page, or, where processes wrote at a time, to another link; more than
# these are a circle.
_MOST_LINKS = 32
_NAME = re.compile(r"[0-9a-f]{1,128}")
# A page is written in seconds: a part of one that is older has lost its process.
_ABANDONED_S = 3600
# Layers, and dimensions of an array.
_MOST_LAYERS, _DIMENSIONS = 4096, 4
_TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint16),
    2: np.dtype(np.float32),
    3: np.dtype(np.float16),
}
_NUMBERS = {dtype: number for number, dtype in _TYPES.items()}


class PageFiles:
    """Reads and writes pages, a file each; those that were used longest ago go first.

    A page takes the place of one that is smaller: it has states besides.

    A file is a line, the BLAKE2b digest of its name and the rest, the number of layers, and for the
    keys and the values of each its type, its shape and its bytes, all numbers little-endian.
    Nothing is read past the size that a file has, and a file that is not what was written under
    its name is removed. Processes may share a directory, and its bound.

    A page that is the beginning of one that came later is a link: another line, a digest as above,
    and the name of the longer page.

    Parameters
    ----------
    directory : Path
    max_bytes : int

    Attributes
    ----------
    nbytes : int
        Of all files.
    num_damaged : int

    Raises
    ------
    StoreError
        If the directory cannot be used.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self.num_damaged = 0
        self._sizes: dict[str, int] = {}
        self.nbytes = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._look()
        except OSError as error:
            raise StoreError(
                f"{directory}: cannot keep pages of prompts: {error.strerror or error}"
            ) from error
        self._make_room(0)

    def read(self, name: str) -> tuple[tuple[np.ndarray, np.ndarray], ...] | None:
        """Return a page, or a longer one that begins with it; `None` if it is gone, or damaged."""
        return self._read(name, _MOST_LINKS)

    def _read(self, name: str, links: int) -> tuple[tuple[np.ndarray, np.ndarray], ...] | None:
        path = self._directory / (name + _SUFFIX)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        longer = _parse_link(data, name) if links else None
        if longer is not None:
            found = self._read(longer, links - 1)
            if found is None:
                with self._lock:
                    self._remove(path.name)
                return None
            with suppress(OSError):
                os.utime(path)
            return found
        page = _parse(data, name)
        if page is None:
            self.num_damaged += 1
            logger.warning("prefixes.damaged path=%s: it is removed", path)
            with self._lock:
                self._remove(path.name)
            return None
        with suppress(OSError):
            os.utime(path)
        return page

    def write(
        self,
        name: str,
        page: tuple[tuple[np.ndarray, np.ndarray], ...],
        parts: Sequence[str] = (),
    ) -> None:
        """Write a page, whole or not at all; a failure is logged, and the page is not kept.

        `parts` are names of its beginnings; those that are there become links to it.
        """
        path = self._directory / (name + _SUFFIX)
        if _num_bytes(path) >= _fewest_bytes(page):
            return
        body = [len(page).to_bytes(4, "little")]
        for array in (part for layer in page for part in layer):
            shape = np.array([_NUMBERS[array.dtype], *array.shape], "<i8")
            body += [shape.tobytes(), np.ascontiguousarray(array).tobytes()]
        digest = _digest(name, *body)
        size = len(_FIRST_LINE) + _DIGEST_BYTES + sum(map(len, body))
        with self._lock, suppress(OSError):
            # Others may have read, written and removed meanwhile.
            self._look()
            if size > self._max_bytes or _num_bytes(path) >= size:
                return
            self._remove(path.name)  # it has fewer layers: states are new
            self._make_room(size)
        try:
            with whole_file(path, None) as file:
                file.writelines([_FIRST_LINE, digest, *body])
        except StoreError as error:
            logger.warning("prefixes.not_written %s", error)
            return
        with self._lock:
            self._add(path.name, size)
            for shorter in parts:
                if shorter + _SUFFIX in self._sizes:
                    self._link(shorter, name)

    def _link(self, shorter: str, longer: str) -> None:
        name = shorter + _SUFFIX
        data = _LINK_LINE + _digest(shorter, longer.encode()) + longer.encode()
        try:
            with whole_file(self._directory / name, None) as file:
                file.write(data)
        except StoreError as error:
            # The page itself is there still.
            logger.warning("prefixes.not_written %s", error)
            return
        self.nbytes -= self._sizes.pop(name, 0)
        self._add(name, len(data))

    def _add(self, name: str, size: int) -> None:
        self._sizes[name] = size
        self.nbytes += size

    def _look(self) -> None:
        """Take in what is in the directory, oldest first; remove what a killed process left."""
        found = []
        for file in self._directory.iterdir():
            is_part = file.name.startswith(".") and f"{_SUFFIX}." in file.name
            if not is_part and file.suffix != _SUFFIX:
                continue
            # Another process may have removed it since.
            with suppress(OSError):
                known = file.stat()
                if not is_part:
                    found.append((known.st_mtime_ns, file.name, known.st_size))
                elif time.time() - known.st_mtime > _ABANDONED_S:
                    file.unlink()
        found.sort()
        self._sizes = {name: size for _, name, size in found}
        self.nbytes = sum(self._sizes.values())

    def _make_room(self, size: int) -> None:
        while self._sizes and self.nbytes + size > self._max_bytes:
            self._remove(next(iter(self._sizes)))

    def _remove(self, name: str) -> None:
        self.nbytes -= self._sizes.pop(name, 0)
        with suppress(OSError):
            (self._directory / name).unlink()


def _fewest_bytes(page: tuple[tuple[np.ndarray, np.ndarray], ...]) -> int:
    """Return what the arrays of a page take."""
    return sum(part.nbytes for layer in page for part in layer)


def _num_bytes(path: Path) -> float:
    """Return the bytes of a page's file; infinite if it leads to a longer page, 0 without one."""
    with suppress(OSError), path.open("rb") as file:
        is_link = file.read(len(_LINK_LINE)) == _LINK_LINE
        return float("inf") if is_link else os.fstat(file.fileno()).st_size
    return 0


def _digest(name: str, *parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _parse_link(data: bytes, name: str) -> str | None:
    """Return the name of the longer page that a link leads to; `None` if it is no link."""
    start = len(_LINK_LINE) + _DIGEST_BYTES
    longer = data[start:]
    if not data.startswith(_LINK_LINE) or data[len(_LINK_LINE) : start] != _digest(name, longer):
        return None
    text = longer.decode("ascii", "replace")
    return text if _NAME.fullmatch(text) else None


def _parse(data: bytes, name: str) -> tuple[tuple[np.ndarray, np.ndarray], ...] | None:
    """Return the page of a file's bytes; `None` if they are none."""
    start = len(_FIRST_LINE) + _DIGEST_BYTES
    if not data.startswith(_FIRST_LINE) or len(data) < start + 4:
        return None
    body = memoryview(data)[start:]
    num_layers = int.from_bytes(body[:4], "little")
    if _digest(name, body) != data[len(_FIRST_LINE) : start] or num_layers > _MOST_LAYERS:
        return None
    at, arrays = 4, []
    for _ in range(2 * num_layers):
        head = np.frombuffer(body[at : at + 8 * (1 + _DIMENSIONS)], "<i8").tolist()
        at += 8 * (1 + _DIMENSIONS)
        if len(head) != 1 + _DIMENSIONS or head[0] not in _TYPES or min(head[1:]) < 0:
            return None
        dtype, shape = _TYPES[head[0]], head[1:]
        size = dtype.itemsize
        for one in shape:
            size *= one
        if at + size > len(body):
            return None
        arrays.append(np.frombuffer(body[at : at + size], dtype).reshape(shape))
        at += size
    return tuple(zip(arrays[::2], arrays[1::2], strict=True)) if at == len(body) else None
