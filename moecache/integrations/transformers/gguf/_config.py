"""The configuration with which transformers builds the model of a GGUF file."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import transformers
from huggingface_hub.errors import StrictDataclassError

from moecache.decoding.gguf._metadata import Metadata
from moecache.errors import ConfigError
from moecache.integrations.transformers.gguf._architectures import find_architecture


def find_config(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray] | None = None,
) -> transformers.PretrainedConfig:
    """Return the configuration with which transformers builds the model of a GGUF file.

    Parameters
    ----------
    metadata : mapping
        The file's values by key: numbers, strings, flags and lists.
    tensors : mapping
        Shape of each tensor, slowest dimension first, by name. All lie within the file: sizes
        that are larger than every dimension are refused.
    read : callable, optional
        Returns a tensor's values by its name. Rotations of some architectures have factors that
        are a tensor: without this, they are an error.

    Returns
    -------
    PretrainedConfig
        `architectures` names the class of the model.

    Raises
    ------
    ConfigError
        If the architecture is not supported, a value is missing or malformed, or one changes
        what the model computes in a way that transformers does not know.
    """
    said = Metadata(metadata, tensors, read)
    architecture = find_architecture(said)
    name = f"{architecture.prefix}{architecture.config_suffix}"
    kind = getattr(transformers, name, None)
    if kind is None:
        raise ConfigError(
            f"architecture {said.architecture!r} needs {name}, which transformers "
            f"{transformers.__version__} does not have; install 5.23 or later"
        )
    settings = architecture.settings(said)
    said.check_rest()
    try:
        return kind(**settings, architectures=[f"{architecture.prefix}ForCausalLM"])
    except (StrictDataclassError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"transformers has no {name} as the GGUF file describes it: {error}"
        ) from error
