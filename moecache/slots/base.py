"""SlotPool: the interface of slots in fast memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from moecache.layout import ExpertLayout


@dataclass(frozen=True)
class UploadCounts:
    """Copies into slots, by a device that copies on its own.

    Parameters
    ----------
    num_uploads, num_bytes : int
        Copies that are done: experts, and their bytes.
    busy_ns : int
        Time in which the device copied them.
    in_flight_bytes : int
        Bytes of copies that are not known to be done.
    pinned_bytes : int
        Memory of the host that is locked for copies.
    """

    num_uploads: int = 0
    num_bytes: int = 0
    busy_ns: int = 0
    in_flight_bytes: int = 0
    pinned_bytes: int = 0


@runtime_checkable
class SlotPool(Protocol):
    """Slots on one device: for each role one slab, an array [num_slots, *shape].

    Filling a slot takes two calls: `buffers` says where to read to, `upload`
    brings what was read into the slot. Different slots may be filled from
    different threads at once.
    """

    @property
    def layout(self) -> ExpertLayout:
        """The layout of the experts in the file."""

    @property
    def num_slots(self) -> int:
        """Number of slots, staging slots among them."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""

    @property
    def converts(self) -> bool:
        """Whether `upload` computes what slots have from what was read."""

    @property
    def max_buffers(self) -> int | None:
        """Most experts in buffers at once, of those that a step waits for.

        None: any number, as `buffers` returns the slots themselves.
        """

    @property
    def max_buffers_ahead(self) -> int | None:
        """Most experts in buffers at once, of those that no step waits for."""

    @property
    def uploads(self) -> UploadCounts:
        """The copies so far; none where `upload` itself copies."""

    def regions(self) -> Sequence[tuple[int, int]]:
        """Return (address, nbytes) of the host memory that slots take, to be pre-faulted."""

    def slab(self, role: str) -> Any:
        """Return all slots of a role, an array [num_slots, *shape] of the device."""

    def expert(self, slot: int, layer: int) -> Any:
        """Return one slot's arrays per role, in the shapes of `layer`."""

    def buffers(self, slot: int, layer: int) -> Mapping[str, np.ndarray]:
        """Return host arrays, one per role, to read an expert of `layer` into.

        They are the caller's until it calls `upload` or `reclaim` for the slot.
        """

    def upload(
        self, slot: int, layer: int, parts: Mapping[str, np.ndarray], *, behind: bool = False
    ) -> None:
        """Bring an expert into a slot, or begin to: `before_compute` waits for it.

        `parts` is what `buffers` returned, filled; it may be reused at once. `behind`: no step
        waits for the expert.
        """

    def reclaim(self, slot: int) -> None:
        """Take back the buffers of a slot that will not be filled from them."""

    def before_compute(self, slots: np.ndarray) -> None:
        """Let what this thread computes from now on wait until these slots are filled."""

    def release_after_compute(self, slots: np.ndarray) -> None:
        """Note that computations issued so far use `slots`; they finish before a refill.

        Called by one thread at a time, also by the garbage collector.
        """

    def to_host(self, array: Any) -> np.ndarray:
        """Return an array of the device, such as ids, in the host's memory."""

    def close(self) -> None:
        """Free the slabs; a second call does nothing."""
