"""Read the header of a GGUF file without trusting it.

The form: "GGUF", version, the numbers of tensors and of metadata entries; the metadata (key,
type, value); the tensors (name, sizes from the fastest on, type, offset); from the next multiple of
the alignment on, their data. Numbers are little-endian, strings have their length before them.
"""

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from moecache.errors import FormatError
from moecache.stores._file import ReadOnlyFile
from moecache.stores._header import TensorEntry, check_overlap, shown
from moecache.stores.gguf._types import GgmlType, ggml_types

# Vocabularies of 256k take 12 MB.
MAX_HEADER_BYTES = 100_000_000
# A model that has each expert's matrices for themselves has 70,000; all take about 1 kB of memory.
MAX_TENSORS = 2**18
MAX_KEYS = 2**16
MAX_DIMENSIONS = 4
# Bytes read at once: a small header should not bring much of a file into memory.
_LEAST_BYTES, _MOST_BYTES = 2**16, 2**20
DEFAULT_ALIGNMENT = 32
_MAGIC, _COUNTS = struct.Struct("<4sI"), struct.Struct("<QQ")
_LENGTH, _NUMBER, _LIST = (struct.Struct(form) for form in ("<Q", "<I", "<IQ"))
# The fields of a tensor by its number of dimensions: its sizes, its type, its place.
_FIELDS = [struct.Struct(f"<{rank}QIQ") for rank in range(MAX_DIMENSIONS + 1)]
_BOOL, _STRING, _ARRAY = 7, 8, 9
# The other types of values, by their numbers.
_NUMBERS = {
    number: np.dtype(f"<{code}")
    for code, number in {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6}.items()
} | {_BOOL: np.dtype("u1"), 10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8")}


@dataclass(frozen=True, slots=True)
class GgufEntry(TensorEntry):
    """A tensor; its shape is that of the values, with rows before columns, as NumPy has it.

    `is_tiled` says that its bytes are the compute form of its matrix.
    """

    type: GgmlType
    is_tiled: bool = False


@dataclass(frozen=True)
class Header:
    """The header before a file's data."""

    metadata: "Metadata"
    tensors: dict[str, GgufEntry]


@dataclass(frozen=True, slots=True)
class Place:
    """The places of a value of the metadata: its type, its number of elements, and these."""

    kind: int
    is_list: bool
    count: int
    start: int
    at: int
    end: int


class Metadata(Mapping[str, Any]):
    """A file's metadata: numbers, strings, lists of these.

    A list is made when it is first asked for, and kept.

    Parameters
    ----------
    path : Path
        For messages.
    data : bytes-like
        The header.
    places : mapping of str to Place
    """

    def __init__(self, path: object, data: bytearray, places: Mapping[str, Place]) -> None:
        self._path, self._data, self._places = path, data, places
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        """Return a value; FormatError if it is a list with a string that is not UTF-8."""
        if key not in self._values:
            place = self._places[key]
            values = self._decode(key, place)
            self._values[key] = values if place.is_list else values[0]
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the keys, in the file's order."""
        return iter(self._places)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._places)

    def text(self, key: str) -> str:
        """Return a string; "" if there is none."""
        value = "" if key not in self or self._places[key].is_list else self[key]
        return value if isinstance(value, str) else ""

    def number(self, key: str) -> int:
        """Return an integer, of a list (one for each layer) the largest; 0 if there is none."""
        value = self.get(key)
        values = value if isinstance(value, list) else [value]
        return max((one for one in values if type(one) is int), default=0)

    def encoded(self, key: str) -> bytes:
        """Return a value as the file has it, with its type before it."""
        place = self._places[key]
        return bytes(self._data[place.start : place.end])

    def _decode(self, key: str, place: Place) -> list[Any]:
        at, kind = place.at, place.kind
        if kind != _STRING:
            values = np.frombuffer(self._data, _NUMBERS[kind], place.count, at)
            return (values.astype(bool) if kind == _BOOL else values).tolist()
        texts = []
        for _ in range(place.count):
            (length,) = _LENGTH.unpack_from(self._data, at)
            texts.append(self._data[at + 8 : at + 8 + length])
            at += 8 + length
        try:
            return [text.decode() for text in texts]
        except UnicodeDecodeError as error:
            raise FormatError(f"{self._path}: {shown(key)} is not UTF-8: {error.reason}") from error


def read_header(file: ReadOnlyFile) -> Header:
    """Return what a GGUF file has.

    Reads no byte of the tensors' data beyond twice the header, or 64 KiB. Memory and time are
    bounded by the file's own size, not by the header's claims.

    Raises
    ------
    FormatError
        If the file is damaged; the message names file, tensor and figures.
    StoreError
        If it cannot be read.
    """
    # Only the header: the kernel should not read the experts ahead.
    os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        return _read(_Reader(file), file)
    finally:
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_NORMAL)


