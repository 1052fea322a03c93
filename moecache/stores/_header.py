"""Read the header of a safetensors file without trusting it.

The form: 8 bytes little-endian header length, a JSON object of that length
(name -> dtype, shape, data_offsets relative to the end of the header), data.
"""

import functools
import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from moecache.errors import FormatError
from moecache.stores._file import ReadOnlyFile

# The limit of the safetensors library itself.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 32
# The key in a packed file's metadata that names the format of its experts.
FORMAT_KEY = "moecache.format"
# Models have less than 200.
MAX_LAYERS = 4096
# The layer in a name of experts' tensors. Each byte is looked at once, in any text.
_LAYER = re.compile(rb'"([^"]{1,512}?)\.(?:experts|block_sparse_moe|moe)\.')


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of one tensor in a file.

    `dtype` is None for types smaller than a byte; `offset` counts from the
    start of the file.
    """

    dtype_name: str
    dtype: np.dtype | None
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Tensors(dict[str, TensorEntry]):
    """The tensors of a file by their names, and what it says beside them.

    Attributes
    ----------
    metadata : dict of str to str
    """

    def __init__(self, entries: Mapping[str, TensorEntry], metadata: object) -> None:
        super().__init__(entries)
        said = metadata if isinstance(metadata, dict) else {}
        self.metadata = {key: text for key, text in said.items() if isinstance(text, str)}


def read_header(path: Path, file: ReadOnlyFile | None = None) -> Tensors:
    """Return the tensors of a safetensors file.

    The file's own size bounds memory and time, not the header's claims.

    Parameters
    ----------
    path : Path
    file : ReadOnlyFile, optional
        The file, if it is open already.

    Raises
    ------
    FormatError
        If the file is damaged; the message names file, tensor and figures.
    StoreError
        If it cannot be read.
    """
    file = file or ReadOnlyFile(path)
    file_bytes = file.nbytes
    if file_bytes < 8:
        _fail(path, f"has {file_bytes} bytes, too short for a safetensors file")
    prefix = bytearray(8)
    file.read(0, [memoryview(prefix)], "the header's length")
    (header_bytes,) = struct.unpack("<Q", prefix)
    if header_bytes > file_bytes - 8:
        _fail(
            path,
            f"the header claims {header_bytes} bytes, the file has {file_bytes}; download it again",
        )
    if header_bytes > MAX_HEADER_BYTES:
        _fail(path, f"the header has {header_bytes} bytes, over {MAX_HEADER_BYTES}")
    text = bytearray(header_bytes)
    if header_bytes:
        file.read(8, [memoryview(text)], "the header")
    check_layers(path, text)
    entries = _parse(path, text)
    data_start = 8 + header_bytes
    tensors = {
        name: _entry(path, name, value, data_start, file_bytes)
        for name, value in entries.items()
        if name != "__metadata__"
    }
    check_overlap(path, tensors)
    return Tensors(tensors, entries.get("__metadata__"))


def check_layers(path: Path, text: bytearray) -> None:
    """Raise FormatError if JSON names experts of too many layers, before objects are made of it."""
    layers: set[bytes] = set()
    for match in _LAYER.finditer(text):
        layers.add(match[1])
        if len(layers) > MAX_LAYERS:
            _fail(path, f"has experts of more than {MAX_LAYERS} layers; no model has so many")


def check_overlap(path: Path, tensors: Mapping[str, TensorEntry]) -> None:
    """Raise FormatError if two tensors share a byte."""
    ordered = sorted((entry.offset, entry.nbytes, name) for name, entry in tensors.items())
    previous_end, previous_name = 0, ""
    for offset, nbytes, name in ordered:
        if nbytes == 0:
            continue
        if offset < previous_end:
            _fail(
                path,
                f"tensor {shown(name)} begins at byte {offset}, before tensor "
                f"{shown(previous_name)} ends at {previous_end}",
            )
        previous_end, previous_name = offset + nbytes, name


@functools.cache
def _dtypes() -> dict[str, tuple[int, np.dtype | None]]:
    """Return bits per element and NumPy's type, where it has one, per dtype name."""
    # Imported here: `import moecache` needs NumPy alone.
    import ml_dtypes

    return {
        "BOOL": (8, np.dtype(np.bool_)),
        "U8": (8, np.dtype(np.uint8)),
        "I8": (8, np.dtype(np.int8)),
        "U16": (16, np.dtype(np.uint16)),
        "I16": (16, np.dtype(np.int16)),
        "U32": (32, np.dtype(np.uint32)),
        "I32": (32, np.dtype(np.int32)),
        "U64": (64, np.dtype(np.uint64)),
        "I64": (64, np.dtype(np.int64)),
        "F16": (16, np.dtype(np.float16)),
        "F32": (32, np.dtype(np.float32)),
        "F64": (64, np.dtype(np.float64)),
        "C64": (64, np.dtype(np.complex64)),
        "BF16": (16, np.dtype(ml_dtypes.bfloat16)),
        "F8_E4M3": (8, np.dtype(ml_dtypes.float8_e4m3fn)),
        "F8_E5M2": (8, np.dtype(ml_dtypes.float8_e5m2)),
        "F8_E4M3FNUZ": (8, np.dtype(ml_dtypes.float8_e4m3fnuz)),
        "F8_E5M2FNUZ": (8, np.dtype(ml_dtypes.float8_e5m2fnuz)),
        "F8_E8M0": (8, np.dtype(ml_dtypes.float8_e8m0fnu)),
        "F6_E2M3": (6, None),
        "F6_E3M2": (6, None),
        "F4": (4, None),
    }


