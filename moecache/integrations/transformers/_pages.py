"""GrowingLayer: keys and values of a layer of transformers' cache, with room for more tokens."""

import weakref
from operator import attrgetter, is_
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from moecache.decoding._program import KeyValues

# Positions that are allocated at once, at least; an eighth of those that are there beyond them.
_PAGE = 256
_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_KEYS, _VALUES = attrgetter("_keys"), attrgetter("_values")
_NUM_KEYS, _NUM_VALUES = attrgetter("_num_keys"), attrgetter("_num_values")


class GrowingLayer(DynamicLayer):
    """transformers' DynamicLayer, whose tensors are views of larger ones.

    A token is written where it belongs, and nothing is copied until the room is used up.
    """

    _keys: torch.Tensor
    _values: torch.Tensor
    _num_keys: int
    _num_values: int

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values of new tokens; return those of all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            # What gradients go through is not written to again.
            return super().update(key_states, value_states, *args, **kwargs)
        length, num = self.get_seq_length(), key_states.shape[-2]
        self.reserve(key_states, value_states, length + num)
        self._keys[:, :, length : length + num] = key_states
        self._values[:, :, length : length + num] = value_states
        self.grow(num)
        return self._keys[:, :, : length + num], self._values[:, :, : length + num]

    def reserve(
        self, key_states: torch.Tensor, value_states: torch.Tensor, num_tokens: int
    ) -> None:
        """Have room for so many tokens, of keys and values of the shapes and dtypes of some."""
        length = self.get_seq_length()
        for name, like in (("_keys", key_states), ("_values", value_states)):
            held: torch.Tensor = self.__dict__[name]
            if held.dim() == 4 and held.is_contiguous() and held.shape[2] >= num_tokens:
                continue
            room = -(-(num_tokens + num_tokens // 8) // _PAGE) * _PAGE
            batch, heads, _, width = like.shape
            larger = like.new_empty((batch, heads, room, width))
            if length:
                larger[:, :, :length] = held[:, :, :length]
            self.__dict__[name] = larger

    def grow(self, num: int) -> None:
        """Take in new tokens that were written behind the others."""
        self._num_keys += num
        self._num_values += num

    def get_seq_length(self) -> int:
        """Return how many tokens are there."""
        return self._num_keys if self.is_initialized else 0

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys of all tokens, [batch, heads, tokens, width]."""
        return self._view("_keys")

    @keys.setter
    def keys(self, given: torch.Tensor | None) -> None:
        self._replace("_keys", given)

    @property
    def values(self) -> torch.Tensor | None:
        """The values of all tokens, [batch, heads, tokens, width]."""
        return self._view("_values")

    @values.setter
    def values(self, given: torch.Tensor | None) -> None:
        self._replace("_values", given)

    def _view(self, name: str) -> torch.Tensor | None:
        held: torch.Tensor | None = self.__dict__.get(name)
        if held is None or held.dim() != 4:
            return held
        return held[:, :, : self.__dict__[f"_num{name}"]]

    def _replace(self, name: str, given: torch.Tensor | None) -> None:
        held: torch.Tensor | None = self.__dict__.get(name)
        num = given.shape[-2] if given is not None and given.dim() == 4 else 0
        self.__dict__[f"_num{name}"] = num
        if given is None or held is None or not _begins(given, held):
            self.__dict__[name] = given


def _begins(some: torch.Tensor, held: torch.Tensor) -> bool:
    """Return whether a tensor is the first tokens of another, in the same memory."""
    return (
        some.dim() == held.dim() == 4
        and some.data_ptr() == held.data_ptr()
        and some.stride() == held.stride()
        and some.shape[:2] == held.shape[:2]
        and some.shape[3] == held.shape[3]
        and some.dtype == held.dtype
    )


class Pages:
    """A cache's layers as the decode step takes them; those of the last cache are kept."""

    def __init__(self) -> None:
        self._cache: weakref.ref[Cache] | None = None
        self._layers: list[GrowingLayer] = []
        self._held: list[torch.Tensor] = []
        self._found: list[KeyValues] = []
        self._room = 0

    def of(self, cache: Cache, length: int, num_tokens: int) -> list[KeyValues] | None:
        """Return a cache's layers, with room for more tokens.

        Returns
        -------
        list of KeyValues, or None
            `None` if a layer is of another kind, of another length, or of another type than
            float32 and bfloat16.
        """
        if not self._is_last(cache, length, num_tokens):
            self._cache = None
            layers = _layers_of(cache, length)
            if layers is None:
                return None
            for layer in layers:
                layer.reserve(layer._keys, layer._values, length + num_tokens)
            self._layers = layers
            self._held = [tensor for layer in layers for tensor in (layer._keys, layer._values)]
            self._room = min(tensor.shape[2] for tensor in self._held)
            self._found = [_key_values(layer) for layer in layers]
            # Its memory goes when the cache does.
            self._cache = weakref.ref(cache, self._forget)
        return self._found

    def grow(self, num_tokens: int) -> None:
        """Take in tokens that were written to the last cache."""
        for layer in self._layers:
            layer._num_keys += num_tokens
            layer._num_values += num_tokens

    def _forget(self, gone: object) -> None:
        if self._cache is gone:
            self._cache, self._layers, self._held, self._found = None, [], [], []

    def _is_last(self, cache: Cache, length: int, num_tokens: int) -> bool:
        if self._cache is None or self._cache() is not cache or cache.layers != self._layers:
            return False
        layers = self._layers
        return (
            length + num_tokens <= self._room
            and all(map(is_, map(_KEYS, layers), self._held[::2]))
            and all(map(is_, map(_VALUES, layers), self._held[1::2]))
            and {length} == {*map(_NUM_KEYS, layers), *map(_NUM_VALUES, layers)}
        )


def _layers_of(cache: Cache, length: int) -> list[GrowingLayer] | None:
    """Return layers that can be written to, `None` if not all of them can."""
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return None
    layers: list[Any] = cache.layers
    for layer in layers:
        if type(layer) is DynamicLayer and layer.is_initialized:
            _adopt(layer)
        if type(layer) is not GrowingLayer or not layer.is_initialized:
            return None
        keys, values = layer._keys, layer._values
        if keys is None or keys.dtype not in _TYPES or values.dtype is not keys.dtype:
            return None
        if keys.device.type != "cpu" or keys.requires_grad or values.requires_grad:
            return None
        if {layer._num_keys, layer._num_values} != {length}:
            return None
    return layers


def _key_values(layer: GrowingLayer) -> KeyValues:
    keys, values = layer._keys, layer._values
    return KeyValues(
        keys.data_ptr(),
        values.data_ptr(),
        _TYPES[keys.dtype],
        tuple(keys.shape),
        values.shape[3],
        (keys, values),
    )


def _adopt(layer: Any) -> None:
    keys, values = layer.__dict__.pop("keys"), layer.__dict__.pop("values")
    layer.__class__ = GrowingLayer
    layer.keys, layer.values = keys, values
