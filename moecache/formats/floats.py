"""Formats whose elements are numbers of the processor: f32, f16, bf16."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from moecache.formats.base import FORMATS, Format, Parts, check_matrix


@dataclass(frozen=True)
class FloatFormat(Format):
    """Elements one after the other, rows one after the other.

    Parameters
    ----------
    dtype : numpy dtype
    """

    dtype: np.dtype[Any]

    def parts(self, rows: int, columns: int) -> Parts:
        """Return one array, "values" [rows, columns]."""
        return {"values": (self.dtype, (rows, columns))}

    def dequantize(
        self, parts: Mapping[str, np.ndarray], dtype: npt.DTypeLike = np.float32
    ) -> np.ndarray:
        """Return the values in another dtype."""
        return parts["values"].astype(np.float32).astype(dtype, copy=False)

    def quantize(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Return the values, each rounded to the nearest."""
        check_matrix(values)
        return {"values": values.astype(self.dtype)}


F32 = FloatFormat("f32", (1, 1), np.dtype(np.float32))
F16 = FloatFormat("f16", (1, 1), np.dtype(np.float16))
BF16 = FloatFormat("bf16", (1, 1), np.dtype(ml_dtypes.bfloat16))
FORMATS.update({known.name: known for known in (F32, F16, BF16)})
