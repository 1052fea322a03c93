"""An empty cache of transformers', made ready for a program to write a prompt to."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    LinearAttentionLayer,
)

from moecache.decoding.recipe import (
    Attending,
    Attention,
    LatentAttention,
    Layer,
    ShortConvolution,
)
from moecache.integrations.transformers._cache_layers import (
    EMPTY,
    KEYED,
    GrowingLayer,
    StatesLayer,
    Window,
    adopt,
)
from moecache.interrupts import uninterrupted

_STATES = (LinearAttentionLayer, StatesLayer)


def fill_in(cache: Cache, layers: Sequence[Layer], batch: int, dtype: torch.dtype) -> bool:
    """Give the layers of an empty cache tensors for no token yet, as modules would leave them.

    Parameters
    ----------
    cache : DynamicCache
        One that `is_dynamic`.
    layers : sequence of Layer
        What writes to it.
    batch : int
    dtype : dtype
        Of keys, values and rows of convolutions.

    Returns
    -------
    bool
        `False` if layers of the cache are of other kinds; it is as it was.
    """
    made: list[Any] = cache.layers
    if not made and cache.layer_class_to_replicate is DynamicLayer:
        # As transformers does one after the other.
        made = [DynamicLayer() for _ in layers]
    attending = [layer.attention for layer in layers]
    pairs = list(zip(made, attending, strict=False))
    if len(made) != len(layers) or not all(_fits(*pair) for pair in pairs):
        return False
    for layer, one in pairs:
        if type(layer) in KEYED:
            _fill_in_keys(layer, one, batch, dtype)
        elif type(layer) in _STATES:
            _fill_in_states(layer, one, batch, dtype)
        adopt(layer)
    cache.layers = made
    return True


def _fits(layer: Any, attending: Attending | None) -> bool:
    if isinstance(layer, EMPTY):
        return attending is None
    if isinstance(attending, Attention | LatentAttention):
        return type(layer) in KEYED and not layer.get_seq_length()
    return (
        attending is not None
        and type(layer) in _STATES
        and layer.number_of_states == 1
        and not layer.has_previous_state[0]
        and not layer.record_past
    )


def _fill_in_keys(layer: Any, attending: Any, batch: int, dtype: torch.dtype) -> None:
    heads, *widths = attending.held
    keys, values = (torch.empty((batch, heads, 0, width), dtype=dtype) for width in widths)
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values


def _fill_in_states(layer: Any, attending: Any, batch: int, dtype: torch.dtype) -> None:
    kernel, channels = attending.conv.shape
    layer.dtype, layer.device = dtype, torch.device("cpu")
    layer.conv_states[0] = torch.zeros((batch, channels, kernel), dtype=dtype)
    layer.conv_kernel_size[0] = kernel
    layer.is_conv_states_initialized[0] = layer.has_previous_state[0] = True
    if not isinstance(attending, ShortConvolution):
        layer.recurrent_states[0] = torch.zeros((batch, *attending.state), dtype=torch.float32)
        layer.is_recurrent_states_initialized[0] = True


def reserve(cache: Cache, num_tokens: int) -> None:
    """Have room for a whole prompt in layers that keep all of it: they grow once."""
    for layer in cache.layers:
        if type(layer) is GrowingLayer:
            layer.reserve(num_tokens)


class Kept:
    """A cache as it is, to go back to.

    Parameters
    ----------
    cache : Cache
    """

    def __init__(self, cache: Cache) -> None:
        self._cache, self._layers = cache, [*cache.layers]
        self._were = [(type(layer), _copied(layer)) for layer in self._layers]

    def restore(self) -> None:
        """Put the cache back."""
        with uninterrupted():
            for layer, (kind, attributes) in zip(self._layers, self._were, strict=True):
                layer.__class__ = kind
                layer.__dict__.clear()
                layer.__dict__.update(attributes)
            self._cache.layers = self._layers


def _copied(layer: Any) -> dict[str, Any]:
    """Return a layer's attributes; those that a program changes in place are copies."""
    found = dict(layer.__dict__)
    for name, value in found.items():
        if isinstance(value, dict | Window):
            found[name] = copy.copy(value)
    if isinstance(layer, _STATES):
        # Written to by every second part of a prompt.
        for states in (found["conv_states"], found["recurrent_states"]):
            states |= {place: None if one is None else one.clone() for place, one in states.items()}
    return found
