"""What layers of linear attention hold of one text, beside the keys and values of others."""

from collections.abc import Sequence

import numpy as np

from moecache.decoding._held import KeyValues, States
from moecache.decoding.gguf._facts import Linear
from moecache.decoding.gguf._keys_values import TextCache
from moecache.decoding.prefixes import Page


class StatesCache(TextCache):
    """Keys and values of a text, and the states of its layers of linear attention, in float32.

    A call reads the states of the text so far, and writes the next ones beside them: one that fails
    leaves the text as it was.

    Parameters
    ----------
    is_linear : sequence of bool
        For each layer whether it holds states.
    linear : Linear
    num_heads, width, value_width : int
        Of the other layers, as `TextCache` has them.
    name : int, optional
    """

    def __init__(
        self,
        is_linear: Sequence[bool],
        linear: Linear,
        num_heads: int,
        width: int,
        value_width: int,
        name: int | None = None,
    ) -> None:
        super().__init__(is_linear.count(False), num_heads, width, value_width, name)
        self._is_linear, self._linear = tuple(is_linear), linear
        self._num_linear = sum(is_linear)
        # Pages by which of two places is read from; none before the first call.
        self._states: tuple[list[States], list[States]] | None = None
        self._turn = 0

    def pages(self, num_new: int) -> list[KeyValues | States]:
        """Return what a program reads, and writes to."""
        own = iter(super().pages(num_new))
        if self._states is None:
            self._states = self._allocated_states()
        states = iter(self._states[self._turn])
        return [next(states) if is_linear else next(own) for is_linear in self._is_linear]

    def advance(self, num_new: int) -> None:
        """Note that a call has put tokens behind the others."""
        super().advance(num_new)
        self._turn = 1 - self._turn

    def fits(self, _: Page) -> bool:
        """Return False: a page has no states."""
        return False

    def growth_bytes(self, num_new: int) -> int:
        """Return the bytes that `pages` would allocate."""
        states = 2 * self._num_linear * self._linear.nbytes if self._states is None else 0
        return super().growth_bytes(num_new) + states

    def _allocated_states(self) -> tuple[list[States], list[States]]:
        linear, num = self._linear, self._num_linear
        rows = linear.kernel - 1
        seen = np.zeros((2, num, rows, linear.channels), np.float32)
        states = np.zeros((2, num, linear.num_heads, linear.width, linear.value_width), np.float32)

        def page(layer: int, turn: int) -> States:
            return States(
                seen[turn, layer].ctypes.data,
                seen[1 - turn, layer].ctypes.data,
                "f32",
                (1, rows, linear.channels),
                (0, 4 * linear.channels, 4),
                states[turn, layer].ctypes.data,
                states[1 - turn, layer].ctypes.data,
                states.shape[2:],
                (seen, states),
            )

        first, second = ([page(layer, turn) for layer in range(num)] for turn in (0, 1))
        return first, second
