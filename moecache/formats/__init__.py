"""What the bytes of a weight matrix mean: formats, their parts, their values."""

from moecache.formats.base import FORMATS, Format, find_format, format_of, quantize
from moecache.formats.blocks import Q4_0, Q8_0
from moecache.formats.floats import BF16, F16, F32

__all__ = [
    "BF16",
    "F16",
    "F32",
    "FORMATS",
    "Q4_0",
    "Q8_0",
    "Format",
    "find_format",
    "format_of",
    "quantize",
]
