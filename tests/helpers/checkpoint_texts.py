"""Checkpoints whose texts are compared with transformers' own."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moecache.decoding.files.opening import open_text_model
from tests.helpers.families import FAMILIES, Family
from tests.helpers.gguf_texts import parts_of
from tests.helpers.more_families import MORE_FAMILIES

ALL = {**MORE_FAMILIES, **FAMILIES}
IDS = np.random.default_rng(0).integers(3, 90, 40).tolist()
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHARP = YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}


def made(name: str, **settings: Any) -> Family:
    """Return a family with other settings."""
    family = ALL[name]
    return replace(family, settings={**family.settings, **settings})


def change_config(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a checkpoint's config.json anew."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def assert_near(path: Path, model: Any) -> None:
    """Compare the logits of prompts, and of tokens after them."""
    import torch
    import transformers

    with open_text_model(path, "50%") as ours, torch.no_grad():
        for num in (1, 17, len(IDS)):
            cache, theirs = ours.new_cache(), transformers.DynamicCache(config=model.config)
            for ids in (IDS[:num], [7], [8, 9]):
                found = ours.read(ids, cache)
                wanted = model(torch.tensor([ids]), past_key_values=theirs).logits[0, -1].numpy()
                assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


def rewritten(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Write a checkpoint's tensors anew."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def saved(name: str, into: Path, dtype: Any) -> Any:
    """Write a model, and return it."""
    model, _, _ = parts_of(name)
    model.to(dtype).save_pretrained(into)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            # Nemotron's steps in time have a least one in transformers' prompts, and no other's.
            module.time_step_limit = (0.0, float("inf"))
    return model
