"""Routing traces of real models, where they are at hand."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
NUM_EXPERTS = {
    "nvmoe-olmoe": 64,
    "bigmoe-gemma": 128,
    "bigmoe-qwen": 128,
    "sparsify-qwen3-30b": 128,
}
NAMES = tuple(NUM_EXPERTS)
FRACTIONS = (0.125, 0.25, 0.5)


def load(name: str) -> npt.NDArray[np.int32]:
    """Return the experts of a trace, int32 [tokens, layers, k], without padded tokens."""
    path = TRACES / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"no trace {path}")
    with np.load(path) as archive:
        experts = archive["experts"].astype(np.int32)
    return np.ascontiguousarray(experts[(experts >= 0).all(axis=(1, 2))])
