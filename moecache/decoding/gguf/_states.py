"""What layers with states hold of one text, beside the keys and values of others."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from moecache.decoding._held import KeyValues, States
from moecache.decoding.gguf._facts import LinearSizes
from moecache.decoding.gguf._keys_values import TextCache
from moecache.decoding.prefixes import Page
from moecache.interrupts import uninterrupted
from moecache.sizing.headroom import STATE_PLACES

_NOTHING: np.ndarray = np.zeros(0, np.float32)
# States are saved behind a multiple of so many tokens, as pages end there.
STATE_TOKENS = 64


class StatesCache(TextCache):
    """Keys and values of a text, and the states of layers that have these instead, in float32.

    A call reads the states of the text so far, and writes the next ones beside them: one that fails
    leaves the text as it was. A page has keys and values of the other layers, and behind them the
    states where it ends, if they are saved.

    Parameters
    ----------
    kinds : sequence of str
        Of each layer what it holds: "keys" (and values), "states", or "", nothing.
    linear : LinearSizes
    held : sequence of (int, int, int)
        Of the other layers, as `TextCache` has it.
    name : int, optional
    """

    def __init__(
        self,
        kinds: Sequence[str],
        linear: LinearSizes,
        held: Sequence[tuple[int, int, int]],
        name: int | None = None,
    ) -> None:
        super().__init__(held, name)
        self._kinds, self._linear = tuple(kinds), linear
        self._num_stateful = self._kinds.count("states")
        # Of each layer the rows that a convolution sees and the heads' states, in three places:
        # two that are read and written in turns, and that of what is saved.
        self._seen = self._held = _NOTHING
        self._states: tuple[list[States], list[States]] | None = None
        self._turn = 0
        # How many tokens are before the saved states, and before those that a call saves.
        self._saved: int | None = None
        self._saving: int | None = None

    def pages(self, num_new: int) -> list[KeyValues | States | None]:
        """Return what a program reads, and writes to."""
        own = iter(super().pages(num_new))
        states = self._all_states()[self._turn]
        end = (self.length + num_new) // STATE_TOKENS * STATE_TOKENS
        num_saved = max(end - self.length, 0)
        self._saving = end if num_saved else None
        if num_saved:
            self._saved = None
        for page in states:
            page.num_saved = num_saved
        by_kind: dict[str, Iterator[KeyValues | States | None]] = {
            "keys": own,
            "states": iter(states),
            "": itertools.repeat(None),
        }
        return [next(by_kind[kind]) for kind in self._kinds]

    def advance(self, num_new: int) -> None:
        """Note that a call has put so many tokens behind the others."""
        with uninterrupted():
            if self._saving is not None:
                self._saved = self._saving
            self.length += num_new
            self._turn = 1 - self._turn

    def fits(self, page: Page) -> bool:
        """Return whether a page is of such keys and values, and states."""
        num_layers = len(self.sizes)
        states = page[num_layers:]
        shapes = [shape[1:] for shape in self._state_shapes()]
        return super().fits(page[:num_layers]) and all(
            len(states) in (0, self._num_stateful)
            and tuple(part.shape for part in parts) == tuple(shapes)
            and all(part.dtype == np.float32 for part in parts)
            for parts in states
        )

    def restore(self, pages: Sequence[Page]) -> None:
        """Put the positions of pages that `fits` behind none, up to the last that has states."""
        num_layers = len(self.sizes)
        whole = num_layers + self._num_stateful
        places = [place for place, page in enumerate(pages) if len(page) == whole]
        if not places:
            return
        found = pages[: places[-1] + 1]
        self._all_states()
        super().restore([page[:num_layers] for page in found])
        for layer, (seen, states) in enumerate(found[-1][num_layers:]):
            self._seen[self._turn, layer], self._held[self._turn, layer] = seen, states

    def page(self, begin: int, end: int) -> Page:
        """Return a copy of positions from `begin` to `end`, and of the states if saved there."""
        found = super().page(begin, end)
        if self._saved != end:
            return found
        return (*found, *zip(self._seen[2].copy(), self._held[2].copy(), strict=True))

    def growth_bytes(self, num_new: int) -> int:
        """Return the bytes that `pages` would allocate."""
        states = STATE_PLACES * self._num_stateful * self._linear.nbytes
        return super().growth_bytes(num_new) + (states if self._states is None else 0)

    def _state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        linear, num = self._linear, self._num_stateful
        # Of four dimensions, as keys and values.
        seen = (num, 1, 1, linear.kernel - 1, linear.channels)
        return seen, (num, 1, *linear.state)

    def _all_states(self) -> tuple[list[States], list[States]]:
        """Return the layers' states, by which of the two places is read."""
        if self._states is None:
            seen, held = (
                np.zeros((STATE_PLACES, *shape), np.float32) for shape in self._state_shapes()
            )
            linear = self._linear

            def page(layer: int, turn: int) -> States:
                places = (turn, 1 - turn, 2)
                read, written, saved = (seen[place, layer].ctypes.data for place in places)
                state, next_state, saved_state = (held[at, layer].ctypes.data for at in places)
                return States(
                    read,
                    written,
                    saved,
                    "f32",
                    (1, linear.kernel - 1, linear.channels),
                    (0, 4 * linear.channels, 4),
                    state,
                    next_state,
                    saved_state,
                    held.shape[3:],
                    (seen, held),
                )

            layers = range(len(held[0]))
            first, second = ([page(layer, turn) for layer in layers] for turn in (0, 1))
            self._seen, self._held, self._states = seen, held, (first, second)
        return self._states
