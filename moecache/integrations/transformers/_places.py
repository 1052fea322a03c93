"""Places: where a call's tokens stand in their sequences, and the angles that belong to them."""

from typing import Any

import numpy as np
import torch

# Positions whose angles are computed at once, where they depend on nothing else.
_POSITIONS = 1024
_FAR = 64 * _POSITIONS
# Kinds of rotary positions whose frequencies stay.
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
# Modules whose other kinds scale by the largest position.
_GROWING = ("PhimoeRotaryEmbedding",)


class Rotary:
    """Angles of positions, from a model's own module; kept where they depend on nothing else.

    Attributes
    ----------
    is_static : bool
        Whether a position's angles depend on nothing else.
    """

    def __init__(self, module: Any, width: int) -> None:
        self._module, self._width = module, width
        kind = getattr(module, "rope_type", None)
        is_growing = type(module).__name__ in _GROWING and kind != "default"
        self.is_static = not width or (kind in STATIC_ROTARY and not is_growing)
        self._cos = self._sin = np.empty((0, 0), np.float32)

    def angles(
        self, positions: np.ndarray, *, apart: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and sines, float32 [num_positions, width / 2] each.

        Some modules' angles depend on the largest position: on that of each one if they are
        `apart`, of sequences that have nothing to do with each other.
        """
        if not self.is_static:
            if not apart:
                return self._compute(positions)
            found = [self._compute(positions[i : i + 1]) for i in range(len(positions))]
            return np.concatenate([cos for cos, _ in found]), np.concatenate(
                [sin for _, sin in found]
            )
        num = len(self._cos)
        if len(positions) == 1 and (at := int(positions[0])) < num:
            return self._cos[at : at + 1], self._sin[at : at + 1]
        most = int(positions.max())
        if most >= num + _FAR:
            # One position far away: not all before it.
            return self._compute(positions)
        if most >= num:
            cos, sin = self._compute(np.arange(num, (most // _POSITIONS + 1) * _POSITIONS))
            if num:
                cos, sin = np.concatenate([self._cos, cos]), np.concatenate([self._sin, sin])
            self._cos, self._sin = cos, sin
        return self._cos[positions], self._sin[positions]

    def _compute(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not self._width:
            none = np.empty((len(positions), 0), np.float32)
            return none, none
        like = torch.empty((1, 1, 1), dtype=torch.float32)
        found = self._module(like, torch.from_numpy(positions)[None])
        # A pair has one angle: twice if the module says it for each number, once as a complex one.
        pair = (found.real, found.imag) if isinstance(found, torch.Tensor) else found
        cos, sin = (part.reshape(len(positions), -1)[:, : self._width // 2] for part in pair)
        return cos.float().contiguous().numpy(), sin.float().contiguous().numpy()


def are_own(positions: np.ndarray, lengths: list[int], begins: np.ndarray | None) -> bool:
    """Return whether tokens' positions are their places in their texts.

    Parameters
    ----------
    positions : ndarray of int64
        Of all texts' tokens, one text's after the other's.
    lengths : list of int
        Positions that are in each cache.
    begins : ndarray of int64, optional
        The first position of each text of one cache; by default each has a cache and a token.
    """
    if begins is None:
        return bool((positions == lengths).all())
    places = lengths[0] + np.arange(len(positions) // len(begins)) - begins[:, None]
    return bool((positions.reshape(places.shape) == places)[places >= 0].all())


def begins_of(mask: Any, batch: int, length: int, each: int) -> np.ndarray | None:
    """Return the first position that each sequence sees; `None` if a mask hides others, too."""
    if mask is None:
        return np.zeros(batch, np.int64)
    if not isinstance(mask, torch.Tensor) or mask.shape != (batch, length + each):
        return None
    seen = (mask != 0).numpy()
    num_hidden = (length + each) - seen.sum(1)
    # Padding on the left, and nothing else.
    if any(seen[row, :num].any() for row, num in enumerate(num_hidden.tolist())):
        return None
    return num_hidden.astype(np.int64)


def positions_of(given: Any, batch: int, length: int, each: int) -> np.ndarray | None:
    """Return each row's position; `None` if they are of another form."""
    if given is None:
        one = np.arange(length, length + each)
        return one if batch == 1 else np.tile(one, batch)
    if not isinstance(given, torch.Tensor) or given.dtype != torch.int64:
        return None
    if given.dim() == 3 and given.shape[0] in (1, 3, 4):
        # Time, height and width of a picture, after the place in the text; text has one for all.
        planes = given[-3:].numpy()
        if (planes != planes[:1]).any():
            return None
        given = given[-1]
    if given.dim() != 2 or given.shape[1] != each or given.shape[0] not in (1, batch):
        return None
    positions: np.ndarray = given.expand(batch, each).reshape(-1).numpy()
    return positions if positions.min() >= 0 else None
