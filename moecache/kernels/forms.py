"""Compute forms: codes in the order that vectors want, 16 rows interleaved; and back."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from moecache.errors import ConfigError
from moecache.formats import (
    TILE_ROWS,
    BlockFormat,
    Form,
    Format,
    GlobalFormat,
    GroupedFormat,
    ScaledFormat,
    StackedFormat,
    find_format,
)
from moecache.formats.code_books import CodeBook
from moecache.formats.form import BLOCK_COLUMNS
from moecache.formats.scaled import largest_scale, pack, unpack
from moecache.kernels._matrix import Matrix
from moecache.kernels._tiler import Tiler
from moecache.layout import ExpertLayout, Role

# What files have; other scales become float32.
_SCALES = ("f32", "f16", "bf16", "e8m0")
# By what a form has; of scales in two steps, the dtype of the first.
_SCALE_DTYPES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f16*i8": "float16",
    **dict.fromkeys(("e4m3*", "e4m3/"), "float8_e4m3fn"),
}
# Order in a file, and a byte of codes that mean zero.
_ORDERS = {
    "e4m3": ("bytes", 0),
    "e2m1": ("nibbles", 0),
    "int4": ("nibbles", 0x88),
    "int8": ("offset bytes", 0x80),
}
# ggml's blocks of a scale and codes: order, a byte of codes that mean zero, where codes begin.
_PLAIN_BLOCKS = {
    "q8_0": ("bytes", 0, 2),
    "q4_0": ("halves", 0x88, 2),
    "iq4_nl": ("halves", 0, 2),
    "mxfp4_gguf": ("halves fp4", 0, 1),
}
_OUTPUTS = {"float32": "f32", "bfloat16": "bf16"}


def has_form(name: str) -> bool:
    """Return whether there is such a format, and it has a compute form."""
    try:
        return find_format(name).has_form
    except ConfigError:
        return False


def default_compute(layout: ExpertLayout) -> str:
    """Return what multiplies if nobody says: kernels if all formats have a compute form."""
    formats = {role.format for roles in layout.layers for role in roles} - {""}
    return "fast" if formats and all(map(has_form, formats)) else "torch"


@functools.cache
def tiler(name: str, rows: int, columns: int) -> "Tiler | Repacker | StackedTiler":
    """Return what makes the compute form of matrices of one format and one shape.

    Raises
    ------
    ConfigError
        If the format has no compute form, or no matrix of this shape.
    """
    return _making(name, rows, columns)


@functools.cache
def transposer(dtype: np.dtype[Any], rows: int, columns: int) -> Tiler:
    """Return what makes matrices [rows, columns] of those that are stored as [columns, rows].

    Parameters
    ----------
    dtype : numpy.dtype
        Of 2 or 4 bytes.
    rows, columns : int
    """
    size = dtype.itemsize
    if size not in (2, 4):
        raise ConfigError(f"numbers of {dtype} are not transposed here")
    nbytes = rows * columns * size
    return Tiler(
        rows=rows,
        columns=columns,
        group=BLOCK_COLUMNS,
        raw_bytes=nbytes,
        form_bytes=nbytes,
        order="columns",
        row_bytes=rows * size,
        block_bytes=size,
        scale="f32",
        scale_row_bytes=0,
        largest=0,
    )


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
        C-contiguous; as many bytes as `Format.form_bytes` says. What fills up the last rows and
        columns is zero.
    """
    made, known = _making(name, rows, columns), find_format(name)
    wanted = known.nbytes(rows, columns), known.form_bytes(rows, columns)
    if (raw.nbytes, out.nbytes) != wanted:
        raise ValueError(
            f"a {rows} x {columns} matrix in {name} takes {wanted[0]} bytes, tiled {wanted[1]}; "
            f"got {raw.nbytes} and {out.nbytes}"
        )
    if np.may_share_memory(raw, out):
        raise ValueError("a matrix cannot be tiled into the memory that it is in")
    made.tile(raw, out)


def _making(name: str, rows: int, columns: int) -> "Tiler | Repacker | StackedTiler":
    known = find_format(name)
    if isinstance(known, StackedFormat) and known.has_form:
        return StackedTiler(known, rows, columns)
    return _tiler(*_known(name, rows, columns), rows, columns)


