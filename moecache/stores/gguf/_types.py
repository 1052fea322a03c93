"""ggml's types of tensors, and llama.cpp's names of what a file is quantized to."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("f4"),
    "F16": np.dtype("f2"),
    "F64": np.dtype("f8"),
    **{f"I{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
}
# Those that other files have, too, with their bytes in another order.
_FORMATS = {"MXFP4": "mxfp4_gguf", "NVFP4": "nvfp4_gguf"}


@dataclass(frozen=True)
class GgmlType:
    """How the elements of a tensor are stored.

    Parameters
    ----------
    number : int
        ggml's own (ggml.h, `enum ggml_type`).
    name : str
        ggml's, such as "Q4_K".
    columns, nbytes : int
        Elements of a block, and its bytes.
    """

    number: int
    name: str
    columns: int
    nbytes: int

    @property
    def format(self) -> str:
        """Name of the format of a matrix of these blocks."""
        return _FORMATS.get(self.name, self.name.lower())

    @property
    def is_quantized(self) -> bool:
        """Whether blocks are more than a number each."""
        return self.columns > 1

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The dtype of an element; `None` if it is quantized."""
        if self.name == "BF16":
            # Here, as `import moecache` needs NumPy alone.
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return _DTYPES.get(self.name)


@functools.cache
def ggml_types() -> Mapping[int, GgmlType]:
    """Return the types that files have, by their numbers."""
    rows: list[tuple[int, str, int, int]] = [
        *((0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2), (28, "F64", 1, 8)),
        *((24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8)),
        *((2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24)),
        *((8, "Q8_0", 32, 34), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110)),
        *((12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210)),
        *((19, "IQ1_S", 256, 50), (29, "IQ1_M", 256, 56), (16, "IQ2_XXS", 256, 66)),
        *((17, "IQ2_XS", 256, 74), (22, "IQ2_S", 256, 82), (18, "IQ3_XXS", 256, 98)),
        *((21, "IQ3_S", 256, 110), (20, "IQ4_NL", 32, 18), (23, "IQ4_XS", 256, 136)),
        *((34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (41, "Q1_0", 128, 18)),
        *((39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36)),
    ]
    return MappingProxyType({row[0]: GgmlType(*row) for row in rows})


# The meaning of `general.file_type` (llama.h, `enum llama_ftype`).
FILE_TYPES: Mapping[int, str] = MappingProxyType(
    dict(
        [
            *((0, "F32"), (1, "F16"), (2, "Q4_0"), (3, "Q4_1"), (7, "Q8_0"), (8, "Q5_0")),
            *((9, "Q5_1"), (10, "Q2_K"), (11, "Q3_K_S"), (12, "Q3_K_M"), (13, "Q3_K_L")),
            *((14, "Q4_K_S"), (15, "Q4_K_M"), (16, "Q5_K_S"), (17, "Q5_K_M"), (18, "Q6_K")),
            *((19, "IQ2_XXS"), (20, "IQ2_XS"), (21, "Q2_K_S"), (22, "IQ3_XS"), (23, "IQ3_XXS")),
            *((24, "IQ1_S"), (25, "IQ4_NL"), (26, "IQ3_S"), (27, "IQ3_M"), (28, "IQ2_S")),
            *((29, "IQ2_M"), (30, "IQ4_XS"), (31, "IQ1_M"), (32, "BF16"), (36, "TQ1_0")),
            *((37, "TQ2_0"), (38, "MXFP4_MOE"), (39, "NVFP4"), (40, "Q1_0")),
        ]
    )
)
# Added to the number where a program has guessed it.
GUESSED = 1024
