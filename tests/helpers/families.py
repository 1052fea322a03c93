"""Tiny random checkpoints of mixture-of-experts families, written by transformers itself."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.helpers import family_settings as tiny

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# As constraints.txt has it, without the last number.
PINNED = (5, 23)
# Families whose experts older releases stack otherwise, or whose own reference fails there.
_OTHERWISE = ("aria", "deepseek_v4")
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


@dataclass(frozen=True)
class Family:
    """A model architecture at a size that loads in milliseconds.

    Expert widths I are such that 2 I is not the hidden size (no matrix passes for its transpose)
    and rows are multiples of 16 bytes, which torch's `grouped_mm` asks for on the CPU.

    Parameters
    ----------
    name : str
        The family as the documentation calls it.
    prefix : str
        What the names of its classes in transformers begin with.
    settings : mapping
        What the configuration is given beside the sizes that all families share. They are the
        text part's where the model reads images.
    expert_layers : tuple of int
        Decoder layers that have experts.
    model_suffix, config_suffix : str
        Rests of the class names.
    has_interface : bool
        Whether the experts' forward goes through transformers' `ExpertsInterface`.
    vision : mapping or None
        Settings of the image part, if there is one.
    relayout : callable or None
        Turns tensors by name as transformers saves them into those of the published checkpoints.
    """

    name: str
    prefix: str
    settings: Mapping[str, Any]
    expert_layers: tuple[int, ...]
    model_suffix: str = "ForCausalLM"
    config_suffix: str = "Config"
    has_interface: bool = True
    vision: Mapping[str, Any] | None = None
    relayout: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def config(self) -> Any:
        """Return a new configuration of the tiny model."""
        import transformers

        configuration = getattr(transformers, self.prefix + self.config_suffix)
        text = copy.deepcopy({**tiny.COMMON, **self.settings})  # configurations keep lists
        if self.vision is None:
            return configuration(**text)
        tokens = ("image", "video", "vision_start", "vision_end")
        ids = {f"{token}_token_id": 120 + i for i, token in enumerate(tokens)}
        return configuration(
            text_config=text, vision_config=copy.deepcopy(dict(self.vision)), **ids
        )

    @property
    def model_class(self) -> Any:
        """Class of transformers that loads the checkpoint."""
        import transformers

        return getattr(transformers, self.prefix + self.model_suffix)

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return next(self.settings[key] for key in _NUM_EXPERTS if key in self.settings)

    @property
    def top_k(self) -> int:
        """Experts that a token is routed to."""
        return next(self.settings[key] for key in _TOP_K if key in self.settings)

    @property
    def reference(self) -> dict[str, str]:
        """Keyword arguments of `from_pretrained` that choose the reference implementation."""
        return {"experts_implementation": "grouped_mm"} if self.has_interface else {}


def write_checkpoint(family: Family, directory: Path, dtype: str) -> Path:
    """Write a random checkpoint as transformers saves it, and return its directory.

    Parameters
    ----------
    family : Family
        What to write; the same weights each time.
    directory : path
        Where to; made if it does not exist.
    dtype : {"bfloat16", "float32"}
        Type of every weight.
    """
    import pytest
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    # Only of releases older than the one that CI pins: there a missing class is a failure.
    is_there = hasattr(transformers, family.prefix + family.model_suffix)
    if _is_older(PINNED) and (not is_there or family.name in _OTHERWISE):
        pytest.skip(f"transformers {transformers.__version__} has no {family.name}, or another")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(family.name.removesuffix("_hub").encode()))
        model = family.model_class(family.config())
        _randomize(model)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    if family.relayout is not None:
        shard = directory / "model.safetensors"
        save_file(family.relayout(load_file(shard)), shard, metadata={"format": "pt"})
    return directory


def _is_older(release: tuple[int, int]) -> bool:
    """Return whether the transformers that is here is older than a release."""
    import transformers

    major, minor = transformers.__version__.split(".")[:2]
    return (int(major), int(minor)) < release


def _randomize(model: Any) -> None:
    """Draw weights that keep activations near 1, so that tokens differ in route and successor."""
    import torch

    embedding = model.get_input_embeddings().weight
    # A tied head is the embedding too: a large one would repeat the last token for ever.
    head = model.get_output_embeddings()
    embedding_std = 0.1 if head is not None and embedding is head.weight else 1.0
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor is embedding:
                tensor.normal_(std=embedding_std)
            elif not tensor.is_floating_point():
                continue  # a table, such as that of tokens' experts
            elif tensor.numel() > max(tensor.shape, default=1):
                tensor.normal_(std=tensor.shape[-1] ** -0.5)
            else:  # norms stay near 1 (or 0), biases do not stay 0
                tensor.add_(torch.randn_like(tensor), alpha=0.1)


def _transpose_stacks(tensors: dict[str, Any]) -> dict[str, Any]:
    """Give each stack of experts the published [E, in, out]."""
    return {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }


def _stack_experts(tensors: dict[str, Any]) -> dict[str, Any]:
    """Stack the matrices of single experts into two tensors per layer."""
    import torch

    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for module in sorted({name.partition(".experts.")[0] for name in tensors.keys() - stacked}):
        experts = f"{module}.experts"
        count = sum(name.startswith(experts) for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors[f"{experts}.{e}.{part}_proj.weight"] for e in range(count)])
            for part in ("gate", "up", "down")
        )
        stacked[f"{experts}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        stacked[f"{experts}.down_proj"] = down
    return stacked


_MEMBERS = (
    Family("mixtral", "Mixtral", tiny.MIXTRAL, (0, 1)),
    Family("qwen2_moe", "Qwen2Moe", tiny.QWEN2_MOE, (0, 2)),
    Family("qwen3_moe", "Qwen3Moe", tiny.QWEN3_MOE, (1, 3)),
    Family("qwen3_next", "Qwen3Next", tiny.QWEN3_NEXT, (1, 2)),
    Family("qwen3_5_moe", "Qwen3_5Moe", tiny.QWEN3_5_MOE, (0, 1, 2), config_suffix="TextConfig"),
    _QWEN3_5_VL := Family(
        "qwen3_5_moe_vl",
        "Qwen3_5Moe",
        tiny.QWEN3_5_MOE_VL,
        (0, 1, 2),
        model_suffix="ForConditionalGeneration",
        vision=tiny.VISION,
    ),
    replace(_QWEN3_5_VL, name="qwen3_5_moe_vl_hub", relayout=_stack_experts),
    _QWEN3_VL := Family(
        "qwen3_vl_moe",
        "Qwen3VLMoe",
        tiny.QWEN3_VL_MOE,
        (0, 2),
        model_suffix="ForConditionalGeneration",
        vision={**tiny.VISION, "deepstack_visual_indexes": [0]},
    ),
    replace(_QWEN3_VL, name="qwen3_vl_moe_hub", relayout=_transpose_stacks),
    Family("olmoe", "Olmoe", tiny.OLMOE, (0, 1)),
    Family("deepseek_v2", "DeepseekV2", tiny.DEEPSEEK_V2, (1, 2)),
    Family("deepseek_v3", "DeepseekV3", tiny.DEEPSEEK_V3, (1, 2)),
    Family("glm4_moe", "Glm4Moe", tiny.GLM4_MOE, (1, 2)),
    Family("gpt_oss", "GptOss", tiny.GPT_OSS, (0, 1)),
    Family("minimax_m2", "MiniMaxM2", tiny.MINIMAX_M2, (0, 1)),
    Family("ernie4_5_moe", "Ernie4_5_Moe", tiny.ERNIE4_5_MOE, (1, 2)),
    Family("granitemoe", "GraniteMoe", tiny.GRANITEMOE, (0, 1)),
    Family("jamba", "Jamba", tiny.JAMBA, (1, 3)),
    Family("phimoe", "Phimoe", tiny.PHIMOE, (0, 1)),
    Family("lfm2_moe", "Lfm2Moe", tiny.LFM2_MOE, (1, 2)),
    Family("hunyuan_v1_moe", "HunYuanMoEV1", tiny.HUNYUAN_V1_MOE, (0, 1)),
    Family("gemma4_text", "Gemma4", tiny.GEMMA4_TEXT, (0, 1), config_suffix="TextConfig"),
    Family("nemotron_h", "NemotronH", tiny.NEMOTRON_H, (1, 3)),
    Family(
        "llama4", "Llama4", tiny.LLAMA4, (1, 3), config_suffix="TextConfig", has_interface=False
    ),
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _MEMBERS}
