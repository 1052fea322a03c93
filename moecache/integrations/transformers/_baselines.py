"""The ways to run a model without moecache: contestants of `moecache bench --compare`."""

import shutil
from pathlib import Path
from typing import Any

import torch

from moecache.errors import MissingDependencyError
from moecache.integrations.transformers._configuration import find_config, find_model_class
from moecache.integrations.transformers._damage import FILES, Damage
from moecache.integrations.transformers._experts import find_experts
from moecache.sizing.host_memory import free_host_bytes
from moecache.units import format_bytes

NO_ACCELERATE = (
    "what runs on accelerate cannot be compared without it; install it with: "
    "pip install 'moecache[transformers]'"
)


def load_resident(path: str, **options: Any) -> Any:
    """Return a model with all its weights in memory: `from_pretrained`, as it is."""
    model_class = find_model_class(find_config(path, {}, {}))
    with Damage(path, "load the model", *FILES):
        return model_class.from_pretrained(path, **options)


def load_disk_offload(path: str, folder: str, **options: Any) -> Any:
    """Return a model after accelerate's `disk_offload`: all its weights in files of `folder`.

    Raises
    ------
    MissingDependencyError
        If accelerate is not installed.
    """
    try:
        from accelerate import disk_offload
    except ImportError as error:
        raise MissingDependencyError(NO_ACCELERATE) from error
    model = load_resident(path, **options)
    disk_offload(model, offload_dir=folder)
    return model


def load_experts_on_disk(path: str, folder: str, **options: Any) -> Any:
    """Return a model whose `device_map` has its experts on "disk", and all else on the CPU."""
    config = find_config(path, {}, {})
    model_class = find_model_class(config)
    with torch.device("meta"), Damage(path, "build the model", "config.json"):
        skeleton = model_class(config)
    places = device_map(skeleton)
    with Damage(path, "load the model", *FILES):
        return model_class.from_pretrained(
            path, device_map=places, offload_folder=folder, **options
        )


def device_map(model: torch.nn.Module) -> dict[str, str]:
    """Return a map with experts modules on "disk" and everything beside them on "cpu".

    Every module is named: a module that only "" covers stays off the disk in accelerate.
    """
    experts = find_experts(model)
    places: dict[str, str] = {}

    def place(name: str, module: torch.nn.Module) -> None:
        inner = f"{name}." if name else ""
        if name in experts:
            places[name] = "disk"
        elif not any(path.startswith(inner) for path in experts):
            places[name] = "cpu"
        else:
            for child_name, child in module.named_children():
                place(inner + child_name, child)
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            places.update({inner + part: "cpu" for part, _ in own})

    place("", model)
    return places


def lack_of_room(checkpoint_bytes: int, folder: Path | None) -> str | None:
    """Return why a checkpoint cannot be loaded as a whole, or written anew; `None` if it can.

    Parameters
    ----------
    checkpoint_bytes : int
    folder : Path, optional
        The directory to write to. By default it would be in memory.
    """
    if folder is not None:
        free = shutil.disk_usage(folder).free
        if checkpoint_bytes > free:
            return (
                f"writes {format_bytes(checkpoint_bytes)} anew, but {format_bytes(free)} are free "
                f"in {folder}; TMPDIR says where"
            )
        return None
    free = free_host_bytes()
    if checkpoint_bytes > free:
        return f"takes {format_bytes(checkpoint_bytes)}, but {format_bytes(free)} are free"
    return None
