"""Matrices among the tensors of a quantized checkpoint: their parts, and checks of these."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moecache.errors import ConfigError, FormatError
from moecache.formats import TILE_ROWS, Format, GlobalFormat, find_format, scaled_name
from moecache.formats.form import BLOCK_COLUMNS
from moecache.layout import Role
from moecache.stores._header import shown

_LARGEST_BLOCK = 2**20
_SCALES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "uint8": "e8m0",
    "float8_e8m0fnu": "e8m0",
}
Read = Callable[[str], np.ndarray]
# The quantization by the configuration.
Said = Mapping[str, Any]


class UnsupportedQuantizationError(ConfigError):
    """A checkpoint is quantized in a way that nothing here reads; the store adds where."""


@dataclass(frozen=True)
class Stored:
    """A tensor, or tensors alike of several experts: name of one, dtype, shape without experts."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Matrix:
    """A matrix in a format: its shape, and the suffix of the tensor that has each part.

    `is_tiled` says that there is one part, the format's compute form.
    """

    format: Format
    rows: int
    columns: int
    suffixes: tuple[str, ...]
    is_tiled: bool = False

    def weight_name(self, codes: str) -> str:
        """Return the name that the weight has where it is not quantized."""
        suffix = self.suffixes[0]
        if codes.endswith(suffix):
            return codes.removesuffix(suffix)
        return codes.removesuffix(suffix.lstrip("_")) + "weight"


def sizes(said: object, key: str) -> tuple[int, int]:
    """Return rows and columns of a block, as the configuration has them."""
    # compressed-tensors has written blocks as "128x128", too.
    if isinstance(said, str) and said.count("x") == 1 and len(said) < 32:
        said = [int(size) if size.isdecimal() else size for size in said.split("x")]
    sizes = said if isinstance(said, list) else []
    if len(sizes) != 2 or not all(type(n) is int and 0 < n <= _LARGEST_BLOCK for n in sizes):
        raise FormatError(f"{key} in config.json is {shown(said)}, not [rows, columns]")
    return sizes[0], sizes[1]


def need(tensors: Mapping[str, Stored], suffix: str) -> Stored:
    """Return the tensor of a suffix; FormatError if it is not there."""
    if suffix not in tensors:
        some = next(iter(tensors.values()))
        raise FormatError(
            f"tensor {shown(some.name)} has no {suffix.lstrip('_') or 'weight'} beside it; "
            "download the checkpoint again"
        )
    return tensors[suffix]


def fp8_weight(tensors: Mapping[str, Stored], suffixes: Sequence[str]) -> tuple[Stored, str]:
    """Return the codes of FP8, and the suffix of their scales."""
    weight = need(tensors, "")
    if weight.dtype == np.int8:
        raise UnsupportedQuantizationError(
            f"tensor {shown(weight.name)} has integers of 8 bits, which are not supported beside "
            "activations of 8 bits"
        )
    if weight.dtype.name != "float8_e4m3fn" or len(weight.shape) != 2:
        raise FormatError(
            f"tensor {shown(weight.name)} is {weight.dtype} {list(weight.shape)}; FP8 is a matrix "
            "of F8_E4M3"
        )
    for suffix in suffixes:
        if suffix in tensors:
            return weight, suffix
    raise FormatError(
        f"tensor {shown(weight.name)} has no scale beside it; download the checkpoint again"
    )


def scale_name(scale: Stored) -> str:
    """Return what formats call the type of a scale."""
    if scale.dtype.name not in _SCALES:
        raise FormatError(f"tensor {shown(scale.name)} is {scale.dtype}, no type of a scale")
    return _SCALES[scale.dtype.name]


def check_parts(found: Matrix, tensors: Mapping[str, Stored]) -> None:
    """Raise FormatError unless each part has as many bytes, in such a shape, as the format says."""
    try:
        wanted = found.format.parts(found.rows, found.columns).values()
    except ConfigError as error:
        some = tensors[found.suffixes[0]]
        raise FormatError(f"tensor {shown(some.name)}: {error}") from error
    for suffix, (dtype, shape) in zip(found.suffixes, wanted, strict=True):
        tensor = tensors[suffix]
        # A stack of blocks has its bytes in dimensions of their own.
        is_alike = squeezed(tensor.shape) == squeezed(shape) or (
            len(tensor.shape) > 2 and math.prod(tensor.shape) == math.prod(shape)
        )
        is_byte = dtype == np.uint8 and tensor.dtype.name == "float8_e8m0fnu"
        if not is_alike or (tensor.dtype != dtype and not is_byte):
            raise FormatError(
                f"tensor {shown(tensor.name)} is {tensor.dtype} {list(tensor.shape)}; a "
                f"[{found.rows}, {found.columns}] matrix in {found.format.name} needs {dtype} "
                f"{list(shape)}"
            )


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without its sizes of 1."""
    return tuple(size for size in shape if size != 1)


def fp8_matrix(weight: Stored, scale: Stored, block: tuple[int, int], suffix: str) -> Matrix:
    """Return the matrix of codes of FP8 and scales of some blocks."""
    rows, columns = weight.shape
    known = find_format(scaled_name("fp8", block, scale_name(scale)))
    return Matrix(known, rows, columns, ("", suffix))


def in_format(roles: Sequence[Role], name: str) -> tuple[Role, ...]:
    """Return roles whose stacks of tiles, uint8 [tiles, groups, bytes], are those of a format.

    Raises
    ------
    FormatError
        If the format is not known, or a stack has other bytes than it would have.
    """
    return tuple(_in_format(role, name) if role.dtype == np.uint8 else role for role in roles)


def _in_format(role: Role, name: str) -> Role:
    if len(role.shape) != 3:
        raise FormatError(f"role {role.name!r}, uint8 {list(role.shape)}, is no stack of tiles")
    tiles, groups, nbytes = role.shape
    try:
        known = find_format(name)
        columns = groups * known.block[1]
        if known.form is not None and not known.form.group:  # one group, as wide as its bytes say
            scales = TILE_ROWS * known.form.scale_bytes
            columns = (nbytes - scales) // known.form.block_bytes * BLOCK_COLUMNS
        elif known.form is not None and groups == 1 and isinstance(known, GlobalFormat):
            factor, whole = (known.form.tile_bytes(size) for size in (0, BLOCK_COLUMNS))
            columns = (nbytes - factor) // (whole - factor) * BLOCK_COLUMNS
        found = Role(role.name, (tiles * TILE_ROWS, columns), format=name, is_tiled=True)
    except ConfigError as error:
        raise FormatError(f"role {role.name!r}: {error}") from error
    if found.nbytes != role.nbytes:
        raise FormatError(
            f"role {role.name!r}, {role.nbytes} bytes of shape {list(role.shape)}, is not {name}: "
            f"that takes {found.nbytes}"
        )
    return found