class Repacker:
    """Makes compute forms as `Tiler` does, by way of a format whose order it reads.

    Parameters
    ----------
    known : Format
    plain : Format
        It has the same form.
    rows, columns : int
    repack : callable (parts) -> sequence of ndarray
        What `plain` has of the parts of `known`.

    Attributes
    ----------
    raw_bytes, form_bytes : int
    """

    def __init__(
        self, known: Format, plain: Format, rows: int, columns: int, repack: Callable[[Any], Any]
    ) -> None:
        self._known, self._shape, self._repack = known, (rows, columns), repack
        assert plain.form is not None
        self._tiler = _tiler(plain, plain.form, rows, columns)
        self.raw_bytes = known.nbytes(rows, columns)
        self.form_bytes: int = plain.form.nbytes(rows, columns)

    def tile(self, raw: np.ndarray, out: np.ndarray) -> bool:
        """Write the forms of matrices that lie one after the other; True: scales may be wrong."""
        if not (raw.flags.c_contiguous and out.flags.carray):
            raise ValueError("a matrix must be contiguous, and what it is tiled into writable, too")
        if self.form_bytes == 0:
            return False
        matrices = raw.reshape(-1).view(np.uint8).reshape(-1, self.raw_bytes)
        for one, form in zip(matrices, out.reshape(-1, self.form_bytes), strict=True):
            parts = self._repack(self._known.split(one, *self._shape))
            self._tiler.tile(joined(parts), form)
        return True


