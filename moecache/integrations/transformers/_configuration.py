"""The configuration of a checkpoint, as transformers reads it, and the class of its model."""

import copy
import os
from pathlib import Path
from typing import Any

import torch
import transformers

from moecache.errors import ConfigError, FormatError
from moecache.integrations.transformers._damage import Damage, check_sizes
from moecache.stores._checkpoint import read_config
from moecache.stores._quantized import Quantization


def find_config(
    path: str | os.PathLike[str], hub: dict[str, Any], from_pretrained: dict[str, Any]
) -> Any:
    """Return the configuration of a checkpoint, or the one that was given."""
    config = from_pretrained.get("config")
    if isinstance(config, transformers.PretrainedConfig):
        return config
    if config is None and os.path.isdir(path):
        # transformers stumbles over what is no object there.
        said = read_config(Path(path) / "config.json")
        _check_quantization(path, said)
        check_sizes(path, said)
    trusted = {"trust_remote_code": from_pretrained.get("trust_remote_code")}
    with Damage(config or path, "read the configuration", "config.json"):
        found = transformers.AutoConfig.from_pretrained(config or path, **hub, **trusted)
    names = found.architectures
    if names is not None and not (isinstance(names, list) and all(type(n) is str for n in names)):
        raise FormatError(
            f"{Path(config or path) / 'config.json'}: architectures is {ascii(names)[:40]}, not a "
            "list of names"
        )
    return found


def find_model_class(config: Any) -> Any:
    """Return the class whose `from_pretrained` loads a checkpoint."""
    if hasattr(config, "auto_map"):
        return transformers.AutoModelForCausalLM  # code of the checkpoint's own
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return transformers.AutoModelForCausalLM


def quantized_parts(config: Any) -> list[Any]:
    """Return what of a configuration says that the checkpoint is quantized."""
    text = config.get_text_config(decoder=True)
    levels = (config,) if text is config else (config, text)
    return [level for level in levels if getattr(level, "quantization_config", None) is not None]


def without_quantization(
    path: str | os.PathLike[str], config: Any, from_pretrained: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments for transformers, which is told of a model that is not quantized.

    Raises
    ------
    ConfigError
        If nothing here reads what it is quantized with.
    """
    said = quantized_parts(config)[0].quantization_config
    said = said.to_dict() if hasattr(said, "to_dict") else said
    _check_quantization(path, {"quantization_config": said or {"quant_method": ""}})
    config = copy.deepcopy(config)
    for level in quantized_parts(config):
        del level.quantization_config
    # The tensors from which transformers would take the dtype hold codes.
    usual = {} if config.dtype else {"dtype": torch.bfloat16}
    return {**usual, **from_pretrained, "config": config}


def _check_quantization(path: str | os.PathLike[str], config: dict[str, Any]) -> None:
    """Raise ConfigError if a configuration says that something is quantized in an unknown way."""
    try:
        Quantization(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
