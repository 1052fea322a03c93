"""SlotPool: what room for experts in fast memory offers."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from moecache.layout import ExpertLayout


@runtime_checkable
class SlotPool(Protocol):
    """Slots on one device: for each role one slab, an array [num_slots, *shape].

    Filling a slot takes two calls: `buffers` says where to read to, `upload`
    brings what was read into the slot. Different slots may be filled from
    different threads at once.
    """

    @property
    def layout(self) -> ExpertLayout:
        """What the experts look like in the file."""

    @property
    def num_slots(self) -> int:
        """Number of slots, staging slots among them."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""

    @property
    def fills_in_place(self) -> bool:
        """Whether `buffers` are the slots themselves, so that they cost no memory."""

    def regions(self) -> Sequence[tuple[int, int]]:
        """Return (address, nbytes) of the host memory that slots take, to be pre-faulted."""

    def slab(self, role: str) -> Any:
        """Return all slots of a role, an array [num_slots, *shape] of the device."""

    def expert(self, slot: int, layer: int) -> Any:
        """Return one slot's arrays per role, in the shapes of `layer`."""

    def buffers(self, slot: int, layer: int) -> Mapping[str, np.ndarray]:
        """Return host arrays, one per role, to read an expert of `layer` into.

        They are the caller's until it calls `upload` or `discard` for the slot.
        """

    def upload(self, slot: int, layer: int, parts: Mapping[str, np.ndarray]) -> object:
        """Bring an expert into a slot and return a ticket for `wait`.

        `parts` is what `buffers` returned, filled; it may be reused at once.
        """

    def discard(self, slot: int) -> None:
        """Take back the buffers of a slot that will not be filled from them."""

    def wait(self, ticket: object) -> None:
        """Return when the upload is complete, as seen by computations issued afterwards."""

    def release_after_compute(self, slots: np.ndarray) -> None:
        """Note that computations issued so far use `slots`; they finish before a refill."""

    def close(self) -> None:
        """Free the slabs; a second call does nothing."""
