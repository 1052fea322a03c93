"""The meaning of a weight matrix' bytes: formats, their parts, their values."""

import moecache.formats.code_books
import moecache.formats.super_blocks  # noqa: F401 - both name what they have
from moecache.formats.base import (
    FORMATS,
    Format,
    find_format,
    format_of,
    quantize,
)
from moecache.formats.blocks import Q4_0, Q8_0, BlockFormat
from moecache.formats.floats import BF16, F16, F32
from moecache.formats.form import TILE_ROWS, Form
from moecache.formats.grouped import GroupedFormat, grouped_name
from moecache.formats.scaled import (
    MXFP4,
    NVFP4,
    NVFP4_MODELOPT,
    GlobalFormat,
    ScaledFormat,
    scaled_name,
)
from moecache.formats.stacked import StackedFormat, stacked_name

__all__ = [
    "BF16",
    "F16",
    "F32",
    "FORMATS",
    "MXFP4",
    "NVFP4",
    "NVFP4_MODELOPT",
    "Q4_0",
    "Q8_0",
    "TILE_ROWS",
    "BlockFormat",
    "Form",
    "Format",
    "GlobalFormat",
    "GroupedFormat",
    "ScaledFormat",
    "StackedFormat",
    "find_format",
    "format_of",
    "grouped_name",
    "quantize",
    "scaled_name",
    "stacked_name",
]
