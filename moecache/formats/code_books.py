"""ggml's formats of code books, iq1_s to iq3_s: their values are the `gguf` package's."""

import importlib

import numpy as np

from moecache.errors import ConfigError
from moecache.formats.base import FORMATS
from moecache.formats.blocks import BlockFormat
from moecache.formats.form import SUPER_COLUMNS

_BYTES = {"iq1_s": 50, "iq1_m": 56, "iq2_xxs": 66, "iq2_xs": 74, "iq2_s": 82, "iq3_xxs": 98}


class _CodeBook(BlockFormat):
    def _values(self, blocks: np.ndarray) -> np.ndarray:
        try:
            gguf = importlib.import_module("gguf")
        except ImportError as error:
            raise ConfigError(
                f"values of {self.name} need the gguf package; install it with: "
                "pip install 'moecache[gguf]'"
            ) from error
        if not blocks.size:
            return np.zeros(blocks.shape[:2], np.float32)
        rows = np.ascontiguousarray(blocks).reshape(len(blocks), -1)
        return np.asarray(gguf.dequantize(rows, gguf.GGMLQuantizationType[self.name.upper()]))


for _name, _nbytes in (_BYTES | {"iq3_s": 110}).items():
    # iq1_m has its scale in the highest bits of four numbers.
    _places = () if _name == "iq1_m" else (0,)
    FORMATS[_name] = _CodeBook(_name, (1, SUPER_COLUMNS), _nbytes, None, _places)
