"""What layers with states hold of one text, beside the keys and values of others."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from moecache.decoding._held import KeyValues, States
from moecache.decoding.attending import Attending, Attention, LatentAttention, Stateful
from moecache.decoding.prefixes import Page
from moecache.decoding.recipe import Recipe
from moecache.decoding.text_cache import DTYPES, TextCache
from moecache.interrupts import uninterrupted
from moecache.sizing.headroom import STATE_PLACES

_NOTHING: np.ndarray = np.zeros(0, np.float32)
# States are saved behind a multiple of so many tokens, as pages end there.
STATE_TOKENS = 64


class StatesCache(TextCache):
    """Keys and values of a text, and the states of layers that have these instead.

    A call reads the states of the text so far, and writes the next ones beside them: one that fails
    leaves the text as it was. A page has keys and values of the other layers, and behind them the
    states where it ends, if they are saved.

    Parameters
    ----------
    kinds : sequence of str
        Of each layer what it holds: "keys" (and values), "states", or "", nothing.
    stateful : LinearAttention, StateSpace or ShortConvolution, optional
        A layer that holds states; all of them are alike. `None` if there is none.
    held : sequence of (int, int, int)
        Of the other layers, as `TextCache` has it.
    kind : {"bf16", "f32"}
        Of keys and values.
    seen_kind : {"bf16", "f32"}
        Of rows that convolutions see; heads' states are float32.
    name : int, optional
    """

    def __init__(
        self,
        kinds: Sequence[str],
        stateful: Stateful | None,
        held: Sequence[tuple[int, int, int]],
        kind: str = "bf16",
        seen_kind: str = "f32",
        name: int | None = None,
    ) -> None:
        super().__init__(held, kind, name)
        self._kinds, self._seen_kind = tuple(kinds), seen_kind
        num = self._num_stateful = self._kinds.count("states")
        kernel, channels = (1, 0) if stateful is None else stateful.conv.shape
        state = (1, 0, 0) if stateful is None else stateful.state
        # Of four dimensions, as keys and values.
        self._seen_shape: tuple[int, ...] = num, 1, 1, kernel - 1, channels
        self._state_shape: tuple[int, ...] = num, 1, *state
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
        shapes = self._seen_shape[1:], self._state_shape[1:]
        dtypes = DTYPES[self._seen_kind], np.dtype(np.float32)
        return super().fits(page[:num_layers]) and all(
            len(states) in (0, self._num_stateful)
            and tuple(part.shape for part in parts) == shapes
            and tuple(part.dtype for part in parts) == dtypes
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
        size = DTYPES[self._seen_kind].itemsize
        states = size * math.prod(self._seen_shape) + 4 * math.prod(self._state_shape)
        grown = 0 if self._states is not None else STATE_PLACES * states
        return super().growth_bytes(num_new) + grown

    def _all_states(self) -> tuple[list[States], list[States]]:
        """Return the layers' states, by which of the two places is read."""
        if self._states is None:
            kind, rows = self._seen_kind, self._seen_shape[3:]
            seen = np.zeros((STATE_PLACES, *self._seen_shape), DTYPES[kind])
            held = np.zeros((STATE_PLACES, *self._state_shape), np.float32)
            size = seen.itemsize

            def page(layer: int, turn: int) -> States:
                places = (turn, 1 - turn, 2)
                read, written, saved = (seen[place, layer].ctypes.data for place in places)
                state, next_state, saved_state = (held[at, layer].ctypes.data for at in places)
                return States(
                    read,
                    written,
                    saved,
                    kind,
                    (1, *rows),
                    (0, size * rows[1], size),
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


def empty_cache(
    recipe: Recipe, kind: str = "bf16", seen_kind: str = "f32", name: int | None = None
) -> TextCache:
    """Return a cache for a text of a recipe's, which has no token yet.

    Parameters
    ----------
    recipe : Recipe
    kind, seen_kind : {"bf16", "f32"}
        Of keys and values, and of rows that convolutions see.
    name : int, optional
        Of the text, if there are others beside it.
    """
    found = [layer.attention for layer in recipe.layers]
    held = [one.held for one in found if isinstance(one, Attention | LatentAttention)]
    if len(held) == len(found):
        return TextCache(held, kind, name)
    stateful = next((one for one in found if isinstance(one, Stateful)), None)
    return StatesCache([_kind(one) for one in found], stateful, held, kind, seen_kind, name)


def _kind(attending: Attending | None) -> str:
    if attending is None:
        return ""
    return "states" if isinstance(attending, Stateful) else "keys"
