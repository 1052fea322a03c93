"""Bytes from the source into a packed file, a few MiB at a time, and their checksums."""

import errno
import hashlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np

from moecache.errors import ConfigError, FormatError, StoreError
from moecache.packing._journal import Finished
from moecache.packing._plan import ZEROS, Extent, Unit
from moecache.packing._recipe import Recipe
from moecache.packing._report import Deviation
from moecache.packing._source import Origin, OtherFile
from moecache.stores._file import ReadOnlyFile
from moecache.stores._header import shown

CHUNK_BYTES = 2**22
# One is hashed while another is written and the next is read.
_NUM_CHUNKS = 3
_DIGEST_BYTES = 16

Copied = Callable[[int], None]


class PackedFile:
    """A file of the packed directory, open for writing; closes as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._chunks = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(_NUM_CHUNKS)]
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _not_written(path, 0, error) from error

    def __enter__(self) -> Self:
        """Return the file."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it, and free the chunks."""
        os.close(self._descriptor)
        self._chunks = []

    def write(self, unit: Unit, source: Origin, copied: Copied) -> Finished:
        """Write a unit and return what is to be noted.

        Blocks until the bytes are on disk, and drops them from the page cache,
        where they would push out pages that are in use.

        Parameters
        ----------
        unit : Unit
        source : Origin
            The source of its extents.
        copied : callable (nbytes)
            Called after each chunk.

        Raises
        ------
        StoreError
            If something cannot be read or written; the message has file and offset.
        ConfigError, FormatError
            If values cannot be converted; the message has the tensor.
        """
        digest, offset = hashlib.blake2b(digest_size=_DIGEST_BYTES), unit.offset
        deviations: list[Deviation] = []
        hashing: deque[Future[None]] = deque()
        with ThreadPoolExecutor(1, "moecache-pack") as hasher:
            for chunk in self._read(unit, source, deviations):
                hashing.append(hasher.submit(digest.update, chunk))
                self._write_at(offset, chunk)
                offset += len(chunk)
                copied(len(chunk))
                # The chunk that is filled next must have been hashed before.
                while len(hashing) >= _NUM_CHUNKS - 1:
                    hashing.popleft().result()
        for hashed in hashing:
            hashed.result()
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise _not_written(self.path, unit.offset, error) from error
        os.posix_fadvise(self._descriptor, unit.offset, unit.nbytes, os.POSIX_FADV_DONTNEED)
        deviation = Deviation.of_all(deviations) if deviations else None
        return Finished(digest.hexdigest(), deviation)

    def _read(
        self, unit: Unit, source: Origin, deviations: list[Deviation]
    ) -> Iterator[memoryview]:
        """Yield the unit's bytes in chunks, whose memory is reused; append the deviations."""
        if unit.header:
            for start in range(0, len(unit.header), CHUNK_BYTES):
                yield memoryview(unit.header)[start : start + CHUNK_BYTES]
        buffers = itertools.cycle(self._chunks)
        buffer, filled = next(buffers), 0
        for extent in unit.extents:
            done, made = 0, None
            if extent.recipe is not None:
                array, deviation = _make(extent.recipe, source, unit.name)
                made = array.data[extent.source_offset :]
                deviations += [] if deviation is None else [deviation]
            while done < extent.nbytes:
                part = buffer[filled : filled + extent.nbytes - done]
                if made is None:
                    _fill(part, extent, done, source, unit.name)
                else:
                    part[:] = made[done : done + len(part)]
                filled, done = filled + len(part), done + len(part)
                if filled == CHUNK_BYTES:
                    yield buffer
                    buffer, filled = next(buffers), 0
        if filled:
            yield buffer[:filled]

    def _write_at(self, offset: int, chunk: memoryview) -> None:
        while chunk:
            try:
                count = os.pwrite(self._descriptor, chunk, offset)
            except OSError as error:
                raise _not_written(self.path, offset, error) from error
            offset, chunk = offset + count, chunk[count:]


