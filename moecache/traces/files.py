"""Read arrays from .npz and .npy files without trusting them, and write .npz files."""

import ast
import errno
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from moecache.errors import FormatError, StoreError
from moecache.files import Kind, whole_file
from moecache.units import format_bytes

# An honest trace shrinks to a third or so; a file of zeros would shrink to a thousandth.
MAX_RATIO = 200
ALWAYS_ALLOWED_BYTES = 64 * 2**20
MAX_BYTES = 16 * 2**30
# Bytes per token that a trace keeps, or needs while it is made, beside the ids.
ROW_BYTES = 16
# Errors that a damaged zip file causes, besides OSError.
ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    RuntimeError,  # encrypted, or of a kind that is not implemented
    ValueError,
    KeyError,
    IndexError,
    OverflowError,
)
_MAX_HEADER = 10_000
_CHUNK_BYTES = 1 << 20
_MAGIC = b"\x93NUMPY"
# Numbers and text; neither pickles nor records.
_DTYPE = re.compile(r"[<>|=]?[biufcSU][0-9]{1,9}")


def allowed_bytes(file_bytes: int) -> int:
    """Return how many bytes of arrays a file of this size may ask for."""
    return min(MAX_BYTES, max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * file_bytes))


def read_arrays(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return those of the named arrays that an .npz file has, as `read_npy` does.

    Raises
    ------
    FormatError
        If the file is no zip file, is damaged, or asks for too much memory.
    StoreError
        If it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read_members(path, archive, set(names))
    except FormatError:
        raise
    except OSError as error:
        # A damaged directory sends the reader to places before the file's beginning.
        kind = FormatError if error.errno == errno.EINVAL else StoreError
        raise kind(f"{path}: cannot be read: {error.strerror or error}") from error
    except ZIP_ERRORS as error:
        raise FormatError(
            f"{path}: is no .npz file, or a damaged one: {error or type(error).__name__}"
        ) from error


def read_npy(file: IO[bytes], name: str, size: int, allowed: int) -> np.ndarray:
    """Return the array of an .npy file of `size` bytes, in C order.

    Integers come as int16 if all of their dtype fit there, else as int32, and are made
    so piece by piece. The header is compared with `size` and `allowed` before anything
    is allocated. No pickle is ever loaded.

    Parameters
    ----------
    file : binary file
        At its beginning.
    name : str
        Its name in messages.
    size : int
        Bytes of the file, header included.
    allowed : int
        Bytes that the array may take, with what a trace adds to each row of three dimensions.

    Raises
    ------
    FormatError
        If it is damaged, a pickle, larger than allowed, or has an integer beyond 32 bits.
    """
    shape, fortran, stored = _read_header(file, name)
    kept = stored.newbyteorder("=")
    if stored.kind in "iu":
        kept = np.dtype(np.int16 if np.can_cast(stored, np.int16) else np.int32)
    # Lengths of arrays without elements count, too: NumPy multiplies them.
    most = math.prod(max(1, length) for length in shape) * max(1, kept.itemsize)
    most += ROW_BYTES * shape[0] if len(shape) == 3 else 0
    if most > allowed:
        raise FormatError(
            f"{name}: says it has the shape {_short(shape)}, which takes {format_bytes(most)}, "
            f"more than the {format_bytes(allowed)} that a file of this size may have"
        )
    nbytes = math.prod(shape) * stored.itemsize
    left = size - file.tell()
    if nbytes > left:
        raise FormatError(f"{name}: needs {nbytes} bytes by its header, the file has {left}")
    array = np.empty(shape, kept)
    places = array.T.flat if fortran else array.reshape(-1)
    piece_size = max(1, _CHUNK_BYTES // max(1, stored.itemsize)) * stored.itemsize
    for start in range(0, nbytes, max(1, piece_size)):
        data = file.read(min(piece_size, nbytes - start))
        if len(data) < min(piece_size, nbytes - start):
            raise FormatError(f"{name}: ends after {start + len(data)} of {nbytes} bytes")
        piece = np.frombuffer(data, stored)
        if kept == np.int32:
            check_32_bits(name, piece)
        first = start // stored.itemsize
        places[first : first + len(piece)] = piece
    if file.read(1):
        raise FormatError(f"{name}: goes on after the {nbytes} bytes of its array")
    return array


def check_32_bits(name: str, array: np.ndarray) -> None:
    """Raise a FormatError if there is an integer that does not fit into 32 bits."""
    if array.size and (array.max() > 2**31 - 1 or array.min() < -(2**31)):
        bad = array.max() if array.max() > 2**31 - 1 else array.min()
        raise FormatError(f"{name}: has {bad}, which is no expert: it needs more than 32 bits")


def write_arrays(
    path: str | os.PathLike[str], arrays: Mapping[str, Any], kind: Kind, *, force: bool
) -> None:
    """Write a compressed .npz file, whole or not at all.

    Raises
    ------
    ConfigError
        If it would replace a file of another kind.
    StoreError
        If it cannot be written. The file that was there is kept.
    """
    with whole_file(path, kind, force=force) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _read_members(path: Path, archive: zipfile.ZipFile, names: set[str]) -> dict[str, np.ndarray]:
    allowed = allowed_bytes(path.stat().st_size)
    arrays: dict[str, np.ndarray] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name not in names or name == member.filename:
            continue
        if name in arrays:
            raise FormatError(f"{path}: has {name!r} twice")
        # Other methods fail in ways of their own, or take a dictionary of any size.
        if member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise FormatError(
                f"{path}: {name} is compressed by method {member.compress_type}, not deflate; "
                "save it with numpy.savez_compressed"
            )
        with archive.open(member) as file:
            array = read_npy(file, f"{path}: {name}", member.file_size, allowed)
        allowed -= array.nbytes
        arrays[name] = array
    return arrays


def _read_header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, whether in Fortran's order, and dtype; execute nothing of the header."""
    magic = file.read(8)
    if not magic.startswith(_MAGIC) or len(magic) < 8:
        raise FormatError(f"{name}: is no .npy file")
    layout = {b"\1\0": "<H", b"\2\0": "<I"}.get(magic[6:])
    if layout is None:
        raise FormatError(f"{name}: is of .npy version {magic[6]}.{magic[7]}, known are 1.0, 2.0")
    lengths = file.read(struct.calcsize(layout)).ljust(struct.calcsize(layout), b"\xff")
    (length,) = struct.unpack(layout, lengths)
    text = file.read(length) if length <= _MAX_HEADER else b""
    damaged = f"{name}: its header is damaged"
    if len(text) < length:
        raise FormatError(f"{damaged}: it says it has {length} bytes")
    try:
        header = ast.literal_eval(text.decode("latin-1").strip())
        shape, fortran, descr = header["shape"], header["fortran_order"], header["descr"]
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise FormatError(
            f"{damaged}: it is no dictionary of descr, fortran_order and shape"
        ) from (error)
    if (
        not isinstance(shape, tuple)
        or len(shape) > 32
        or not all(type(length) is int and 0 <= length < 2**63 for length in shape)
    ):
        raise FormatError(f"{name}: has the shape {_short(shape)}")
    if not isinstance(descr, str) or not _DTYPE.fullmatch(descr) or type(fortran) is not bool:
        raise FormatError(
            f"{name}: is of dtype {_short(descr)}; pickles and records are not loaded"
        )
    try:
        return shape, fortran, np.dtype(descr)
    except (TypeError, ValueError) as error:
        raise FormatError(f"{name}: is of dtype {descr}, which there is not") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