def _parse(path: Path, text: bytearray) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    _fail(path, f"the header names {shown(name)} twice")
                seen.add(name)
        return entries

    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: the header is not JSON: {str(error)[:200]}") from error
    if not isinstance(entries, dict):
        _fail(path, f"the header is a JSON {type(entries).__name__}, not an object")
    return entries


def _entry(path: Path, name: str, value: Any, data_start: int, file_bytes: int) -> TensorEntry:
    label = f"tensor {shown(name)}"
    if not isinstance(value, dict):
        _fail(path, f"{label} is described by a JSON {type(value).__name__}, not an object")
    dtype_name, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype_name, str) or dtype_name not in _dtypes():
        _fail(path, f"{label} has unknown dtype {shown(dtype_name)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_size, shape)):
        _fail(path, f"{label} has an impossible shape {shown(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        _fail(path, f"{label} has impossible data_offsets {shown(offsets)}")
    bits, dtype = _dtypes()[dtype_name]
    begin, end = offsets
    if begin > end:
        _fail(path, f"{label} ends at byte {shown(end)}, before it begins at {shown(begin)}")
    if data_start + end > file_bytes:
        _fail(
            path,
            f"{label} ends at byte {shown(data_start + end)}, file has {file_bytes}; "
            "download it again",
        )
    # NumPy multiplies the dimensions that are not 0 too, and must not overflow.
    if math.prod(size or 1 for size in shape) * bits >= 2**66:
        _fail(path, f"{label} has an impossible shape {shown(shape)}")
    expected, rest = divmod(math.prod(shape) * bits, 8)
    if rest or expected != end - begin:
        _fail(
            path,
            f"{label} of shape {shown(shape)} and dtype {dtype_name} needs "
            f"{shown(expected)} bytes, has {end - begin}",
        )
    return TensorEntry(dtype_name, dtype, tuple(shape), data_start + begin, end - begin)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def shown(value: Any, depth: int = 0) -> str:
    """Return a value of a header, shortened for a message."""
    # Integers of a hostile header can be too long to be converted to text.
    if type(value) is int and value.bit_length() > 128:
        return f"about 2^{value.bit_length()}"
    if isinstance(value, list | dict) and depth == 2:
        return "..."
    if isinstance(value, list):
        items = ", ".join(shown(item, depth + 1) for item in value[:8])
        return f"[{items}{', ...' if len(value) > 8 else ''}]"
    text = type(value).__name__ if isinstance(value, dict) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _fail(path: Path, problem: str) -> NoReturn:
    raise FormatError(f"{path}: {problem}")
