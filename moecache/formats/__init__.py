"""What the bytes of a weight matrix mean: formats, their parts, their values."""

from moecache.formats.base import (
    FORMATS,
    TILE_ROWS,
    Format,
    find_format,
    format_of,
    quantize,
    tiled_rows,
)
from moecache.formats.blocks import Q4_0, Q8_0
from moecache.formats.floats import BF16, F16, F32

__all__ = [
    "BF16",
    "F16",
    "F32",
    "FORMATS",
    "Q4_0",
    "Q8_0",
    "TILE_ROWS",
    "Format",
    "find_format",
    "format_of",
    "quantize",
    "tiled_rows",
]
