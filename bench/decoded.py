"""What a transformers model routes to while it decodes, and the figures of that."""

from pathlib import Path
from typing import Any

import numpy as np

from moecache.study import Trace, replay, statistics


def decode_trace(directory: Path, num_tokens: int, *, seed: int = 0, num_prompt: int = 16) -> Trace:
    """Sample tokens after a random prompt; return the routing of those that were decoded."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    return routing(model, num_tokens, seed=seed, num_prompt=num_prompt)


def routing(
    model: Any, num_tokens: int, *, seed: int = 0, num_prompt: int = 16, sample: bool = True
) -> Trace:
    """Let a model go on from a random prompt and note what its routers choose."""
    import torch

    rows: list[list[np.ndarray]] = []
    hooks = []
    for layer in model.model.layers:
        chosen: list[np.ndarray] = []
        rows.append(chosen)

        def note(_: Any, __: Any, output: Any, chosen: list[np.ndarray] = chosen) -> None:
            if len(output[2]) == 1:
                chosen.append(output[2][0].numpy())

        hooks.append(layer.mlp.gate.register_forward_hook(note))
    torch.manual_seed(seed)
    prompt = torch.randint(model.config.vocab_size, (1, num_prompt))
    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=sample, top_k=0,
        max_new_tokens=num_tokens + 1, min_new_tokens=num_tokens + 1,
    )  # fmt: skip
    for hook in hooks:
        hook.remove()
    experts = np.stack([np.stack(chosen) for chosen in rows], axis=1)
    return Trace(experts, num_experts=model.config.num_experts)


def table(trace: Trace) -> list[str]:
    """Return figures of a trace: overlap and skew per layer, hit rates."""
    found = statistics(trace)
    lines = [f"{trace.num_tokens} tokens decoded"]
    lines.append("overlap with the token before   " + " ".join(f"{x:.2f}" for x in found.overlap))
    lines.append(
        "uses of the busiest quarter     " + " ".join(f"{x:.2f}" for x in found.top_shares[:, 1])
    )
    for policy in ("lru", "echo", "belady"):
        rates = [replay(trace, policy, share).hit_rate for share in ("12.5%", "25%", "50%")]
        lines.append(
            f"hit rate at 12.5, 25, 50 %, {policy:7}" + " ".join(f"{x:.3f}" for x in rates)
        )
    return lines


def mean_overlap(chosen: np.ndarray) -> float:
    """Return the mean share of each row [T, K] that is in the row before, too."""
    same = chosen[1:, :, None] == chosen[:-1, None, :]
    return float(same.any(axis=2).mean())