class StackedTiler:
    """Makes the compute forms of matrices in formats of their own, as `Tiler` does of one.

    Parameters
    ----------
    known : StackedFormat
    rows, columns : int
        Of all.

    Attributes
    ----------
    raw_bytes, form_bytes : int
    pieces : tuple of (Tiler or Repacker or None, int, int, int)
        What makes each matrix's form, or None: it is copied; its first byte in a file, and in the
        form, and the bytes it has there.
    """

    def __init__(self, known: StackedFormat, rows: int, columns: int) -> None:
        shape, pieces = (rows // len(known.formats), columns), []
        sizes = known.sizes(rows, columns), known.sizes(rows, columns, is_form=True)
        self.raw_bytes = self.form_bytes = 0
        for one, stored, held in zip(known.formats, *sizes, strict=True):
            making = None if one.form is None else _tiler(one, one.form, *shape)
            pieces.append((making, self.raw_bytes, self.form_bytes, held))
            self.raw_bytes += stored
            self.form_bytes += held
        self.pieces = tuple(pieces)

    def tile(self, raw: np.ndarray, out: np.ndarray) -> bool:
        """Write the forms; see `Tiler.tile`."""
        if (raw.nbytes, out.nbytes) != (self.raw_bytes, self.form_bytes):
            raise ValueError(
                f"matrices of {self.raw_bytes} bytes are tiled into {self.form_bytes}; got "
                f"{raw.nbytes} and {out.nbytes}"
            )
        wrong, given = False, raw.reshape(-1).view(np.uint8)
        ends = [start for _, start, _, _ in self.pieces[1:]] + [self.raw_bytes]
        for (making, start, at, nbytes), end in zip(self.pieces, ends, strict=True):
            form = out[at : at + nbytes]
            if making is None:
                form[...] = given[start:end]
            else:
                wrong |= making.tile(given[start:end], form)
        return wrong


@functools.cache
def _tiler(known: Format, form: Form, rows: int, columns: int) -> Tiler | Repacker:
    parts, starts = known.parts(rows, columns), {}
    nbytes = 0
    for name, (dtype, shape) in parts.items():
        starts[name] = nbytes
        nbytes += dtype.itemsize * math.prod(shape)
    args: dict[str, Any] = {
        "rows": rows,
        "columns": columns,
        "group": form.group or -(-columns // BLOCK_COLUMNS) * BLOCK_COLUMNS,
        "raw_bytes": nbytes,
        "form_bytes": form.nbytes(rows, columns),
        "largest": largest_scale(_SCALE_DTYPES[form.scale], known.most),
    }
    if isinstance(known, ScaledFormat):
        if plain := _plain_scaled(known):
            repack = functools.partial(_repack_scaled, known, plain, columns)
            return Repacker(known, plain, rows, columns, repack)
        order, zero = _ORDERS[known.element]
        (codes, (_, width)), (scales, (_, num_scales)) = parts["codes"], parts["scales"]
        return Tiler(
            **args,
            order=order,
            row_bytes=width * codes.itemsize,
            block_bytes=form.block_bytes // TILE_ROWS,
            zero=zero,
            scale=form.scale if isinstance(known, GlobalFormat) else known.scale,
            scale_rows=known.block[0] or max(rows, 1),
            scale_row_bytes=num_scales * scales.itemsize,
            scale_step=scales.itemsize,
            num_scales=num_scales,
            scales_at=starts["scales"],
            factor_at=starts.get("global_scale", 0),
        )
    if isinstance(known, GroupedFormat):
        points = (128 if form.codes == "i8" else 8) - known.zeros(np.arange(1 << known.bits))
        scales, _ = parts["scales"]
        return Tiler(
            **args,
            order="awq" if known.method == "awq" else f"gptq{known.bits}",
            row_bytes=4 * parts["codes"][1][1],
            scale=known.scale,
            scale_row_bytes=rows * scales.itemsize,
            scales_at=starts["scales"],
            zeros_at=starts["zeros"],
            zero_row_bytes=4 * parts["zeros"][1][1],
            zero_points=points.astype(scales).view(f"u{scales.itemsize}").astype("u4").tobytes(),
        )
    assert isinstance(known, BlockFormat)
    if isinstance(known, CodeBook):
        book = known
        return Repacker(
            known, known.plain, rows, columns, lambda parts: (book.repack(parts["blocks"]),)
        )
    _, (_, blocks, block_bytes) = parts["blocks"]
    args |= {"row_bytes": blocks * block_bytes, "block_bytes": block_bytes, "scale": form.scale}
    if known.name not in _PLAIN_BLOCKS:
        return Tiler(**args, order=known.name, scale_row_bytes=0)
    order, zero, codes_at = _PLAIN_BLOCKS[known.name]
    return Tiler(
        **args | ({"scale": "e8m0"} if codes_at == 1 else {}),
        order=order,
        zero=zero,
        scale_row_bytes=blocks * block_bytes,
        scale_step=block_bytes,
        num_scales=blocks,
        codes_at=codes_at,
    )


def _plain_scaled(known: ScaledFormat) -> ScaledFormat | None:
    """Return the format by way of which matrices are tiled; None: no other is needed."""
    scale = known.scale if known.scale in _SCALES or isinstance(known, GlobalFormat) else "f32"
    element = known.element
    if element not in _ORDERS:
        # Words that codes straddle, or more than two codes in a byte.
        element = "int4" if known.bits < 4 else "int8"
    if (element, scale) == (known.element, known.scale):
        return None
    return ScaledFormat(f"{known.name} as {element}, {scale}", known.block, element, scale)


def _repack_scaled(
    known: ScaledFormat, plain: ScaledFormat, columns: int, parts: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, ...]:
    codes, scales = parts["codes"], parts["scales"]
    if known.bits != plain.bits:
        more = (1 << (plain.bits - 1)) - (1 << (known.bits - 1))
        codes = pack(unpack(codes, known.bits, columns) + np.uint8(more), plain.bits)
    return codes, scales if known.scale == plain.scale else known.scales(parts)


def joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Return the bytes of a matrix, its parts one after the other."""
    return np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])


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
        array = array.T if stored and role.is_transposed else array
        return array if dtype is None else array.astype(dtype, copy=False)
    wanted = np.dtype(np.float32 if dtype is None else dtype)
    shape, known = role.matrix_shape, find_format(role.format)
    pieces = array.reshape(role.matrices, -1)
    if isinstance(known, StackedFormat):
        is_form = known.has_form and (role.is_tiled or not stored)
        return np.concatenate(
            [
                _values(*one, wanted, is_form=is_form)
                for raw in pieces
                for one in known.matrices(raw, *shape, is_form=is_form)
            ]
        )
    if known.form is None:
        return np.concatenate(
            [known.dequantize(known.split(raw, *shape), wanted) for raw in pieces]
        )
    out = np.empty(role.shape, wanted if wanted.name in _OUTPUTS else np.float32)
    form = np.empty(known.form.nbytes(*shape), np.uint8) if stored and not role.is_tiled else None
    for raw, values in zip(pieces, out.reshape(role.matrices, *shape), strict=True):
        if form is not None:
            tile(raw, role.format, *shape, form)
        expand(raw if form is None else form, role.format, *shape, values)
    return out.astype(wanted, copy=False)


def _values(
    known: Format, raw: np.ndarray, shape: tuple[int, int], dtype: Any, *, is_form: bool
) -> np.ndarray:
    """Return the values of a matrix as in a file, or in its compute form."""
    if known.form is None:
        return known.dequantize(known.split(raw, *shape), dtype)
    return values_in(raw, Role("", shape, format=known.name), stored=not is_form, dtype=dtype)


def _known(name: str, rows: int, columns: int) -> tuple[Format, Form]:
    known = find_format(name)
    if isinstance(known, StackedFormat) and known.has_form:
        raise ConfigError(f"format {name!r} is of several matrices; expand each by itself")
    if known.form is None:
        raise ConfigError(f"format {name!r} has no compute form")
    if rows < 0 or columns < 0:
        raise ConfigError(f"a matrix cannot have {rows} x {columns} elements")
    return known, known.form
