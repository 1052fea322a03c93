"""Products where a thread takes denormals as zeros: the same bits, whoever computes."""

import subprocess
import sys

import numpy as np
import pytest

from moecache import kernels
from moecache.formats import quantize
from tests.helpers.kernels import LEVELS, computing

torch = pytest.importorskip("torch")

ROWS, COLUMNS = 512, 96
SMALL = {"f32": 1e-39, "bf16": 1e-39, "q8_0": 1e-6, "fp8[1x*,bf16]": 1.0}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SMALL)
def test_denormals_are_none_of_the_callers_business(name: str, level: str) -> None:
    """Weights, scales, inputs and results below the smallest normal number; two threads."""
    generator = np.random.default_rng(1)
    values = generator.normal(size=(ROWS, COLUMNS)).astype(np.float32) * np.float32(SMALL[name])
    values[:, 0] *= 400  # FP8's other codes are denormal beside it
    inputs = generator.normal(size=(9, COLUMNS)).astype(np.float32)
    inputs[1:4] *= np.float32(1e-33)
    with computing(level, threads=2):
        given = quantize(values, name)
        matrix = kernels.matrix_of(given, name)
        expected = kernels.products(inputs, matrix).tobytes()
        assert torch.set_flush_denormal(True)
        try:
            found = {kernels.products(inputs, matrix).tobytes() for _ in range(20)}
            assert np.float32(1e-39) * np.float32(1) == 0  # the setting is as it was left
        finally:
            torch.set_flush_denormal(False)
    assert found == {expected}


def test_tables_are_right_if_denormals_were_zeros_at_the_import() -> None:
    """FP8's smallest codes, which are made of denormal numbers."""
    program = """
import numpy as np, torch
torch.set_flush_denormal(True)
from moecache import kernels
import ml_dtypes
from moecache.formats import quantize
torch.set_flush_denormal(False)
parts = quantize(np.ones((16, 32), np.float32), "fp8[1x*,bf16]")
parts["codes"].view(np.uint8)[...] = 3
parts["scales"][...] = 1
inputs = np.ones((1, 32), ml_dtypes.bfloat16)
print(set(kernels.products(inputs, kernels.matrix_of(parts, "fp8[1x*,bf16]"))[0].tolist()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "{0.1875}"
