"""Checks of `load`'s arguments, before anything large is read."""

import difflib
import inspect
from dataclasses import fields
from typing import Any

import numpy as np
import torch
import transformers

from moecache.cuda import open_device, parse_device
from moecache.errors import ConfigError
from moecache.policies.making import SCOPES
from moecache.runtime.options import Options
from moecache.settings import POLICIES, PREFETCH_MODES, READ_MODES

# Arguments that `from_pretrained` takes, but not together with experts in slots.
_REFUSED = {
    "quantization_config": "experts cannot be quantized while they are read",
    "experts_implementation": 'it is "moecache"',
    "output_loading_info": "a model is returned",
    "gguf_file": "give the path of the file itself",
    "state_dict": "the experts are read from the checkpoint's files",
    "tp_plan": "processes share experts by expert_parallel=True",
    "distributed_config": "processes share experts by expert_parallel=True",
}
_NAMES = {
    "policy": POLICIES,
    "scope": SCOPES,
    "read": READ_MODES,
    "trunk": ("bf16", "native"),
    # Not "hints": a transformers model gives none.
    "prefetch": ("router", *(mode for mode in PREFETCH_MODES if mode != "hints")),
}
# Options of `moecache.open` that `load` finds by itself, and those that it takes; transformers has
# the others (dtype).
_FOUND = {"top_k", "layers", "host_bytes", "token_bytes", "state_bytes", "makes_room", "share"}
OPTIONS = {field.name for field in fields(Options)} - {"memory", "device", "dtype"} - _FOUND
# Names of types that transformers does not know.
_SHORT = {
    "bf16": torch.bfloat16,
    **dict.fromkeys(("f16", "fp16"), torch.float16),
    **dict.fromkeys(("f32", "fp32"), torch.float32),
}
# Device maps that mean: where the slots are.
AUTOMATIC = ("auto", "sequential")
# Arguments that `from_pretrained` takes without naming them.
_TAKEN = {
    *(
        "adapter_kwargs",
        "adapter_name",
        "allow_all_kernels",
        "attn_implementation",
        "code_revision",
    ),
    *("device_map", "device_mesh", "dtype", "from_flax", "from_tf", "generation_config"),
    *("kernel_config", "key_mapping", "low_cpu_mem_usage", "max_memory", "mirror"),
    *("offload_buffers", "offload_folder", "offload_state_dict", "proxies", "resume_download"),
    *("subfolder", "torch_dtype", "tp_size", "tqdm_class", "trust_remote_code", "use_kernels"),
    *("use_auth_token", "variant", *_REFUSED),
}


def check_arguments(device: str, from_pretrained: dict[str, Any]) -> None:
    if parse_device(device) is not None:
        # Says what is missing, before the trunk is read.
        open_device(device)
    for name, reason in _REFUSED.items():
        if from_pretrained.get(name):
            raise ConfigError(f"{name} cannot be given to load: {reason}")
    placed = from_pretrained.get("device_map")
    if placed not in (None, "cpu", {"": "cpu"}, *AUTOMATIC):
        raise ConfigError(
            f"device_map {placed!r} is not supported: the trunk goes where the slots are; "
            'give device="cuda"'
        )


def torch_dtype(given: Any) -> Any:
    """Return a type as `from_pretrained` takes it, of NumPy and ml_dtypes too.

    Raises
    ------
    ConfigError
        If it is no type of floating-point numbers.
    """
    if given is None or isinstance(given, dict) or (isinstance(given, str) and given == "auto"):
        return given
    if isinstance(given, str):
        name = given.removeprefix("torch.")
        found = _SHORT.get(name) or getattr(torch, name, None)
    elif isinstance(given, torch.dtype):
        found = given
    else:
        try:
            found = getattr(torch, np.dtype(given).name, None)
        except TypeError:
            found = None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(
            f"dtype {given!r} is no type of weights; give for example bfloat16, float16, float32 "
            "or auto"
        )
    return found


def check_keywords(
    load: Any, model_class: Any, config: Any, from_pretrained: dict[str, Any]
) -> None:
    """Raise TypeError for an argument that nothing takes, before anything large is read."""
    if model_class is not None and not model_class.__module__.startswith("transformers."):
        return  # it may take anything
    known = _TAKEN | OPTIONS
    unknown = [
        name
        for name in from_pretrained
        if name not in known and name[0] != "_" and not hasattr(config, name)
    ]
    if not unknown:
        return  # signatures take 25 ms
    calls = [load, transformers.PreTrainedModel.from_pretrained, model_class or object]
    for name in unknown:
        if name in _FOUND:
            raise TypeError(
                f"load() has no argument {name!r}: it finds out by itself what moecache.open is "
                "told by it"
            )
    known = known.union(*(inspect.signature(call).parameters for call in calls))
    for name in unknown:
        if name not in known:
            near = difflib.get_close_matches(name, known - _REFUSED.keys(), 3)
            raise TypeError(
                f"load() has no argument {name!r}, and from_pretrained has none"
                + (f"; did you mean {' or '.join(near)}?" if near else "")
            )


def split_options(keywords: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what of the arguments is for `moecache.open`, and what is for `from_pretrained`."""
    options = {name: value for name, value in keywords.items() if name in OPTIONS}
    return options, {name: value for name, value in keywords.items() if name not in OPTIONS}


def check_names(**given: Any) -> None:
    for name in _NAMES.keys() & given.keys():
        value = given[name]
        is_name = isinstance(value, str) or (name == "trunk" and value is not None)
        if is_name and value not in _NAMES[name]:
            raise ConfigError(f"{name} {value!r} is not one of {', '.join(_NAMES[name])}")
