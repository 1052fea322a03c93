"""The benchmark of a whole model, made small for a device of tests."""

from typing import Any

import pytest

from bench import gpu_model
from bench.checkpoint import StackSize
from tests.helpers.tensor_device import TensorDevice
from tests.helpers.token_graphs import prepared

MODEL_OPTIONS = ["--device", "cuda", "--runs", "1", "--tokens", "8"]


def made_small(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return a device, and the shapes of a model that fits it."""
    prepared("fake", monkeypatch)
    small = {"VOCABULARY": 120, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16}
    small |= {"PROMPT_TOKENS": 9, "CONTEXT": 64}
    for name, value in small.items():
        monkeypatch.setattr(gpu_model, name, value)
    size = StackSize(num_layers=2, num_experts=8, top_k=2, hidden=32, width=32)
    return TensorDevice(), size
