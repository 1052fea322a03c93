"""Arrays out of .npz and .npy files that are not trusted."""

import errno
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from moecache.errors import FormatError, StoreError
from moecache.files import whole_file
from moecache.units import format_bytes

if TYPE_CHECKING:
    import zipfile

# An honest trace shrinks to a third or so; a file of zeros would to a thousandth.
MAX_RATIO = 200
ALWAYS_ALLOWED_BYTES = 64 * 2**20
MAX_BYTES = 16 * 2**30
_MAX_HEADER = 10_000
_CHUNK_BYTES = 1 << 20


def allowed_bytes(file_bytes: int) -> int:
    """Return how many bytes of arrays a file of this size may ask for."""
    return min(MAX_BYTES, max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * file_bytes))


def read_arrays(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return those of the named arrays that an .npz file has.

    Every header is read, and compared with the sizes the file states, before
    anything is allocated for its array. No pickle is ever loaded.

    Raises
    ------
    FormatError
        If the file is no zip file, is damaged, or asks for too much memory.
    StoreError
        If it cannot be read.
    """
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            return _read_members(path, archive, set(names))
    except FormatError:
        raise
    except OSError as error:
        # A damaged directory sends the reader to places before the file's beginning.
        kind = FormatError if error.errno == errno.EINVAL else StoreError
        raise kind(f"{path}: cannot be read: {error.strerror or error}") from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        EOFError,
        RuntimeError,  # encrypted, or an unknown compression
        ValueError,
        KeyError,
        OverflowError,
    ) as error:
        raise FormatError(
            f"{path}: is no .npz file, or a damaged one: {error or type(error).__name__}"
        ) from error


def read_npy(file: IO[bytes], name: str, size: int, allowed: int) -> np.ndarray:
    """Return the array of an .npy file of `size` bytes.

    Parameters
    ----------
    file : binary file
        At its beginning.
    name : str
        What messages call it.
    size : int
        Bytes of the file, header included.
    allowed : int
        Bytes the array may take.

    Raises
    ------
    FormatError
        If it is damaged, a pickle, or larger than allowed.
    """
    try:
        version = np.lib.format.read_magic(file)
        reader = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if reader is None:
            raise FormatError(f"{name}: is of .npy version {version}, known are 1.0 and 2.0")
        shape, fortran, dtype = reader(file, max_header_size=_MAX_HEADER)
    except FormatError:
        raise
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise FormatError(f"{name}: has no .npy header: {error}") from error
    if dtype.hasobject or dtype.kind not in "biufcSU":
        raise FormatError(f"{name}: is of dtype {dtype}; pickles and records are not loaded")
    count = 1
    for length in shape:
        if length < 0:
            raise FormatError(f"{name}: has the shape {shape}")
        count *= int(length)
    nbytes = count * dtype.itemsize
    if nbytes > allowed:
        raise FormatError(
            f"{name}: says it has {format_bytes(nbytes)}, "
            f"more than the {format_bytes(allowed)} that a file of this size may have"
        )
    left = size - file.tell()
    if nbytes > left:
        raise FormatError(f"{name}: needs {nbytes} bytes by its header, the file has {left}")
    data = bytearray()
    while len(data) < nbytes:
        chunk = file.read(min(_CHUNK_BYTES, nbytes - len(data)))
        if not chunk:
            raise FormatError(f"{name}: ends after {len(data)} of {nbytes} bytes")
        data += chunk
    if file.read(1):
        raise FormatError(f"{name}: goes on after the {nbytes} bytes of its array")
    array = np.frombuffer(data, dtype, count) if dtype.itemsize else np.empty(count, dtype)
    array = array.reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, Any]) -> None:
    """Write a compressed .npz file, whole or not at all.

    Raises
    ------
    StoreError
        If it cannot be written. What was there before is still there.
    """
    with whole_file(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _read_members(path: Path, archive: "zipfile.ZipFile", names: set[str]) -> dict[str, np.ndarray]:
    allowed = allowed_bytes(path.stat().st_size)
    arrays: dict[str, np.ndarray] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name not in names or name == member.filename:
            continue
        if name in arrays:
            raise FormatError(f"{path}: has {name!r} twice")
        with archive.open(member) as file:
            array = read_npy(file, f"{path}: {name}", member.file_size, allowed)
        allowed -= array.nbytes
        arrays[name] = array
    return arrays
