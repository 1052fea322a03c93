"""Matrices for the kernels, made of NumPy arrays; their products."""

from collections.abc import Mapping

import numpy as np

from moecache.errors import ConfigError
from moecache.formats import Format, GroupedFormat, ScaledFormat, find_format, format_of
from moecache.formats.floats import FloatFormat
from moecache.kernels._matrix import Matrix
from moecache.kernels.forms import joined, tile

# Vectors are loaded from any address, but fastest where no cache line is crossed.
_ALIGNMENT = 64
_TYPES = {"float32": "f32", "bfloat16": "bf16"}


def matrix_of(weights: np.ndarray | Mapping[str, np.ndarray], name: str | None = None) -> Matrix:
    """Return a matrix as the kernels read it.

    Parameters
    ----------
    weights : ndarray [rows, columns], or mapping of str to ndarray
        Floating-point numbers, used where they are, or the parts of a format, such as
        `formats.quantize` returns; codes are brought into their compute form.
    name : str, optional
        The format; by default that of the array's dtype.

    Raises
    ------
    ConfigError
        If these are not the parts of a matrix in a format that has a kernel.
    """
    parts = weights if isinstance(weights, Mapping) else {"values": weights}
    if name is None:
        if "values" not in parts:
            raise ConfigError("parts of a matrix need the name of their format")
        name = format_of(parts["values"].dtype).name
    known = find_format(name)
    if known.form is None and not isinstance(known, FloatFormat):
        raise ConfigError(f"format {name!r} has no compute form, which kernels need")
    rows, columns = _shape(parts, known)
    wanted = known.parts(rows, columns)
    found = {part: (given.dtype, given.shape) for part, given in parts.items()}
    if found != wanted:
        raise ConfigError(f"a {rows} x {columns} matrix in {name} is {wanted}, got {found}")
    array = next(iter(parts.values()))
    if known.form is not None:
        array = _aligned(known.form.nbytes(rows, columns))
        tile(joined(parts[part] for part in wanted), name, rows, columns, array)
    return Matrix(array.ctypes.data, name, rows, columns, None, array)


def _shape(parts: Mapping[str, np.ndarray], known: Format) -> tuple[int, int]:
    """Return rows and columns, as far as some parts can tell."""
    array = parts.get("values", parts.get("blocks", parts.get("codes")))
    is_contiguous = all(part.flags.c_contiguous for part in parts.values())
    if array is None or array.ndim != (3 if "blocks" in parts else 2) or not is_contiguous:
        raise ConfigError(f"{known.name} needs a C-contiguous array of rows for each part")
    rows, columns = array.shape[:2]
    if isinstance(known, GroupedFormat):
        each = 32 // known.bits
        return (columns * each, rows) if known.method == "awq" else (columns, rows * each)
    if isinstance(known, ScaledFormat):
        columns = columns * array.itemsize * 8 // known.bits
    return rows, columns * (known.block[1] if array.ndim == 3 else 1)


def products(
    inputs: np.ndarray,
    matrix: Matrix | np.ndarray,
    *,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """Return inputs @ matrix.T + bias, as a linear layer does.

    Weights are exact, sums are float32, and a row's bits are the same whatever the other rows,
    and with any number of threads. Where weights are integers, inputs are rounded to 15 bits and a
    scale for each 32 columns; a row that has an infinity or a NaN gives NaN then.

    Parameters
    ----------
    inputs : ndarray of float32 or bfloat16, shape [num, columns]
    matrix : Matrix, or ndarray of float32, float16 or bfloat16, shape [rows, columns]
        See `matrix_of`.
    bias : ndarray of float32 or bfloat16, shape [rows], optional

    Returns
    -------
    ndarray, shape [num, rows], of the inputs' dtype

    Raises
    ------
    ConfigError
        If shapes or dtypes do not fit.
    """
    if not isinstance(matrix, Matrix):
        matrix = matrix_of(np.ascontiguousarray(matrix))
    kind = type_of(inputs)
    if inputs.ndim != 2 or inputs.shape[1] != matrix.columns:
        raise ConfigError(
            f"inputs of shape {list(inputs.shape)} are not [num, {matrix.columns}], the columns "
            "of the matrix"
        )
    if bias is not None and bias.shape != (matrix.rows,):
        raise ConfigError(f"a bias of shape {list(bias.shape)} is not [{matrix.rows}], the rows")
    inputs = np.ascontiguousarray(inputs)
    out = np.empty((len(inputs), matrix.rows), inputs.dtype)
    terms = None if bias is None else np.ascontiguousarray(bias)
    matrix.multiply(
        inputs.ctypes.data,
        kind,
        len(inputs),
        inputs.strides[0],
        out.ctypes.data,
        kind,
        out.strides[0],
        *((0, "f32") if terms is None else (terms.ctypes.data, type_of(terms))),
    )
    return out


def type_of(array: np.ndarray) -> str:
    """Return what the kernels call an array's dtype.

    Raises
    ------
    ConfigError
        If they do not take it.
    """
    kind = _TYPES.get(array.dtype.name) if array.dtype.isnative else None
    if kind is None:
        raise ConfigError(f"kernels take float32 and bfloat16, not {array.dtype}")
    return kind


def _aligned(nbytes: int) -> np.ndarray:
    raw = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes]
