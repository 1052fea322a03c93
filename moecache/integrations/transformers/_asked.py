"""Asked: what a forward of a model is called for, if it is the logits of a text's tokens."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module
from transformers.cache_utils import Cache

from moecache.integrations.transformers._operators import is_transformed
from moecache.integrations.transformers._places import begins_of, positions_of
from moecache.integrations.transformers.prompts import new_cache

# Arguments of a forward that are looked at; another that is given has it computed by transformers.
_TAKEN = (
    *("input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache"),
    "logits_to_keep",
)
_ANSWERS = ("output_attentions", "output_hidden_states", "output_router_logits")


@dataclass(frozen=True)
class Asked:
    """A call of a forward for logits alone.

    Parameters
    ----------
    ids : Tensor of int64, shape [batch, tokens]
    cache : Cache
        An empty one if the call has none.
    length : int
        Positions that are in the cache.
    begins : ndarray of int64, shape [batch]
        The first position that each sequence sees.
    positions : ndarray of int64, shape [batch * tokens]
    num_logits : int
        Last tokens of each sequence whose logits are wanted.
    """

    ids: torch.Tensor
    cache: Cache
    length: int
    begins: np.ndarray
    positions: np.ndarray
    num_logits: int


def find(model: Any, named: dict[str, Any]) -> Asked | None:
    """Return what a forward is called for; `None` if it is for something else.

    Parameters
    ----------
    model : PreTrainedModel or None
    named : dict
        Arguments of its forward.
    """
    ids, cache = named.get("input_ids"), named.get("past_key_values")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.device.type != "cpu":
        return None
    if ids.dtype not in (torch.int64, torch.int32):
        return None
    if model is None or not ids.numel() or not is_plain(model, named):
        return None
    if cache is None:
        wanted = named.get("use_cache")
        if not (getattr(model.config.get_text_config(), "use_cache", True) or wanted):
            return None
        cache = new_cache(model)
    length = cache.get_seq_length() if isinstance(cache, Cache) else None
    if not isinstance(length, int):
        return None
    batch, each = ids.shape
    begins = begins_of(named.get("attention_mask"), batch, length, each)
    positions = positions_of(named.get("position_ids"), batch, length, each)
    wanted = named.get("logits_to_keep", 0)
    if begins is None or positions is None or not isinstance(wanted, int) or wanted < 0:
        return None
    num_logits = min(wanted, each) or each
    if begins.max() > length + each - num_logits:
        return None  # those of padding are modules'
    return Asked(ids, cache, length, begins, positions, num_logits)


def is_plain(model: Any, named: dict[str, Any]) -> bool:
    """Return whether a call asks for logits alone, and for no gradients.

    Parameters
    ----------
    model : PreTrainedModel
    named : dict
        Arguments of its forward.
    """
    others = {k: v for k, v in named.items() if k not in (*_TAKEN, "return_dict")}
    return not (
        torch.is_grad_enabled()
        or model.training
        or (
            named.get("position_ids") is None
            and getattr(model.model, "rope_deltas", None) is not None
        )
        or named.get("use_cache") is False
        or not named.get("return_dict", True)
        or any(value is not None and value is not False for value in others.values())
        or any(getattr(model.config, name, False) for name in _ANSWERS)
        or torch.is_autocast_enabled("cpu")
        or is_transformed()
        # Hooks of single modules are looked at with the weights.
        or module._has_any_global_hook()
    )
