"""Expert parallel: the ranks' comparisons before they compute, and before each forward."""

import hashlib
import importlib.metadata
import json
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from moecache.integrations.transformers._ranks import Ranks
from moecache.integrations.transformers._sequences import TOKENS
from moecache.kernels import _processor
from moecache.ranks import Placement
from moecache.runtime.runtime import ExpertRuntime

# Bytes of each tensor of the trunk that are compared: finds another checkpoint in milliseconds.
_SAMPLE = 4096


def facts_of(
    model: Any, runtime: ExpertRuntime, *, compute: str | None, trunk: str | None
) -> dict[str, object]:
    """Return all that must be the same on every rank for their rows to fit together."""
    share, config = runtime.share, model.config.to_dict()
    config.pop("_name_or_path", None)
    text = json.dumps(config, sort_keys=True, default=str)
    layout = runtime.layout
    shown = f"{layout.num_experts} {layout.top_k} {layout.layers}"
    packages = ("moecache", "torch", "transformers")
    return {
        **{f"the version of {name}": importlib.metadata.version(name) for name in packages},
        # Facts that say more come before the config's checksum, which covers some of them.
        "dtype": str(model.dtype),
        "the attention's implementation": str(model.config._attn_implementation),
        "the placement": "" if share is None else _named(share.placement),
        "the model's config": hashlib.sha256(text.encode()).hexdigest()[:16],
        "the experts' layout": hashlib.sha256(shown.encode()).hexdigest()[:16],
        "the checkpoint": f"{_checksum(model, runtime):08x}",
        "compute": compute,
        "trunk": trunk,
        # Another number of threads, or other instructions, round torch's products differently.
        "torch's threads (OMP_NUM_THREADS)": torch.get_num_threads(),
        "the processor's instructions": torch.backends.cpu.get_cpu_capability(),
        "the kernels' instructions": _processor.level() if compute != "torch" else "",
    }


def agree_before(model: nn.Module, ranks: Ranks) -> Iterator[Any]:
    """Have the ranks compare their tokens before each forward, and note its end; yield hooks."""

    def agree(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if ranks.num_ranks == 1 or torch.compiler.is_compiling():
            return
        tokens = next((named[name] for name in TOKENS if named.get(name) is not None), None)
        tokens = given[0] if tokens is None and given else tokens
        if isinstance(tokens, torch.Tensor):
            length = getattr(named.get("past_key_values"), "get_seq_length", int)()
            ranks.agree(tokens, int(length))

    def note_end(*_: object) -> None:
        if ranks.stage == "forward":
            ranks.stage = "between"

    yield model.register_forward_pre_hook(agree, with_kwargs=True)
    yield model.register_forward_hook(note_end)


def _named(placement: Placement) -> str:
    """Return what tells a placement from others, and whether somebody gave it."""
    size = (placement.num_layers, placement.num_experts, placement.num_ranks)
    digest = placement.digest[:16]
    return f"{digest}, the even one" if placement == Placement.even(*size) else digest


def _checksum(model: nn.Module, runtime: ExpertRuntime) -> int:
    """Return a checksum of the trunk's beginnings, and of one expert of each layer."""
    found = 0
    for tensor in model.parameters():
        begin = tensor.detach().reshape(-1)[: _SAMPLE // tensor.element_size()]
        found = zlib.crc32(begin.cpu().contiguous().view(torch.uint8).numpy().tobytes(), found)
    store = runtime.store
    for layer in range(store.layout.num_layers):
        parts = {
            role.name: np.empty(role.array_shape, role.dtype) for role in store.layout.layers[layer]
        }
        # Another one in each: checkpoints differ in any of them.
        store.read_into(layer, layer % store.layout.num_experts, parts)
        for name in sorted(parts):
            found = zlib.crc32(parts[name].tobytes(), found)
    return found
