"""An architecture of GGUF files, and the origin of a parameter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moecache.decoding.gguf._metadata import Metadata


@dataclass(frozen=True, eq=False)
class Source:
    """The place of a model's parameter in a GGUF file.

    Without `rows` and `undo` they are the one tensor's own. There is never both.

    Parameters
    ----------
    tensors : tuple of str
        Names of the tensors.
    rows : array of int64 or None
        For each row of the parameter, which row of the tensors, one below another, it is. A
        quantized matrix stays quantized under it.
    undo : callable or None
        Makes the parameter's values, float32, from those of the tensors.
    """

    tensors: tuple[str, ...]
    rows: np.ndarray | None = None
    undo: Callable[[list[np.ndarray]], np.ndarray] | None = None


@dataclass(frozen=True)
class Architecture:
    """How a model of one architecture becomes one of transformers.

    Parameters
    ----------
    prefix : str
        The prefix of its configuration's and its model's names in transformers.
    settings : callable
        Returns what the configuration is given, by the file's metadata.
    names : mapping
        Tensor by parameter, both without "blk.3." and "model.layers.3.", where the `gguf`
        package's map does not know transformers' name.
    source : callable or None
        Returns where a parameter is that is more than a renamed tensor, by its name without
        "model.layers.3." and the number of the layer; `None` for others. A parameter in no
        layer has its whole name, and number -1.
    ignored : tuple of str
        Regular expressions of tensors that transformers computes, or does not run.
    config_suffix : str
        The suffix of the configuration's name.
    like : str
        The architecture whose map of names serves where the `gguf` package has none.
    """

    prefix: str
    settings: Callable[[Metadata], dict[str, Any]]
    names: Mapping[str, str] = field(default_factory=dict)
    source: Callable[[str, int, Metadata], Source | None] | None = None
    ignored: tuple[str, ...] = ()
    config_suffix: str = "Config"
    like: str = ""
