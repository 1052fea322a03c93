"""Layers that guess further tokens (MTP, multi-token prediction), by what their tensors are called.

Checkpoints carry them after the model's own layers, for speculative decoding. The model computes
without them.
"""

import itertools
import re
from collections.abc import Container, Mapping

# Under a name of their own, such as Qwen's mtp.layers.0 and DeepSeek V4's mtp.0; or numbered like
# the model's layers, where only they join an embedding with a hidden state: model.layers.61.eh_proj
# of DeepSeek and GLM, blk.46.nextn.eh_proj of GGUF files.
_NAMED = re.compile(r"((?:.+\.)?mtp(?:_[a-z]+)?\.(?:layers\.)?\d+)\.", re.ASCII)
_JOINING = re.compile(r"(.+\.\d+)\.(?:nextn|eh_proj)\.", re.ASCII)


def mtp_layers(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the layers of a checkpoint that guess further tokens, each with its bytes.

    Parameters
    ----------
    sizes : mapping of str to int
        Bytes of each tensor, by its name.

    Returns
    -------
    dict of str to int
        Bytes of all tensors of a layer, experts included, by what their names begin with
        ("blk.46", "model.layers.61", "mtp.layers.0"), in the order of the tensors.
    """
    matches = (_NAMED.match(name) or _JOINING.match(name) for name in sizes)
    found = dict.fromkeys((match[1] for match in matches if match), 0)
    for name, nbytes in sizes.items() if found else ():
        layer = enclosing(name, found)
        if layer is not None:
            found[layer] += nbytes
    return found


def enclosing(name: str, layers: Container[str]) -> str | None:
    """Return which of some layers a tensor, or a layer of experts, is in; `None` if in no one."""
    parts = itertools.accumulate(name.split("."), "{}.{}".format)
    return next((part for part in parts if part in layers), None)
