"""Pages: a cache's layers as the decode step takes them."""

import functools
import weakref
from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

from transformers.cache_utils import Cache

from moecache.decoding._held import KeyValues, States
from moecache.integrations.transformers._cache_layers import (
    EMPTY,
    TYPES,
    GrowingLayer,
    SlidingLayer,
    StatesLayer,
    adopt,
    is_dynamic,
)

_KEYS, _VALUES = attrgetter("_keys"), attrgetter("_values")
_NUM_KEYS, _NUM_VALUES = attrgetter("_num_keys"), attrgetter("_num_values")


class Pages:
    """Finds what a program writes to and reads; of the caches that were asked for last it is kept.

    Parameters
    ----------
    most : int
        Caches of which it is kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._last: dict[int, _Last] = {}

    def of(
        self, cache: Cache, length: int, num_tokens: int
    ) -> list[KeyValues | States | None] | None:
        """Return a cache's layers, with room for more tokens.

        Returns
        -------
        list of KeyValues, or None
            `None` if a layer is of another kind, of another length, or of another type than
            float32 and bfloat16.
        """
        last = self._last.pop(id(cache), None)
        if last is not None and last.is_current(cache, length, num_tokens):
            self._last[id(cache)] = last
            return last.found
        layers = _layers_of(cache, length)
        if layers is None:
            return None
        for layer in layers:
            if not isinstance(layer, EMPTY):
                layer.reserve(num_tokens)
        while len(self._last) >= self._most:
            self._last.pop(next(iter(self._last)), None)
        # Its memory goes when the cache does.
        reference = weakref.ref(cache, functools.partial(_forget, self._last, id(cache)))
        self._last[id(cache)] = _Last(reference, layers)
        return self._last[id(cache)].found

    def are_alike(self, caches: Sequence[Cache]) -> bool:
        """Return whether caches that were asked for have a sequence each, all of one dtype."""
        kinds = {self._last[id(cache)].kind for cache in caches}
        return len(kinds) == 1 and next(iter(kinds))[0] == 1

    def forget(self, cache: Cache) -> None:
        """Forget the layers of a cache, which are others now."""
        self._last.pop(id(cache), None)

    def grow(self, cache: Cache, num_tokens: int) -> None:
        """Take in tokens that were written to a cache."""
        self._last[id(cache)].grow(num_tokens)


def _forget(kept: "dict[int, _Last]", number: int, gone: object) -> None:
    last = kept.get(number)
    if last is not None and last.cache is gone:
        del kept[number]


class _Last:
    """The layers of a cache, and their tensors as they were left."""

    def __init__(
        self,
        cache: "weakref.ref[Cache]",
        layers: list[GrowingLayer | SlidingLayer | StatesLayer],
    ) -> None:
        self.cache, self.layers = cache, layers
        self._holding = [layer for layer in layers if not isinstance(layer, EMPTY)]
        self.found: list[KeyValues | States | None] = [
            None if isinstance(layer, EMPTY) else layer.key_values() for layer in layers
        ]
        self._states = [
            (place, layer) for place, layer in enumerate(layers) if isinstance(layer, StatesLayer)
        ]
        self._left = [layer.held for _, layer in self._states]
        keys = (one.keys for one in self._holding if not isinstance(one, StatesLayer))
        held: Any = next(keys, None)
        # Batch and dtype, the same for all layers of a model.
        self.kind = (0, None) if held is None else (held.shape[0], held.dtype)
        self._growing = [layer for layer in layers if isinstance(layer, GrowingLayer)]
        self._held = [tensor for layer in self._growing for tensor in (layer._keys, layer._values)]
        self._room = min([tensor.shape[2] for tensor in self._held], default=1 << 62)
        self._sliding = [layer for layer in layers if isinstance(layer, SlidingLayer)]
        self._parts = [part for layer in self._sliding for part in layer.parts]
        self._windows = [part.held for part in self._parts]

    def is_current(self, cache: Cache, length: int, num_tokens: int) -> bool:
        """Return whether this is the cache, as it was left, with room for more tokens."""
        if self.cache() is not cache or cache.layers != self.layers:
            return False
        # What a token looks at goes through functions in C.
        layers = self._growing
        return (
            length + num_tokens <= self._room
            and all(map(is_, map(_KEYS, layers), self._held[::2]))
            and all(map(is_, map(_VALUES, layers), self._held[1::2]))
            and {length} >= {*map(_NUM_KEYS, layers), *map(_NUM_VALUES, layers)}
            and (not self._sliding or self._is_current_window(length, num_tokens))
            and (not self._states or self._are_current_states())
        )

    def grow(self, num_tokens: int) -> None:
        """Take in tokens that were written."""
        for layer in self._holding:
            layer.grow(num_tokens)
        for place, layer in self._states:
            self.found[place] = layer.key_values()
        self._left = [layer.held for _, layer in self._states]

    def _are_current_states(self) -> bool:
        return all(
            layer.is_usable() and all(map(is_, layer.held, left))
            for (_, layer), left in zip(self._states, self._left, strict=True)
        )

    def _is_current_window(self, length: int, num_tokens: int) -> bool:
        now = [part for layer in self._sliding for part in layer.parts]
        return (
            len(now) == len(self._parts)
            and all(map(is_, now, self._parts))
            and all(part.held is held for part, held in zip(now, self._windows, strict=True))
            and all(part.start + part.num + num_tokens <= part.held.shape[2] for part in now)
            and {length} == {layer.cumulative_length for layer in self._sliding}
        )


def _layers_of(
    cache: Cache, length: int
) -> "list[GrowingLayer | SlidingLayer | StatesLayer] | None":
    """Return layers that can be written to, `None` if not all of them can."""
    if not is_dynamic(cache):
        return None
    layers: list[Any] = cache.layers
    for layer in layers:
        adopt(layer)
        if isinstance(layer, EMPTY):
            continue
        if type(layer) is StatesLayer:
            if not layer.is_usable():
                return None
            continue
        if type(layer) not in (GrowingLayer, SlidingLayer) or not layer.is_initialized:
            return None
        keys, values = layer.keys, layer.values
        if keys is None or keys.dtype not in TYPES or values.dtype is not keys.dtype:
            return None
        if keys.device.type != "cpu" or keys.requires_grad or values.requires_grad:
            return None
        if layer.get_seq_length() != length or keys.shape[2] != values.shape[2]:
            return None
        # All that a window still sees has to be there.
        seen = length if type(layer) is GrowingLayer else min(length, layer.sliding_window - 1)
        if keys.shape[2] < seen or (type(layer) is GrowingLayer and keys.shape[2] != length):
            return None
    return layers
