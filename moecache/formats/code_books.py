"""ggml's formats of code books, iq1_s to iq3_s: read by way of the `gguf` package, without kernels."""

import numpy as np

from moecache.errors import ConfigError
from moecache.formats.base import FORMATS
from moecache.formats.blocks import BlockFormat
from moecache.formats.form import SUPER_COLUMNS


class _CodeBook(BlockFormat):
    def _values(self, blocks: np.ndarray) -> np.ndarray:
        try:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize
        except ImportError as error:
            raise ConfigError(
                f"values of {self.name} need the gguf package; install it with: "
                "pip install 'moecache[gguf]'"
            ) from error
        if not blocks.size:
            return np.zeros(blocks.shape[:2], np.float32)
        rows = np.ascontiguousarray(blocks).reshape(len(blocks), -1)
        return np.asarray(dequantize(rows, GGMLQuantizationType[self.name.upper()]))


# iq1_m has its scale in the highest 4 bits of 4 numbers.
_BYTES = {
    **{"iq1_s": 50, "iq1_m": 56, "iq2_xxs": 66, "iq2_xs": 74},
    **{"iq2_s": 82, "iq3_xxs": 98, "iq3_s": 110},
}
FORMATS.update(
    {
        name: _CodeBook(name, (1, SUPER_COLUMNS), nbytes, None, () if name == "iq1_m" else (0,))
        for name, nbytes in _BYTES.items()
    }
)