class _Reader:
    """Takes values from the beginning of a file, one after the other; reads as far as they go."""

    def __init__(self, file: ReadOnlyFile) -> None:
        self._file = file
        self._file_bytes = file.nbytes
        self.data = bytearray()
        self.at = 0

    def take(self, form: struct.Struct, what: str, name: str = "") -> tuple[Any, ...]:
        """Return some numbers."""
        self.have(form.size, what, name)
        values = form.unpack_from(self.data, self.at)
        self.at += form.size
        return values

    def text(self, what: str) -> str:
        """Return a string."""
        (length,) = self.take(_LENGTH, what)
        self.have(length, what)
        text = self.data[self.at : self.at + length]
        self.at += length
        try:
            return text.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8: {shown(bytes(text))}")

    def skip(self, nbytes: int, what: str) -> None:
        """Pass over bytes."""
        self.have(nbytes, what)
        self.at += nbytes

    def skip_texts(self, count: int, what: str) -> None:
        """Pass over strings, and look only at the length of each."""
        data, at, length, left = self.data, self.at, _LENGTH.unpack_from, count
        while left:
            try:
                for left in range(left, 0, -1):  # noqa: B007, B020 - what is left if it fails
                    at += 8 + length(data, at)[0]
                left = 0
            except (struct.error, OverflowError):
                # The bytes read so far end within a length, or before it.
                self.at = at
                self.have(8, what)
        self.at = at
        self.have(0, what)

    def have(self, nbytes: int, what: str, name: str = "") -> None:
        """Read on until `nbytes` bytes follow; `what` and `name` are for the error.

        Raises
        ------
        FormatError
            If the file has fewer.
        """
        end = self.at + nbytes
        if end <= len(self.data):
            return
        what = f"{what} {shown(name)}" if name else what
        if end > self._file_bytes:
            self.fail(f"{what} ends at byte {end}, file has {self._file_bytes}; download it again")
        if end > MAX_HEADER_BYTES:
            self.fail(f"{what} ends at byte {end}: the header has over {MAX_HEADER_BYTES}")
        while len(self.data) < end:
            size = min(max(_LEAST_BYTES, len(self.data)), _MOST_BYTES)
            chunk = bytearray(min(size, self._file_bytes - len(self.data)))
            self._file.read(len(self.data), [memoryview(chunk)], "the header")
            self.data += chunk

    def fail(self, problem: str) -> NoReturn:
        """Raise FormatError."""
        raise FormatError(f"{self._file.path}: {problem}")


def _read(head: _Reader, file: ReadOnlyFile) -> Header:
    magic, version = head.take(_MAGIC, "its version")
    if magic != b"GGUF":
        head.fail(f"begins with {magic!r}, not with b'GGUF': it is no GGUF file")
    if version not in (2, 3):
        if version >> 24 and not version & 0xFFFFFF:
            head.fail("is big-endian, which is not supported; convert the model again")
        head.fail(f"is of version {version}; supported are 2 and 3, so convert the model again")
    num_tensors, num_keys = head.take(_COUNTS, "its counts")
    # An entry takes at least `least` bytes.
    for count, most, least, what in (
        (num_tensors, MAX_TENSORS, 24, "tensors"),
        (num_keys, MAX_KEYS, 13, "metadata entries"),
    ):
        if count * least > file.nbytes:
            head.fail(f"claims {count} {what}, more than its {file.nbytes} bytes can hold")
        if count > most:
            head.fail(f"has {count} {what}, over {most}; no model has so many")
    places: dict[str, Place] = {}
    for _ in range(num_keys):
        key = head.text("a metadata key")
        if key in places:
            head.fail(f"the metadata has {shown(key)} twice")
        places[key] = _skip_value(head, key)
    metadata = Metadata(file.path, head.data, places)
    raw = {}
    for _ in range(num_tensors):
        name = head.text("a tensor's name")
        if name in raw:
            head.fail(f"the header names {shown(name)} twice")
        (rank,) = head.take(_NUMBER, "tensor", name)
        if rank > MAX_DIMENSIONS:
            head.fail(f"tensor {shown(name)} has {rank} dimensions, over {MAX_DIMENSIONS}")
        raw[name] = head.take(_FIELDS[rank], "tensor", name)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        head.fail(f"general.alignment is {shown(alignment)}, no power of two")
    start, size = -(-head.at // alignment) * alignment, file.nbytes
    tensors = {
        name: _entry(head, name, fields, start, alignment, size) for name, fields in raw.items()
    }
    check_overlap(file.path, tensors)
    return Header(metadata, tensors)


def _skip_value(head: _Reader, key: str) -> Place:
    """Pass over a value; return where it is."""
    what, start, count = f"metadata {shown(key)}", head.at, 1
    (kind,) = head.take(_NUMBER, what)
    is_list = kind == _ARRAY
    if is_list:
        kind, count = head.take(_LIST, what)
    if kind not in _NUMBERS and kind != _STRING:
        problem = "is a list of lists" if kind == _ARRAY else f"is of unknown type {kind}"
        head.fail(f"{what} {problem}")
    at = head.at
    if kind == _STRING:
        # Before the first is looked at: as many lengths have to be there at least.
        head.have(8 * count, what)
        head.skip_texts(count, what)
    else:
        head.skip(_NUMBERS[kind].itemsize * count, what)
    return Place(kind, is_list, count, start, at, head.at)


def _entry(
    head: _Reader, name: str, fields: tuple[int, ...], start: int, alignment: int, file_bytes: int
) -> GgufEntry:
    *reverse, number, place = fields
    known = ggml_types().get(number)
    if known is None:
        names = ", ".join(kind.name for kind in ggml_types().values())
        head.fail(f"tensor {shown(name)}: type {number} is not supported; supported are {names}")
    shape = tuple(reverse[::-1])
    columns = shape[-1] if shape else 1
    if 0 in shape or columns % known.columns:
        head.fail(
            f"tensor {shown(name)} has an impossible shape {shown(list(shape))} for {known.name}, "
            f"which stores whole blocks of {known.columns}"
        )
    if place % alignment:
        head.fail(
            f"tensor {shown(name)} begins at byte {place} of the data, no multiple of {alignment}"
        )
    offset, nbytes = start + place, math.prod(shape) // known.columns * known.nbytes
    if offset + nbytes > file_bytes:
        head.fail(
            f"tensor {shown(name)} ends at byte {shown(offset + nbytes)}, file has {file_bytes}; "
            "download it again"
        )
    return GgufEntry(known.name, known.dtype, shape, offset, nbytes, known)
