"""What the bytes of a weight matrix mean: formats, their parts, their values."""

from moecache.formats.base import (
    FORMATS,
    Format,
    find_format,
    format_of,
    quantize,
)
from moecache.formats.blocks import Q4_0, Q8_0
from moecache.formats.floats import BF16, F16, F32
from moecache.formats.form import TILE_ROWS, Form, tiled_rows
from moecache.formats.scaled import MXFP4, ScaledFormat, scaled_name

__all__ = [
    "BF16",
    "F16",
    "F32",
    "FORMATS",
    "MXFP4",
    "Q4_0",
    "Q8_0",
    "TILE_ROWS",
    "Form",
    "Format",
    "ScaledFormat",
    "find_format",
    "format_of",
    "quantize",
    "scaled_name",
    "tiled_rows",
]
