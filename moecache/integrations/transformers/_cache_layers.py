"""What layers of transformers' cache hold, as a decode step writes it: keys, values, states."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from moecache.decoding._held import KeyValues, States

# Positions that are allocated at once, at least; an eighth of those that are there beyond them.
_PAGE = 256
TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
# Kinds of layers that hold nothing; older releases of transformers have none.
EMPTY: Any = getattr(cache_utils, "DummyLayer", ())


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
        self.reserve(num, key_states, value_states)
        self._keys[:, :, length : length + num] = key_states
        self._values[:, :, length : length + num] = value_states
        self.grow(num)
        return self._keys[:, :, : length + num], self._values[:, :, : length + num]

    def reserve(
        self, num: int, keys: torch.Tensor | None = None, values: torch.Tensor | None = None
    ) -> None:
        """Have room for more tokens, of keys and values of the shapes and dtypes of some."""
        length = self.get_seq_length()
        for name, like in (("_keys", keys), ("_values", values)):
            held: torch.Tensor = self.__dict__[name]
            fits = held.dim() == 4 and held.shape[2] >= length + num
            if fits and held.is_contiguous() and _can_change(held):
                continue
            self.__dict__[name] = _larger(
                held if like is None else like, held[:, :, :length] if length else None, num
            )

    def key_values(self) -> KeyValues:
        """Return what a program writes to and reads."""
        return _key_values(self._keys, self._values, 0)

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


@dataclass
class Window:
    """The keys, or the values, of a window: `num` positions of a tensor, from `start` on."""

    held: torch.Tensor
    start: int
    num: int


class SlidingLayer(DynamicSlidingWindowLayer):
    """transformers' DynamicSlidingWindowLayer, whose tensors are views of larger ones.

    A token is written behind the others; what the window has passed is dropped when the room is
    used up. All else is transformers' own, and replaces the tensors.
    """

    _keys: Window | None
    _values: Window | None

    @property
    def parts(self) -> tuple[Window, ...]:
        """Keys and values, where there are some."""
        found = self.__dict__.get("_keys"), self.__dict__.get("_values")
        return tuple(part for part in found if part is not None and part.held.dim() == 4)

    def reserve(self, num: int) -> None:
        """Have room for more tokens."""
        if all(
            part.start + part.num + num <= part.held.shape[2]
            and part.held.is_contiguous()
            and _can_change(part.held)
            for part in self.parts
        ):
            return
        for part in self.parts:
            seen = part.held[:, :, part.start : part.start + part.num]
            part.held, part.start = _larger(seen, seen, num), 0

    def grow(self, num: int) -> None:
        """Take in new tokens that were written behind the others."""
        self.cumulative_length += num
        for part in self.parts:
            part.num += num
            passed = part.num - self.sliding_window + 1
            if passed > 0 and not self.record_past:
                part.start += passed
                part.num -= passed

    def key_values(self) -> KeyValues:
        """Return what a program writes to and reads."""
        keys, values = self.parts
        dropped = self.cumulative_length - keys.num - keys.start
        return _key_values(keys.held, values.held, dropped)

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys that are still seen, [batch, heads, tokens, width]."""
        return _seen(self.__dict__.get("_keys"))

    @keys.setter
    def keys(self, given: torch.Tensor | None) -> None:
        self._keys = _part(given)

    @property
    def values(self) -> torch.Tensor | None:
        """The values that are still seen, [batch, heads, tokens, width]."""
        return _seen(self.__dict__.get("_values"))

    @values.setter
    def values(self, given: torch.Tensor | None) -> None:
        self._values = _part(given)


def _seen(part: Window | None) -> torch.Tensor | None:
    if part is None or part.held.dim() != 4:
        return None if part is None else part.held
    return part.held[:, :, part.start : part.start + part.num]


def _part(given: torch.Tensor | None) -> Window | None:
    if given is None:
        return None
    return Window(given, 0, given.shape[2] if given.dim() == 4 else 0)


def _can_change(held: torch.Tensor) -> bool:
    """Return whether a tensor may be written to: one of inference mode may not, outside of it."""
    return not held.is_inference() or torch.is_inference_mode_enabled()


def growth(length: int, num: int) -> int:
    """Return how many tokens' memory a cache may take for new ones; 0 where they have room."""
    if num == 1 and length % _PAGE:
        return 0
    return num + (length + num) // 8 + _PAGE