def hash_range(path: Path, offset: int, nbytes: int, hashed: Copied) -> str:
    """Return the checksum of a range of a file as it is on the disk.

    Raises
    ------
    StoreError
        If it cannot be read, or ends too early.
    """
    digest, buffer = hashlib.blake2b(digest_size=_DIGEST_BYTES), memoryview(bytearray(CHUNK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            # Pages in memory say nothing about the disk.
            os.posix_fadvise(file.fileno(), offset, nbytes, os.POSIX_FADV_DONTNEED)
            file.seek(offset)
            while nbytes:
                count = file.readinto(buffer[:nbytes])
                if not count:
                    raise StoreError(
                        f"{path}: ends at byte {offset}, {nbytes} bytes too early; "
                        "pack the model again"
                    )
                digest.update(buffer[:count])
                offset, nbytes = offset + count, nbytes - count
                hashed(count)
    except OSError as error:
        raise StoreError(f"{path}: reading at byte {offset} failed: {error.strerror}") from error
    return digest.hexdigest()


def copy_file(other: OtherFile, target: Path, copied: Copied) -> tuple[int, str]:
    """Copy a file, or write its new text, flush it to disk, and return its size and checksum.

    Raises
    ------
    StoreError
        If it cannot be read or written, or its length has changed.
    """
    if other.text is not None:
        copied(other.nbytes)
        return write_file(target, iter([other.text]))
    file = ReadOnlyFile(other.path)

    def chunks() -> Iterator[bytearray]:
        for offset in range(0, other.nbytes, CHUNK_BYTES):
            chunk = bytearray(min(CHUNK_BYTES, other.nbytes - offset))
            file.read(offset, [memoryview(chunk)], "a copy of it")
            yield chunk
            copied(len(chunk))
        # Files of /proc have a size of 0 and no end.
        if file.has_byte(other.nbytes):
            raise StoreError(
                f"{other.path}: has more than the {other.nbytes} bytes that it had; pack the model "
                "again when nothing writes to it"
            )

    return write_file(target, chunks())


def write_file(path: Path, chunks: Iterator[bytes | bytearray]) -> tuple[int, str]:
    """Write a whole file, flush it to disk, and return its size and checksum.

    Raises
    ------
    StoreError
        If it cannot be written.
    """
    digest, nbytes = hashlib.blake2b(digest_size=_DIGEST_BYTES), 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for chunk in chunks:
                digest.update(chunk)
                nbytes += file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _not_written(path, nbytes, error) from error
    return nbytes, digest.hexdigest()


def _fill(part: memoryview, extent: Extent, done: int, source: Origin, unit: str) -> None:
    if extent.file == ZEROS:
        part[:] = bytes(len(part))
    else:
        source.read(extent.file, extent.source_offset + done, part, unit)


def _make(recipe: Recipe, source: Origin, unit: str) -> tuple[np.ndarray, Deviation | None]:
    """Return the bytes of a recipe's tensor, and how far it is from the original."""
    raw, start = np.empty(sum(nbytes for _, _, nbytes in recipe.places), np.uint8), 0
    for file, offset, nbytes in recipe.places:
        source.read(file, offset, raw[start : start + nbytes].data, unit)
        start += nbytes
    try:
        return recipe.make(raw)
    except (ConfigError, FormatError) as error:
        raise type(error)(f"{unit}: tensor {shown(recipe.source)}: {error}") from error


def _not_written(path: Path, offset: int, error: OSError) -> StoreError:
    remedy = {
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "free some of your quota",
        errno.EFBIG: "choose a file system, or a limit (ulimit -f), that allows such files",
    }.get(error.errno or 0, "see to that")
    return StoreError(
        f"{path}: writing at byte {offset} failed: {error.strerror}; {remedy} and pack again: "
        "what is finished stays"
    )
