"""Compute forms: codes in the order that vectors want, 16 rows interleaved; and back."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from moecache.errors import ConfigError
from moecache.formats import TILE_ROWS, Form, Format, ScaledFormat, find_format
from moecache.formats.form import BLOCK_COLUMNS
from moecache.formats.scaled import unpack
from moecache.kernels._kernels import Matrix, to_form
from moecache.layout import Role

# What files have; other scales become float32.
_SCALES = ("f32", "f16", "bf16", "e8m0")
_INT8 = tuple(Form(codes, "f16", BLOCK_COLUMNS) for codes in ("i8", "i4"))
_OUTPUTS = {"float32": "f32", "bfloat16": "bf16"}


def has_form(name: str) -> bool:
    """Return whether there is such a format, and it has a compute form."""
    try:
        return find_format(name).form is not None
    except ConfigError:
        return False


def takes_int8(name: str) -> bool:
    """Return whether a format's form is that of ggml's blocks, which multiply inputs of 8 bits."""
    return has_form(name) and find_format(name).form in _INT8


def tile(raw: np.ndarray, name: str, rows: int, columns: int, out: np.ndarray) -> None:
    """Write the compute form of a matrix.

    Parameters
    ----------
    raw : ndarray
        C-contiguous; the bytes of a matrix as in a file, its parts one after the other.
    name : str
        A format that has a compute form.
    rows, columns : int
    out : ndarray of uint8
        C-contiguous; as many bytes as `Form.nbytes` says. What fills up the last rows and columns
        is zero.
    """
    known, form = _known(name, rows, columns)
    wanted = known.nbytes(rows, columns), form.nbytes(rows, columns)
    if (raw.nbytes, out.nbytes) != wanted:
        raise ValueError(
            f"a {rows} x {columns} matrix in {name} takes {wanted[0]} bytes, tiled {wanted[1]}; "
            f"got {raw.nbytes} and {out.nbytes}"
        )
    if not (raw.flags.c_contiguous and out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("a matrix must be contiguous, and what it is tiled into writable, too")
    if out.size:
        flat = raw.reshape(-1).view(np.uint8)
        tile_parts(known.split(flat, rows, columns), known, rows, columns, out)


def tile_parts(
    parts: Mapping[str, np.ndarray], known: Format, rows: int, columns: int, out: np.ndarray
) -> None:
    """Write the compute form of a matrix that has elements, and whose parts fit."""
    form = known.form
    assert form is not None
    if isinstance(known, ScaledFormat):
        codes, order, zero = _codes(parts["codes"], known, columns)
        scales, scale = parts["scales"], known.scale
        if scale not in _SCALES:
            scales, scale = known.scales(parts), "f32"
        steps = scales.strides[0], scales.itemsize
        width, num_scales = codes.strides[0], scales.shape[1]
        block_bytes = form.block_bytes // TILE_ROWS
        scale_rows = known.block[0] or rows
    else:
        # ggml's blocks: the scale of each lies before its codes.
        scales = parts["blocks"]
        codes, scale, order = scales[..., 2:], "f16", "bytes" if form.codes == "i8" else "halves"
        zero, scale_rows, num_scales = 0 if form.codes == "i8" else 0x88, 1, scales.shape[1]
        width, block_bytes = steps = scales.strides[0], scales.shape[2]
    to_form(
        *(codes.ctypes.data, scales.ctypes.data, order, scale, rows, columns),
        form.group or -(-columns // BLOCK_COLUMNS) * BLOCK_COLUMNS,
        *(width, block_bytes, scale_rows, *steps, num_scales, zero, out.ctypes.data),
    )


def expand(form: np.ndarray, name: str, rows: int, columns: int, out: np.ndarray) -> None:
    """Write the values of a matrix in its compute form, to the bit those of `Format.dequantize`.

    Parameters
    ----------
    form : ndarray of uint8
        C-contiguous; as `tile` writes it.
    name : str
    rows, columns : int
    out : ndarray of float32 or bfloat16, shape [rows, columns]
        Written in place; a row's elements lie side by side.
    """
    _, known = _known(name, rows, columns)
    wanted = known.nbytes(rows, columns)
    if form.nbytes != wanted or not form.flags.c_contiguous:
        raise ValueError(
            f"a {rows} x {columns} matrix in {name} takes {wanted} contiguous bytes in its compute "
            f"form; got {form.nbytes}"
        )
    kind = _OUTPUTS.get(out.dtype.name) if out.dtype.isnative else None
    if kind is None or out.shape != (rows, columns) or not out.flags.writeable:
        raise ValueError(
            f"values are written to float32 or bfloat16 [{rows}, {columns}], not to {out.dtype} "
            f"{list(out.shape)}{'' if out.flags.writeable else ', read-only'}"
        )
    if not out.size:
        return
    if out.strides[1] != out.itemsize or out.strides[0] < columns * out.itemsize:
        raise ValueError(f"rows of values must be contiguous; strides are {out.strides}")
    matrix = Matrix(form.ctypes.data, name, rows, columns)
    matrix.expand(out.ctypes.data, kind, out.strides[0])


def values_in(
    array: np.ndarray, role: Role, *, stored: bool = False, dtype: npt.DTypeLike | None = None
) -> np.ndarray:
    """Return a role's array from a slot of the host; of a format, the values.

    Parameters
    ----------
    array : ndarray
    role : Role
    stored : bool, default False
        The array is as in the file, not as in a slot.
    dtype : numpy dtype, optional
        By default float32 of a format, else the array's own.
    """
    if not role.format:
        return array if dtype is None else array.astype(dtype, copy=False)
    wanted = np.dtype(np.float32 if dtype is None else dtype)
    shape, known = role.matrix_shape, find_format(role.format)
    pieces = array.reshape(role.matrices, -1)
    if known.form is None or (stored and not role.is_tiled):
        return np.concatenate(
            [known.dequantize(known.split(raw, *shape), wanted) for raw in pieces]
        )
    out = np.empty(role.shape, wanted if wanted.name in _OUTPUTS else np.float32)
    for raw, values in zip(pieces, out.reshape(role.matrices, *shape), strict=True):
        expand(raw, role.format, *shape, values)
    return out.astype(wanted, copy=False)


def _known(name: str, rows: int, columns: int) -> tuple[Format, Form]:
    known = find_format(name)
    if known.form is None:
        raise ConfigError(f"format {name!r} has no compute form")
    if rows < 0 or columns < 0:
        raise ConfigError(f"a matrix cannot have {rows} x {columns} elements")
    return known, known.form


def _codes(stored: np.ndarray, known: ScaledFormat, columns: int) -> tuple[np.ndarray, str, int]:
    """Return codes as rows of bytes, their order, and a byte of codes that mean zero."""
    if known.element == "e4m3":
        return stored, "bytes", 0
    if known.element == "e2m1":
        return stored, "nibbles", 0
    if known.bits == 4:
        return stored, "nibbles", 0x88
    if known.bits == 8:
        return stored, "offset bytes", 0x80
    # Words that codes straddle, or more than two codes in a byte.
    half = 1 << (known.bits - 1)
    signed = unpack(stored, known.bits, columns) - np.uint8(half)
    if known.bits > 4:
        return signed, "bytes", 0
    nibbles = np.full((len(signed), columns + columns % 2), 8, np.uint8)
    nibbles[:, :columns] = signed + np.uint8(8)
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4, "nibbles", 0x88
