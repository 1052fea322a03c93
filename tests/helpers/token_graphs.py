"""Models whose tokens are graphs, on a GPU or on the device made for tests."""

from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: TID253 - for tests with torch
import transformers  # noqa: TID253 - for tests with torch

from moecache.integrations.transformers import load, token_cache
from tests.helpers import torch_graph
from tests.helpers.tensor_device import opened


def prepared(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let `load` find a device, "fake" or a real one, and graphs be captured there.

    Return torch's name of the device.
    """
    found = opened(name, monkeypatch)
    if found != "cpu":
        return found

    def capture(model: Any) -> torch_graph.FakeCapture:
        return torch_graph.FakeCapture(model.moecache.runtime.pool.device, monkeypatch)

    monkeypatch.setattr("moecache.integrations.transformers._token_graph._new_capture", capture)
    return found


def fast(path: Path, memory: str | None, **options: Any) -> Any:
    """Return a model whose experts the GPU's kernels compute."""
    model: Any = load(path, memory, "cuda", **{"compute": "fast", "prefetch": "off", **options})
    return model


def prompted(model: Any, rows: int, num_tokens: int = 6, *, own: bool = False) -> Any:
    """Return a static cache that holds a prompt of each row; `own`: transformers' own."""
    length = num_tokens + 18
    cache = (
        transformers.StaticCache(config=model.config, max_cache_len=length)
        if own
        else token_cache(model, length)
    )
    ids = torch.arange(rows * num_tokens).reshape(rows, num_tokens) * 7 % 120
    with torch.no_grad():
        model(ids.to(model.device), past_key_values=cache)
    return cache


def tokens(model: Any, rows: int, number: int) -> Any:
    """Return a token of each row."""
    return ((torch.arange(rows)[:, None] * 11 + number) % 120).to(model.device)


def eager(model: Any, cache: Any, rows: int, numbers: tuple[int, ...]) -> list[Any]:
    """Return the logits that follow each of some tokens, without a graph."""
    with torch.no_grad():
        return [
            model(tokens(model, rows, number), past_key_values=cache).logits.clone()
            for number in numbers
        ]
