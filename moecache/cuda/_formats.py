"""Formats that the kernels read, and what they are called in CUDA C."""

import math

from moecache.errors import ConfigError
from moecache.formats import GlobalFormat, ScaledFormat, find_format

_PLAIN = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
_BLOCKS = {
    "q8_0": "Q8_0",
    "q4_0": "Q4_0",
    "mxfp4_gguf": "Mxfp4Gguf",
    "q4_k": "Q4K",
    "q5_k": "Q5K",
    "q6_k": "Q6K",
}
_CODES = {"e4m3": "E4M3", "e2m1": "E2M1", "int4": "Int4", "int8": "Int8"}
_SCALES = {"e8m0": "PowerScale", "e4m3": "E4M3Scale"}
# Columns that a lane multiplies before it scales them.
_RUN = 16


def cuda_type(name: str) -> str:
    """Return the C++ type of a format, by its name.

    Raises
    ------
    ConfigError
        If no kernel reads it.
    """
    known = _PLAIN.get(name)
    if known is not None:
        return f"Plain<{known}>"
    if name in _BLOCKS:
        return _BLOCKS[name]
    found = find_format(name)
    if isinstance(found, ScaledFormat) and found.element in _CODES:
        rows, columns = found.block
        if columns % _RUN == 0:
            scale = _SCALES.get(found.scale) or f"PlainScale<{_PLAIN[found.scale]}>"
            arguments = [_CODES[found.element], str(rows), str(columns), scale]
            if isinstance(found, GlobalFormat):
                arguments.append("DIVIDES" if found.divides else "MULTIPLIES")
            return f"Scaled<{', '.join(arguments)}>"
    raise ConfigError(
        f"experts in {name} have no kernel on a GPU; it has kernels for bf16, f16, f32, "
        f"{', '.join(_BLOCKS)}, fp8, mxfp4, nvfp4, int4 and int8 with a scale for a multiple of "
        f'{_RUN} columns; open it with device="cpu", or in bfloat16 (moecache pack --format bf16)'
    )


def check_matrix(role: str, name: str, rows: int, columns: int) -> None:
    """Raise ConfigError if the matrix' scales would not lie where a GPU can load them."""
    found = find_format(name)
    if not isinstance(found, ScaledFormat):
        return
    parts = found.parts(rows, columns)
    start = 0
    for dtype, shape in parts.values():
        if start % dtype.itemsize:
            raise ConfigError(
                f"{role} [{rows}, {columns}] in {name} has scales at byte {start}, which a GPU "
                f'cannot load; open it with device="cpu"'
            )
        start += dtype.itemsize * math.prod(shape)
