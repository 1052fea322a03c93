"""Formats whose elements are numbers of the processor: f32, f16, bf16."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moecache.formats.base import FORMATS, Format, Parts, check_matrix


@dataclass(frozen=True)
class FloatFormat(Format):
    """Elements one after the other, rows one after the other.

    Parameters
    ----------
    element : str
        Name of the elements' dtype, of NumPy or ml_dtypes.
    """

    element: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """The elements' dtype."""
        if self.element == "bfloat16":
            # Here, as `import moecache` needs NumPy alone.
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(self.element)

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


F32 = FloatFormat("f32", (1, 1), "float32")
F16 = FloatFormat("f16", (1, 1), "float16")
BF16 = FloatFormat("bf16", (1, 1), "bfloat16")
FORMATS.update({known.name: known for known in (F32, F16, BF16)})
