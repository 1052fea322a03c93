"""Models of transformers, whole and with their experts in slots, to be compared bit for bit."""

from pathlib import Path
from typing import Any

from tests.helpers.families import Family

PROMPT = [5, 17, 99, 3, 64, 28, 77, 41]


def load_whole(family: Family, path: Path, dtype: str = "float32") -> Any:
    """Return the model as transformers loads it, all experts in memory."""
    import torch

    return realigned(
        family.model_class.from_pretrained(path, dtype=getattr(torch, dtype), **family.reference)
    )


def load_in_slots(path: Path, memory: str | None = "25%", **options: Any) -> Any:
    """Return the model as moecache loads it."""
    from moecache.integrations.transformers import load

    return realigned(load(path, memory=memory, **options))


def realigned(model: Any) -> Any:
    """Give a model's weights memory of torch's own.

    A float32 product may be rounded otherwise where a weight starts at no multiple of 64 bytes,
    and transformers maps weights from the file, where another checkpoint has them elsewhere.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def without_least_steps(model: Any) -> Any:
    """Have Nemotron's steps in time, of prompts by its modules too, be what its tokens' are."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    return model


def prompt() -> Any:
    """Return the ids of a prompt, [1, 8]."""
    import torch

    return torch.tensor([PROMPT])


def generated(model: Any, ids: Any = None, num_tokens: int = 12, **options: Any) -> Any:
    """Return the ids that a model continues a prompt with, greedily if not told otherwise."""
    options = {"do_sample": False, **options}
    return model.generate(prompt() if ids is None else ids, max_new_tokens=num_tokens, **options)