def _larger(like: torch.Tensor, seen: torch.Tensor | None, num: int) -> torch.Tensor:
    """Return a tensor that begins with what is seen and has room for more tokens behind it."""
    length = 0 if seen is None else seen.shape[2]
    room = -(-(length + num + (length + num) // 8) // _PAGE) * _PAGE
    batch, heads, _, width = like.shape
    larger = like.new_empty((batch, heads, room, width))
    if seen is not None:
        larger[:, :, :length] = seen
    return larger


def _key_values(keys: torch.Tensor, values: torch.Tensor, dropped: int) -> KeyValues:
    return KeyValues(
        keys.data_ptr(),
        values.data_ptr(),
        TYPES[keys.dtype],
        tuple(keys.shape),
        values.shape[3],
        (keys, values),
        dropped,
    )


class StatesLayer(LinearAttentionLayer):
    """transformers' LinearAttentionLayer, whose states a step writes beside those that it reads.

    So a step that fails leaves them as they were. All else is transformers' own.
    """

    # What the next step writes to.
    _spare: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies have: tensors to write to are each one's own."""
        return {name: value for name, value in self.__dict__.items() if name != "_spare"}

    @property
    def held(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows that a convolution sees [batch, channels, rows], and heads' states, if any."""
        found: Any = self.conv_states[0], self.recurrent_states[0]
        return found[0], found[1]

    def is_usable(self) -> bool:
        """Return whether a step can write what is held."""
        if self.number_of_states != 1 or self.record_past or not self.has_previous_state[0]:
            return False
        parts = zip(self.held, (TYPES, (torch.float32,)), (3, 4), strict=True)
        if not self.is_recurrent_states_initialized[0]:
            parts = zip(self.held[:1], (TYPES,), (3,), strict=True)
        return all(
            isinstance(held, torch.Tensor)
            and held.dtype in dtypes
            and held.device.type == "cpu"
            and held.is_contiguous()
            and not held.requires_grad
            and held.dim() == num
            for held, dtypes, num in parts
        )

    def reserve(self, _: int) -> None:
        """Have tensors to write to."""
        spare = self._spare
        if spare is None or not all(map(_is_spare, spare, self.held)):
            seen, states = self.held
            # So that a module may change either, or neither.
            with torch.inference_mode(seen.is_inference()):
                other = None if states is None else torch.zeros_like(states)
                self._spare = torch.zeros_like(seen), other

    def grow(self, _: int) -> None:
        """Take in what a step has written."""
        assert self._spare is not None
        held, spare = self.held, self._spare
        (self.conv_states[0], self.recurrent_states[0]), self._spare = spare, held

    def key_values(self) -> States:
        """Return what a program writes to and reads."""
        (seen, states), spare = self.held, self._spare
        assert spare is not None
        (batch, channels, rows), size = seen.shape, seen.itemsize
        # A convolution alone is as one head without a state.
        shape = (1, 0, channels) if states is None else tuple(states.shape[1:])
        read, written = (0 if one is None else one.data_ptr() for one in (states, spare[1]))
        # The first is seen by no later row.
        return States(
            seen.data_ptr() + size,
            spare[0].data_ptr() + size,
            0,
            TYPES[seen.dtype],
            (batch, rows - 1, channels),
            (size * channels * rows, size, size * rows),
            read,
            written,
            0,
            shape,
            (seen, states, spare),
        )


def _is_spare(one: torch.Tensor | None, held: torch.Tensor | None) -> bool:
    """Return whether a tensor can be written in the place of what is held."""
    if one is None or held is None:
        return one is held
    return one.shape == held.shape and one.dtype == held.dtype and _can_change(one)


# Kinds of layers that hold keys and values.
KEYED = (DynamicLayer, DynamicSlidingWindowLayer, GrowingLayer, SlidingLayer)
_OURS: dict[type[Any], type[Any]] = {
    DynamicLayer: GrowingLayer,
    DynamicSlidingWindowLayer: SlidingLayer,
}


def is_dynamic(cache: Any) -> bool:
    """Return whether a cache is transformers' own, in memory, and grows with its text."""
    return type(cache) is DynamicCache and not getattr(cache, "offloading", False)


def adopt(layer: Any) -> None:
    """Make one of our layers of transformers' own, in place."""
    if type(layer) is LinearAttentionLayer:
        layer.__class__ = StatesLayer
        return
    ours: Any = _OURS.get(type(layer))
    if ours is None or not layer.is_initialized:
        return
    keys, values = layer.__dict__.pop("keys"), layer.__dict__.pop("values")
    layer.__class__ = ours
    layer.keys, layer.values = keys, values
