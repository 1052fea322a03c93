"""A store and slots of experts that have sizes, but no bytes: simulations move none."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from moecache.errors import MoeCacheError
from moecache.layout import ExpertLayout
from moecache.slots.base import UploadCounts
from moecache.stores.base import Parts


class BytelessStore:
    """An `ExpertStore` that has a layout and nothing else."""

    def __init__(self, layout: ExpertLayout) -> None:
        self.layout = layout

    def read_into(self, layer: int, expert: int, out: Parts | np.ndarray) -> None:
        """Raise: there are no bytes."""
        _refuse()

    def view(self, layer: int, expert: int) -> dict[str, np.ndarray]:
        """Raise: there are no bytes."""
        _refuse()

    def regions(
        self, layers: Iterable[int] | None = None, *, held: np.ndarray | None = None
    ) -> list[tuple[int, int]]:
        """Return that nothing is in memory."""
        return []

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Do nothing, as hints may."""

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


class BytelessSlots:
    """A `SlotPool` without memory."""

    nbytes = 0
    converts = False
    max_buffers = None
    max_buffers_ahead = None
    uploads = UploadCounts()

    def __init__(self, layout: ExpertLayout, num_slots: int) -> None:
        self.layout = layout
        self.num_slots = num_slots

    def regions(self) -> list[tuple[int, int]]:
        """Return that there is no memory."""
        return []

    def slab(self, role: str) -> Any:
        """Raise: there are no bytes."""
        _refuse()

    def expert(self, slot: int, layer: int) -> Any:
        """Raise: there are no bytes."""
        _refuse()

    def buffers(self, slot: int, layer: int) -> dict[str, np.ndarray]:
        """Return that there is nothing to read to."""
        return {}

    def upload(
        self, slot: int, layer: int, parts: Mapping[str, np.ndarray], *, behind: bool = False
    ) -> None:
        """Do nothing: there are no bytes."""

    def reclaim(self, slot: int) -> None:
        """Do nothing: no buffer was given."""

    def before_compute(self, slots: np.ndarray) -> None:
        """Do nothing: there is nothing to compute with."""

    def release_after_compute(self, slots: np.ndarray) -> None:
        """Do nothing: a slot may be taken at once."""

    def to_host(self, array: npt.ArrayLike) -> np.ndarray:
        """Return it as an array of NumPy."""
        return np.asarray(array)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def _refuse() -> NoReturn:
    raise MoeCacheError("a simulated expert has no bytes")
